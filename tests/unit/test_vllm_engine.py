"""The vLLM engine's book-keeping, without vLLM: what is released after an error, and what closing leaves."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from explorer import EngineError
from explorer.engine.protocol import Request
from explorer.engine.vllm import engine as subject
from explorer.engine.vllm import internals
from explorer.engine.vllm.wire import pack


@pytest.fixture
def engine(monkeypatch):
    """An engine whose worker answers every request with two rows and no captures; `calls` are what it was asked."""
    made = subject.VllmEngine.__new__(subject.VllmEngine)
    made._llm, made._stop_ids, made._shards, made.calls = object(), [], [{}], []
    answer = {"captures": {}, "head_rows": pack(torch.zeros(2, 4)), "last_logits": pack(torch.zeros(8)), "edited": {}}

    def rpc(llm, method, *args):
        made.calls.append((method, args[-1]))
        return [[answer for _ in args[0]]] if method == "explorer_read" else [None]

    queue = []
    outputs = [SimpleNamespace(token_ids=[5])]
    monkeypatch.setattr(made, "_params", lambda request: None)
    monkeypatch.setattr(internals, "rpc", rpc)
    monkeypatch.setattr(internals, "add", lambda llm, key, ids, params: queue.append(key))
    monkeypatch.setattr(internals, "abort", lambda llm, keys: None)
    monkeypatch.setattr(
        internals, "step", lambda llm: [SimpleNamespace(request_id=queue.pop(0), outputs=outputs, finished=True)]
    )
    return made


def execute(engine, *requests: Request):
    return engine.execute(requests, lambda done, total: None, lambda: False)


def test_what_is_held_stays_and_the_rest_is_let_go(engine):
    results = execute(engine, Request("source", (1, 2), hold=True), Request("run", (1, 2)))
    assert [result.generated for result in results] == [(), ()]
    assert engine.calls[-1] == ("explorer_release", ["run"])


def test_after_an_answer_that_is_short_of_rows_nothing_is_held(engine):
    source = Request("source", (1, 2), capture=("blocks.0.hook_out",), hold=True)
    with pytest.raises(EngineError, match=r"blocks\.0\.hook_out captured 0 rows of 2"):
        execute(engine, source)
    assert engine.calls[-1] == ("explorer_release", ["source"])


def test_an_engine_that_cannot_be_freed_is_counted_out(engine, monkeypatch):
    left = []
    monkeypatch.setattr(internals, "free", lambda llm: 1 / 0)
    monkeypatch.setattr(internals.lifetime, "left", lambda: left.append(True))
    with pytest.raises(ZeroDivisionError):
        engine.close()
    engine.close()
    assert left == [True]
