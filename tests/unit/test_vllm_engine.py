"""The vLLM engine's book-keeping, without vLLM: what is released after an error, and what closing leaves."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from explorer import BootError, EngineError
from explorer.engine.protocol import Request
from explorer.engine.vllm import engine as subject
from explorer.engine.vllm import internals
from explorer.engine.vllm.shards import Shard
from explorer.engine.vllm.wire import pack

from . import fake


@pytest.fixture
def engine(monkeypatch):
    """An engine whose worker answers every request with two rows and no captures; `calls` are what it was asked."""
    made = subject.VllmEngine.__new__(subject.VllmEngine)
    made._llm, made._stop_ids, made._shards, made.calls = object(), (), [{}], []
    made._shares, made._untried = True, False
    made.sampled = []
    made._broken, made._watch = None, SimpleNamespace(died=lambda: None)
    answer = {"captures": {}, "head_rows": pack(torch.zeros(2, 4)), "last_logits": pack(torch.zeros(8)), "edited": {}}

    def rpc(llm, method, *args):
        made.calls.append((method, args[-1]))
        return [[answer for _ in args[0]]] if method == "explorer_read" else [None]

    queue = []
    monkeypatch.setattr(internals, "call", rpc)
    monkeypatch.setattr(internals, "sampling", lambda *parameters: made.sampled.append(parameters))
    monkeypatch.setattr(internals, "add", lambda llm, key, ids, alike, seed, extra_args: queue.append(key))
    monkeypatch.setattr(internals, "give_up", lambda llm, keys: None)
    made.ahead = []
    monkeypatch.setattr(internals, "run_ahead", lambda llm, ahead: made.ahead.append(ahead))
    monkeypatch.setattr(internals, "catch_up", lambda llm: None)
    limits = SimpleNamespace(max_num_seqs=3, max_num_batched_tokens=5)
    core = SimpleNamespace(vllm_config=SimpleNamespace(scheduler_config=limits))
    monkeypatch.setattr(internals, "_core", lambda llm: SimpleNamespace(engine_core=core))
    monkeypatch.setattr(internals, "step", lambda llm: [internals.Output(queue.pop(0), [5], True)])
    return made


def execute(engine, *requests: Request):
    return engine.execute(requests, lambda done, total: None, lambda: False)


def test_what_is_held_stays_and_the_rest_is_let_go(engine):
    results = execute(engine, Request("source", (1, 2), hold=True), Request("run", (1, 2)))
    assert [result.generated for result in results] == [(), ()]
    assert engine.calls[-1] == ("explorer_read", ["run"])  # and forgotten as it is read


def test_after_an_answer_that_is_short_of_rows_nothing_is_held(engine):
    source = Request("source", (1, 2), capture=("blocks.0.hook_out",), hold=True)
    with pytest.raises(EngineError, match=r"blocks\.0\.hook_out captured 0 rows of 2"):
        execute(engine, source)
    assert engine.calls[-1] == ("explorer_release", ["source"])


def test_an_engine_that_cannot_be_freed_is_counted_out(engine, monkeypatch):
    left = []
    monkeypatch.setattr(internals, "free", lambda llm, at_once: 1 / 0)
    monkeypatch.setattr(internals.lifetime, "left", lambda: left.append(True))
    with pytest.raises(ZeroDivisionError):
        engine.close()
    engine.close()
    assert left == [True]


def test_workers_that_count_differently_are_an_error(engine, monkeypatch):
    monkeypatch.setattr(internals, "call", lambda llm, method: [{"embed.hook_out": 1}, {"embed.hook_out": 2, "x": 3}])
    with pytest.raises(EngineError, match=r"embed\.hook_out: one worker counted 1, another 2"):
        engine.fires()
    monkeypatch.setattr(internals, "call", lambda llm, method: [{"embed.hook_out": 2}, {"embed.hook_out": 2, "x": 3}])
    assert engine.fires() == {"embed.hook_out": 2, "x": 3}


def test_copies_that_differ_at_boot_are_an_error(engine, monkeypatch):
    engine._shards = [{"blocks.0.hook_out": Shard(0, 4, 4, copy)} for copy in range(2)]
    engine.model = SimpleNamespace(max_model_len=10, missing={})
    same = {"captures": {"blocks.0.hook_out": pack(torch.ones(2, 4))}}
    other = {"captures": {"blocks.0.hook_out": pack(torch.full((2, 4), 1.5))}}
    monkeypatch.setattr(engine, "execute", lambda *_: [SimpleNamespace(head_rows=torch.zeros(2, 4))])
    monkeypatch.setattr(engine, "logits", lambda rows: None)
    for second, differ in ((same, False), (other, True)):
        monkeypatch.setattr(
            internals, "call", lambda llm, method, *args, last=second: [[same], [last]] if "read" in method else [None]
        )
        if differ:
            with pytest.raises(BootError, match=r"workers that should hold the same at blocks\.0\.hook_out do not"):
                engine._warm_up()
        else:
            engine._warm_up()


@pytest.mark.parametrize("broken", [None, "W died"])
def test_a_head_that_cannot_be_reached_is_no_end_of_the_boot_but_a_lost_worker_is(engine, monkeypatch, caplog, broken):
    def fail(rows):
        engine._broken = broken
        raise RuntimeError("this head wants more than rows")

    engine.model = dataclasses.replace(fake.FakeEngine().model, missing={})
    monkeypatch.setattr(engine, "execute", lambda *_: [SimpleNamespace(head_rows=torch.zeros(2, 4))])
    monkeypatch.setattr(engine, "logits", fail)
    monkeypatch.setattr(
        internals, "call", lambda llm, method, *args: [[{"captures": {}}]] if "read" in method else [{}]
    )
    if broken:
        with pytest.raises(RuntimeError, match="more than rows"):
            engine._warm_up()
    else:
        engine._warm_up()
        assert engine.model.no_head == "RuntimeError: this head wants more than rows"
        assert "cannot be asked for logits of every row" in caplog.text


def test_a_parameter_shared_in_an_unknown_way_is_refused(engine, monkeypatch):
    def answer(value):
        whole = {"stage": 0, "axis": None, "sections": [], "length": None}
        return whole | {"tensor": pack(torch.full((2,), value))}

    monkeypatch.setattr(internals, "call", lambda llm, method, *args: [answer(1.0), answer(2.0)])
    with pytest.raises(ValueError, match="workers share sinks in a way that is not known"):
        engine.parameter("sinks")
    monkeypatch.setattr(internals, "call", lambda llm, method, *args: [answer(1.0), answer(1.0)])
    assert torch.equal(engine.parameter("sinks"), torch.ones(2))


def test_a_head_that_no_worker_has_is_an_error(engine, monkeypatch):
    monkeypatch.setattr(internals, "call", lambda llm, method, *args: [None, None])
    with pytest.raises(EngineError, match="no worker has the model's head"):
        engine.logits(torch.zeros(2, 4))


@pytest.mark.parametrize(("died", "says"), [("W died", r"\(W died\)"), (None, r"\(one failed: out of sync\)")])
def test_a_worker_process_that_fails_is_the_end_of_all(engine, monkeypatch, died, says):
    def fail(llm):
        raise RuntimeError("out of sync")

    engine._watch = SimpleNamespace(died=lambda: died)
    monkeypatch.setattr(internals, "in_processes", lambda llm: True)
    monkeypatch.setattr(internals, "step", fail)
    with pytest.raises(EngineError, match=rf"lost its worker processes {says}; session\.reboot\(\)"):
        execute(engine, Request("run", (1, 2)))
    with pytest.raises(EngineError, match=says):
        execute(engine, Request("run", (1, 2)))
    assert [method for method, _ in engine.calls] == ["explorer_open"]  # nobody is asked any more
    freed = []
    monkeypatch.setattr(internals, "free", lambda llm, at_once: freed.append(at_once))
    monkeypatch.setattr(internals.lifetime, "left", lambda: None)
    engine.close()
    assert freed == [True]


@pytest.mark.parametrize(("raised", "kind"), [("KeyError", EngineError), ("OutOfMemoryError", torch.OutOfMemoryError)])
def test_a_question_that_a_worker_process_cannot_answer_is_not_its_end(engine, monkeypatch, raised, kind):
    asked = []

    def rpc(llm, *question):
        asked.append(question)
        return [{"answer": {"x": 1}}, {"raised": raised, "says": "no"} if len(asked) == 1 else {"answer": {"x": 1}}]

    engine._shares = False
    monkeypatch.setattr(internals, "in_processes", lambda llm: True)
    monkeypatch.setattr(internals, "rpc", rpc)
    with pytest.raises(kind, match=f"a worker failed at explorer_fires: {raised}: no"):
        engine.fires()
    assert engine.fires() == {"x": 1}
    assert asked == [("explorer_answer", "explorer_fires")] * 2


def test_vllm_runs_ahead_where_there_are_steps_to_come(engine):
    execute(engine, Request("a", (1, 2)), Request("b", (3, 4, 5), max_new_tokens=1))
    execute(engine, Request("c", (1, 2)), Request("d", (3, 4, 5, 6)))
    execute(engine, Request("e", (1, 2), max_new_tokens=2))
    execute(engine, *(Request(key, (1,)) for key in "fghi"))
    assert engine.ahead == [False, True, True, True]


def test_requests_are_sampled_as_they_ask_and_at_least_one_token(engine):
    execute(engine, Request("a", (1, 2)), Request("b", (3, 4), max_new_tokens=3, temperature=0.5))
    assert engine.sampled == [(1, 0.0, ()), (3, 0.5, ())]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_request_without_a_seed_gets_one_of_its_own(monkeypatch, temperature):
    """Else vLLM's V2 runner takes one from numpy's random numbers, which are the user's."""
    seeds = []
    monkeypatch.setattr(internals, "sampling", lambda *parameters: None)
    monkeypatch.setattr(internals, "add", lambda llm, key, ids, alike, seed, extra_args: seeds.append(seed))
    made = subject.VllmEngine.__new__(subject.VllmEngine)
    made._llm, made._stop_ids = object(), ()
    for seed in (None, None, None, 0):
        made._add(Request("a", (1,), temperature=temperature, seed=seed))
    assert len(set(seeds[:3])) == 3 and all(0 <= seed < 2**63 for seed in seeds)
    assert seeds[3] == 0


def test_an_error_of_the_only_worker_is_its_own(engine, monkeypatch):
    monkeypatch.setattr(internals, "in_processes", lambda llm: False)
    with monkeypatch.context() as patch:
        patch.setattr(internals, "step", lambda llm: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            execute(engine, Request("run", (1, 2)))


def test_a_stop_is_asked_with_all_that_was_generated_and_ends_its_request(engine, monkeypatch):
    steps = iter([[("a", [7], False), ("b", [1], False)], [("a", [8], False), ("b", [2], True)]])
    seen, aborted = [], []
    monkeypatch.setattr(internals, "step", lambda llm: [internals.Output(*output) for output in next(steps)])
    monkeypatch.setattr(internals, "abort", lambda llm, keys: aborted.extend(keys))
    requests = [
        Request("a", (1, 2), max_new_tokens=5, stop=lambda ids: bool(seen.append(list(ids))) or ids[-1] == 8),
        Request("b", (1,), max_new_tokens=2),
    ]
    results = execute(engine, *requests)
    assert [result.generated for result in results] == [(7, 8), (1, 2)]
    assert seen == [[7], [7, 8]]
    assert aborted == ["a"]
