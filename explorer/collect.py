"""Activations of many prompts, streamed to safetensors shards at bounded memory, and stacked in memory."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from .errors import SpecError
from .given import short
from .runs import Run

if TYPE_CHECKING:
    from .session import Prompt, Session

MANIFEST = "collection.json"
FORMAT = 1
BATCH_PROMPTS = 256
BATCH_TOKENS = 2048
BATCH_BYTES = 2**28  # of rows; a batch has fewer tokens where each takes more


def collect(
    session: Session,
    prompts: Iterable[Prompt],
    hooks: str | Sequence[str],
    folder: str | Path,
    progress: Callable[[int, int | None], None],
) -> Path:
    """See `Session.collect`. `progress(done, total)` counts prompts; total is None for a stream."""
    if isinstance(prompts, str):
        raise ValueError("collect takes many prompts: put this one into a list")
    if not isinstance(prompts, Iterable) or isinstance(prompts, Mapping):
        raise ValueError(
            f"collect takes many prompts, a list or anything that gives them in turn, not {short(prompts)}"
        )
    if not isinstance(folder, (str, os.PathLike)):
        raise ValueError(f"collect: a folder is named by a string or a Path, not by {short(folder)}")
    if not callable(progress):
        raise ValueError(
            f"collect: progress is called with the prompts done and their number, {short(progress)} cannot be"
        )
    folder = Path(folder)
    names = _rowwise(session, hooks)
    about = {
        "format": FORMAT,
        "model": session.name,
        "engine": session.info["engine"],
        "dtype": session.info["dtype"],
        "hooks": list(names),
    }
    manifest = _open(folder, about)
    total = len(prompts) if isinstance(prompts, Sequence) else None
    stream = _encoded(session, prompts)
    done = 0
    for shard in manifest["shards"]:
        _skip(stream, shard, done)
        done += shard["prompts"]
    progress(done, total)
    for batch in _batches(stream, _tokens_at_once(session, names)):
        file = f"shard-{len(manifest['shards']):05d}.safetensors"
        rows = _write(folder / file, names, session.run(batch, capture=names), done)
        manifest["shards"].append({"file": file, "prompts": len(batch), "rows": rows, "ids": _digest(batch)})
        _save(folder, manifest)
        done += len(batch)
        progress(done, total)
    if not manifest["shards"]:
        _save(folder, manifest)  # of no prompts
    return folder


def stack(runs: Iterable[Run], hook: str) -> tuple[torch.Tensor, torch.Tensor]:
    """What one hook held in several runs of a model, as one tensor padded with zeros on the right, and its mask.

    Returns `(runs, longest, ...)` in the engine's dtype and a bool `(runs, longest)`, true where a row is real.
    KeyError when a run did not capture the hook; ValueError without runs, for runs of models that differ in width or
    dtype, and for patterns and scores, which have no row a token.
    """
    given: Any = runs
    if isinstance(given, Run):
        raise ValueError("stack takes several runs: put this one into a list")
    given = list(given) if isinstance(given, Iterable) else [given]
    if not given:
        raise ValueError("stack needs at least one run")
    for run in given:
        if not isinstance(run, Run):
            raise ValueError(f"stack takes a list of Runs; {short(run)} is none")
    rows = [run.view(hook) for run in given]
    if str(hook).endswith(("hook_pattern", "hook_attn_scores")):  # their first axis is heads
        raise ValueError(f"{hook} has no row a token: stack takes hooks such as 'blocks.0.hook_out'")
    kinds = {(tuple(r.shape[1:]), r.dtype): None for r in rows}
    if len(kinds) > 1:
        (one, other) = (f"{shape} a token in {dtype}" for shape, dtype in list(kinds)[:2])
        raise ValueError(f"the runs are of different models: {hook} holds {one}, and {other}; stack those of one model")
    longest = max(map(len, rows))
    out = torch.zeros(len(rows), longest, *rows[0].shape[1:], dtype=rows[0].dtype)
    mask = torch.zeros(len(rows), longest, dtype=torch.bool)
    for i, r in enumerate(rows):
        out[i, : len(r)] = r
        mask[i, : len(r)] = True
    return out, mask


def _rowwise(session: Session, hooks: str | Sequence[str]) -> tuple[str, ...]:
    names = session.hooks.match(hooks)
    if not names:
        raise SpecError("collect needs at least one hook, for example 'blocks.*.hook_out'")
    for name in names:
        point = session.hooks.find(name)
        if point.derived_from or point.component == "logits":
            raise SpecError(f"collect: {name} is computed from other hooks and large; collect those instead")
    return names


def _open(folder: Path, about: dict[str, Any]) -> dict[str, Any]:
    """The manifest of a collection that is begun or resumed; ValueError when the folder holds another one."""
    path = folder / MANIFEST
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"collect: {str(folder)!r} is a file; choose another folder")
    if not path.exists():
        return about | {"shards": []}
    try:
        manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"collect: {str(path)!r} is no collection ({error}); choose another folder") from error
    for key, value in about.items():
        if manifest.get(key) != value:
            raise ValueError(
                f"collect: {str(folder)!r} holds a collection with {key}={manifest.get(key)!r}, not {value!r}; "
                "choose another folder"
            )
    return manifest


def _encoded(session: Session, prompts: Iterable[Prompt]) -> Iterator[tuple[int, ...]]:
    for i, prompt in enumerate(prompts):
        try:
            yield session.encode(prompt)
        except ValueError as error:
            raise ValueError(f"collect: prompt {i + 1}: {error}") from None


def _skip(stream: Iterator[tuple[int, ...]], shard: dict[str, Any], done: int) -> None:
    """Pass over prompts that a shard holds already; ValueError when they are not the same."""
    batch = list(islice(stream, shard["prompts"]))
    if len(batch) != shard["prompts"] or _digest(batch) != shard["ids"]:
        last = done + shard["prompts"]
        raise ValueError(
            f"collect: prompts {done + 1} to {last} are not those that {shard['file']} was made from; "
            "choose another folder"
        )


def _tokens_at_once(session: Session, names: Sequence[str]) -> int:
    """How many tokens a batch may have for its rows to take no more than `BATCH_BYTES`."""
    numbers = sum(math.prod(session.hooks.find(name).shape) for name in names)
    return max(1, min(BATCH_TOKENS, BATCH_BYTES // (numbers * session.model.dtype.itemsize)))


def _batches(stream: Iterable[tuple[int, ...]], most: int) -> Iterator[list[tuple[int, ...]]]:
    """In order, as many together as have at most that many tokens; a prompt that has more is a batch of its own."""
    batch: list[tuple[int, ...]] = []
    tokens = 0
    for ids in stream:
        if batch and (tokens + len(ids) > most or len(batch) == BATCH_PROMPTS):
            yield batch
            batch, tokens = [], 0
        batch.append(ids)
        tokens += len(ids)
    if batch:
        yield batch


def _write(path: Path, names: Sequence[str], runs: Sequence[Run], first: int) -> int:
    """One shard: the rows of each hook, and for each row its prompt (over the collection), position and token.

    Returns how many rows it has.
    """
    tensors = {name: torch.cat([run.view(name) for run in runs]) for name in names}
    tensors["prompt"] = torch.cat([torch.full((run.rows,), first + i) for i, run in enumerate(runs)])
    tensors["position"] = torch.cat([torch.arange(run.rows) for run in runs])
    tensors["token"] = torch.cat([torch.tensor(run.ids[: run.rows]) for run in runs])
    with _written(path) as partial:
        save_file(tensors, partial)
    return len(tensors["token"])


def _save(folder: Path, manifest: dict[str, Any]) -> None:
    with _written(folder / MANIFEST) as partial:
        partial.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


@contextmanager
def _written(path: Path) -> Iterator[Path]:
    """Where to write a file that appears under its name when it is whole, with the permissions of a new file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    partial.unlink(missing_ok=True)
    partial.touch()
    mode = partial.stat().st_mode
    yield partial
    partial.chmod(mode)  # safetensors writes private files
    os.replace(partial, path)


def _digest(batch: Sequence[Sequence[int]]) -> str:
    return hashlib.sha256(json.dumps([list(ids) for ids in batch]).encode()).hexdigest()
