"""What an edit writes: factors and values in every form and shape, and what is refused."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from explorer import SpecError

from .fake import SHAPE
from .resolving import STREAM, K, Z, one, refusal


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
        lambda v: np.array(v[::-1])[::-1],  # negative strides
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


def test_sizes_of_the_fake_model_are_all_different():
    assert len({SHAPE.d_model, SHAPE.d_head, SHAPE.d_mlp, SHAPE.d_vocab, SHAPE.heads, SHAPE.kv_heads}) == 6
