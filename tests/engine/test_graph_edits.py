"""Edits in the compiled graph, as on a GPU: the layers' own Python does not run, and nothing is compiled again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import explorer
from explorer.engine.vllm import internals
from explorer.engine.vllm.program import ChangedWhere, Program, Table

from ..reference import reference
from .compare import idle, relative, same, worker
from .test_compiled import compiled_so_far
from .test_edits import IDS, OTHER


@pytest.fixture(scope="module")
def session(tiny_folder: Callable[[str], Path]) -> Iterator[explorer.Session]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(internals, "compiles_edits", lambda inner: not getattr(inner, "do_not_compile", True))
        with explorer.boot(tiny_folder("llama"), mode="compiled", max_model_len=64) as session:
            session.run(IDS, {"blocks.0.hook_out": {"op": "suppress", "pos": 0}})  # tried, and trusted
            assert worker(session)._program is not None
            yield session


def test_each_editable_hook_as_in_eager_mode(
    session: explorer.Session, llama: explorer.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.models.llama import LlamaModel

    calls: list[str] = []
    written = LlamaModel.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        calls.append("forward")
        return written(*args, **kwargs)

    before, clean = compiled_so_far(), session.run(IDS)
    hooks = [p.name for p in session.hooks if p.editable and p.available]
    specs = [
        {hook: edit | {"pos": [1, 4]}}
        for hook in hooks
        for edit in ({"op": "scale", "factor": -1.5}, {"op": "patch", "source": {"ids": OTHER[: len(IDS)]}})
        if edit["op"] == "scale" or len(OTHER) >= 5
    ]
    want = llama.run([IDS] * len(specs), specs)
    session.worker.reset_fires()
    with monkeypatch.context() as patch:
        patch.setattr(LlamaModel, "forward", forward)
        got = [session.run(IDS, spec) for spec in specs]
    assert len(calls) <= sum("source" in str(spec) for spec in specs)  # what patches read is captured uncompiled
    for spec, one, other in zip(specs, got, want, strict=True):
        assert relative(one.logits, other.logits) <= 5e-4, spec
        assert relative(one.logits, clean.logits) > 1e-3, spec
    assert compiled_so_far() == before
    assert same(session.run(IDS), clean) and idle(session)


@pytest.mark.parametrize("heads", [None, range(4)])
def test_a_sweep_in_one_batch(session: explorer.Session, heads: range | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Patches of many requests at once, layer by position or layer by head, from one run that is held."""
    hook = "blocks.{}.hook_out" if heads is None else "blocks.{}.attn.o.hook_in"
    cells = [{"pos": pos} for pos in range(10)] if heads is None else [{"pos": 6, "head": head} for head in heads]
    patch = {"op": "patch", "source": {"ids": OTHER}}
    specs = [{hook.format(layer): {**patch, **cell}} for layer in range(2) for cell in cells]
    taken: list[bool] = []
    fill = Program.set
    monkeypatch.setattr(Program, "set", lambda *args: taken.append(fill(*args)) or taken[-1])
    got = session.run([IDS] * len(specs), specs)
    assert taken[-1]  # the first is the source's, which is captured
    ref = reference(session.model_path)
    clean = ref.run(IDS).logits
    for spec, run in zip(specs, got, strict=True):
        want = ref.run(IDS, spec)
        assert relative(run.logits, want.logits) <= 1e-4, spec
        if "pos': 0" not in str(spec):  # both begin alike
            assert relative(want.logits, clean) > 1e-3, spec


def test_steering_and_counters(session: explorer.Session, llama: explorer.Session) -> None:
    steer = {"blocks.0.hook_out": {"op": "scale", "factor": 1.7, "phase": "both"}}
    session.worker.reset_fires()
    got = session.generate([IDS, OTHER], steer, max_new_tokens=8)
    assert session.worker.fires() == {"blocks.0.hook_out": 8}
    assert [run.ids for run in got] == [run.ids for run in llama.generate([IDS, OTHER], steer, max_new_tokens=8)]


def test_what_the_program_cannot_do_runs_uncompiled(session: explorer.Session, llama: explorer.Session) -> None:
    both = {"blocks.0.hook_out": [{"op": "scale", "factor": 1.7}, {"op": "add", "value": 0.5}]}
    captured = {"blocks.0.hook_out": {"op": "suppress", "pos": 2}}
    for spec, capture in ((both, ()), (captured, "all")):
        got, want = (s.run(IDS, spec, capture) for s in (session, llama))
        assert relative(got.logits, want.logits) <= 5e-4


def test_a_graph_that_is_off_is_not_used(
    tiny_folder: Callable[[str], Path], llama: explorer.Session, caplog: pytest.LogCaptureFixture
) -> None:
    edit = {"blocks.0.hook_out": {"op": "suppress", "pos": 0}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(internals, "compiles_edits", lambda inner: True)
        patch.setattr(Table, "changed", lambda table, entry, x: ChangedWhere((entry > 0)[:, None], x))  # no edit at all
        patch.setenv("VLLM_DISABLE_COMPILE_CACHE", "1")
        with explorer.boot(tiny_folder("llama"), mode="compiled", max_model_len=64) as session:
            assert worker(session)._program is not None
            got = session.run(IDS, edit)
            assert "they run uncompiled instead" in caplog.text
            assert worker(session)._program is None
            assert relative(got.logits, llama.run(IDS, edit).logits) <= 5e-4
