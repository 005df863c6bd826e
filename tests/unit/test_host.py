"""Tensors on their way to the host: in few copies, in pieces that fit."""

from __future__ import annotations

import pytest
import torch

from explorer.engine.host import FEW, Parcel, to_host
from explorer.engine.vllm.wire import share


def copies(parcel: Parcel, monkeypatch) -> list[int]:
    """The sizes of its copies to the host, as they are made."""
    made: list[int] = []
    copy = torch.Tensor.copy_

    def counted(self, x, non_blocking=False):
        if non_blocking:
            made.append(self.nbytes)
        return copy(self, x, non_blocking)

    monkeypatch.setattr(torch.Tensor, "copy_", counted)
    return made


def memory(tensors: list[torch.Tensor]) -> list[int]:
    """The sizes of the pieces that tensors are parts of."""
    return sorted({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())


def test_what_was_added_is_there_once_it_was_sent():
    tensors = [torch.randn(3, 4), torch.randn(3, 10).to(torch.bfloat16), torch.randn(3, 8)[:, 2:6], torch.randn(7, 1)]
    parcel = Parcel(61, most=64)
    want = [x.clone() for x in tensors]
    got = [parcel.add(x) for x in tensors]
    for x in tensors:
        x.zero_()
    parcel.send()
    for mine, expected in zip(got, want, strict=True):
        assert mine.dtype == expected.dtype and torch.equal(mine, expected)


def test_who_gets_a_part_may_have_it_in_autograd(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda x: True)
    with torch.inference_mode():  # as in vLLM's steps
        parcel = Parcel(8)
        part = parcel.add(torch.ones(2, 3))
        parcel.send()
        shared = share(part)
    assert shared.data_ptr() == part.data_ptr()
    weight = torch.full((), 2.0, requires_grad=True)
    (weight * shared).sum().backward()
    assert weight.grad == 6
    shared += 1
    assert shared.eq(2).all()


def test_a_parcel_is_one_copy(monkeypatch):
    parcel = Parcel(40)
    made = copies(parcel, monkeypatch)
    tensors = [parcel.add(torch.zeros(2, 5)) for _ in range(4)]
    assert made == []
    parcel.send()
    parcel.send()
    assert made == [160] == memory(tensors)


def test_pieces_are_powers_of_two_that_are_filled(monkeypatch):
    quarter = FEW // 4  # bytes
    parcel = Parcel(13 * FEW // 4, most=4 * FEW)
    made = copies(parcel, monkeypatch)
    tensors = [parcel.add(torch.zeros(1, quarter // 4)) for _ in range(4 * 13)]
    parcel.send()
    assert made == [4 * FEW] * 3 + [FEW]
    assert memory(tensors) == [FEW, *[4 * FEW] * 3]


def test_what_fits_in_no_piece_has_its_own(monkeypatch):
    parcel = Parcel(12, most=16)
    made = copies(parcel, monkeypatch)
    tensors = [parcel.add(torch.zeros(n, 1)) for n in (2, 9, 1, 5)]  # the last was not to come
    parcel.send()
    assert made == [8, 36, 4, 20]
    assert [len(x) for x in tensors] == [2, 9, 1, 5]


@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_a_copy_in_the_host_is_a_copy(dtype):
    x = torch.randn(3, 4)
    got = to_host(x, dtype)
    assert torch.equal(got, x.to(got.dtype)) and got.dtype == (dtype or x.dtype)
    assert got.data_ptr() != x.data_ptr()
