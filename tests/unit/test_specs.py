"""Edits and specs: every form a user may write, every refusal and its words, and the way to JSON and back."""

from __future__ import annotations

import json
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from explorer import Edit, SpecError
from explorer.catalogue import Catalogue
from explorer.positions import Extent
from explorer.resolve import RowEdit, pin, resolve
from explorer.specs import Source, as_source, parse, parse_batch, to_json

from .fake import CATALOGUE, SHAPE

STREAM = "blocks.1.hook_out"
Z = "blocks.1.attn.o.hook_in"  # 4 heads of 3
K = "blocks.1.attn.k.hook_out"  # 2 key-value heads of 3
PROMPT = Extent(5, 5)
GENERATING = Extent(5, 8)


def no_source(origin, point, where):
    raise AssertionError("nothing here patches")


def rows_of(*edits: Edit, extent: Extent = PROMPT, dtype: torch.dtype = torch.float32, source=no_source):
    return resolve(parse(list(edits)), CATALOGUE, extent, dtype, source)


def one(hook: str = STREAM, op: str = "suppress", *, extent: Extent = PROMPT, dtype=torch.float32, **fields) -> RowEdit:
    return rows_of(Edit(hook, op, **fields), extent=extent, dtype=dtype)[0]


def refusal(hook: str = STREAM, op: str = "suppress", *, extent: Extent = PROMPT, dtype=torch.float32, **fields) -> str:
    """What is said about an edit, which is always named."""
    with pytest.raises(SpecError) as refused:
        one(hook, op, extent=extent, dtype=dtype, **fields)
    message = str(refused.value)
    assert message.startswith(f"edit 1 ({hook}, {op}): "), message
    assert refused.value.edit_index == 0
    assert isinstance(refused.value, ValueError)
    return message.removeprefix(f"edit 1 ({hook}, {op}): ")


# --- the forms of a spec ----------------------------------------------------------------------------------------------


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


# --- batches ----------------------------------------------------------------------------------------------------------


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


# --- hooks and heads --------------------------------------------------------------------------------------------------


def test_an_alias_resolves_to_the_canonical_name():
    assert one("blocks.1.attn.hook_z").hook == Z


def test_hooks_that_cannot_be_edited():
    assert "there is no hook 'blocks.1.hook_oout' in this model; did you mean blocks.1.hook_out" in refusal(
        "blocks.1.hook_oout"
    )
    assert "layers 0 to 2" in refusal("blocks.3.hook_out")
    assert "nearest one that is: blocks.1.attn.o.hook_in" in refusal("blocks.1.attn.hook_result")
    assert "not available in this model: attention and MLP read the same stream" in refusal("blocks.2.hook_resid_mid")
    assert "can be captured but not edited: edit q, k or z" in refusal("blocks.1.attn.hook_pattern")
    assert "edit q, k or z" in refusal("blocks.1.attn.hook_attn_scores")
    assert "edit the last layer's hook_out" in refusal("logits")
    assert "not edited" in refusal("ln_final.hook_normalized")


@pytest.mark.parametrize("head", [2, np.int64(2), torch.tensor(2), [2], (2,), np.array([2]), range(2, 3)])
def test_head_forms(head):
    assert one(Z, head=head).heads == (2,)


def test_heads_keep_their_order():
    assert one(Z, head=[3, 0]).heads == (3, 0)
    assert one(Z).heads is None
    assert one(K, head=[0, 1]).heads == (0, 1)


@pytest.mark.parametrize(
    ("hook", "head", "says"),
    [
        (Z, 4, "there is no head 4: blocks.1.attn.o.hook_in has heads 0 to 3$"),
        (Z, -1, "there is no head -1: .* has heads 0 to 3; the last is head=3"),
        (K, 2, "has key-value heads 0 to 1"),
        ("blocks.1.attn.hook_v", 2, "has key-value heads 0 to 1"),
        ("blocks.1.attn.hook_rot_k", 2, "has key-value heads 0 to 1"),
        (STREAM, 0, "blocks.1.hook_out has no heads; remove head"),
        ("blocks.1.mlp.hook_post", [0], "has no heads"),
        (Z, True, "head takes whole numbers, not True"),
        (Z, [0, np.True_], "not True"),
        (Z, 1.0, "head takes whole numbers, not 1.0"),
        (Z, "0:3", r"head takes whole numbers such as 0 or \[0, 1, 2\], not '0:3'"),
        (Z, [[0]], r"not \[0\]"),
        (Z, [], "head is empty"),
        (Z, [1, 2, 1], "head names 1 twice"),
    ],
)
def test_wrong_heads(hook, head, says):
    with pytest.raises(SpecError, match=says):
        one(hook, head=head)


# --- positions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pos", "rows"),
    [
        (None, (0, 1, 2, 3, 4)),
        ("all", (0, 1, 2, 3, 4)),
        ("last", (4,)),
        (0, (0,)),
        (-1, (4,)),
        (-5, (0,)),
        ([3, 0], (3, 0)),
        ((-1, 0), (4, 0)),
        (range(1, 3), (1, 2)),
        (np.int64(2), (2,)),
        (np.array([1, 2]), (1, 2)),
        (np.array(3), (3,)),
        (torch.tensor(2), (2,)),
        (torch.tensor([0, -1]), (0, 4)),
        ([np.int32(1), torch.tensor(2)], (1, 2)),
        ("1:3", (1, 2)),
        (":2", (0, 1)),
        ("3:", (3, 4)),
        ("-2:", (3, 4)),
        (":-3", (0, 1)),
        ("::2", (0, 2, 4)),
        ("1:5:3", (1, 4)),
        (" 1 : 3 ", (1, 2)),
        (":", (0, 1, 2, 3, 4)),
        (np.str_("last"), (4,)),
    ],
)
def test_positions(pos, rows):
    assert tuple(one(pos=pos).rows) == rows


@pytest.mark.parametrize(
    ("pos", "says"),
    [
        (5, "pos 5 is outside the prompt, which has positions 0 to 4"),
        (-6, "pos -6 (counted from the prompt's end) is outside the prompt, which has positions 0 to 4"),
        ([0, 9], "pos 9 is outside the prompt"),
        ("3:9", "pos '3:9' is outside the prompt, which has positions 0 to 4"),
        ("-9:", "pos '-9:' (counted from the prompt's end) is outside the prompt"),
        ("3:3", "pos '3:3' would match no row"),
        ("4:2", "would match no row"),
        ("5:", "would match no row"),
        ([], "pos is empty: it would match nothing"),
        (np.array([], dtype=int), "pos is empty"),
        (True, "pos takes whole numbers, not True"),
        ([False], "not False"),
        (np.True_, "pos takes whole numbers"),
        ([np.True_, np.False_], "pos takes whole numbers"),
        (np.array([True, False, True, False, True]), "pos takes whole numbers"),
        (torch.tensor([True]), "pos takes whole numbers"),
        ([torch.tensor(True)], "pos takes whole numbers"),
        (1.0, "pos takes whole numbers, not 1.0"),
        (np.array([0.5]), "not 0.5"),
        ([torch.tensor(0.5)], "not 0.5"),
        ([torch.tensor([0, 1])], "pos takes whole numbers, not [0, 1]"),
        ([np.array([0, 1])], "not [0, 1]"),
        (["last"], "not 'last'"),
        ({1, 2}, "pos takes whole numbers, not {1, 2}"),
        ({"start": 1}, "pos takes whole numbers"),
        (slice(1, 2), "pos takes whole numbers, not slice(1, 2, None)"),
        ([1, -4], "pos names 1 twice"),
        ([0, 0], "pos names 0 twice"),
        ("first", "pos 'first' is not understood; write an int, a list, a slice such as '3:7', 'last' or 'all'"),
        ("3", "is not understood"),
        ("", "is not understood"),
        ("1:2:3:4", "is not understood"),
        ("a:b", "is not understood"),
        ("1.5:", "is not understood"),
        ("::0", "the step must be at least 1"),
        ("::-1", "the step must be at least 1"),
        (10**30, f"pos {10**30} is outside the prompt"),
    ],
)
def test_wrong_positions(pos, says):
    assert says in refusal(pos=pos)


def test_one_token_is_in_the_singular():
    assert "pos 1 is outside the prompt, which has position 0 alone" in refusal(pos=1, extent=Extent(1, 1))


def test_many_positions_are_quick():
    extent = Extent(100_000, 100_000)
    assert len(one(pos=list(range(100_000)), extent=extent).rows) == 100_000


@pytest.mark.parametrize(
    ("phase", "pos", "rows"),
    [
        ("prompt", None, (0, 1, 2, 3, 4)),
        ("prompt", "last", (4,)),
        ("decode", None, (5, 6, 7)),
        ("decode", "all", (5, 6, 7)),
        ("decode", 6, (6,)),
        ("decode", "6:", (6, 7)),
        ("decode", ":", (5, 6, 7)),
        ("both", None, tuple(range(8))),
        ("both", -1, (4,)),
        ("both", [4, 5], (4, 5)),
        ("both", "3:6", (3, 4, 5)),
    ],
)
def test_phases(phase, pos, rows):
    assert tuple(one(pos=pos, phase=phase, extent=GENERATING).rows) == rows


@pytest.mark.parametrize(
    ("phase", "pos", "says"),
    [
        ("prompt", 6, "pos 6 is outside the prompt, which has positions 0 to 4; phase='both' reaches generated tokens"),
        ("prompt", 9, "pos 9 is outside the prompt, which has positions 0 to 4"),
        ("prompt", "4:6", "is outside the prompt, which has positions 0 to 4; phase='both' reaches generated tokens"),
        ("decode", 4, "tokens that are fed back, which have positions 5 to 7; phase='both' reaches the prompt"),
        (
            "decode",
            "last",
            "pos 'last' (counted from the prompt's end) is outside the generated tokens that are fed back",
        ),
        ("decode", "2:6", "pos '2:6' is outside the generated tokens that are fed back, which have positions 5 to 7"),
        ("both", 8, "pos 8 is outside the run, which has positions 0 to 7"),
    ],
)
def test_wrong_phases(phase, pos, says):
    assert says in refusal(pos=pos, phase=phase, extent=GENERATING)


def test_decode_without_generated_rows_matches_nothing():
    says = refusal(phase="decode")
    assert (
        "would match no row: it edits generated tokens that are fed back, and this run feeds none; generate at least 2"
        in says
    )


# --- factors and values -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [0.5, np.float32(0.5), np.array(0.5), torch.tensor(0.5), Fraction(1, 2)])
def test_factor_forms(factor):
    assert one(op="scale", factor=factor).factor == 0.5


def test_a_whole_factor_is_a_float():
    factor = one(op="scale", factor=0).factor
    assert factor == 0.0
    assert isinstance(factor, float)
    assert one(op="scale", factor=-2).factor == -2.0


@pytest.mark.parametrize(
    ("factor", "says"),
    [
        (math.nan, "factor is nan; it must be finite"),
        (math.inf, "factor is inf; it must be finite"),
        (np.float32("nan"), "factor is nan"),
        (True, "factor must be one number, not True"),
        (np.True_, "factor must be one number"),
        (torch.tensor(True), "factor must be one number"),
        ("0.5", "factor must be one number, not '0.5'"),
        ([0.5], r"factor must be one number, not \[0.5\]"),
        (np.array([0.5]), "factor must be one number"),
        (torch.ones(2), "factor must be one number"),
        (1j, "factor must be one number, not 1j"),
        (np.complex64(1), "factor must be one number"),
        (10**400, "too large for the model's float32"),
        (1e39, r"factor is 1e\+39, too large for the model's float32 \(at most 3.403e\+38\)"),
    ],
)
def test_wrong_factors(factor, says):
    with pytest.raises(SpecError, match=says):
        one(op="scale", factor=factor)


def test_a_factor_for_half_precision():
    assert "too large for the model's float16 (at most 6.55e+04)" in refusal(
        op="scale", factor=70000, dtype=torch.float16
    )


@pytest.mark.parametrize(
    "value",
    [
        0.1,
        np.float64(0.1),
        np.array(0.1),
        torch.tensor(0.1, dtype=torch.float64),
    ],
)
def test_scalars_are_kept_exactly(value):
    resolved = one(op="set", value=value).value
    assert resolved.shape == (1, 1, 1)
    assert resolved.item() == 0.1


@pytest.mark.parametrize(
    "convert",
    [
        list,
        tuple,
        np.float16,
        np.float32,
        np.array,
        lambda v: np.array(v)[::-1][::-1].copy()[::-1][::-1],
        lambda v: np.array(v[::-1])[::-1],  # negative strides
        lambda v: np.asfortranarray(np.array(v)),
        lambda v: torch.tensor(v),
        lambda v: torch.tensor(v, dtype=torch.bfloat16),
        lambda v: torch.tensor(v, dtype=torch.float16),
        lambda v: torch.tensor(v, dtype=torch.float8_e4m3fn),
        lambda v: torch.tensor(v, requires_grad=True),
        lambda v: [torch.tensor(x) for x in v],
        lambda v: [np.float32(x) for x in v],
    ],
)
def test_arrays_of_every_kind(convert):
    numbers = [0.5, -1.0, 0.0, 2.0, 4.0, 0.25, 1.0, -8.0]
    value = one(op="add", value=convert(numbers)).value
    assert value.shape == (1, 1, 8)
    assert value.flatten().tolist() == numbers
    assert value.is_floating_point()
    assert not value.requires_grad


def test_rows_of_other_libraries_in_a_list():
    rows = [[float(i)] * 8 for i in range(3)]
    for form in (
        rows,
        [np.array(r) for r in rows],
        [torch.tensor(r) for r in rows],
        np.array(rows),
        torch.tensor(rows),
    ):
        value = one(op="set", value=form, pos=[0, 1, 2]).value
        assert value.shape == (3, 1, 8)
        assert value[:, 0, 0].tolist() == [0.0, 1.0, 2.0]


def test_whole_numbers_are_numbers():
    assert one(op="set", value=3).value.item() == 3.0
    assert one(op="set", value=np.arange(8)).value.flatten().tolist() == list(range(8))
    assert one(op="set", value=torch.arange(8, dtype=torch.uint8)).value.dtype == torch.float64


def test_a_read_only_array_is_welcome(recwarn):
    value = np.ones(8)
    value.setflags(write=False)
    assert one(op="set", value=value).value.sum() == 8
    assert not recwarn


@pytest.mark.parametrize(
    ("hook", "head", "pos", "given", "resolved"),
    [
        (STREAM, None, None, (8,), (1, 1, 8)),
        (STREAM, None, None, (5, 8), (5, 1, 8)),
        (STREAM, None, [1, 2], (2, 8), (2, 1, 8)),
        (STREAM, None, 1, (1, 8), (1, 1, 8)),
        (Z, None, None, (12,), (1, 4, 3)),
        (Z, None, None, (4, 3), (1, 4, 3)),
        (Z, None, None, (5, 12), (5, 4, 3)),
        (Z, None, None, (5, 4, 3), (5, 4, 3)),
        (Z, 1, None, (3,), (1, 1, 3)),
        (Z, 1, None, (1, 3), (1, 1, 3)),
        (Z, 1, None, (5, 3), (5, 1, 3)),
        (Z, [1, 2], None, (3,), (1, 1, 3)),
        (Z, [1, 2], None, (2, 3), (1, 2, 3)),
        (Z, [1, 2], None, (5, 3), (5, 1, 3)),
        (Z, [1, 2], None, (5, 2, 3), (5, 2, 3)),
        (K, None, None, (2, 3), (1, 2, 3)),
        ("blocks.1.mlp.hook_post", None, "last", (10,), (1, 1, 10)),
    ],
)
def test_value_shapes(hook, head, pos, given, resolved):
    value = torch.arange(math.prod(given), dtype=torch.float32).reshape(given)
    out = one(hook, "set", value=value, head=head, pos=pos).value
    assert out.shape == resolved
    assert torch.equal(out.flatten(), value.flatten())


@pytest.mark.parametrize(
    ("hook", "head", "given", "says"),
    [
        (
            STREAM,
            None,
            (7,),
            "value has shape (7,) but blocks.1.hook_out takes a number, (8,), or (5, 8) for the 5 positions",
        ),
        (STREAM, None, (3, 8), "value has shape (3, 8) but blocks.1.hook_out takes a number, (8,), or (5, 8)"),
        (STREAM, None, (5,), "value has shape (5,)"),
        (STREAM, None, (5, 1), "value has shape (5, 1)"),
        (STREAM, None, (0,), "value has shape (0,)"),
        (STREAM, None, (0, 8), "value has shape (0, 8)"),
        (STREAM, None, (1, 5, 8), "value has shape (1, 5, 8)"),
        (Z, None, (3,), "takes a number, (12,), (4, 3), or (5, 12) or (5, 4, 3)"),
        (Z, None, (3, 4), "value has shape (3, 4)"),
        (Z, [0, 1], (12,), "takes a number, (3,), (2, 3), or (5, 3) or (5, 2, 3)"),
        (Z, [0, 1], (3, 3), "value has shape (3, 3)"),
        (Z, [0, 1], (4, 3), "value has shape (4, 3)"),
    ],
)
def test_wrong_value_shapes(hook, head, given, says):
    assert says in refusal(hook, "set", value=torch.zeros(given), head=head)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (math.nan, "value holds NaN or infinity"),
        (-math.inf, "value holds NaN or infinity"),
        ([0.0] * 7 + [math.nan], "value holds NaN or infinity; use 'suppress' to zero"),
        (torch.tensor([math.inf] * 8), "value holds NaN or infinity"),
        (True, "value must hold real numbers, not bool"),
        ([True] * 8, "value must hold real numbers, not bool"),
        (np.ones(8, dtype=bool), "not bool"),
        (torch.ones(8, dtype=torch.bool), "not bool"),
        (1j, "no array of numbers|real numbers"),
        ([1j] * 8, "real numbers, not complex"),
        (np.ones(8, dtype=complex), "real numbers, not complex"),
        ("0.5", "value must be a number or an array of numbers, not '0.5'"),
        (b"abc", "value must be a number"),
        ({"a": 1}, "value must be a number"),
        (lambda x: x, "value must be a number"),
        (["a"] * 8, "no array of numbers"),
        ([[1.0], [1.0, 2.0]], "no array of numbers"),
        ([None] * 8, "no array of numbers"),
        (object(), "no array of numbers"),
        (np.array([None] * 8), "no array of numbers"),
        (10**400, "no array of numbers"),
        (1e39, r"value holds 1e\+39, too large for the model's float32 \(at most 3.403e\+38\)"),
    ],
)
def test_wrong_values(value, says):
    with pytest.raises(SpecError, match=says):
        one(op="set", value=value)


def test_values_must_fit_the_models_dtype():
    assert "value holds 7e+04, too large for the model's float16 (at most 6.55e+04)" in refusal(
        op="add", value=[0.0] * 7 + [-70000.0], dtype=torch.float16
    )
    assert one(op="add", value=65504.0, dtype=torch.float16).value.item() == 65504
    assert one(op="add", value=70000.0, dtype=torch.bfloat16).value.item() == 70000


# --- sources ----------------------------------------------------------------------------------------------------------


class FakeRun:
    """A Run of `prompt` tokens that generated, and captured z with the position as every value."""

    def __init__(self, prompt: int = 5, rows: int = 5) -> None:
        self.prompt_length, self.rows = prompt, rows
        self.fed, self.fed_edits = tuple(range(rows)), (Edit(STREAM, "suppress", pos=[0]),)

    def recipe(self):
        return {"ids": list(self.fed), "edits": to_json(self.fed_edits)}

    def rows_at(self, hook):
        return torch.arange(self.rows, dtype=torch.float32)[:, None, None].expand(-1, 4, 3) if hook == Z else None

    def made_in(self, catalogue):
        return True


def patched(extent: Extent = PROMPT, of: Extent = PROMPT, **fields) -> RowEdit:
    return rows_of(Edit(STREAM, "patch", source="w1", **fields), extent=extent, source=lambda *_: (of, "key"))[0]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("w1 w2", Source(prompt="w1 w2")),
        ([3, 4], Source(ids=(3, 4))),
        ((3, 4), Source(ids=(3, 4))),
        (range(3, 5), Source(ids=(3, 4))),
        (np.array([3, 4]), Source(ids=(3, 4))),
        (torch.tensor([3, 4]), Source(ids=(3, 4))),
        ({"prompt": "w1"}, Source(prompt="w1")),
        ({"ids": [3]}, Source(ids=(3,))),
        ({"prompt": "w1", "edits": None}, Source(prompt="w1")),
        ({"prompt": "w1", "edits": {Z: {"op": "suppress"}}}, Source(prompt="w1", edits=(Edit(Z, "suppress"),))),
        (FakeRun(rows=2), Source(ids=(0, 1), edits=(Edit(STREAM, "suppress", pos=[0]),))),
    ],
)
def test_source_forms(source, expected):
    made = as_source(source, "edit 1")
    assert made == expected
    assert as_source(made, "edit 1") is made
    assert as_source(made.to_json(), "edit 1") == expected
    assert Edit(STREAM, "patch", source=source).to_json()["source"] == expected.to_json()


def test_a_run_stays_with_its_recipe():
    run = FakeRun()
    assert as_source(run, "").run is run
    assert "run" not in as_source(run, "").to_json()


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (5, "source is 5; it must be a Run, a prompt or a list of token ids"),
        (b"w1", "source is b'w1'; it must be"),
        ({1, 2}, "it must be a Run"),
        (len, "it must be a Run"),
        (torch.zeros(5, 8), "source is an array of numbers; write them with op 'set' and value="),
        (np.zeros(8), "op 'set' and value="),
        ([], "source: ids is empty"),
        ([1.5], "source: ids takes whole numbers, not 1.5"),
        ([True], "not True"),
        (["w1"], "ids takes whole numbers, not 'w1'"),
        ({}, "source: it needs exactly one of 'prompt' and 'ids'"),
        ({"prompt": "w1", "ids": [1]}, "exactly one of"),
        ({"prompt": "w1", "spec": {}}, "unknown key 'spec'"),
        ({"prompt": 5}, "'prompt' is 5, not a string"),
        ({"ids": "w1"}, "ids takes whole numbers"),
        ({"prompt": "w1", "edits": {Z: {"op": "zap"}}}, "source: edit 1 .*unknown op 'zap'"),
        ({"prompt": "w1", "edits": len}, "source: a spec is data"),
    ],
)
def test_what_is_no_source(source, says):
    with pytest.raises(SpecError, match=rf"^edit 1 \(blocks.1.hook_out, patch\): .*{says}") as refused:
        parse(Edit(STREAM, "patch", source=source))
    assert refused.value.edit_index == 0


def test_source_positions_default_to_pos():
    edit = patched(pos=[0, -1], of=Extent(7, 7))
    assert edit.op == "patch"
    assert (tuple(edit.rows), edit.source) == ((0, 4), ("key", (0, 6)))
    assert patched(pos="last", of=Extent(2, 2)).source == ("key", (1,))
    assert patched().source == ("key", (0, 1, 2, 3, 4))


def test_source_positions_of_their_own():
    assert patched(pos=[0, 1], source_pos=[3, 2]).source == ("key", (3, 2))
    assert patched(pos=[0, 1, 3], source_pos=[2, -1, 2]).source == ("key", (2, 4, 2))  # a row may be read twice
    assert patched(pos="2:4", source_pos="-2:", of=Extent(9, 9)).source == ("key", (7, 8))
    assert patched(pos=0, source_pos=6, of=GENERATING).source == ("key", (6,))  # a generated token of the source


@pytest.mark.parametrize(
    ("fields", "of", "says"),
    [
        ({}, Extent(4, 4), "5 positions to write, but 4 positions of the source to read"),
        ({}, Extent(6, 6), "5 positions to write, but 6 positions of the source to read"),
        (
            {"pos": [0, 1], "source_pos": 3},
            PROMPT,
            "2 positions to write, but 1 position of the source to read",
        ),
        (
            {"pos": 4},
            Extent(3, 3),
            "pos 4 is outside the source's prompt, which has positions 0 to 2; source_pos= says where to read",
        ),
        (
            {"pos": 0, "source_pos": 5},
            PROMPT,
            "source_pos 5 is outside the source's prompt, which has positions 0 to 4",
        ),
        ({"pos": 0, "source_pos": "5:9"}, PROMPT, "source_pos '5:9' is outside the source's prompt"),
        ({"pos": 0, "source_pos": True}, PROMPT, "source_pos takes whole numbers"),
    ],
)
def test_source_positions_that_do_not_match(fields, of, says):
    with pytest.raises(SpecError, match=r"^edit 1 \(blocks.1.hook_out, patch\): ") as refused:
        patched(of=of, **fields)
    assert says in str(refused.value)


def test_the_phase_of_a_patch():
    assert patched(GENERATING, GENERATING, phase="decode").source == ("key", (5, 6, 7))
    assert patched(GENERATING, GENERATING, phase="both").source == ("key", tuple(range(8)))
    assert patched(GENERATING, GENERATING).source == ("key", tuple(range(5)))
    assert patched(GENERATING, Extent(9, 9), phase="decode", pos=6).source == ("key", (6,))
    assert patched(GENERATING, Extent(3, 3), phase="decode", source_pos="all").source == ("key", (0, 1, 2))
    assert patched(GENERATING, Extent(4, 7), phase="decode", pos="::2").source == ("key", (4, 6))
    assert patched(GENERATING, Extent(2, 8), phase="decode", pos="6:").source == ("key", (6, 7))


@pytest.mark.parametrize("pos", [None, "all", ":", "::1"])
def test_generated_tokens_are_not_patched_from_a_prompt(pos):
    """Not even where it has as many."""
    with pytest.raises(SpecError, match=r"^edit 1 \(blocks.1.hook_out, patch\): ") as refused:
        patched(GENERATING, Extent(3, 3), phase="decode", pos=pos)
    assert "3 positions to write, but 0 positions of the source to read; give pos and source_pos of " in str(
        refused.value
    )
    assert "or a source run that generated as many tokens" in str(refused.value)


def test_where_a_patch_reads_unless_told_is_in_the_sources_prompt():
    """The source generated: its prompt has 3 tokens, its rows go on."""
    with pytest.raises(
        SpecError, match="pos 4 is outside the source's prompt, which has positions 0 to 2; source_pos="
    ):
        patched(PROMPT, Extent(3, 6), pos=[1, 4])
    assert patched(PROMPT, Extent(3, 6), pos=-1).source == ("key", (2,))
    assert patched(PROMPT, Extent(3, 6), pos=4, source_pos=5).source == ("key", (5,))


def test_values_that_a_run_holds_are_set():
    values = FakeRun().rows_at(Z)
    edit = rows_of(
        Edit(Z, "patch", source="w1", pos=[0, 1], source_pos=[4, 2], head=[1, 3]), source=lambda *_: (PROMPT, values)
    )[0]
    assert (edit.op, edit.heads, edit.source) == ("set", (1, 3), None)
    assert edit.value.shape == (2, 2, 3)
    assert edit.value[:, 0, 0].tolist() == [4.0, 2.0]


def test_a_refused_source_names_the_edit():
    def source(origin, point, where):
        raise SpecError(f"{where}: no")

    with pytest.raises(SpecError, match=r"^edit 2 \(blocks.1.hook_out, patch\): no$") as refused:
        rows_of(Edit(STREAM, "suppress"), Edit(STREAM, "patch", source="w1"), source=source)
    assert refused.value.edit_index == 1


# --- pinned edits: what a generated run did, as an edit of the tokens it fed ------------------------------------------


def pinned(edit: Edit, rows: int = 7, source=no_source) -> Edit | None:
    edit = parse(edit)[0]
    return pin(edit, rows_of(edit, extent=GENERATING, source=source)[0], rows)


def test_pinning_writes_the_positions_that_were_fed():
    assert pinned(Edit(STREAM, "suppress", pos="last")) == Edit(STREAM, "suppress", pos=[4])
    assert pinned(Edit(STREAM, "suppress", phase="decode")) == Edit(STREAM, "suppress", pos=[5, 6])
    assert pinned(Edit(STREAM, "suppress", phase="decode", pos=7)) is None
    assert pinned(Edit(STREAM, "set", value=2.0, phase="both"), 6) == Edit(STREAM, "set", value=2.0, pos=list(range(6)))


@pytest.mark.parametrize(
    ("hook", "head", "shape"),
    [
        (STREAM, None, (3, 8)),
        (Z, None, (3, 12)),
        (Z, None, (3, 4, 3)),
        (Z, [2, 0], (3, 3)),
        (Z, [2, 0], (3, 2, 3)),
        (Z, 1, (3, 3)),
    ],
)
def test_pinning_keeps_the_values_of_the_positions_that_were_fed(hook, head, shape):
    value = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)
    edit = pinned(Edit(hook, "set", value=value, head=head, phase="decode"))
    before = one(hook, "set", value=value, head=head, phase="decode", extent=GENERATING).value
    after = rows_of(edit, extent=Extent(7, 7))[0]
    assert tuple(after.rows) == (5, 6)
    assert torch.equal(after.value, before[:2].expand_as(after.value))


def test_pinning_a_patch_writes_where_it_read():
    edit = pinned(Edit(STREAM, "patch", source="w1", pos="last"), source=lambda *_: (Extent(3, 3), "key"))
    assert (edit.pos, edit.source_pos) == ([4], [2])
    edit = pinned(
        Edit(Z, "patch", source=FakeRun(3, 3), pos="last"), source=lambda *_: (Extent(3, 3), FakeRun(3, 3).rows_at(Z))
    )
    assert (edit.pos, edit.source_pos) == ([4], [2])
    edit = pinned(Edit(STREAM, "patch", source="w1", phase="decode"), source=lambda *_: (GENERATING, "key"))
    assert (edit.pos, edit.source_pos, edit.phase) == ([5, 6], [5, 6], "prompt")


# --- any valid spec, any broken one -----------------------------------------------------------------------------------

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


def same_length(origin, point, where):
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


def test_sizes_of_the_fake_model_are_all_different():
    assert len({SHAPE.d_model, SHAPE.d_head, SHAPE.d_mlp, SHAPE.d_vocab, SHAPE.heads, SHAPE.kv_heads}) == 6


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
