"""Edits as a program told by tables: the same rows as edits that are applied one by one, or a plain no."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from explorer.catalogue import Catalogue
from explorer.engine.parts import find_parts
from explorer.engine.points import find_taps
from explorer.engine.rows import Rows, Span
from explorer.engine.vllm import internals
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


def test_a_patch_reads_what_another_request_held():
    model, hook = Model(torch.float32), "blocks.0.hook_out"
    source = model.rows.prepare([], (hook,), stays=True)
    rows = torch.randn(3, SHAPE.d_model)
    source.chunks[hook] = {0: rows}
    model.rows.held["source"] = source
    patch = RowEdit(hook, "patch", (0, 1), None, None, None, ("source", (2, 0)))
    _, work = model.work([patch], [])
    assert model.program.set(work)
    got = model.program.run(lambda: model.forward())
    assert torch.equal(got, model.written(work))
