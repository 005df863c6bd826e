"""Which part of a hook point each worker holds: edits cut down to it, captures put together, copies compared."""

from __future__ import annotations

import pytest
import torch

from explorer import EngineError
from explorer.engine.rows import Held, Span, apply
from explorer.engine.vllm.shards import Shard, agree, assemble, cut, gather, shard_of
from explorer.resolve import RowEdit


@pytest.mark.parametrize(
    ("whole", "held", "ranks", "expected"),
    [
        (4, 4, 1, [(0, 4, 0)]),
        (4, 2, 2, [(0, 2, 0), (2, 4, 0)]),
        (96, 96, 2, [(0, 96, 0), (0, 96, 1)]),  # a stream: every worker has it
        (1, 1, 2, [(0, 1, 0), (0, 1, 1)]),  # one key-value head for two workers
        (2, 1, 4, [(0, 1, 0), (0, 1, 1), (1, 2, 0), (1, 2, 1)]),
    ],
)
def test_who_holds_what(whole, held, ranks, expected):
    parts = [shard_of(whole, held, rank, ranks) for rank in range(ranks)]
    assert [(p.start, p.stop, p.copy) for p in parts] == expected
    assert all(p.whole == whole and p.complete == (held == whole) for p in parts)


@pytest.mark.parametrize(("whole", "held", "ranks"), [(4, 3, 2), (4, 1, 2), (5, 2, 2)])
def test_what_does_not_add_up(whole, held, ranks):
    with pytest.raises(ValueError, match="do not share out"):
        shard_of(whole, held, 0, ranks)


def value_of(edit: RowEdit) -> torch.Tensor | None:
    return edit.value


VALUES = {
    "one number": (None, torch.tensor([[[2.0]]])),
    "a value a head": (None, torch.randn(1, 4, 1)),
    "everything, a value a position": (None, torch.randn(3, 4, 2)),
    "a head": ((2,), torch.randn(1, 1, 2)),
    "heads of both workers, out of order": ((3, 0, 2), torch.randn(3, 3, 2)),
    "the same for all heads": ((1, 3), torch.randn(3, 1, 2)),
}


@pytest.mark.parametrize("op", ["set", "add", "scale", "suppress"])
@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("shape", [(4, 2), (8,)], ids=["heads", "neurons"])
def test_parts_edited_apart_are_the_whole_edited(op, name, shape):
    """The whole edited by one worker, cut in two, is what two workers make of their halves."""
    heads, value = VALUES[name]
    if len(shape) == 1:
        heads = None
        if value.shape[1] > 1 or value.shape[2] > 1:
            value = torch.randn(value.shape[0], 1, 8)
    edit = RowEdit("h", op, (4, 0, 3), heads, factor=-1.5, value=value if op in ("set", "add") else None)
    x = torch.randn(5, 8)
    whole = x.clone()
    apply(whole, shape, [edit], Span(Held({}, ()), 0, 5, 0), value_of)
    halves = []
    for rank in range(2):
        half = x.reshape(5, 2, 4)[:, rank].clone()
        part = shard_of(shape[0], shape[0] // 2, rank, 2)
        mine = cut(edit, part, heads=len(shape) == 2)
        local = (shape[0] // 2, *shape[1:])
        assert apply(half, local, [mine], Span(Held({}, ()), 0, 5, 0), value_of) == [[4, 0, 3]]
        halves.append((part, half.reshape(5, *local)))
    assert torch.equal(gather(halves), whole.reshape(5, *shape))


def test_a_worker_that_holds_everything_edits_as_asked():
    edit = RowEdit("h", "suppress", (0,), (1,))
    assert cut(edit, shard_of(4, 4, 1, 2), heads=True) is edit


def test_parts_are_put_in_order_and_copies_left_out():
    rows = torch.randn(3, 4, 2)
    pieces = [(shard_of(4, 2, rank // 2, 2), rows[:, rank // 2 * 2 :][:, :2]) for rank in range(4)]
    assert torch.equal(gather(pieces[::-1]), rows)
    assert gather([(shard_of(4, 4, 0, 1), rows)]) is rows


def test_a_part_that_is_missing():
    with pytest.raises(EngineError, match="the workers hold 2 of 4 heads or neurons"):
        gather([(Shard(0, 2, 4), torch.zeros(3, 2, 2))])


@pytest.mark.parametrize("axis", [0, 1])
def test_a_parameter_from_its_shards(axis):
    """One process keeps [q, k, v]; of four each has a quarter of q, and half of k and v as its neighbour has."""
    q, k, v = torch.randn(8, 3), torch.randn(2, 3), torch.randn(4, 3)
    shards = [
        torch.cat([q[2 * r :][:2], k[r // 2 :][:1], v[r // 2 * 2 :][:2]]).transpose(0, axis).clone() for r in range(4)
    ]
    whole = assemble(shards, axis, [(2, 1), (1, 2), (2, 2)])
    assert torch.equal(whole, torch.cat([q, k, v]).transpose(0, axis))


def test_a_packed_parameter_is_refused():
    with pytest.raises(ValueError, match="stored packed"):
        assemble([torch.zeros(4, 2)] * 2, 0, [(8, 1)])


def test_copies_that_differ():
    rows = torch.randn(3, 8)
    part = [shard_of(8, 8, rank, 2) for rank in range(2)]
    rounded = rows * (1 + 1e-7)
    assert agree([(part[0], rows), (part[1], rounded)])
    assert agree([(shard_of(16, 8, rank, 2), rows + rank) for rank in range(2)])  # two parts, no copies
    other = rows.clone()
    other[1, 3] += 0.01
    assert not agree([(part[0], rows), (part[1], other)])
    assert not agree([(part[0], rows), (part[1], rows[:2])])
    sink = rows.clone()
    sink[1, 0] = 20_000  # as the first token's stream has it: sums of its row round by that much
    off = sink.clone()
    off[1, 3] += 0.002
    assert agree([(part[0], sink), (part[1], off)])
    off[2, 3] += 0.01
    assert not agree([(part[0], sink), (part[1], off)])
    nan = torch.full_like(rows, float("nan"))
    assert agree([(part[0], nan), (part[1], nan.clone())])
    assert not agree([(part[0], rows), (part[1], nan)])
