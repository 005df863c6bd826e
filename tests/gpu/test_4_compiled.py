"""Compiled: idle it is plain vLLM bit for bit; edits are in its graphs; changed hook code never meets an old one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import explorer
from explorer.engine.vllm import boot
from explorer.engine.vllm.program import ChangedWhere, Table

from ..engine.compare import plain_twin, worker
from ..engine.test_compiled import compiled_so_far
from .conftest import ROOM
from .numbers import off
from .test_2_edits import specs_at

Booted = Callable[..., explorer.Session]
EDIT = {"blocks.0.hook_out": {"op": "suppress", "pos": 0}}


@pytest.fixture(scope="module", autouse=True)
def one_worker(parallel: dict[str, int]) -> None:
    """Several run their edits uncompiled."""
    if parallel:
        pytest.skip("one worker only")


@pytest.fixture(scope="module")
def session(compiled: explorer.Session, prompts: Sequence[tuple[int, ...]]) -> explorer.Session:
    """Compiled, and tried with an edit."""
    compiled.run(prompts[0], EDIT)
    assert worker(compiled)._program is not None, "edits are not in the graph: see the log"
    return compiled


@pytest.mark.parametrize("mode", ["compiled", "eager"])
def test_idle_as_plain_vllm(booted: Booted, folder: Path, prompts: Sequence[tuple[int, ...]], mode: str) -> None:
    """The logits of the 20 best tokens, of each prompt alone and of all in a batch, and 16 greedy tokens."""
    from vllm import SamplingParams

    session = booted(dtype="bfloat16", mode=mode)
    best = SamplingParams(max_tokens=1, temperature=0, logprobs=20, detokenize=False)
    greedy = SamplingParams(max_tokens=16, temperature=0, detokenize=False, ignore_eos=True)
    batches = [*([ids] for ids in prompts), list(prompts)]
    with plain_twin(str(folder), mode, dtype="bfloat16", logprobs_mode="raw_logits", **ROOM) as llm:
        given = [[{"prompt_token_ids": list(ids)} for ids in batch] for batch in batches]
        answers = [llm.generate(batch, best, use_tqdm=False) for batch in given]
        written = [llm.generate(batch, greedy, use_tqdm=False) for batch in given]
    for batch, answer, text in zip(batches, answers, written, strict=True):
        for run, seen in zip(session.run(batch), answer, strict=True):
            logits = run.logits_at(-1)
            theirs = {i: token.logprob for i, token in seen.outputs[0].logprobs[0].items()}
            assert {i: float(logits[i]) for i in theirs} == theirs
        for run, seen in zip(session.run(batch, max_new_tokens=16), text, strict=True):
            assert list(run.generated) == list(seen.outputs[0].token_ids)[: len(run.generated)]


def test_edits_run_in_the_graph(
    session: explorer.Session, prompts: Sequence[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layers' own Python never runs, and nothing is compiled for another edit."""
    from vllm.model_executor.models.llama import LlamaModel

    calls: list[str] = []
    written = LlamaModel.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        calls.append("forward")
        return written(*args, **kwargs)

    before, ids = compiled_so_far(), prompts[0]
    specs = [spec for (_, op), spec in specs_at(session, (0, 1), ids).items() if op != "patch"]  # it reads captures
    with monkeypatch.context() as patch:
        patch.setattr(LlamaModel, "forward", forward)
        for spec in specs:
            session.run(ids, spec)
        session.run(ids)
        session.generate(ids, {hook: edit | {"phase": "both"} for hook, edit in specs[1].items()}, max_new_tokens=4)
    assert not calls and compiled_so_far() == before


def test_changed_hook_code_is_not_served_the_old_graph(
    session: explorer.Session,
    folder: Path,
    prompts: Sequence[tuple[int, ...]],
    caplog: pytest.LogCaptureFixture,
    record_property: Callable[[str, object], None],
) -> None:
    """What edits do is changed to nothing, in the graph alone: a new graph is found out and dropped, an old one edits.

    Without another hash vLLM may serve the old one, or not: that is noted, since only then the hash is what protects.
    """
    want = session.run(prompts[0], EDIT).logits
    nothing = mock.patch.object(Table, "changed", lambda table, entry, x: ChangedWhere((entry > 0)[:, None], x))
    for what, code in (("the same", boot.code_hash()), ("another", "0" * 16)):
        caplog.clear()
        with (
            nothing,
            mock.patch.object(boot, "code_hash", lambda code=code: code),
            explorer.boot(folder, dtype="bfloat16", mode="compiled", **ROOM) as changed,
        ):
            got = changed.run(prompts[0], EDIT).logits
            served = worker(changed)._program is not None
        record_property(f"old graph served under {what} hash", served)
        assert ("they run uncompiled instead" in caplog.text) != served
        assert off(got, want) <= 0.1
    assert not served


def test_a_second_boot_compiles_nothing(session: explorer.Session, folder: Path) -> None:
    from torch._dynamo.utils import counters

    before = compiled_so_far()
    counters.clear()
    with explorer.boot(folder, dtype="bfloat16", mode="compiled", **ROOM):
        assert not counters["inductor"]["fxgraph_cache_miss"]
        assert compiled_so_far().num_aot_compiles == before.num_aot_compiles
