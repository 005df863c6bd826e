"""Each op at each editable hook: as in transformers under plain PyTorch hooks, and exact at the hook itself."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeVar

import pytest
import torch

import explorer
from explorer.catalogue import HookPoint

from ..reference import Reference
from ..reference.edits import apply
from .numbers import CLOSE, MORE_THAN_THEIRS, edits_at, off, on_average

T = TypeVar("T")
Booted = Callable[..., explorer.Session]
Record = Callable[[str, object], None]
MODES = ("eager", "compiled")
MOST_OF_ONE = 4.0  # the same of a single edit: on SmolLM2 they are between 0.35 and 1.8


def points(session: explorer.Session, layers: Sequence[int]) -> list[HookPoint]:
    """The hook points of these layers that can be edited, the embedding with them."""
    return [p for p in session.hooks if p.editable and p.available and (p.layer is None or p.layer in layers)]


def batched(items: Iterable[T], size: int) -> Iterator[tuple[T, ...]]:
    """Python 3.12's `itertools.batched`."""
    rest = iter(items)
    while batch := tuple(islice(rest, size)):
        yield batch


def specs_at(session: explorer.Session, layers: Sequence[int], ids: Sequence[int]) -> dict[tuple[str, str], Any]:
    """A spec for each op at each of the `points`."""
    source = tuple(reversed(ids))
    return {
        (point.name, op): {point.name: edit}
        for point in points(session, layers)
        for op, edit in edits_at(point, len(ids), source).items()
    }


def test_every_op_at_every_hook_in_fp32(
    exact: explorer.Session, want: Reference, prompts: Sequence[tuple[int, ...]], record_property: Record
) -> None:
    layers, ids = exact.model.shape.layers, prompts[0]
    specs = specs_at(exact, (0, layers // 2, layers - 1), ids)
    clean = want.run(ids).logits
    errors: dict[tuple[str, str], float] = {}
    hidden = []
    for places in batched(specs, 16):  # each run's logits are as large as the vocabulary
        runs = exact.run([ids] * len(places), [specs[place] for place in places])
        for place, run in zip(places, runs, strict=True):
            true = want.run(ids, specs[place]).logits
            errors[place] = off(run.logits, true)
            if errors[place] > off(clean, true) / 10:
                hidden.append(place)
    record_property("edits", len(errors))
    record_property("logits", max((error, *place) for place, error in errors.items()))
    assert not hidden, "whether these did anything cannot be told"
    assert max(errors.values()) <= CLOSE


@pytest.mark.parametrize("mode", MODES)
def test_bf16_edits_as_good_as_transformers_bf16(
    booted: Booted,
    want: Reference,
    want_bf16: Reference,
    prompts: Sequence[tuple[int, ...]],
    mode: str,
    record_property: Record,
) -> None:
    """Of each hook the ratio of errors, ours to theirs: the geometric mean over ops and prompts, and none far off.

    One error is one draw: what an edit makes of the stream may magnify a single rounding, theirs or ours.
    """
    session = booted(dtype="bfloat16", mode=mode)
    ratios: dict[str, list[float]] = {}
    errors: dict[str, list[tuple[float, float]]] = {}
    for ids in prompts[:2]:
        for (hook, op), spec in specs_at(session, (session.model.shape.layers // 2,), ids).items():
            true = want.run(ids, spec).logits
            ours = on_average([(session.run(ids, spec).logits, true)])
            theirs = on_average([(want_bf16.run(ids, spec).logits, true)])
            errors.setdefault(op, []).append((ours, theirs))
            ratios.setdefault(hook, []).append(ours / theirs)
    for op, pairs in errors.items():
        record_property(op, [statistics.median(side) for side in zip(*pairs, strict=True)])
    means = {hook: statistics.geometric_mean(of_hook) for hook, of_hook in ratios.items()}
    record_property("ratio, worst hook", max((mean, hook) for hook, mean in means.items()))
    record_property("ratio, worst single edit", max(max(of_hook) for of_hook in ratios.values()))
    assert max(means.values()) <= MORE_THAN_THEIRS, means
    assert max(max(of_hook) for of_hook in ratios.values()) <= MOST_OF_ONE, ratios


@pytest.mark.parametrize("mode", MODES)
def test_what_an_edit_leaves_is_what_the_op_says(
    booted: Booted, prompts: Sequence[tuple[int, ...]], mode: str, record_property: Record
) -> None:
    """Bit for bit, in bf16: the edited rows and the ones beside them."""
    session, ids = booted(dtype="bfloat16", mode=mode), prompts[0]
    layers = session.model.shape.layers
    specs = specs_at(session, (0, layers // 2, layers - 1), ids)
    hooks = list(dict.fromkeys(hook for hook, _ in specs))
    clean, source = session.run(ids, capture=hooks), session.run(tuple(reversed(ids)), capture=hooks)
    different = []
    for (hook, op), spec in specs.items():
        rows = clean[hook]
        apply(rows, spec[hook], source[hook])
        if not torch.equal(session.run(ids, spec, capture=hook)[hook], rows):
            different.append((hook, op))
    record_property("edits", len(specs))
    assert not different


def test_a_suppressed_head(
    exact: explorer.Session, want: Reference, prompts: Sequence[tuple[int, ...]], record_property: Record
) -> None:
    ids, layer = prompts[1], exact.model.shape.layers // 2
    hook, head = f"blocks.{layer}.attn.o.hook_in", exact.model.shape.heads - 1
    spec = {hook: {"op": "suppress", "head": head}}
    both = exact.compare(ids, spec, capture=[hook, f"blocks.{layer}.hook_out"])
    z, before = both.patched[hook], both.clean[hook]
    assert not z[:, head].any() and torch.equal(z[:, :head], before[:, :head])
    true = want.run(ids, spec)
    errors = [off(both.patched[name], true[name]) for name in both.patched.captured]
    errors.append(off(both.patched.logits, true.logits))
    record_property("stream and logits", max(errors))
    assert max(errors) <= CLOSE


@pytest.mark.parametrize("mode", MODES)
def test_the_run_after_an_edit_is_the_one_before(booted: Booted, prompts: Sequence[tuple[int, ...]], mode: str) -> None:
    session, ids = booted(dtype="bfloat16", mode=mode), prompts[0]
    before, captured = session.run(ids), session.run(ids, capture="blocks.*.hook_out")
    editable = {p.name: {"op": "set", "value": 1.0} for p in session.hooks if p.editable and p.available}
    session.run([ids] * 3, editable, capture="all")
    for hook in list(editable)[:3]:
        session.run(ids, {hook: editable[hook]})
    session.generate(ids, {hook: edit | {"phase": "both"} for hook, edit in editable.items()}, max_new_tokens=3)
    assert torch.equal(session.run(ids).logits, before.logits)
    again = session.run(ids, capture="blocks.*.hook_out")
    assert all(torch.equal(again[name], captured[name]) for name in captured.captured)
