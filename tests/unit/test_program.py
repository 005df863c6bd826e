"""Edits as a program told by tables: the same rows as edits that are applied one by one, or a plain no."""

from __future__ import annotations

import contextlib
import weakref
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from explorer.catalogue import Catalogue
from explorer.engine.parts import find_parts
from explorer.engine.points import find_taps
from explorer.engine.rows import Rows, Span
from explorer.engine.vllm import internals, program
from explorer.engine.vllm.program import Program
from explorer.engine.vllm.reads import reads
from explorer.resolve import RowEdit

from .stack import SHAPE, Stack

IDS = torch.tensor([3, 1, 4, 1, 5, 9])
POINTS = {p.name: p for p in Catalogue(SHAPE) if p.editable and not p.derived_from}
HOOKS = list(POINTS)


class Attached:
    """In place of a compiled twin: what is attached to it runs in the model itself."""

    def __init__(self, runner, inner, attach) -> None:
        self._attach = attach

    def run(self, forward):
        handles = self._attach()
        try:
            return forward()
        finally:
            for handle in reversed(handles):
                handle.remove()


class Model:
    """A stack with a program; two requests of three tokens each are its batch."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.stack = Stack(dtype)
        self.parts = find_parts(self.stack, reads)
        taps = find_taps(self.parts, SHAPE)
        self.taps = {name: taps[name] for name in HOOKS}
        self.rows = Rows({name: tap.shape for name, tap in taps.items()})
        runner = SimpleNamespace(
            device=torch.device("cpu"),
            max_num_tokens=16,
            compilation_config=SimpleNamespace(cudagraph_capture_sizes=None),
        )
        self.program = Program(runner, self.parts, self.taps, self.rows, dtype)

    def forward(self) -> torch.Tensor:
        return self.stack(IDS, (3, 3))

    def work(self, *edits: list[RowEdit], capture: tuple[str, ...] = ()):
        """The edits of each request, as they are held, and the hook points where they act."""
        held = [self.rows.prepare(of_request, capture) for of_request in edits]
        spans = [Span(h, 3 * i, 3, 0) for i, h in enumerate(held)]
        return held, self.rows.work(spans)

    def written(self, work) -> torch.Tensor:
        """The pass with edits applied where they are, one by one."""
        handles = [self.taps[name].attach(partial(self.rows.handle, name, spans)) for name, spans in work.items()]
        out = self.forward()
        for handle in reversed(handles):
            handle.remove()
        return out


@pytest.fixture(autouse=True)
def internal(monkeypatch):
    monkeypatch.setattr(internals, "attention_module", lambda attention: attention.attn)
    monkeypatch.setattr(internals, "Twin", Attached)


def edit(hook: str, op: str, rows=(1,), heads=None, value=None, factor=None) -> RowEdit:
    return RowEdit(hook, op, tuple(rows), heads, factor, value, None)


def value(hook: str, rows: int = 1, seed: int = 0) -> torch.Tensor:
    shape = POINTS[hook].shape
    heads, width = shape if len(shape) == 2 else (1, shape[0])
    return torch.randn(rows, heads, width, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hook", HOOKS)
def test_each_op_at_each_hook(hook, dtype):
    model = Model(dtype)
    clean = model.forward()
    for op in (
        edit(hook, "suppress"),
        edit(hook, "scale", factor=-1.7),
        edit(hook, "add", value=value(hook)),
        edit(hook, "set", (0, 2), value=value(hook, 2)),
    ):
        held, work = model.work([op], [])
        assert model.program.set(work)
        got = model.program.run(lambda: model.forward())
        assert held[0].edited == {hook: [len(op.rows)]}
        assert torch.equal(got, model.written(work))
        assert not torch.equal(got, clean)
        assert torch.equal(got[3:], clean[3:])  # the other request
    assert model.rows.fired[hook] == 8
    assert torch.equal(model.forward(), clean)


@st.composite
def edits(draw) -> list[RowEdit]:
    """Up to four edits at two hook points, often of the same rows and heads."""
    made = []
    for _ in range(draw(st.integers(1, 4))):
        hook = draw(st.sampled_from(["blocks.0.attn.o.hook_in", "blocks.1.hook_out"]))
        heads = draw(st.sampled_from([None, (0,), (1, 3)])) if len(POINTS[hook].shape) == 2 else None
        rows = draw(st.sampled_from([(0,), (1,), (0, 2), (0, 1, 2)]))
        op = draw(st.sampled_from(["suppress", "scale", "add", "set"]))
        given = None
        if op in ("add", "set"):
            given = value(hook, draw(st.sampled_from([1, len(rows)])), draw(st.integers(0, 3)))
            given = given if heads is None else given[:, list(heads)]
        made.append(edit(hook, op, rows, heads, given, draw(st.sampled_from([0.5, -2.0])) if op == "scale" else None))
    return made


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(edits(), edits()), min_size=1, max_size=3))
def test_whatever_it_takes_on_it_does_exactly_and_forgets(steps):
    model = Model(torch.float32)
    clean = model.forward()
    for first, second in steps:
        held, work = model.work(first, second)
        if model.program.set(work):
            got = model.program.run(lambda: model.forward())
            counted = [h.edited for h in held]
            for h in held:
                h.edited = {}
            assert torch.equal(got, model.written(work))
            assert counted == [h.edited for h in held]
    assert torch.equal(model.forward(), clean)


def test_what_it_cannot_do_it_refuses():
    model = Model(torch.float32)
    _, work = model.work([edit("blocks.0.hook_out", "suppress")], [], capture=("blocks.1.hook_out",))
    assert not model.program.set(work)
    both = [
        edit("blocks.0.hook_out", "scale", factor=2.0),
        edit("blocks.0.hook_out", "add", value=value("blocks.0.hook_out")),
    ]
    assert not model.program.set(model.work(both, [])[1])  # an entry scales or adds
    table = model.program._tables[SHAPE.d_model]
    table.size = 3
    many = [edit("blocks.0.hook_out", "scale", (row,), factor=row + 2.0) for row in range(3)]
    assert not model.program.set(model.work(many, [])[1])
    assert model.program.set(model.work(many[:2], [])[1])


def test_a_pass_that_fails_counts_nothing():
    model = Model(torch.float32)
    held, work = model.work([edit("blocks.0.hook_out", "suppress")], [])
    assert model.program.set(work)
    with pytest.raises(ZeroDivisionError):
        model.program.run(lambda: 1 / 0)
    assert held[0].edited == {} and not model.rows.fired


def hold(model: Model, hook: str, *chunks: int, key: str = "source") -> torch.Tensor:
    """Rows of a hook point that a run holds, which fed so many at a time."""
    source = model.rows.held.setdefault(key, model.rows.prepare([], (), stays=True))
    rows = torch.randn(sum(chunks), *POINTS[hook].shape)
    source.chunks[hook] = {sum(chunks[:i]): part.clone() for i, part in enumerate(rows.split(chunks))}
    return rows


def patch(hook: str, rows, source_rows, heads=None, key: str = "source") -> RowEdit:
    return RowEdit(hook, "patch", rows, heads, None, None, (key, tuple(source_rows)))


def test_a_patch_reads_what_another_request_held():
    model, hook = Model(torch.float32), "blocks.0.hook_out"
    hold(model, hook, 3)
    _, work = model.work([patch(hook, (0, 1), (2, 0))], [])
    assert model.program.set(work)
    got = model.program.run(lambda: model.forward())
    assert torch.equal(got, model.written(work))


def made(model: Model, hook: str, x: torch.Tensor) -> torch.Tensor:
    """What the tables make of the rows of a hook point."""
    entry = model.program._entry[model.program._numbers[hook], : len(x)]
    return model.program._tables[x.shape[1]].changed(entry, x).put(x)


def by_hand(
    hook: str, x: torch.Tensor, requests: list[list[RowEdit]], sources: dict[str, torch.Tensor], start: int = 0
) -> torch.Tensor:
    """The rows of requests, three each from position `start` on, edited number by number in plain PyTorch."""
    shape = POINTS[hook].shape
    heads, width = shape if len(shape) == 2 else (1, shape[0])
    out = x.clone().reshape(len(x), heads, width)
    for request, of_request in enumerate(requests):
        for e in of_request:
            for place, position in enumerate(e.rows):
                for number, head in enumerate(range(heads) if e.heads is None else e.heads):
                    if e.hook != hook or not start <= position < start + 3:
                        continue
                    cells = out[3 * request + position - start, head]
                    if e.op == "suppress":
                        cells.zero_()
                    elif e.op == "scale":
                        cells *= e.factor
                    elif e.op == "patch":
                        cells.copy_(sources[e.source[0]][e.source[1][place]].reshape(heads, width)[head])
                    else:
                        given = e.value.expand(len(e.rows), heads if e.heads is None else len(e.heads), width)
                        cells.copy_(given[place, number] + (cells if e.op == "add" else 0))
    return out.reshape(x.shape)


Z = "blocks.0.attn.o.hook_in"
VALUES = [value(Z, 1, 0), value(Z, 2, 1), value(Z, 1, 2)[:, :, :1], value(Z, 1, 3)[:, :1]]


@st.composite
def edits_of_heads(draw) -> list[RowEdit]:
    """Up to three edits of positions 0 to 4."""
    made = []
    for _ in range(draw(st.integers(0, 3))):
        op = draw(st.sampled_from(["suppress", "scale", "add", "set", "patch"]))
        rows = draw(st.sampled_from([(0,), (1, 2), (4, 3), range(5), range(1, 4)]))
        heads = draw(st.sampled_from([None, (0,), (3, 1), (1, 2)]))
        if op == "patch":
            read = draw(st.permutations(range(5)))[: len(rows)]
            made.append(patch(Z, rows, read, heads, draw(st.sampled_from("ab"))))
        elif op in ("add", "set"):
            given = draw(st.sampled_from([v for v in VALUES if v.shape[0] in (1, len(rows))]))
            given = given if heads is None or given.shape[1] == 1 else given[:, list(heads)]
            made.append(edit(Z, op, rows, heads, given))
        else:
            made.append(edit(Z, op, rows, heads, None, draw(st.sampled_from([0.5, -2.0])) if op == "scale" else None))
    return made


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(edits_of_heads(), edits_of_heads(), st.sampled_from([0, 2])), min_size=1, max_size=3))
def test_rows_are_what_plain_pytorch_makes_of_them(steps):
    model = Model(torch.float32)
    sources = {"a": hold(model, Z, 5, key="a"), "b": hold(model, Z, 2, 3, key="b")}
    for *requests, start in steps:
        held = [model.rows.prepare(of_request, ()) for of_request in requests]
        if model.program.set(model.rows.work([Span(h, 3 * i, 3, start) for i, h in enumerate(held)])):
            x = torch.randn(6, SHAPE.heads * SHAPE.d_head)
            x[0] = torch.inf  # it is left alone, or makes what it makes
            assert torch.equal(made(model, Z, x), by_hand(Z, x, requests, sources, start))


def test_each_value_is_told_from_those_that_were():
    """Also from one that is gone, where it may lie in memory now."""
    model, hook = Model(torch.float32), "blocks.0.hook_out"
    x = torch.randn(6, SHAPE.d_model)
    for seed in range(20):
        request = [edit(hook, "set", value=value(hook, 1, seed))]
        assert model.program.set(model.work(request, [])[1])
        assert torch.equal(made(model, hook, x), by_hand(hook, x, [request, []], {}))
        model.program.run(lambda: None)
        del request


@pytest.mark.parametrize("fails", [False, True])
def test_what_tables_were_filled_with_is_let_go(fails):
    model, hook = Model(torch.float32), "blocks.0.hook_out"
    held, work = model.work([edit(hook, "set", value=value(hook))], [])
    gone = [weakref.ref(held[0]), weakref.ref(held[0].edits[hook][0].value)]
    assert model.program.set(work)
    with pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext():
        model.program.run(lambda: 1 / (not fails))
    del held, work
    assert [of() for of in gone] == [None, None]


def test_tables_that_were_half_filled_are_filled_again():
    model, hook, other = Model(torch.float32), "blocks.0.hook_out", "blocks.1.hook_out"
    sources = {"source": hold(model, hook, 3), "bad": hold(model, hook, 3, key="bad")}
    model.rows.held["bad"].chunks[hook] = {0: torch.zeros(3, SHAPE.d_model + 1)}
    good = [patch(hook, (0, 1), (2, 0)), edit(other, "scale", factor=3.0)]
    x = torch.randn(6, SHAPE.d_model)
    assert model.program.set(model.work(good, [])[1])
    with pytest.raises(RuntimeError):
        model.program.set(model.work([edit(hook, "suppress", (0,)), patch(hook, (1,), (1,), key="bad")], [])[1])
    assert model.program.set(model.work(good, [])[1])
    assert torch.equal(made(model, hook, x), by_hand(hook, x, [good, []], sources))
    assert torch.equal(made(model, other, x), by_hand(other, x, [good, []], sources))


def test_places_that_were_half_written_are_written_again(monkeypatch):
    model, hook = Model(torch.float32), "blocks.0.hook_out"
    good, other = ([edit(hook, "scale", rows, factor=2.0)] for rows in ((1, 2), (0,)))
    assert model.program.set(model.work(good, [])[1])
    with monkeypatch.context() as patched, pytest.raises(ZeroDivisionError):
        patched.setattr(program, "to_device", lambda *_: 1 / 0)
        model.program.set(model.work(other, [])[1])
    assert model.program.set(model.work(good, [])[1])
    x = torch.randn(6, SHAPE.d_model)
    assert torch.equal(made(model, hook, x), by_hand(hook, x, [good, []], {}))


class Counted(TorchDispatchMode):
    """How many operations PyTorch is given."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("heads", [False, True])
def test_many_patches_take_no_more_operations_than_few(heads):
    """On a GPU one of them costs more than what Python has to do for an edit."""
    model = Model(torch.float32)
    sources = {"source": hold(model, Z, 8)}
    counts = []
    for few in (2, 5):
        requests = [[patch(Z, (n % 3,), (few + n % 3,), (n % 4,) if heads else None)] for n in range(few)]
        _, work = model.work(*requests)
        with Counted() as counted:
            assert model.program.set(work)
        counts.append(counted.count)
        x = torch.randn(15, SHAPE.heads * SHAPE.d_head)
        assert torch.equal(made(model, Z, x), by_hand(Z, x, requests, sources))
    assert counts[0] == counts[1]


def test_what_stays_as_it_was_takes_no_operation():
    model, hook = Model(torch.float32), "blocks.0.hook_out"
    request = [edit(hook, "scale", (1, 2), factor=2.0)]
    assert model.program.set(model.work(request, [])[1])
    with Counted() as counted:
        assert model.program.set(model.work(request, [])[1])
    assert not counted.count
    x = torch.randn(6, SHAPE.d_model)
    assert torch.equal(made(model, hook, x), by_hand(hook, x, [request, []], {}))
