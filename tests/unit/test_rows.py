"""Edits applied to the rows of a step: spans, chunks, ops, heads, values a position."""

from __future__ import annotations

import itertools
import weakref

import pytest
import torch
from torch import nn

from explorer import EngineError
from explorer.engine.protocol import Request, Result
from explorer.engine.rows import Held, LastLogits, Rows, Span, apply, check, chosen, join, keep, rows_of
from explorer.resolve import RowEdit

HEADS = (2, 3)


def edit(op="suppress", rows=(0,), heads=None, factor=None, value=None, source=None) -> RowEdit:
    return RowEdit("h", op, rows, heads, factor, value, source)


def held(*edits: RowEdit) -> Held:
    return Held({"hook": list(edits)}, ())


def value_of(e: RowEdit):
    return e.value


@pytest.fixture
def x() -> torch.Tensor:
    return torch.arange(1.0, 61.0).reshape(10, 6)


def test_rows_before_and_after_the_span_are_left(x):
    before = x.clone()
    assert apply(x, (6,), [edit(rows=range(9))], Span(held(), row=2, count=3, start=4), value_of) == [[2, 3, 4]]
    assert x[2:5].eq(0).all()
    assert torch.equal(x[:2], before[:2])
    assert torch.equal(x[5:], before[5:])


def test_positions_of_another_chunk_are_not_touched(x):
    before = x.clone()
    assert apply(x, (6,), [edit(rows=(0, 9))], Span(held(), 0, 4, 2), value_of) == [[]]
    assert torch.equal(x, before)


@pytest.mark.parametrize(
    ("e", "expected"),
    [
        (edit("suppress"), lambda row: row * 0),
        (edit("scale", factor=-2.0), lambda row: row * -2),
        (edit("add", value=torch.tensor([[[10.0]]])), lambda row: row + 10),
        (edit("set", value=torch.tensor([[[10.0]]])), lambda row: torch.full_like(row, 10)),
        (edit("set", value=torch.arange(6.0).reshape(1, 1, 6)), lambda row: torch.arange(6.0)),
        (edit("patch", value=torch.arange(6.0).reshape(1, 1, 6)), lambda row: torch.arange(6.0)),
    ],
)
def test_ops(x, e, expected):
    row = x[0].clone()
    apply(x, (6,), [e], Span(held(), 0, 10, 0), value_of)
    assert torch.equal(x[0], expected(row))


def test_suppress_removes_nan_and_infinity(x):
    x[0, :2] = torch.tensor([float("nan"), float("inf")])
    apply(x, (6,), [edit()], Span(held(), 0, 10, 0), value_of)
    assert x[0].tolist() == [0.0] * 6


def test_edits_apply_in_order(x):
    ten = torch.tensor([[[10.0]]])
    edits = [edit("set", value=ten), edit("scale", factor=2), edit("add", value=ten)]
    assert apply(x, (6,), edits, Span(held(), 0, 1, 0), value_of) == [[0], [0], [0]]
    assert x[0].tolist() == [30.0] * 6


def test_heads(x):
    before = x.clone()
    value = torch.arange(3.0).reshape(1, 1, 3)
    apply(x, HEADS, [edit("set", rows=(0, 1), heads=(1,), value=value)], Span(held(), 0, 10, 0), value_of)
    assert x[:2, 3:].tolist() == [[0.0, 1.0, 2.0]] * 2
    assert torch.equal(x[:2, :3], before[:2, :3])


def test_a_value_a_head_follows_the_order_of_the_heads(x):
    value = torch.tensor([[[1.0] * 3, [2.0] * 3]])
    apply(x, HEADS, [edit("set", heads=(1, 0), value=value)], Span(held(), 0, 10, 0), value_of)
    assert x[0].tolist() == [2.0] * 3 + [1.0] * 3


@pytest.mark.parametrize("rows", [(1, 2, 3, 4, 5, 7), (7, 3, 5, 1, 2, 4), range(1, 8)], ids=str)
@pytest.mark.parametrize("shape", [(6,), HEADS], ids=str)
@pytest.mark.parametrize("size", [1, 2, 3, 10])
def test_a_value_a_position_across_chunks_equals_one_pass(rows, shape, size):
    count = shape[0] if len(shape) == 2 else 1
    value = torch.randn(len(rows), count, shape[-1])
    e = edit("set", rows=rows, value=value)
    touched, parts = 0, []
    for start in range(0, 10, size):
        part = torch.zeros(min(size, 10 - start), 6)
        touched += len(apply(part, shape, [e], Span(held(), 0, len(part), start), value_of)[0])
        parts.append(part)
    whole = torch.cat(parts)
    for i, position in enumerate(rows):
        assert torch.equal(whole[position], value[i].flatten())
    assert whole[0].eq(0).all()
    assert touched == len(rows)


def test_heads_that_another_worker_holds(x):
    before = x.clone()
    assert apply(x, HEADS, [edit(rows=(0, 1), heads=())], Span(held(), 0, 10, 0), value_of) == [[0, 1]]
    assert torch.equal(x, before)


def test_values_take_the_dtype_of_the_rows():
    x = torch.full((1, 6), 300.0, dtype=torch.bfloat16)
    apply(x, (6,), [edit("set", value=torch.tensor([[[0.5]]], dtype=torch.float64))], Span(held(), 0, 1, 0), value_of)
    assert x.tolist() == [[0.5] * 6]


# --- chunks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cuts", list(itertools.combinations(range(1, 6), 2)), ids=str)
def test_chunks_join_in_token_order(cuts):
    rows = torch.arange(12.0).reshape(6, 2)
    chunks: dict[int, torch.Tensor] = {}
    for start, end in itertools.pairwise([0, *cuts, 6]):
        keep(chunks, start, rows[start:end])
    assert torch.equal(join(chunks), rows)
    for most in (3, 6, 7):
        assert torch.equal(join(chunks, most), rows[:most])


def test_one_chunk_is_not_copied():
    rows = torch.zeros(3, 2)
    assert join({0: rows}) is rows


@pytest.mark.parametrize("again", [[(0, 8)], [(0, 5), (5, 8)], [(0, 3), (3, 7), (7, 8)]], ids=str)
def test_tokens_fed_again_replace_their_rows(again):
    chunks: dict[int, torch.Tensor] = {}
    for start, end in [(0, 4), (4, 6), (6, 7), (7, 8)]:
        keep(chunks, start, torch.zeros(end - start, 1))
    for start, end in again:
        keep(chunks, start, torch.ones(end - start, 1))
    assert join(chunks).flatten().tolist() == [1.0] * 8


def test_a_chunk_that_begins_inside_another_counts():
    chunks = {0: torch.zeros(6, 1)}
    keep(chunks, 4, torch.ones(3, 1))
    assert join(chunks).flatten().tolist() == [0, 0, 0, 0, 1, 1, 1]


# --- nothing silent ---------------------------------------------------------------------------------------------------


def test_the_rows_of_each_edit_are_counted_over_chunks(x):
    rows = Rows({"h": (6,), "other": (6,)})
    h = rows.prepare([edit(rows=(1, 2)), edit(rows=(2, 5))], ())
    rows.handle("h", [Span(h, 0, 3, 0)], nn.Identity(), x)
    assert h.edited == {"h": [2, 1]}
    rows.handle("h", [Span(h, 0, 3, 3)], nn.Identity(), x)
    assert h.edited == {"h": [2, 2]}


@pytest.mark.parametrize(
    ("edited", "says"),
    [
        ({"h": [2, 2]}, None),
        ({"h": [2, 3]}, None),  # fed again
        ({"h": [3, 1]}, "an edit at h touched 1 rows of 2"),
        ({}, "an edit at h touched 0 rows of 2"),
    ],
)
def test_an_edit_that_missed_a_row_is_an_error(edited, says):
    request = Request("key", (1, 2, 3), (edit(rows=(0, 1)), edit(rows=(1, 2, 7))))
    result = Result((), torch.zeros(3, 4), torch.zeros(8))
    if says is None:
        check(request, result, edited)
    else:
        with pytest.raises(EngineError, match=says):
            check(request, result, edited)


def test_the_last_logits_of_who_goes_on_and_who_is_over():
    over, going, last = Held({}, (), rows=3), Held({}, (), rows=9), LastLogits()
    logits = torch.randn(3, 5, dtype=torch.bfloat16)
    last.keep([Span(going, 0, 3, 0), None, Span(over, 3, 2, 1)], logits)
    assert over.last_logits[2].dtype == torch.float32
    assert torch.equal(over.last_logits[2], logits[2].float())
    kept = [logits[0].clone()]
    for position in (3, 4):
        kept.append(torch.randn(5).bfloat16())
        step = kept[-1][None].clone()
        last.keep([Span(going, 0, 1, position)], step)
        step.zero_()  # the sampler works in place
        latest = dict(zip(range(2, position + 1), kept, strict=True)).items()
        assert [(p, row.tolist()) for p, row in going.last_logits.items()] == [(p, r.tolist()) for p, r in latest][-2:]


def test_the_row_before_the_last_that_a_request_may_have_is_kept():
    """The text may have ended there: the last one was fed ahead."""
    request, other, last = Held({}, (), rows=5), Held({}, (), rows=9), LastLogits()
    logits = torch.randn(2, 2, 5)
    for position in (3, 4):
        last.keep([Span(request, 0, 1, position), Span(other, 1, 1, position)], logits[position - 3].clone())
    host = request.last_logits[4]
    last.keep([Span(other, 0, 1, 5)], torch.randn(1, 5))
    assert torch.equal(request.last_logits[3], logits[0, 0]) and request.last_logits[4] is host  # perhaps on its way
    assert request.last_logits[3].untyped_storage().nbytes() == 20


def test_the_last_logits_of_who_left_keep_no_others():
    """A text that ends early is read with the rest of its batch, perhaps hundreds of steps later."""
    first, second, last = Held({}, (), rows=9), Held({}, (), rows=9), LastLogits()
    for position in (3, 4):
        last.keep([Span(first, 0, 1, position), Span(second, 1, 1, position)], torch.randn(2, 5))
    last.keep([Span(second, 0, 1, 5)], torch.randn(1, 5))
    assert [row.untyped_storage().nbytes() for row in first.last_logits.values()] == [20, 20]


def test_what_was_captured_of_a_text_that_ended_early_is_let_go():
    request, last = Held({}, (), rows=9), LastLogits()
    last.keep([Span(request, 0, 1, 3)], torch.randn(1, 5))
    gone = weakref.ref(request)
    del request
    assert gone() is None


# --- captures ---------------------------------------------------------------------------------------------------------


class Hook:
    """A tap of a hook point that is fired by hand."""

    def __init__(self, *shape: int) -> None:
        self.shape, self.handler = shape, None

    def attach(self, handler):
        self.handler = handler
        return self

    def remove(self) -> None:
        self.handler = None


@pytest.mark.parametrize("device", ["cpu", "cuda"])  # on its way from a GPU everything else is as on the CPU
def test_what_is_captured_is_a_copy_of_each_request_alone(device):
    taps = {"stream": Hook(6), "heads": Hook(*HEADS)}
    rows = Rows({name: tap.shape for name, tap in taps.items()})
    both, one, source = (
        rows.prepare([], names, hold) for names, hold in ((taps, False), (["heads"], False), (taps, True))
    )
    spans = [Span(both, 0, 4, 0), Span(one, 4, 2, 7), Span(source, 6, 4, 0)]
    stream, projection = torch.randn(10, 6), torch.randn(10, 18)
    want = stream.clone(), projection[:, 6:12].clone().unflatten(1, HEADS)
    with rows.attached(taps, rows.work(spans), torch.device(device)):
        for tap, x in (("stream", stream), ("heads", projection[:, 6:12])):
            taps[tap].handler(nn.Identity(), x)
            x.zero_()  # what a model's next kernel may do
    assert all(tap.handler is None for tap in taps.values())
    for span in spans:
        for name, whole in zip(taps, want, strict=True):
            if name in span.held.capture:
                assert torch.equal(span.held.chunks[name][span.start], span.of(whole)), name
    memory = [{x[k].untyped_storage().data_ptr() for x in s.held.chunks.values() for k in x} for s in spans]
    assert not (memory[0] & memory[1] or memory[1] & memory[2] or memory[0] & memory[2])
    assert rows.fired == {"stream": 1, "heads": 1}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_prompt_in_two_passes_of_which_one_is_tried_again(device):
    taps = {"h": Hook(*HEADS)}
    rows, whole = Rows({"h": HEADS}), torch.randn(7, 6)
    request = rows.prepare([], ["h"], rows=7)

    def run(start: int, end: int, fails: bool = False) -> None:
        span = Span(request, 0, end - start, start)
        with rows.attached(taps, rows.work([span]), torch.device(device)):
            taps["h"].handler(nn.Identity(), whole[start:end].clone())
            if fails:
                raise RuntimeError("out of luck")

    run(0, 4)
    with pytest.raises(RuntimeError, match="out of luck"):
        run(4, 7, fails=True)
    run(4, 7)
    assert list(request.chunks["h"]) == [0, 4]
    assert torch.equal(join(request.chunks["h"]), whole.unflatten(1, HEADS))


def test_a_pass_that_fails_leaves_nothing_attached():
    taps = {"h": Hook(6)}
    rows = Rows({"h": (6,)})
    work = rows.work([Span(rows.prepare([], ["h"]), 0, 3, 0)])
    with pytest.raises(RuntimeError, match="out of luck"), rows.attached(taps, work, torch.device("cpu")):
        assert taps["h"].handler is not None
        raise RuntimeError("out of luck")
    assert taps["h"].handler is None


def test_hook_points_have_their_turn_in_forward_order():
    rows = Rows({"first": (6,), "second": (6,), "third": (6,)})
    one = rows.prepare([RowEdit("second", "suppress", (0,)), RowEdit("first", "suppress", (0,))], ())
    other = rows.prepare([], ("third", "first"))
    spans = [Span(one, 0, 3, 0), Span(other, 3, 3, 0)]
    assert list(rows.work(spans)) == list(rows.work(spans[::-1])) == ["first", "second", "third"]


@pytest.mark.parametrize("rows", [range(5), range(3, 9), range(0, 9, 2), range(5, 0, -1), range(0), (7, 2, 3), (4,)])
def test_the_rows_of_an_edit_in_a_span(rows):
    for start, count in itertools.product(range(9), range(1, 4)):
        want = [(i, 10 + p - start) for i, p in enumerate(rows) if p in range(start, start + count)]
        assert rows_of(edit(rows=rows), Span(held(), 10, count, start)) == want


@pytest.mark.parametrize("indices", [(), (3,), (2, 3, 4), (4, 3), (0, 2), (9,)])
def test_chosen_rows(indices):
    assert torch.arange(10)[chosen(indices)].tolist() == list(indices)
    assert isinstance(chosen(indices), slice) == (indices in [(3,), (2, 3, 4), (9,)])
