"""Compiled mode with two workers: idle they run what was compiled; captures and edits are those of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import explorer
from explorer.engine.vllm import internals

from ..reference import reference
from .compare import relative, same
from .test_edits import IDS, OTHER
from .test_parallel import KINDS

# heads, a stream and neurons, in either half of the heads and of the layers
SPEC = {
    "blocks.0.attn.o.hook_in": {"op": "scale", "factor": -2.0, "head": [3, 0], "pos": [4, 9]},
    "blocks.1.attn.v.hook_out": {"op": "suppress", "head": 1},
    "blocks.0.hook_out": {"op": "patch", "source": {"ids": OTHER}, "pos": [2]},
}
HOOKS = ("blocks.*.mlp.hook_post", "blocks.*.hook_out", "blocks.*.attn.hook_z")


@pytest.fixture(scope="module", params=KINDS)
def session(request: pytest.FixtureRequest, tiny_folder: Callable[[str], Path]) -> Iterator[explorer.Session]:
    with explorer.boot(tiny_folder("llama"), mode="compiled", max_model_len=64, **KINDS[request.param]) as session:
        assert session.info["mode"] == "compiled"
        yield session


def count_forwards(worker: Any) -> None:
    """In a worker: count from now on how often the decoder runs as it is written."""
    from vllm.model_executor.models.llama import LlamaModel

    calls: list[None] = []
    written = LlamaModel.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return written(*args, **kwargs)

    LlamaModel.forward = forward
    LlamaModel.calls = calls


def forwards(worker: Any) -> tuple[int, int]:
    """In a worker: what was counted, and all that vLLM says to have traced, compiled or loaded here."""
    from vllm.compilation.counter import compilation_counter
    from vllm.model_executor.models.llama import LlamaModel

    return len(LlamaModel.calls), sum(vars(compilation_counter).values())


def test_idle_it_runs_what_was_compiled(session: explorer.Session, llama: explorer.Session) -> None:
    llm = session._engine._llm  # type: ignore[union-attr]
    internals.rpc(llm, count_forwards)
    compiled = [counts for _, counts in internals.rpc(llm, forwards)]
    assert all(compiled)
    prompts = [IDS, OTHER[:1], OTHER * 3]
    for got, one in zip(session.run(prompts), llama.run(prompts), strict=True):
        assert relative(got.logits, one.logits) <= 2e-5
    assert internals.rpc(llm, forwards) == [(0, counts) for counts in compiled]
    session.run(IDS, {f"blocks.{i}.hook_out": {"op": "suppress"} for i in (0, 1)})  # something to do in each stage
    session.run(IDS, capture=HOOKS)
    assert internals.rpc(llm, forwards) == [(2, counts) for counts in compiled], "nothing is compiled for them"


def test_edits_and_captures_as_in_transformers(session: explorer.Session) -> None:
    idle = session.run(IDS)
    ref = reference(session.model_path)
    both = session.compare(IDS, SPEC, capture=HOOKS)
    for run, want in ((both.clean, ref.run(IDS)), (both.patched, ref.run(IDS, SPEC))):
        assert relative(run.logits, want.logits) <= 1e-4
        for hook in run.captured:
            assert relative(run[hook], want[hook]) <= 1e-4, hook
    assert relative(both.patched.logits, both.clean.logits) > 1e-2
    assert same(session.run(IDS), idle)


def test_generation_with_an_edit_of_every_token(session: explorer.Session, llama: explorer.Session) -> None:
    steer = explorer.Edit("blocks.1.attn.hook_z", "scale", head=[0, 3], factor=-1.5, phase="both")
    for edits in (None, steer):
        got, want = (s.generate([IDS, OTHER[:3]], edits, 6, capture=HOOKS[:2]) for s in (session, llama))
        for one, other in zip(got, want, strict=True):
            assert one.ids == other.ids
            assert all(relative(one[hook], other[hook]) <= 2e-5 for hook in one.captured)
    assert session.generate(IDS, max_new_tokens=6).ids == llama.generate(IDS, max_new_tokens=6).ids
