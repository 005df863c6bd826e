"""How the engine suite compares numbers, and how it looks into an engine."""

from __future__ import annotations

from typing import Any

import torch

import explorer


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
    return session._engine._llm.llm_engine.engine_core.engine_core  # type: ignore[union-attr]


def worker(session: explorer.Session) -> Any:
    """The explorer's worker of a session."""
    return core(session).model_executor.driver_worker.worker


def idle(session: explorer.Session) -> bool:
    """Whether nothing is queued, running or held, and no hook is attached."""
    own = worker(session)
    hooks = [m for m in own.model_runner.model.modules() if m._forward_hooks or m._forward_pre_hooks]
    return not (core(session).scheduler.has_unfinished_requests() or own._rows.held or hooks)
