"""Tensors on their way to the host: in few copies, in pieces that fit."""

from __future__ import annotations

import pytest
import torch

from explorer.engine import host
from explorer.engine.host import FEW, Parcel, to_host
from explorer.engine.vllm.wire import share


class Sent(dict[str, torch.Tensor]):
    """What was sent, by name, and the sizes of the copies to the host."""

    def __init__(self, monkeypatch) -> None:
        self.copies: list[int] = []
        monkeypatch.setattr(host, "to_host", self.copy)

    def copy(self, x: torch.Tensor) -> torch.Tensor:
        self.copies.append(x.nbytes)
        return to_host(x)

    def memory(self) -> list[int]:
        """The sizes of the pieces that tensors are parts of."""
        return sorted({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in self.values()}.values())


@pytest.fixture
def sent(monkeypatch) -> Sent:
    return Sent(monkeypatch)


def test_what_was_added_is_there_once_it_was_sent(sent):
    tensors = [torch.randn(3, 4), torch.randn(3, 10).to(torch.bfloat16), torch.randn(3, 8)[:, 2:6], torch.randn(7, 1)]
    parcel = Parcel(61, sent.__setitem__, most=64)
    want = [x.clone() for x in tensors]
    for i, x in enumerate(tensors):
        parcel.add(f"{i}", x)
        x.zero_()
    parcel.send()
    assert list(sent) == ["0", "1", "2", "3"]
    for mine, expected in zip(sent.values(), want, strict=True):
        assert mine.dtype == expected.dtype and torch.equal(mine, expected.flatten())


def test_who_gets_a_part_may_have_it_in_autograd(monkeypatch, sent):
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda x: True)
    with torch.inference_mode():  # as in vLLM's steps
        parcel = Parcel(8, sent.__setitem__)
        parcel.add("part", torch.ones(2, 3))
        parcel.add("rest", torch.ones(2, 1))
        parcel.send()
        part = sent["part"].view(2, 3)
        shared = share(part)
    assert shared.data_ptr() == part.data_ptr()
    weight = torch.full((), 2.0, requires_grad=True)
    (weight * shared).sum().backward()
    assert weight.grad == 6
    shared += 1
    assert shared.eq(2).all()


def test_a_parcel_is_one_copy(sent):
    parcel = Parcel(40, sent.__setitem__)
    for name in "abcd":
        parcel.add(name, torch.zeros(2, 5))
    assert not sent.copies and not sent
    parcel.send()
    parcel.send()
    assert sent.copies == [160] == sent.memory()


def test_pieces_are_powers_of_two_that_are_filled(sent):
    quarter = FEW // 4  # bytes
    parcel = Parcel(13 * FEW // 4, sent.__setitem__, most=4 * FEW)
    for i in range(4 * 13):
        parcel.add(f"{i}", torch.zeros(1, quarter // 4))
    parcel.send()
    assert sent.copies == [4 * FEW] * 3 + [FEW]
    assert sent.memory() == [FEW, *[4 * FEW] * 3]


def test_what_fits_in_no_piece_has_its_own(sent):
    parcel = Parcel(12, sent.__setitem__, most=16)
    for n in (2, 9, 1, 5):  # the last was not to come
        parcel.add(f"{n}", torch.zeros(n, 1))
    parcel.send()
    assert sent.copies == [8, 36, 4, 20]
    assert [len(x) for x in sent.values()] == [2, 9, 1, 5]


def test_of_what_comes_twice_by_a_name_the_later_counts(sent):
    parcel = Parcel(4, sent.__setitem__)
    for value in (1.0, 2.0, 3.0):
        parcel.add("twice" if value < 3 else "once", torch.full((2, 1), value))
    parcel.send()
    assert {name: x.tolist() for name, x in sent.items()} == {"twice": [2, 2], "once": [3, 3]}


@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_a_copy_in_the_host_is_a_copy(dtype):
    x = torch.randn(3, 4)
    got = to_host(x, dtype)
    assert torch.equal(got, x.to(got.dtype)) and got.dtype == (dtype or x.dtype)
    assert got.data_ptr() != x.data_ptr()
