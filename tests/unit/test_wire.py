"""Tensors and requests packed and unpacked: every bit comes back."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from explorer.engine.protocol import Request
from explorer.engine.vllm.wire import pack, pack_requests, share, unpack, unpack_edit, unpack_values
from explorer.resolve import RowEdit

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3), st.integers(0, 2**31))
def test_any_tensor_comes_back(dtype, shape, seed):
    tensor = (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)
    back = unpack(pack(tensor))
    assert back.dtype == dtype
    assert back.shape == tensor.shape
    assert torch.equal(back, tensor)


def test_every_bf16_number_comes_back_exactly():
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    packed = pack(bits.view(torch.bfloat16))
    assert len(packed["data"]) == 2 * 2**16
    assert torch.equal(unpack(packed).view(torch.int16), bits)  # NaN, infinity and minus zero too


def test_it_is_plain_data():
    packed = pack(torch.zeros(2, 3, requires_grad=True))
    assert packed == {"dtype": "float32", "shape": [2, 3], "data": bytes(24)}


def test_slices_are_packed_as_they_read():
    x = torch.arange(12.0).reshape(3, 4)
    assert torch.equal(unpack(pack(x[:, 1::2].T)), x[:, 1::2].T)


def test_the_copy_has_memory_of_its_own():
    x = torch.zeros(3)
    back = unpack(pack(x))
    back += 1
    assert x.sum() == 0


@pytest.mark.parametrize("shape", [(0,), (0, 5), (3, 0, 2)])
def test_empty_tensors(shape):
    back = unpack(pack(torch.empty(shape, dtype=torch.bfloat16)))
    assert back.shape == shape
    assert back.dtype == torch.bfloat16


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "float31"},
        {"dtype": "nn"},
        {"dtype": None},
        {"dtype": 5},
        {"shape": [4]},
        {"shape": None},
        {"shape": [2, 0]},
        {"data": b""},
        {"data": bytes(11)},
        {"data": "text"},
    ],
)
def test_what_is_no_tensor_is_refused(change):
    with pytest.raises(ValueError, match=r"not a dtype|are no float32 tensor"):
        unpack(pack(torch.zeros(3)) | change)


def test_nothing_is_no_tensor():
    with pytest.raises(ValueError, match="not a dtype"):
        unpack({})


@pytest.mark.parametrize(
    "edit",
    [
        RowEdit("a", "suppress", range(1, 7, 2), heads=(0,)),
        RowEdit("a", "scale", (3, 1), factor=2.0),
        RowEdit("a", "set", (0,), value=torch.ones(1, 1, 3, dtype=torch.bfloat16)),
        RowEdit("b", "patch", (5, 6), source=("k", (0, 2))),
    ],
    ids=lambda e: e.op,
)
def test_edits_cross_as_plain_data(edit):
    [request], tensors = pack_requests([Request("key", (1, 2), (edit,), ("a",))])
    crossed = json.loads(json.dumps(request))
    assert (crossed["key"], crossed["capture"]) == ("key", ["a"])
    values = unpack_values(tensors, torch.device("cpu"))
    back = unpack_edit(crossed["edits"][0], values)
    assert replace(back, value=None) == replace(edit, value=None)
    assert (back.value is None) == (edit.value is None)
    if edit.value is not None:
        assert back.value.dtype == edit.value.dtype and torch.equal(back.value, edit.value)


def test_equal_values_cross_once():
    edits = tuple(RowEdit("a", "set", (i,), value=torch.full((1, 1, 3), 0.5)) for i in range(5))
    _, tensors = pack_requests([Request(str(i), (1,), edits) for i in range(3)])
    assert len(tensors) == 1


def test_values_of_a_dtype_are_copied_at_once():
    draw = torch.Generator().manual_seed(0)
    made = [torch.randn(2, 1, 3, generator=draw), torch.ones(1, 1, 1).double(), torch.randn(1, 4, 5, generator=draw)]
    edits = tuple(RowEdit("a", "set", (0, 1), value=value) for value in made)
    _, tensors = pack_requests([Request("key", (1, 2), edits)])
    values = unpack_values(tensors, torch.device("cpu"))
    assert list(values) == list(tensors)
    for value, one in zip(values.values(), made, strict=True):
        assert value.dtype == one.dtype and torch.equal(value, one)
    assert len({value.untyped_storage().data_ptr() for value in values.values()}) == 2
    assert unpack_values({}, torch.device("cpu")) == {}


def test_a_value_that_was_not_sent_along():
    [request], _ = pack_requests([Request("key", (1,), (RowEdit("a", "add", (0,), value=torch.ones(1, 1, 1)),))])
    with pytest.raises(KeyError):
        unpack_edit(request["edits"][0], {})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_process_may_share_the_memory(dtype):
    with torch.inference_mode():  # as in vLLM's steps
        made = torch.arange(6).to(dtype).reshape(2, 3)
    shared = share(made)
    assert torch.equal(shared, made)
    assert shared.data_ptr() == made.data_ptr()
    assert not shared.is_inference()  # a user's autograd may keep it
    shared += 1
    assert made[0, 0] == 1


def test_who_keeps_a_part_keeps_nothing_else():
    batch = torch.arange(8.0).reshape(2, 4)
    part = share(batch[1])
    assert torch.equal(part, batch[1])
    assert part.untyped_storage().nbytes() == 16
