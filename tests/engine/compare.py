"""How the engine suite compares numbers, and how it looks into an engine."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file
from torch._subclasses.fake_tensor import FakeTensor

import explorer
from explorer.engine.shapes import model_shape, read_config
from explorer.engine.transformers import attention
from explorer.engine.transformers.engine import TransformersEngine
from explorer.engine.vllm import boot, internals

READS = "explorer.engine.vllm.reads"


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest error of any position, relative to that position's own largest value. NaN counts as infinite."""
    assert got.shape == want.shape, f"{tuple(got.shape)} against {tuple(want.shape)}"
    got, want = got.flatten(1), want.flatten(1)
    error = (got - want).abs().amax(1) / want.abs().amax(1).clamp_min(1e-30)
    return float("inf") if bool(error.isnan().any()) else float(error.max())


def same(got: explorer.Run, want: explorer.Run) -> bool:
    """Whether two runs are bit for bit the same: ids, logits of every row, and every capture."""
    return (
        got.ids == want.ids
        and got.captured == want.captured
        and torch.equal(got.logits, want.logits)
        and all(torch.equal(got[name], want[name]) for name in got.captured)
    )


def as_alone(got: explorer.Run, want: explorer.Run) -> bool:
    """Whether a run among others is the run alone: on vLLM bit for bit.

    The transformers engine pads a batch to its longest prompt, and sums of another length round differently.
    """
    if str(got._origin.model.info["engine"]).startswith("vllm"):
        return same(got, want)
    rowwise = [name for name in got.captured if not name.endswith(("hook_pattern", "hook_attn_scores"))]
    return (
        got.ids == want.ids
        and got.captured == want.captured
        and relative(got.logits, want.logits) <= 1e-4
        and all(relative(got[name], want[name]) <= 1e-4 for name in rowwise)
    )


def token_ids(session: explorer.Session, prompt: str) -> list[int]:
    """The prompt's token ids."""
    return [token.id for token in session.tokens(prompt)]


def core(session: explorer.Session) -> Any:
    """vLLM's engine core of a session, for tests that look whether anything was left in it."""
    return session._engine._llm.llm_engine.engine_core.engine_core


def worker(session: explorer.Session) -> Any:
    """The explorer's worker of a session."""
    return core(session).model_executor.driver_worker.worker


def in_transformers(session: explorer.Session) -> bool:
    """Whether it is the transformers engine's."""
    return isinstance(session._engine, TransformersEngine)


def holder(session: explorer.Session) -> Any:
    """What has the hooks and the rows that they see: the engine itself, or vLLM's worker."""
    return session._engine if in_transformers(session) else worker(session)


def idle(session: explorer.Session) -> bool:
    """Whether nothing is queued, running or held, and no hook is attached."""
    if in_transformers(session):
        model, readers, queued = session._engine._lm, attention._readers, False  # type: ignore[union-attr]
    else:
        model = worker(session).model_runner.model
        readers = {m: True for m in model.modules() if getattr(vars(m).get("forward"), "__module__", "") == READS}
        queued = core(session).scheduler.has_unfinished_requests()
    hooks = [m for m in model.modules() if m._forward_hooks or m._forward_pre_hooks]
    return not (queued or holder(session)._rows.held or hooks or any(readers.values()))


def before_each_pass(session: explorer.Session, act: Callable[[], object]) -> AbstractContextManager[Any]:
    """Meanwhile `act` is called, in the engine's thread, before each forward pass."""
    owner, name = (session._engine, "_pass") if in_transformers(session) else (core(session).scheduler, "schedule")
    step = getattr(owner, name)

    def acting(*args: Any, **kwargs: Any) -> Any:
        act()
        return step(*args, **kwargs)

    return mock.patch.object(owner, name, acting)


def tensor_bytes() -> int:
    """What all tensors of this process take; memory that several share counts once."""
    gc.unfreeze()  # vLLM hides what there is after a boot from the collector
    gc.collect()
    tensors = [t for t in gc.get_objects() if issubclass(type(t), torch.Tensor) and not isinstance(t, FakeTensor)]
    storages = [t.untyped_storage() for t in tensors if t.device.type != "meta"]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def log_probs(run: explorer.Run) -> torch.Tensor:
    """Of every token of the vocabulary, in order of ids."""
    top = run.top(10**6)
    return torch.tensor([t.logprob for t in sorted(top, key=lambda t: t.id)])


def ask_plain(session: explorer.Session, batches: list[list[list[int]]], folder: Path) -> dict[str, torch.Tensor]:
    """What a plain engine of the same model, dtype and mode, in a process of its own, says; see `plain_vllm.py`."""
    question = {
        "model": session.model_path,
        "dtype": session.info["dtype"],
        "eager": session.info["mode"] == "eager",
        "max_model_len": session.info["max_model_len"],
        "batches": batches,
    }
    (folder / "question.json").write_text(json.dumps(question))
    script = Path(__file__).with_name("plain_vllm.py")
    command = [sys.executable, str(script), str(folder / "question.json"), str(folder / "answer.safetensors")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    return load_file(folder / "answer.safetensors")


@contextmanager
def plain_twin(path: str, mode: str = "eager", **asked: Any) -> Iterator[Any]:
    """A plain `vllm.LLM` in this process: all keywords that a session of this folder gives it, but our worker's two."""
    config = read_config(path, {})
    asked = {"mode": mode, "gpu_memory_utilization": 0.5, "max_num_batched_tokens": 2048} | asked
    options = boot.choose(boot.with_mode(asked), path, config, model_shape(config))
    del options["worker_cls"], options["additional_config"]
    with internals.lifetime.booting():
        llm = internals.construct(path, options)
    try:
        yield llm
    finally:
        internals.free(llm)
        del llm  # so that its memory can be given back
        internals.lifetime.left()
