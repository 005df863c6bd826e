"""Generation: greedy and steered while it decodes, against transformers under plain PyTorch hooks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

import explorer

from ..reference import Reference
from .numbers import CLOSE, MORE_THAN_THEIRS, drawn, off, on_average

Record = Callable[[str, object], None]
TOKENS = 12


def steer(session: explorer.Session) -> tuple[str, dict[str, Any]]:
    """A hook in the middle and an edit there that changes what is written."""
    hook = f"blocks.{session.model.shape.layers // 2}.hook_out"
    return hook, {"op": "add", "value": drawn(session.model.shape.d_model)}


def test_greedy(exact: explorer.Session, want: Reference, prompts: Sequence[tuple[int, ...]]) -> None:
    for ids, run in zip(prompts, exact.generate(prompts, max_new_tokens=TOKENS), strict=True):
        assert list(run.generated) == want.greedy(ids, TOKENS)[: len(run.generated)]


@pytest.mark.parametrize("phase", ["decode", "both", "prompt"])
def test_steered(
    exact: explorer.Session, want: Reference, prompts: Sequence[tuple[int, ...]], phase: str, record_property: Record
) -> None:
    """The tokens of greedy generation, and the logits of every row that was fed."""
    ids, (hook, edit) = prompts[0], steer(exact)

    def spec(fed: int) -> dict[str, Any] | None:
        edited = {"decode": range(len(ids), fed), "both": range(fed), "prompt": range(len(ids))}[phase]
        return {hook: edit | {"pos": list(edited)}} if edited else None

    run = exact.generate(ids, {hook: edit | {"phase": phase}}, max_new_tokens=TOKENS, capture=hook)
    assert list(run.generated) == want.greedy(ids, TOKENS, spec)[: len(run.generated)]
    true = want.run(run.ids[: run.rows], spec(run.rows))
    record_property("logits", off(run.logits, true.logits))
    assert off(run.logits, true.logits) <= CLOSE and off(run[hook], true[hook]) <= CLOSE
    assert off(true.logits, want.run(run.ids[: run.rows]).logits) > 10 * CLOSE


@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_steered_in_bf16(
    booted: Callable[..., explorer.Session],
    want: Reference,
    want_bf16: Reference,
    prompts: Sequence[tuple[int, ...]],
    mode: str,
    record_property: Record,
) -> None:
    """Every row that was fed, decoded ones with CUDA graphs, as near to fp32 as transformers' bf16 is."""
    session = booted(dtype="bfloat16", mode=mode)
    hook, edit = steer(session)
    pairs = []
    for run in session.generate(prompts, {hook: edit | {"phase": "both"}}, max_new_tokens=TOKENS):
        true, theirs = (ref.run(run.ids[: run.rows], {hook: edit}).logits for ref in (want, want_bf16))
        pairs.append((run.logits, theirs, true))
    ours, theirs = on_average([(g, w) for g, _, w in pairs]), on_average([(t, w) for _, t, w in pairs])
    record_property("logits", [ours, theirs])
    assert ours <= MORE_THAN_THEIRS * theirs


def test_tokens_and_edits_that_are_refused_leave_it_usable(
    eager: explorer.Session, prompts: Sequence[tuple[int, ...]]
) -> None:
    ids = prompts[0]
    before = eager.run(ids)
    wrong: list[Any] = [
        {"blocks.999.hook_out": {"op": "suppress"}},
        {"blocks.0.hook_out": {"op": "suppress", "pos": len(ids)}},
        {"blocks.0.hook_out": {"op": "set", "value": [1.0, 2.0]}},
        {"blocks.0.hook_out": {"op": "set", "value": float("nan")}},
        {"blocks.0.hook_out": {"op": "suppress", "head": 0}},
        {"blocks.0.attn.hook_pattern": {"op": "suppress"}},
        lambda x: x,
    ]
    for spec in wrong:
        with pytest.raises(explorer.SpecError):
            eager.run([ids, ids], [None, spec])
    for prompt in ([], [10**9], [5] * 5000):
        with pytest.raises(ValueError):
            eager.run(prompt)
    again = eager.run(ids)
    assert again.top(5) == before.top(5) and bool((again.logits == before.logits).all())
