"""Any valid spec resolves within its run and comes back from JSON; any broken one is refused by name."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from explorer import Edit, SpecError
from explorer.positions import Extent
from explorer.specs import parse, to_json

from .fake import CATALOGUE
from .resolving import GENERATING, rows_of

EDITABLE = [p for p in CATALOGUE if p.editable]
numbers = st.floats(-1e6, 1e6, width=32)


@st.composite
def edits(draw, extent: Extent = GENERATING) -> Edit:
    """A valid edit for an extent."""
    point = draw(st.sampled_from(EDITABLE))
    hook = draw(st.sampled_from([point.name, *point.aliases]))
    phase = draw(st.sampled_from(["prompt", "decode", "both"]))
    first = extent.prompt if phase == "decode" else 0
    stop = extent.prompt if phase == "prompt" else extent.rows
    absolute = st.integers(first, stop - 1)
    begin, end = sorted(draw(st.lists(st.integers(first, stop), min_size=2, max_size=2, unique=True)))
    choices = [
        st.none(),
        st.just("all"),
        absolute,
        st.lists(absolute, min_size=1, unique=True),
        st.just(f"{begin}:{end}"),
    ]
    if phase != "decode":
        choices += [st.just("last"), st.integers(-extent.prompt, -1)]
    pos = draw(st.one_of(choices))
    head = None
    if point.heads:
        one_head = st.integers(0, point.heads - 1)
        head = draw(st.one_of(st.none(), one_head, st.lists(one_head, min_size=1, unique=True)))
    op = draw(st.sampled_from(["suppress", "scale", "add", "set", "patch"]))
    fields: dict = {}
    if op == "scale":
        fields["factor"] = draw(numbers)
    elif op == "patch":
        fields["source"] = {"prompt": draw(st.text(min_size=1, max_size=5))}
    elif op in ("add", "set"):
        width = point.shape[-1] if head is not None or not point.heads else point.width
        fields["value"] = draw(st.one_of(numbers, st.lists(numbers, min_size=width, max_size=width)))
    return Edit(hook, op, pos=pos, head=head, phase=phase, **fields)


def same_length(origin, point):
    return GENERATING, "key"


@settings(max_examples=80, deadline=None)
@given(st.lists(edits(), max_size=4))
def test_valid_specs_resolve_within_the_run_and_round_trip(spec):
    resolved = rows_of(*spec, extent=GENERATING, source=same_length)
    assert len(resolved) == len(spec)
    for edit, out in zip(spec, resolved, strict=True):
        rows = tuple(out.rows)
        assert rows
        assert len(set(rows)) == len(rows)
        inside = {"prompt": range(5), "decode": range(5, 8), "both": range(8)}[edit.phase]
        assert set(rows) <= set(inside)
        point = CATALOGUE[out.hook]
        assert out.heads is None or set(out.heads) <= set(range(point.heads))
        if out.value is not None:
            count = len(out.heads) if out.heads else point.heads or 1
            assert torch.broadcast_shapes(out.value.shape, (len(rows), count, point.shape[-1]))[0] == len(rows)
        if out.source is not None:
            assert len(out.source[1]) == len(rows)
            assert set(out.source[1]) <= set(range(8))

    def written(edits):
        return to_json(edits, lambda name: CATALOGUE[name].name)

    again = parse(json.loads(json.dumps(written(spec))))
    assert written(again) == written(spec)
    by_hook = {p.name: [e for e in resolved if e.hook == p.name] for p in EDITABLE}
    for name, expected in by_hook.items():
        back = [e for e in rows_of(*again, extent=GENERATING, source=same_length) if e.hook == name]
        assert [(e.op, tuple(e.rows), e.heads, e.factor, e.source) for e in back] == [
            (e.op, tuple(e.rows), e.heads, e.factor, e.source) for e in expected
        ]
        assert all(
            (a.value is None and b.value is None) or torch.equal(a.value, b.value)
            for a, b in zip(back, expected, strict=True)
        )


def break_it(draw, body: dict) -> None:
    """Make one thing of an edit's JSON wrong."""
    kind = draw(st.sampled_from(["op", "key", "pos", "head", "field", "number", "phase"]))
    op = body["op"]
    if kind == "op":
        body["op"] = draw(st.text().filter(lambda t: t not in ("suppress", "scale", "add", "set", "patch")))
    elif kind == "key":
        body[draw(st.sampled_from(["position", "value_", "heads", "Pos", "fn", ""]))] = 0
    elif kind == "pos":
        wrong = [8, -6, True, 0.5, [], [0, 0], "x", "7:3", "0:99", {}, [None], math.nan]
        body["pos"] = draw(st.sampled_from(wrong))
    elif kind == "head":
        body["head"] = draw(st.sampled_from([99, -1, True, 0.5, [], [0, 0], "all"]))
    elif kind == "phase":
        body["phase"] = draw(st.sampled_from(["generate", None, 1, "", True]))
    elif kind == "field":
        body[draw(st.sampled_from([f for f in ("value", "factor", "source") if f not in body]))] = "w1"
    elif op == "scale":
        body["factor"] = draw(st.sampled_from([math.nan, math.inf, True, "1", [1.0], 1e300]))
    elif op == "patch":
        body["source"] = draw(st.sampled_from([5, [], {}, {"prompt": 1}, {"prompt": "a", "ids": [1]}, True]))
    elif op in ("add", "set"):
        body["value"] = draw(st.sampled_from([math.nan, [1.0] * 99, True, "1", [[]], 1e300, {}]))
    else:
        body["value"] = 0.0


@settings(max_examples=80, deadline=None)
@given(st.data(), st.lists(edits(), min_size=1, max_size=3))
def test_broken_specs_are_refused_naming_the_edit(data, spec):
    spec = list(parse(to_json(spec)))
    wrong = data.draw(st.integers(0, len(spec) - 1))
    body = spec[wrong].to_json()
    hook = body.pop("hook")
    break_it(data.draw, body)
    with pytest.raises(SpecError) as refused:
        made = parse({hook: body})
        spec[wrong] = made[0]
        rows_of(*spec, extent=GENERATING, source=same_length)
    message = str(refused.value)
    assert message.startswith("edit ")
    assert hook in message
    assert refused.value.edit_index in (0, wrong)
