"""Where an edit acts: hooks, heads, positions and phases in every form, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from explorer import SpecError
from explorer.positions import Extent

from .resolving import GENERATING, STREAM, K, Z, one, refusal


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
        (slice(1, 2), "pos takes a slice as text, such as '3:7', not slice(1, 2, None)"),
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
