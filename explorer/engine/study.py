"""What one forward pass shows of a model: how its stream adds up, and which hook points it lacks, with the reason."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..analysis.attention import pattern
from ..errors import BootError
from ..hooks import ModelShape
from .parts import Layer, Parts, first_of
from .points import Convention, find_taps
from .protocol import Attention
from .taps import Handler, Tap, output

# Why a hook point is not there.
LAYOUT = "where queries, keys and values are in their fused projection is not known"
LATENT = "multi-head latent attention compresses queries, keys and values; they are not there head by head"
NO_ROTARY = "this layer has no rotary embedding: attention reads the queries and keys as they are projected"
NOT_ADDED = "what these modules put out is not what this layer adds to the stream, and what comes between is not known"
NOT_REPLAYED = "the pattern replayed from its queries and keys is not the one that its attention used"
PARALLEL = "attention and MLP read the same stream (a parallel block): there is none between them"
SHARED = "this layer has no keys and values of its own: it reads those of another layer"
SILENT = "nothing came through it in a forward pass"
SPARSE = "the MLP is a mixture of experts: a token has no one row of neurons"

LATENT_HOOKS = (
    *("attn.q.hook_out", "attn.k.hook_out", "attn.v.hook_out", "attn.hook_rot_q", "attn.hook_rot_k"),
    *("attn.hook_attn_scores", "attn.hook_pattern", "attn.o.hook_in"),
)
SHARED_HOOKS = ("attn.k.hook_out", "attn.v.hook_out", "attn.hook_attn_scores", "attn.hook_pattern")
PROJECTED = ("attn.q.hook_out", "attn.k.hook_out", "attn.v.hook_out")

Rows = dict[str, torch.Tensor]  # hook point -> the rows `(rows, width)` that it held


@dataclass
class Reading:
    """What every hook point held in one pass."""

    seen: dict[Convention, Rows]
    values: Rows  # what attention read as values
    end: Rows  # what the final norm put out


def read(
    parts: Parts, shape: ModelShape, tried: Sequence[Convention], forward: Callable[[], Any]
) -> tuple[Any, Reading]:
    """Run a forward pass and read every hook point by every convention tried; what `forward` returned comes first."""
    reading = Reading({convention: {} for convention in tried}, {}, {})
    with ExitStack() as attached:
        for convention, rows in reading.seen.items():
            for name, tap in find_taps(parts, shape, convention).items():
                attached.callback(tap.attach(_keep(rows, name)).remove)
        for i, layer in parts.layers.items():
            if layer.reads is not None and layer.qkv:
                attached.callback(layer.reads(2)(_keep(reading.values, f"blocks.{i}.attn.v.hook_out")).remove)
        if parts.norm is not None:
            attached.callback(output(parts.norm)(_keep(reading.end, "norm")).remove)
        return forward(), reading


def judge(
    parts: Parts, shape: ModelShape, reading: Reading, attention: Mapping[int, Attention]
) -> tuple[dict[str, Tap], dict[str, str]]:
    """The taps by the convention under which fewest hook points are missing, and these with their reasons.

    `attention` says how layers treat their scores, where the pass was of one sequence and this can be checked.
    `BootError` when the stream can be followed by no convention.
    """
    layouts = [c for c, rows in reading.seen.items() if all(same(rows.get(n), v) for n, v in reading.values.items())]
    layout = (layouts or list(reading.seen))[0]
    projected = {name: rows for name, rows in reading.seen[layout].items() if name.endswith(PROJECTED)}
    found: list[tuple[dict[str, str], bool]] = []
    refused: list[BootError] = []
    for convention, rows in reading.seen.items():
        try:
            _check_end(parts, rows, reading.end.get("norm"))
            found.append((missing_hooks(parts, rows | projected), convention.fused))
        except BootError as error:
            refused.append(error)
    if not found:
        raise refused[0]
    missing, fused = min(found, key=lambda each: len(each[0]))
    if not layouts:
        missing |= dict.fromkeys(projected, LAYOUT)
    taps, rows = find_taps(parts, shape, Convention(fused, layout.by_group)), reading.seen[layout]
    missing |= _unlike(taps, rows)
    for i, how in attention.items():
        block = f"blocks.{i}.attn."
        if block + "hook_pattern" not in missing and not _replays(block, taps, rows, missing, how):
            missing |= dict.fromkeys((block + "hook_pattern", block + "hook_attn_scores"), NOT_REPLAYED)
    return taps, missing


def _unlike(taps: Mapping[str, Tap], rows: Rows) -> dict[str, str]:
    """Hook points that did not fire, or fired with another width than all layers should have."""
    wrong = {name: SILENT for name in taps if name not in rows}
    for name, tap in taps.items():
        width = math.prod(tap.shape)
        if name in rows and rows[name].shape[1] != width:
            wrong[name] = f"it is {rows[name].shape[1]} wide here and not {width}, as in other layers"
    return wrong


def _replays(block: str, taps: Mapping[str, Tap], rows: Rows, missing: Mapping[str, str], how: Attention) -> bool:
    """Whether the pattern replayed from queries and keys turns values into what attention put out."""
    rotated = f"{block}hook_rot_q" not in missing
    read = ("hook_rot_q", "hook_rot_k") if rotated else ("q.hook_out", "k.hook_out")
    names = [block + name for name in (*read, "v.hook_out", "o.hook_in")]
    if any(name in missing for name in names):
        return False
    q, k, v, z = (rows[name].reshape(-1, *taps[name].shape).float() for name in names)
    values = v.transpose(0, 1).repeat_interleave(q.shape[1] // v.shape[1], dim=0)
    replayed = (pattern(q, k, how) @ values).transpose(0, 1)
    return bool((z - replayed).abs().max() <= 64 * torch.finfo(rows[names[-1]].dtype).eps * v.abs().max())


def _check_end(parts: Parts, seen: Rows, normed: torch.Tensor | None) -> None:
    """`BootError` unless the final norm reads the last layer's stream."""
    last = seen.get(f"blocks.{max(parts.layers)}.hook_out")
    if parts.norm is None or normed is None or last is None:  # a layer that did not fire is refused by name
        return
    want = first_of(parts.norm(last)).float()
    if (normed.float() - want).abs().max() > 16 * torch.finfo(normed.dtype).eps * want.abs().max():
        raise BootError(f"boot: {type(parts.inner).__name__} is not served: its final norm does not read the stream")


def _keep(rows: Rows, name: str) -> Handler:
    def keep(_: nn.Module, x: torch.Tensor) -> None:
        rows[name] = x.clone()

    return keep


def missing_hooks(parts: Parts, seen: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """The hook points that a model lacks, and why, from one pass of several tokens.

    `seen` holds the rows `(rows, width)` of every hook point that could be read, `hook_attn_out` and `hook_mlp_out`
    included. What is not shown to be what its name says is missing. `BootError` when the stream cannot be followed.
    """
    missing: dict[str, str] = {}
    for i, layer in parts.layers.items():
        block = f"blocks.{i}."
        here = {name.removeprefix(block): rows for name, rows in seen.items() if name.startswith(block)}
        if "hook_in" not in here or "hook_out" not in here:
            raise BootError(f"boot: {_name(layer)} is not served: it was not called as a decoder layer is")
        reader = seen.get(f"blocks.{i + 1}.hook_in")
        if reader is not None and not torch.equal(here["hook_out"], reader):
            raise BootError(f"boot: {_name(layer)} is not served: the next layer does not read what it puts out")
        missing |= {block + name: reason for name, reason in _missing_here(layer, here).items()}
    return missing


def _missing_here(layer: Layer, seen: Mapping[str, torch.Tensor]) -> dict[str, str]:
    missing: dict[str, str] = {}
    before, middle = seen["hook_in"], seen.get("ln2.hook_in")
    added = [seen[name] for name in ("hook_attn_out", "hook_mlp_out") if name in seen]
    if len(added) < 2 or not adds_up(seen["hook_out"], before, *added):
        missing |= dict.fromkeys(("hook_attn_out", "hook_mlp_out", "ln2.hook_in"), NOT_ADDED)
    elif middle is None or torch.equal(middle, before):
        missing["ln2.hook_in"] = PARALLEL
    elif not adds_up(middle, before, added[0]):
        missing["ln2.hook_in"] = NOT_ADDED
    if layer.down is None:
        missing["mlp.out.hook_in"] = SPARSE
    if not layer.qkv or "attn.hook_rot_q" not in seen:
        missing |= dict.fromkeys(LATENT_HOOKS, LATENT)
    elif "attn.hook_rot_k" not in seen:
        missing |= dict.fromkeys(SHARED_HOOKS, SHARED)
    elif same(seen.get("attn.k.hook_out"), seen.get("attn.hook_rot_k")):  # transformers' OPT scales queries before
        missing |= dict.fromkeys(("attn.hook_rot_q", "attn.hook_rot_k"), NO_ROTARY)
    return missing


def adds_up(total: torch.Tensor, *terms: torch.Tensor) -> bool:
    """Whether `total` is the sum of the terms, entry by entry, to the rounding of a few additions in its dtype."""
    exact = torch.stack([term.double() for term in terms])
    allowed = 8 * torch.finfo(total.dtype).eps * (exact.abs().sum(0) + total.double().abs())
    return bool(((total.double() - exact.sum(0)).abs() <= allowed).all())


def same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Whether both are there, and equal bit for bit."""
    return one is not None and other is not None and torch.equal(one, other)


def _name(layer: Layer) -> str:
    return type(layer.block).__name__
