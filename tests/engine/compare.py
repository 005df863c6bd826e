"""How the engine suite compares numbers, and how it looks into an engine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import explorer
from explorer.engine.vllm import reads


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


def token_ids(session: explorer.Session, prompt: str) -> list[int]:
    """The prompt's token ids."""
    return [token.id for token in session.tokens(prompt)]


def core(session: explorer.Session) -> Any:
    """vLLM's engine core of a session, for tests that look whether anything was left in it."""
    return session._engine._llm.llm_engine.engine_core.engine_core


def worker(session: explorer.Session) -> Any:
    """The explorer's worker of a session."""
    return core(session).model_executor.driver_worker.worker


def idle(session: explorer.Session) -> bool:
    """Whether nothing is queued, running or held, and no hook is attached."""
    own = worker(session)
    modules = own.model_runner.model.modules()
    hooks = [m for m in modules if m._forward_hooks or m._forward_pre_hooks]
    return not (core(session).scheduler.has_unfinished_requests() or own._rows.held or hooks or reads._readers)


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
