"""Plans: which sources run before what, and how often."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from explorer import Edit, SpecError
from explorer.plan import Plan, tapped
from explorer.specs import parse

from .fake import CATALOGUE, words

STREAM = "blocks.1.hook_out"


def encode(prompt):
    if prompt == "":
        raise ValueError("the prompt is empty")
    return tuple(words().encode(prompt)) if isinstance(prompt, str) else tuple(prompt)


@pytest.fixture
def plan() -> Plan:
    return Plan(CATALOGUE, torch.float32, encode)


def patch(source, hook: str = STREAM, **fields):
    return parse(Edit(hook, "patch", source=source, **fields))


def test_a_plain_run_has_no_waves(plan):
    plan.add((3, 4), parse(Edit(STREAM, "suppress")), (STREAM,), max_new_tokens=2, seed=5)
    (request,) = plan.requests
    assert plan.waves() == []
    assert (request.ids, request.capture, request.hold) == ((3, 4), (STREAM,), False)
    assert (request.max_new_tokens, request.seed) == (2, 5)
    assert request.edits[0].rows == range(2)


def test_keys_are_unique(plan):
    for _ in range(3):
        plan.add((3,), ())
    assert len({r.key for r in plan.requests}) == 3


@pytest.mark.parametrize(("new", "rows"), [(0, 2), (1, 2), (2, 3), (5, 6)])
def test_the_last_generated_token_has_no_row(plan, new, rows):
    plan.add((3, 4), parse(Edit(STREAM, "suppress", phase="both")), max_new_tokens=new)
    assert len(plan.requests[0].edits[0].rows) == rows


def test_what_is_patched_from_is_let_go_with_the_plan():
    plan, source = Plan(CATALOGUE, torch.float32, encode), parse(Edit(STREAM, "patch", source="w0 w1"))
    plan.add((3, 4), source)
    gone = weakref.ref(plan)
    gc.disable()  # a source may be a Run with much captured
    try:
        del plan
        assert gone() is None
    finally:
        gc.enable()


def test_a_shared_source_runs_once(plan):
    recipe = {"prompt": "w0 w1", "edits": {"hook_embed": {"op": "scale", "factor": 2}}}
    plan.add((3, 4), patch("w0 w1"))
    plan.add((5, 6), patch({"prompt": "w0 w1"}, "blocks.0.hook_resid_pre"))
    plan.add((5, 6), (*patch("w0 w1", pos=0), *patch(recipe, pos=1)))
    (wave,) = plan.waves()
    assert [r.ids for r in wave] == [(3, 4), (3, 4)]
    assert [len(r.edits) for r in wave] == [0, 1]
    assert all(r.hold for r in wave)
    assert wave[0].capture == (STREAM, "blocks.0.hook_in")
    assert wave[1].capture == (STREAM,)
    sources = [[e.source[0] for e in r.edits] for r in plan.requests]
    assert sources == [[wave[0].key], [wave[0].key], [wave[0].key, wave[1].key]]
    assert plan.requests[2].edits[1].source == (wave[1].key, (1,))


def test_sources_of_sources_run_in_waves(plan):
    inner = {"prompt": "w0 w1"}
    middle = {"prompt": "w2 w3", "edits": {"hook_embed": {"op": "patch", "source": inner}}}
    outer = {"prompt": "w4 w5", "edits": {STREAM: {"op": "patch", "source": middle}}}
    plan.add((3, 4), (*patch(outer), *patch(inner)))
    assert [[r.ids for r in wave] for wave in plan.waves()] == [[(3, 4)], [(5, 6)], [(7, 8)]]
    first, second, third = (wave[0] for wave in plan.waves())
    assert first.capture == ("embed.hook_out", STREAM)
    assert second.edits[0].source[0] == first.key
    assert third.edits[0].source[0] == second.key


class HeldRun:
    """A Run that holds the stream of layer 1."""

    def __init__(self, rows: torch.Tensor, ours: bool = True) -> None:
        self.prompt_length = self.rows = len(rows)
        self.held, self.ours = rows, ours
        self.fed, self.fed_edits = tuple(range(3, 3 + self.rows)), ()

    def rows_at(self, hook):
        return self.held if hook == STREAM else None

    def made_in(self, catalogue):
        return self.ours and catalogue is CATALOGUE

    def recipe(self):
        return {"ids": list(self.fed)}


def test_a_run_that_captured_the_hook_is_used_as_it_is(plan):
    run = HeldRun(torch.arange(24.0).reshape(3, 8), ours=False)
    plan.add((3, 4), patch(run, pos=[0, 1], source_pos=[2, 0]))
    assert plan.waves() == []
    edit = plan.requests[0].edits[0]
    assert edit.op == "set"
    assert torch.equal(edit.value[:, 0], run.held[[2, 0]])


def test_a_run_that_did_not_is_run_again(plan):
    plan.add((3, 4, 5), patch(HeldRun(torch.zeros(3, 8)), "blocks.0.hook_out"))
    (wave,) = plan.waves()
    assert (wave[0].ids, wave[0].capture) == ((3, 4, 5), ("blocks.0.hook_out",))


def test_a_run_of_another_session_is_not_run_here(plan):
    with pytest.raises(SpecError, match=r"edit 1 .*another session.*run it again with capture='blocks.0.hook_out'"):
        plan.add((3, 4, 5), patch(HeldRun(torch.zeros(3, 8), ours=False), "blocks.0.hook_out"))


def test_a_source_of_another_width_is_refused(plan):
    with pytest.raises(SpecError, match=r"the source run holds \(9,\) a token at blocks.1.hook_out, this model \(8,\)"):
        plan.add((3, 4), patch(HeldRun(torch.zeros(2, 9))))


def test_sources_of_another_length_are_refused(plan):
    with pytest.raises(SpecError, match="3 positions to write, but 2 positions of the source to read"):
        plan.add((3, 4, 5), patch("w0 w1"))


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("", "source: the prompt is empty"),
        (
            {"prompt": "w0", "edits": {STREAM: {"op": "suppress", "pos": 5}}},
            "source: edit 1 .*pos 5 is outside the prompt",
        ),
        (
            {"prompt": "w0", "edits": {STREAM: {"op": "suppress", "pos": slice(1, 2)}}},
            "source: edit 1 .*a slice as text",
        ),
        ({"prompt": "w0", "edits": {STREAM: {"op": "set", "value": object()}}}, "source: edit 1 .*no array of numbers"),
        ({"prompt": "w0", "edits": {"blocks.9.hook_out": {"op": "suppress"}}}, "source: edit 1 .*layers 0 to 2"),
    ],
)
def test_a_wrong_source_names_both_edits(plan, source, says):
    with pytest.raises(SpecError, match=rf"^edit 1 \(blocks.1.hook_out, patch\): {says}") as refused:
        plan.add((3,), patch(source))
    assert refused.value.edit_index == 0
    assert plan.requests == []


def test_what_must_be_tapped():
    asked = (
        "blocks.0.attn.hook_pattern",
        "blocks.0.attn.hook_attn_scores",
        "blocks.0.attn.hook_rot_k",
        "unembed.hook_out",
    )
    assert tapped(CATALOGUE, asked) == ("blocks.0.attn.hook_rot_q", "blocks.0.attn.hook_rot_k")
    assert tapped(CATALOGUE, ()) == ()
