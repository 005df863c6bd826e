"""Specs as they are written: every form a user may give, what is no spec, batches, and the way to JSON and back."""

from __future__ import annotations

import json
from fractions import Fraction

import numpy as np
import pytest
import torch

from explorer import Edit, SpecError
from explorer.catalogue import Catalogue
from explorer.specs import parse, parse_batch, to_json

from .fake import CATALOGUE
from .resolving import STREAM, Z, rows_of


def test_no_spec_is_no_edit():
    assert parse(None) == parse([]) == parse(()) == parse({}) == ()
    assert to_json(()) == {}


def test_a_dict_a_list_and_an_edit_say_the_same():
    edit = Edit(STREAM, "scale", factor=0.5, pos=[1, 2])
    spec = {STREAM: {"op": "scale", "factor": 0.5, "pos": [1, 2]}}
    assert parse(edit) == parse([edit]) == parse((edit,)) == parse(spec) == parse({STREAM: [spec[STREAM]]}) == (edit,)
    assert to_json([edit]) == spec


def test_an_edit_is_immutable_and_compares_by_value():
    edit = Edit(STREAM, "set", value=torch.ones(8))
    assert edit == Edit(STREAM, "set", value=[1.0] * 8) == Edit(STREAM, "set", value=np.ones(8))
    assert edit != Edit(STREAM, "set", value=[2.0] * 8)
    assert edit != "edit"
    with pytest.raises(AttributeError):
        edit.pos = 3
    with pytest.raises(TypeError):
        hash(edit)
    with pytest.raises(TypeError):
        Edit(STREAM, "set", 1)


def test_json_keeps_order_and_several_edits_a_hook():
    spec = {
        STREAM: [
            {"op": "scale", "factor": 2},
            {"op": "add", "value": 1.0, "pos": "last"},
            {"op": "suppress", "pos": 0},
        ],
        Z: {"op": "suppress", "head": [0, 2], "phase": "both"},
        "blocks.0.hook_resid_pre": {"op": "patch", "source": {"prompt": "w1 w2"}, "pos": [0, 1], "source_pos": "0:2"},
    }
    edits = parse(spec)
    assert [e.op for e in edits] == ["scale", "add", "suppress", "suppress", "patch"]
    assert to_json(edits) == spec
    assert list(to_json(edits)) == list(spec)
    assert json.loads(json.dumps(to_json(edits))) == spec


def test_edits_of_one_hook_under_two_names_stay_in_order():
    edits = parse(
        [
            Edit("blocks.1.hook_resid_post", "suppress"),
            Edit(STREAM, "add", value=1.0),
            Edit("embed.hook_out", "suppress"),
            Edit("blocks.1.hook_resid_post", "scale", factor=2),
        ]
    )
    spec = to_json(edits)
    assert list(spec) == ["blocks.1.hook_resid_post", "embed.hook_out"]
    assert [body["op"] for body in spec["blocks.1.hook_resid_post"]] == ["suppress", "add", "scale"]
    again = rows_of(*parse(spec))
    assert [(e.hook, e.op) for e in again if e.hook == STREAM] == [(STREAM, o) for o in ("suppress", "add", "scale")]


def test_names_of_one_hook_in_turn_keep_their_order_or_are_refused():
    out, added = "blocks.0.mlp.hook_out", "blocks.0.hook_mlp_out"
    spec = [Edit(out, "suppress"), Edit(added, "add", value=1.0), Edit(out, "scale", factor=2.0)]
    assert [body["op"] for body in to_json(spec, lambda name: CATALOGUE[name].name)[out]] == [
        "suppress",
        "add",
        "scale",
    ]
    apart = Catalogue(CATALOGUE.shape, apart=True)  # two hooks there: nothing to keep in order
    assert list(to_json(spec, lambda name: apart[name].name)) == [out, added]
    with pytest.raises(SpecError, match=f"between {out} and {added}"):
        to_json(spec)
    assert list(to_json(spec[:2])) == [out, added]


def test_transformer_lens_specs_are_valid_unchanged():
    spec = {
        "blocks.0.hook_resid_post": {"op": "suppress", "pos": [1, -1]},
        "blocks.1.attn.hook_z": {"op": "scale", "factor": 0.0, "pos": 2},
        "blocks.1.mlp.hook_post": {"op": "add", "value": [0.5] * 10},
        "blocks.2.hook_out": [{"op": "set", "value": 0.25, "pos": (0, 1)}],
    }
    resolved = rows_of(*parse(spec))
    assert [e.hook for e in resolved] == ["blocks.0.hook_out", Z, "blocks.1.mlp.out.hook_in", "blocks.2.hook_out"]
    assert [tuple(e.rows) for e in resolved] == [(1, 4), (2,), (0, 1, 2, 3, 4), (0, 1)]


def test_json_of_arrays_and_numbers_of_other_libraries():
    edit = Edit(Z, "set", value=torch.full((3,), 0.5, dtype=torch.bfloat16), head=np.int64(2), pos=torch.tensor([0, 1]))
    assert edit.to_json() == {"hook": Z, "op": "set", "value": [0.5] * 3, "head": 2, "pos": [0, 1]}
    assert json.loads(json.dumps(edit.to_json())) == edit.to_json()
    assert Edit(STREAM, "scale", factor=Fraction(1, 4), pos=range(2)).to_json()["factor"] == 0.25
    assert Edit(STREAM, "set", value=[np.float32(1), torch.tensor(2.0)]).to_json()["value"] == [1.0, 2.0]


def test_a_parsed_spec_shares_nothing_with_what_was_given():
    value, pos, nested = torch.ones(8), [0, 1], [np.ones(8), np.ones(8)]
    edits = parse([Edit(STREAM, "set", value=value, pos=pos), Edit(STREAM, "set", value=nested, pos=[0, 1])])
    before = to_json(edits)
    value.zero_()
    pos.append(2)
    nested[0][:] = 9
    assert to_json(edits) == before
    source = {"prompt": "w1", "edits": {STREAM: {"op": "suppress"}}}
    edits = parse(Edit(STREAM, "patch", source=source))
    source["edits"].clear()
    assert edits[0].source.edits == (Edit(STREAM, "suppress"),)


@pytest.mark.parametrize(
    ("edits", "says"),
    [
        (lambda x: x, "a spec is data, not a function"),
        (Edit, "a spec is data, not a function"),
        ("suppress", "a dict or a list of Edits, not str"),
        (5, "not int"),
        ({1, 2}, "not set"),
        (torch.ones(2), "not Tensor"),
        ([5], "edit 1 is 5, not an Edit"),
        (
            [Edit(STREAM, "suppress"), {STREAM: {"op": "suppress"}}],
            "edit 2 is .*a list of specs needs a list of prompts",
        ),
        ([None], "edit 1 is None"),
        ({5: {"op": "suppress"}}, "5 is no hook name"),
        ({STREAM: "suppress"}, "'suppress'; it must be a dict such as {'op': 'suppress'}"),
        ({STREAM: None}, "is None; it must be a dict"),
        ({STREAM: []}, "no edit in the list; remove the hook"),
        ({STREAM: [[{"op": "suppress"}]]}, "must be a dict"),
        ({STREAM: lambda x: x}, "is a function; an edit is data"),
        ({STREAM: [{"op": "suppress"}, len]}, r"edit 2 \(blocks.1.hook_out\) is a function"),
        ({STREAM: Edit(STREAM, "suppress")}, "already names its hook; give a list of Edits"),
        ({"hook": STREAM, "op": "suppress"}, "'hook' is no hook name"),
        ({"op": "suppress"}, "'op' is no hook name"),
        ({STREAM: {"pos": 1}}, "it names no op; the ops are suppress, scale, add, set, patch"),
        ({STREAM: {"op": "suppress", "position": 1}}, "unknown key 'position'; did you mean 'pos'?"),
        ({STREAM: {"op": "suppress", "heads": 1}}, "unknown key 'heads'; did you mean 'head'?"),
        ({STREAM: {"op": "suppress", "fn": 1}}, "unknown key 'fn'"),
        ({STREAM: {"op": "suppress", "hook": STREAM}}, "unknown key 'hook'"),
        ({STREAM: {"op": "suppress", 3: 1}}, "unknown key 3"),
    ],
)
def test_what_is_no_spec(edits, says):
    with pytest.raises(SpecError, match=says):
        parse(edits)


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (Edit(STREAM, "zero"), "unknown op 'zero'"),
        (Edit(STREAM, "supress"), "unknown op 'supress'; did you mean 'suppress'?"),
        (Edit(STREAM, None), "unknown op None"),
        (Edit(STREAM, ["set"]), "unknown op"),
        (Edit(STREAM, "scale"), "scale needs 'factor'"),
        (Edit(STREAM, "add"), "add needs 'value'"),
        (Edit(STREAM, "set", factor=2), "set needs 'value'"),
        (Edit(STREAM, "patch"), "patch needs 'source'"),
        (Edit(STREAM, "suppress", value=0.0), "suppress takes no 'value'; remove it"),
        (Edit(STREAM, "scale", factor=2, value=1), "scale takes no 'value'"),
        (Edit(STREAM, "add", value=1, factor=2), "add takes no 'factor'"),
        (Edit(STREAM, "set", value=1, source="w1"), "set takes no 'source'"),
        (Edit(STREAM, "set", value=1, source_pos=1), "set takes no 'source_pos'"),
        (Edit(STREAM, "patch", source="w1", value=1), "patch takes no 'value'"),
        (Edit(STREAM, "suppress", phase="generate"), "unknown phase 'generate'; it is one of prompt, decode, both"),
        (Edit(STREAM, "suppress", phase=None), "unknown phase None"),
    ],
)
def test_what_is_no_edit(edit, says):
    with pytest.raises(SpecError, match=r"^edit 2 \(blocks.1.hook_out, .*\): ") as refused:
        parse([Edit(STREAM, "suppress"), edit])
    assert says in str(refused.value)
    assert refused.value.edit_index == 1


def test_a_hook_is_a_string():
    with pytest.raises(SpecError, match="edit 1: a hook is named by a string, not by 5"):
        parse(Edit(5, "suppress"))


def test_one_spec_for_all_or_one_a_prompt():
    a, b = Edit(STREAM, "suppress"), Edit(Z, "suppress")
    assert parse_batch(None, 2) == parse_batch([], 2) == parse_batch({}, 2) == [(), ()]
    assert parse_batch([a, b], 3) == parse_batch((a, b), 3) == [(a, b)] * 3
    assert parse_batch({STREAM: {"op": "suppress"}}, 2) == parse_batch(a, 2) == [(a,)] * 2
    assert parse_batch([[a], None, {Z: {"op": "suppress"}}], 3) == [(a,), (), (b,)]
    assert parse_batch([a, None], 2) == [(a,), ()]
    assert parse_batch([[], []], 2) == [(), ()]


def test_as_many_specs_as_prompts():
    with pytest.raises(SpecError, match="2 specs for 3 prompts; give one, or one a prompt"):
        parse_batch([None, {}], 3)


def test_a_wrong_spec_in_a_batch_names_its_prompt():
    with pytest.raises(SpecError, match=r"^prompt 2: edit 1 \(blocks.1.hook_out, zap\): unknown op") as refused:
        parse_batch([None, {STREAM: {"op": "zap"}}], 2)
    assert refused.value.edit_index == 0
    with pytest.raises(SpecError, match=r"^prompt 1: a spec is data, not a function"):
        parse_batch([len, None], 2)
