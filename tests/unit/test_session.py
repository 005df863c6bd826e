"""The session on a fake engine: prompts and batches, what it says, threads, workers, and the way out."""

from __future__ import annotations

import builtins
import copy
import pickle
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import explorer
from explorer import Cancelled, Edit, SessionClosed, SpecError

from . import fake

STREAM = "blocks.1.hook_out"
Z = "blocks.0.attn.o.hook_in"
A, B = "w0 w1 w2", "w5 w6 w7"


@pytest.mark.parametrize(
    "prompt",
    [
        A,
        [3, 4, 5],
        (3, 4, 5),
        range(3, 6),
        np.array([3, 4, 5]),
        torch.tensor([3, 4, 5]),
        list(torch.tensor([3, 4, 5])),
        np.str_(A),
    ],
    ids=lambda p: type(p).__name__,
)
def test_one_prompt_gives_one_run(session, prompt):
    run = session.run(prompt)
    assert run.ids == (3, 4, 5)
    assert session.compare(prompt, None).clean.ids == (3, 4, 5)


@pytest.mark.parametrize(
    "prompts",
    [
        [A, B],
        (A, B),
        [A, [8, 9, 10]],
        [[3, 4, 5], (8, 9, 10)],
        [torch.tensor([3, 4, 5]), np.array([8, 9, 10])],
        torch.tensor([[3, 4, 5], [8, 9, 10]]),
        np.array([[3, 4, 5], [8, 9, 10]]),
        np.array([A, B]),
    ],
    ids=lambda p: type(p).__name__,
)
def test_a_list_of_prompts_is_one_batch_in_order(session, engine, prompts):
    runs = session.run(prompts)
    assert [run.ids for run in runs] == [(3, 4, 5), (8, 9, 10)]
    assert len(engine.batches) == 1


def test_a_batch_of_one_is_a_list(session):
    assert [run.ids for run in session.run([A])] == [(3, 4, 5)]
    assert len(session.compare([A], {STREAM: {"op": "suppress"}})) == 1


def test_a_batch_equals_its_runs_alone(session):
    specs = [None, {STREAM: {"op": "suppress"}}, [Edit(Z, "scale", factor=2, head=1)], Edit(STREAM, "set", value=1.0)]
    prompts = [A, "w3", B, A]
    together = session.run(prompts, specs, capture="blocks.*.hook_out")
    for run, prompt, spec in zip(together, prompts, specs, strict=True):
        alone = session.run(prompt, spec, capture="blocks.*.hook_out")
        assert run.spec == alone.spec
        assert torch.equal(run.logits_at(), alone.logits_at())
        assert all(torch.equal(run[h], alone[h]) for h in run)


def test_one_spec_for_all(session):
    a, b = session.run([A, B], [Edit(STREAM, "suppress"), Edit(Z, "suppress")])
    assert a.spec == b.spec == {STREAM: {"op": "suppress"}, Z: {"op": "suppress"}}
    assert [r.spec for r in session.run([A, B], [])] == [{}, {}]


def test_comparing_is_one_batch_clean_and_patched(session, engine):
    one = session.compare(A, {STREAM: {"op": "suppress"}})
    assert [len(r.edits) for r in engine.batches[0]] == [0, 1]
    assert (one.clean.spec, one.patched.spec) == ({}, {STREAM: {"op": "suppress"}})
    pairs = session.compare([A, B], [None, {STREAM: {"op": "suppress"}}], capture=STREAM)
    assert len(engine.batches) == 2
    assert [(p.clean.ids, p.patched.ids) for p in pairs] == [((3, 4, 5),) * 2, ((8, 9, 10),) * 2]
    assert [len(p.patched.spec) for p in pairs] == [0, 1]
    assert pairs[1].patched[STREAM].eq(0).all()


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ("", "the prompt is empty"),
        ([], "the prompt is empty"),
        ([3, 99], "token id 99 at position 1 is not in the vocabulary"),
        ([3, True], "True at position 1 is no token id"),
        (5, "a prompt is text or a list of token ids, not int"),
        (None, "not NoneType"),
        ("w0 " * 16, "the prompt has 16 tokens and needs room for 1 more, but this session takes 16 in all"),
    ],
)
def test_prompts_that_cannot_run(session, engine, prompt, says):
    with pytest.raises(ValueError, match=says):
        session.run(prompt)
    assert engine.batches == []


@pytest.mark.parametrize(
    "ids", [[3.0, 4.0], [3, 4.5], (3, 4.0), np.array([3.0]), torch.tensor([3.5, 4.0]), [np.float32(3)], [True, False]]
)
def test_numbers_are_one_prompt_though_they_are_no_ids(session, ids):
    for ask in (session.run, session.generate, lambda prompt: session.compare(prompt, None)):
        with pytest.raises(ValueError, match=r"^\S+ at position \d is no token id: ids are whole numbers"):
            ask(ids)


@pytest.mark.parametrize("copied", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_session_is_not_copied(session, copied):
    with pytest.raises(TypeError, match="a Session is neither pickled nor copied: it holds a model; boot fake where"):
        copied(session)


@pytest.mark.parametrize("name", [5, None, b"unembedding"])
def test_a_parameter_is_named_by_a_string(session, name):
    with pytest.raises(ValueError, match="a parameter is named by a string"):
        session.worker.parameter(name)


def test_errors_in_a_batch_name_the_prompt(session, engine):
    with pytest.raises(ValueError, match=r"^prompt 2: the prompt is empty"):
        session.run([A, ""])
    with pytest.raises(ValueError, match=r"^prompt 2: a prompt is text or a list of token ids, not float"):
        session.run([A, 1.5])
    with pytest.raises(
        SpecError, match=r"^prompt 2: edit 1 \(blocks.1.hook_out, suppress\): pos 2 is outside the prompt"
    ) as refused:
        session.run([A, "w0"], {STREAM: {"op": "suppress", "pos": 2}})
    assert refused.value.edit_index == 0
    with pytest.raises(SpecError, match=r"^prompt 2: edit 1 .*unknown op"):
        session.run([A, B], [None, {STREAM: {"op": "zap"}}])
    with pytest.raises(SpecError, match=r"^prompt 2: edit 1 .*pos 2 is outside"):
        session.compare([A, "w0"], [None, Edit(STREAM, "suppress", pos=2)])
    with pytest.raises(SpecError, match=r"^edit 1 .*pos 9 is outside"):
        session.compare(A, Edit(STREAM, "suppress", pos=9))
    with pytest.raises(SpecError, match="3 specs for 2 prompts"):
        session.run([A, B], [None] * 3)
    with pytest.raises(SpecError, match="a list of specs needs a list of prompts"):
        session.run(A, [None])
    assert engine.batches == []


def test_after_a_refusal_the_session_is_as_before(session):
    before = session.run(A).logits_at()
    for wrong in ({STREAM: {"op": "set", "value": [1.0]}}, {"nothing": {"op": "suppress"}}, len):
        with pytest.raises(SpecError):
            session.run(A, wrong)
        assert torch.equal(session.run(A).logits_at(), before)


def test_wrong_captures_are_refused_before_anything_runs(session, engine):
    for capture in ("blocks.0.hook_oout", ["blocks.9.hook_out"], "x*", len, 5):
        with pytest.raises(SpecError):
            session.run(A, capture=capture)
    assert engine.batches == []


def test_tokens(session):
    assert [(t.position, t.id, t.text) for t in session.tokens(A)] == [(0, 3, "w0"), (1, 4, "w1"), (2, 5, "w2")]
    assert [t.id for t in session.tokens([3, 4])] == [3, 4]
    assert len(session.tokens("w0 " * 40)) == 40  # longer than can run: shown all the same
    with pytest.raises(ValueError, match="no chat template"):
        session.tokens(A, chat=True)


def test_what_a_session_says_of_itself(session, tmp_path):
    assert repr(session) == "Session of fake: fake, cpu, torch.float32, eager; 3 layers, 4 heads, d_model 8"
    assert session.model_path is None
    assert session.info["d_mlp"] == 10
    assert "blocks.0.hook_out" in session.hooks
    local = explorer.Session(str(tmp_path), str(tmp_path), fake.FakeEngine(), fake.words(), explorer.jobs.Jobs("local"))
    assert (local.name, local.model_path) == (tmp_path.name, str(tmp_path))
    local.close()


def test_closing(engine):
    with fake.session(engine) as session:
        assert session.run(A)
    assert engine.closed == 1
    session.close()
    assert engine.closed == 1
    assert "(closed)" in repr(session)
    for ask in (
        lambda: session.run(A),
        lambda: session.compare(A, None),
        lambda: session.generate(A, max_new_tokens=1),
        session.explore,
    ):
        with pytest.raises(SessionClosed, match="the session is closed"):
            ask()
    assert len(session.tokens(A)) == 3


def test_a_job_that_closing_finds_before_its_first_run_is_cancelled(session):
    begun, go = threading.Event(), threading.Event()

    def work(job):
        begun.set()
        go.wait(10)
        session.run(A)

    job = session.jobs.submit(work)
    assert begun.wait(10)
    closing = threading.Thread(target=session.close)
    closing.start()
    while not job.cancelled:
        closing.join(0.001)
    go.set()
    with pytest.raises(Cancelled):
        job.result(10)
    closing.join()


def test_an_error_of_the_engine_leaves_the_session_usable(session, engine):
    engine.failing = Cancelled("cancelled")
    with pytest.raises(Cancelled):
        session.run(A)
    assert session.run(A).ids == (3, 4, 5)


def test_any_thread_may_ask(session):
    runs: dict[int, object] = {}
    threads = [threading.Thread(target=lambda i=i: runs.setdefault(i, session.run([3 + i]))) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {i: run.ids for i, run in runs.items()} == {i: (3 + i,) for i in range(8)}


def test_explore_says_what_to_install(session, monkeypatch):
    real = builtins.__import__

    def without_widgets(name, *args, **kwargs):
        if name == "widgets":
            raise ImportError("No module named 'anywidget'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_widgets)
    with pytest.raises(ImportError, match=r"pip install 'activation-explorer\[notebooks\]'") as missing:
        session.explore(A)
    assert "anywidget" in str(missing.value)


def test_explore_opens_the_workbench_on_the_session(session, monkeypatch):
    monkeypatch.setitem(sys.modules, "widgets", SimpleNamespace(explore=lambda s, prompt: (s, prompt)))
    assert session.explore(A) == (session, A)


def test_the_workers_are_asked_through_the_session():
    with fake.session() as session:
        session.run([3, 4])
        assert session.worker.fires() == {"embed.hook_out": 1}
        session.worker.reset_fires()
        assert session.worker.fires() == {"embed.hook_out": 0}
        assert session.worker.parameter("unembedding").shape == (8, 20)
        with pytest.raises(ValueError, match=r"the model has no parameter 'embedding'; did you mean unembedding\?"):
            session.worker.parameter("embedding")
        session.worker.detach()
    with pytest.raises(SessionClosed):
        session.worker.fires()
