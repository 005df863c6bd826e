"""Every hook against transformers in fp32: in fp32 to rounding, in bf16 to what transformers' own bf16 is off."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import pytest
import torch

import explorer

from ..engine.compare import same
from ..reference import Pass, Reference
from .numbers import CLOSE, MORE_THAN_THEIRS, off, on_average

Record = Callable[[str, object], None]


def test_bf16_as_good_as_transformers_bf16(
    eager: explorer.Session,
    want: Reference,
    want_bf16: Reference,
    prompts: Sequence[tuple[int, ...]],
    record_property: Record,
) -> None:
    runs = eager.run(prompts, capture="all")
    true, theirs = ([ref.run(ids) for ids in prompts] for ref in (want, want_bf16))
    assert set(runs[0].captured) == set(want.names)
    errors = compared(runs, true, theirs)
    by_component: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for name, error in errors.items():
        by_component[eager.hooks[name].component].append(error)
    for component, pairs in by_component.items():
        record_property(component, [max(ours for ours, _ in pairs), max(theirs for _, theirs in pairs)])
    too_far = {name: pair for name, pair in errors.items() if pair[0] > MORE_THAN_THEIRS * pair[1]}
    record_property("worst ratio", max((ours / theirs, name) for name, (ours, theirs) in errors.items() if theirs))
    assert not too_far


def compared(
    runs: Sequence[explorer.Run], true: Sequence[Pass], theirs: Sequence[Pass]
) -> dict[str, tuple[float, float]]:
    """For each hook how far our rows and theirs are off on average."""
    errors = {}
    for name in runs[0].captured:
        ours = on_average([(run[name], ref[name]) for run, ref in zip(runs, true, strict=True)])
        errors[name] = (ours, on_average([(run[name], ref[name]) for run, ref in zip(theirs, true, strict=True)]))
    return errors


def test_fp32(
    exact: explorer.Session, want: Reference, prompts: Sequence[tuple[int, ...]], record_property: Record
) -> None:
    errors: dict[str, float] = defaultdict(float)
    for ids, run in zip(prompts, exact.run(prompts, capture="all"), strict=True):
        true = want.run(ids)
        for name in run.captured:
            assert run[name].dtype == torch.float32
            component = exact.hooks[name].component
            errors[component] = max(errors[component], off(run[name], true[name]))
        torch.testing.assert_close(run.loss, true.loss, atol=CLOSE, rtol=0)
        assert run.top(1)[0].id == int(true.logits[-1].argmax())
    for component, error in errors.items():
        record_property(component, error)
    assert max(errors.values()) <= CLOSE


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_batch_is_its_prompts_alone(
    booted: Callable[..., explorer.Session], prompts: Sequence[tuple[int, ...]], dtype: str, record_property: Record
) -> None:
    """Other sizes, other kernels: to rounding. In bf16 the figure is kept, not judged."""
    session = booted(dtype=dtype)
    hook = f"blocks.{session.model.shape.layers // 2}.hook_out"
    edits = [None, {hook: {"op": "scale", "factor": 0.5, "pos": 3}}, {hook: {"op": "suppress", "pos": [-1, 0]}}]
    batch = session.run([*prompts] * 3, [edit for edit in edits for _ in prompts])
    alone = [session.run(ids, edit) for edit in edits for ids in prompts]
    errors = [off(got.logits, one.logits) for got, one in zip(batch, alone, strict=True)]
    record_property("logits", max(errors))
    apart = [float((got.logits - one.logits).abs().max()) for got, one in zip(batch, alone, strict=True)]
    record_property("logits, absolute", max(apart))
    assert dtype == "bfloat16" or max(errors) <= CLOSE


@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_five_times_the_same(
    booted: Callable[..., explorer.Session], prompts: Sequence[tuple[int, ...]], mode: str
) -> None:
    session = booted(dtype="bfloat16", mode=mode)
    edit = {"blocks.1.hook_out": {"op": "scale", "factor": 0.5, "phase": "both"}}
    for spec, capture in ((None, ()), (None, "all"), (edit, ())):
        first, *others = (session.generate(prompts, spec, max_new_tokens=4, capture=capture) for _ in range(5))
        for again in others:
            assert all(same(got, one) for got, one in zip(again, first, strict=True))
