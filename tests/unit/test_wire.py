"""Tensors packed and unpacked: every bit comes back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from explorer.engine.vllm.wire import pack, unpack

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
