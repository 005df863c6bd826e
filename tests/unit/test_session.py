"""The session on a fake engine: batches, order, prefixes of errors, sources, sampling, and the way out."""

from __future__ import annotations

import builtins
import dataclasses
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch
import transformers

import explorer
from explorer import BootError, Cancelled, Edit, SessionClosed, SpecError
from explorer import booting as subject
from explorer.engine.process import one_boot

from . import fake

STREAM = "blocks.1.hook_out"
Z = "blocks.0.attn.o.hook_in"
A, B = "w0 w1 w2", "w5 w6 w7"


# --- prompts and batches ----------------------------------------------------------------------------------------------


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


# --- sources ----------------------------------------------------------------------------------------------------------


def test_a_source_is_run_held_and_let_go(session, engine):
    run = session.run([A, A], Edit(STREAM, "patch", source=B), capture=STREAM)[0]
    assert [[r.ids for r in batch] for batch in engine.batches] == [[(8, 9, 10)], [(3, 4, 5)] * 2]
    assert engine.held == {}
    assert torch.equal(run[STREAM], session.run(B, capture=STREAM)[STREAM])


def test_every_form_of_a_source_gives_the_same(session, engine):
    captured, bare = session.run(B, capture=STREAM), session.run(B)
    forms = [B, [8, 9, 10], {"prompt": B}, {"ids": [8, 9, 10]}, captured, bare, np.array([8, 9, 10])]
    rows = [session.run(A, Edit(STREAM, "patch", source=s, pos=[0, 2]), capture=STREAM)[STREAM] for s in forms]
    assert all(torch.equal(r, rows[0]) for r in rows)
    assert [len(b) for b in engine.batches].count(1) == len(engine.batches)


def test_patching_a_run_with_itself_changes_nothing(session):
    run = session.run(A, capture="all")
    for hook in (STREAM, Z, "blocks.0.attn.k.hook_out", "blocks.2.mlp.hook_post"):
        patched = session.run(A, Edit(hook, "patch", source=run))
        assert torch.equal(patched.logits_at(), run.logits_at()), hook


def test_a_patched_run_is_a_source(session):
    scaled = session.run(B, Edit(Z, "scale", factor=3))
    captured = session.run(B, scaled.spec, capture=STREAM)
    run = session.run(A, Edit(STREAM, "patch", source=scaled), capture=STREAM)
    assert torch.equal(run[STREAM], captured[STREAM])
    assert run.spec[STREAM]["source"] == {"ids": [8, 9, 10], "edits": {Z: {"op": "scale", "factor": 3}}}
    again = session.run(A, run.spec, capture=STREAM)
    assert torch.equal(again[STREAM], run[STREAM])


def test_sources_that_count_from_different_ends_are_two(session):
    run = session.generate("w1 w2", max_new_tokens=3)
    last = {"op": "patch", "pos": -1, "source_pos": "last"}
    recipes = [{"prompt": "w5 w6", "edits": {STREAM: last | {"source": s}}} for s in (run, run.recipe())]
    specs = [{"blocks.2.hook_out": {"op": "patch", "pos": -1, "source": recipe}} for recipe in recipes]
    for spec, got in zip(specs, session.run(["w7 w8"] * 2, specs), strict=True):
        assert torch.equal(got.logits, session.run("w7 w8", spec).logits)
    assert not torch.equal(*(session.run("w7 w8", spec).logits for spec in specs))
    wrong = {"prompt": "w5", "edits": {STREAM: {"op": "patch", "source": run, "source_pos": 9}}}
    with pytest.raises(SpecError, match=r"^edit 1 \(.*\): source: .*source_pos 9 is outside the source") as refused:
        session.run("w7", {STREAM: {"op": "patch", "source": wrong}})
    assert refused.value.edit_index == 0


def test_a_run_of_another_session_must_hold_what_is_patched(session):
    with fake.session(fake.FakeEngine(seed=1)) as other:
        captured, bare = other.run(A, capture=STREAM), other.run(A)
    assert torch.equal(session.run(A, Edit(STREAM, "patch", source=captured), capture=STREAM)[STREAM], captured[STREAM])
    with pytest.raises(SpecError, match="from another session, or from before a reboot, and did not capture"):
        session.run(A, Edit(STREAM, "patch", source=bare))


def test_held_sources_are_let_go_after_an_error(session, engine):
    execute = engine.execute

    def failing(requests, progress, cancelled):
        if not requests[0].hold:
            raise RuntimeError("out of memory")
        return execute(requests, progress, cancelled)

    engine.execute = failing
    with pytest.raises(RuntimeError, match="out of memory"):
        session.run(A, Edit(STREAM, "patch", source=B))
    assert engine.held == {}


# --- generating -------------------------------------------------------------------------------------------------------


def test_generating(session, engine):
    run = session.generate(A, max_new_tokens=np.int64(3), temperature=np.float32(0.5), seed=np.int64(7))
    request = engine.batches[0][0]
    assert (request.max_new_tokens, request.temperature, request.seed, request.stop) == (3, 0.5, 7, None)
    assert type(request.max_new_tokens) is int
    assert len(run.generated) == 3
    assert len(session.generate([A, B], max_new_tokens=1)) == 2
    assert session.run(A, max_new_tokens=3).ids == session.generate(A, max_new_tokens=3).ids


def test_stopping_at_a_text(session):
    free = session.generate(A, max_new_tokens=4)
    words = [t.text for t in free.tokens[3:]]
    stopped = session.generate(A, max_new_tokens=4, stop=[words[0], "never"])
    assert stopped.ids == free.ids[:4]
    assert session.generate(A, max_new_tokens=4, stop="never").ids == free.ids
    assert session.generate(A, max_new_tokens=4, stop=[]).ids == free.ids


def test_steering_what_is_generated(session):
    steered = session.generate(A, Edit(STREAM, "set", value=1.0, phase="decode"), 3, capture=STREAM)
    assert steered[STREAM][3:].eq(1).all()
    assert not steered[STREAM][:3].eq(1).any()


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1 to generate, not 0"),
        ({"max_new_tokens": -1}, "max_new_tokens must be at least 1"),
        ({"max_new_tokens": True}, "must be a whole number of at least 0, not True"),
        ({"max_new_tokens": 1.5}, "must be a whole number of at least 0, not 1.5"),
        ({"max_new_tokens": "3"}, "not '3'"),
        ({"max_new_tokens": None}, "not None"),
        ({"max_new_tokens": 14}, "has 3 tokens and needs room for 14 more, but this session takes 16 in all"),
        ({"temperature": -0.1}, "temperature must be a number from 0 to 2, not -0.1"),
        ({"temperature": 2.5}, "temperature must be a number from 0 to 2, not 2.5"),
        ({"temperature": float("nan")}, "temperature must be"),
        ({"temperature": float("inf")}, "temperature must be"),
        ({"temperature": True}, "temperature must be"),
        ({"temperature": "hot"}, "temperature must be"),
        ({"seed": 1.0}, "seed must be a whole number, not 1.0"),
        ({"seed": True}, "seed must be"),
        ({"seed": -1}, "seed must be between 0 and .*, not -1"),
        ({"seed": 2**63}, "seed must be between"),
        ({"stop": ""}, "stop takes a string that is not empty, or a list of them, not ''"),
        ({"stop": ["a", ""]}, "stop takes"),
        ({"stop": 5}, "stop takes a string that is not empty, or a list of them, not 5"),
        ({"stop": [5]}, "stop takes"),
    ],
)
def test_wrong_sampling(session, engine, fields, says):
    with pytest.raises(ValueError, match=says):
        session.generate(A, **{"max_new_tokens": 3} | fields)
    assert engine.batches == []


def test_run_takes_no_negative_generation(session):
    with pytest.raises(ValueError, match="at least 0, not -1"):
        session.run(A, max_new_tokens=-1)


# --- the rest ---------------------------------------------------------------------------------------------------------


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
    ):
        with pytest.raises(SessionClosed, match="the session is closed"):
            ask()
    assert len(session.tokens(A)) == 3


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
    import sys
    from types import SimpleNamespace

    monkeypatch.setitem(sys.modules, "widgets", SimpleNamespace(explore=lambda s, prompt: (s, prompt)))
    assert session.explore(A) == (session, A)


# --- boot, up to the engine ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"engine": "jax"}, "boot: engine must be .*, not 'jax'"),
        ({"mode": "fast"}, "boot: mode must be .*, not 'fast'"),
    ],
)
def test_boot_refuses_what_it_does_not_know(fields, says):
    with pytest.raises(BootError, match=says):
        explorer.boot("smollm2-135m", **fields)


def test_boot(monkeypatch, capsys, tmp_path):
    asked = {}

    def build(engine, path, options, stop_ids, progress):
        progress("loading weights")
        asked.update(
            engine=engine, path=path, options=options, stop_ids=stop_ids, thread=threading.current_thread().name
        )
        return fake.FakeEngine()

    monkeypatch.setattr(subject, "_build", build)
    monkeypatch.setattr(subject, "resolve", lambda model, progress: (progress(0.5, "fetching"), tmp_path)[1])
    monkeypatch.setattr(subject, "load_tokenizer", lambda path: fake.words())
    monkeypatch.setattr(subject, "find_spec", lambda name: object())
    with pytest.warns(UserWarning, match="enable_batching changes nothing here"):
        session = explorer.boot(tmp_path, dtype=torch.bfloat16, enable_batching=True, max_num_seqs=4)
    with session:
        assert session.run(A).ids == (3, 4, 5)
    assert (asked["engine"], asked["path"]) == ("vllm", str(tmp_path))
    assert asked["thread"].startswith("explorer-")
    assert asked["stop_ids"] == [2]
    assert (asked["options"]["dtype"], asked["options"]["max_num_seqs"]) == ("bfloat16", 4)
    assert "enable_batching" not in asked["options"]
    out = capsys.readouterr().out
    assert out.startswith("Session of ") and "ready in" in out and out.count("\n") == 1


def test_a_boot_that_fails_leaves_no_thread(monkeypatch, tmp_path):
    def build(*args):
        raise BootError("boot: no")

    monkeypatch.setattr(subject, "_build", build)
    monkeypatch.setattr(subject, "resolve", lambda model, progress: tmp_path)
    monkeypatch.setattr(subject, "load_tokenizer", lambda path: fake.words())
    before = threading.active_count()
    with pytest.raises(BootError, match="boot: no"):
        explorer.boot(tmp_path)
    for thread in threading.enumerate():
        if thread.name == f"explorer-{tmp_path.name}":
            thread.join(5)
    assert threading.active_count() == before


def test_an_interrupted_boot_frees_what_was_built(monkeypatch, tmp_path):
    engine, call = fake.FakeEngine(), subject.Jobs.call
    closed = []

    def interrupted(self, fn):
        call(self, fn)
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "close", lambda: closed.append(threading.current_thread().name))
    monkeypatch.setattr(subject.Jobs, "call", interrupted)
    monkeypatch.setattr(subject, "_build", lambda *_: engine)
    monkeypatch.setattr(subject, "resolve", lambda model, progress: tmp_path)
    monkeypatch.setattr(subject, "load_tokenizer", lambda path: fake.words())
    with pytest.raises(KeyboardInterrupt):
        explorer.boot(tmp_path)
    assert closed == [f"explorer-{tmp_path.name}"]


def test_boots_take_turns(monkeypatch, tmp_path):
    """Each puts back the environment that it found: overlapping, the last one would put back the first one's."""
    booting, most, lock = [], [], threading.Lock()

    def build(*_):
        with lock:
            booting.append(threading.current_thread())
            most.append(len(booting))
        time.sleep(0.05)
        booting.pop()
        return fake.FakeEngine()

    monkeypatch.setattr(subject, "_build", build)
    monkeypatch.setattr(subject, "resolve", lambda model, progress: tmp_path)
    monkeypatch.setattr(subject, "load_tokenizer", lambda path: fake.words())
    threads = [threading.Thread(target=lambda: explorer.boot(tmp_path).close()) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert most == [1, 1, 1]


@pytest.mark.parametrize(
    ("fields", "asked"),
    [
        ({}, {}),
        ({"revision": "v2", "hf_token": "t"}, {"revision": "v2", "token": "t"}),
        ({"revision": "v2", "tokenizer": "other/words"}, {}),
        ({"revision": "v2", "tokenizer": "other/words", "tokenizer_revision": "v3"}, {"revision": "v3"}),
        ({"trust_remote_code": True}, {"trust_remote_code": True}),
    ],
)
def test_the_tokenizer_comes_from_the_revision_and_with_the_token_asked_for(monkeypatch, fields, asked):
    seen = {}
    monkeypatch.setattr(subject, "load_tokenizer", lambda path, **hub: (seen.update({path: hub}), fake.words())[1])
    monkeypatch.setattr(subject, "_stop_ids", lambda words, path, hub: seen.update(stop=hub) or [])
    monkeypatch.setattr(subject, "_build", lambda *_: fake.FakeEngine())
    explorer.boot("some/model", **fields).close()
    assert seen[fields.get("tokenizer", "some/model")] == asked
    assert seen["stop"].get("revision") == fields.get("revision")


def test_without_vllm_the_transformers_engine_and_a_line_that_says_so(monkeypatch, capsys, tmp_path):
    engines = []
    monkeypatch.setattr(subject, "_build", lambda engine, *_: engines.append(engine) or fake.FakeEngine())
    monkeypatch.setattr(subject, "resolve", lambda model, progress: tmp_path)
    monkeypatch.setattr(subject, "load_tokenizer", lambda path: fake.words())
    monkeypatch.setattr(subject, "find_spec", lambda name: None)
    explorer.boot(tmp_path).close()
    assert "vLLM is not installed: the transformers engine runs the model" in capsys.readouterr().out
    explorer.boot(tmp_path, engine="transformers").close()
    assert "not installed" not in capsys.readouterr().out
    assert engines == ["transformers", "transformers"]


def test_a_head_that_gives_the_last_row_alone_is_said_at_boot_and_loss_is_refused(monkeypatch, capsys, tmp_path):
    engine = fake.FakeEngine()
    engine.model = dataclasses.replace(engine.model, no_head="it wants more than rows")
    monkeypatch.setattr(subject, "_build", lambda *_: engine)
    monkeypatch.setattr(subject, "resolve", lambda model, progress: tmp_path)
    monkeypatch.setattr(subject, "load_tokenizer", lambda path: fake.words())
    with explorer.boot(tmp_path) as session:
        assert "predictions at the last position only" in capsys.readouterr().out
        run = session.run("w1 w2 w3")
        assert len(run.top(3)) == 3
        for more in (lambda: run.logits, lambda: run.loss, lambda: run.top(1, position=0)):
            with pytest.raises(explorer.EngineError, match=r"last position only.*no loss \(it wants more than rows\)"):
                more()
        assert session.run("w1").logits.shape == (1, 20)
        assert session.compare("w1 w2", {"blocks.0.hook_out": {"op": "suppress"}}).kl() > 0


def test_vllm_asked_for_where_there_is_none_is_refused_before_the_network(monkeypatch):
    monkeypatch.setattr(subject, "find_spec", lambda name: None)
    for step in ("resolve", "load_tokenizer", "_build"):
        monkeypatch.setattr(subject, step, lambda *_, **__: pytest.fail("something was looked for"))
    with pytest.raises(ImportError, match=r"^engine='vllm' needs vLLM: pip install 'activation-explorer\[vllm\]'"):
        explorer.boot("some/model", engine="vllm")


def test_a_tokenizer_in_hand_is_used_as_it_is(monkeypatch, tmp_path):
    own = fake.words()
    monkeypatch.setattr(subject, "_build", lambda *_: fake.FakeEngine())
    monkeypatch.setattr(subject, "resolve", lambda model, progress: tmp_path)
    monkeypatch.setattr(
        transformers.AutoTokenizer, "from_pretrained", lambda *_, **__: pytest.fail("another was loaded")
    )
    with explorer.boot(tmp_path, tokenizer=own) as session:
        assert session.run(A)._origin.tokenizer is own


def test_importing_explorer_brings_no_engine():
    code = "import sys, explorer, widgets; print(sorted({'vllm', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_reboot_takes_a_new_engine_for_the_same_session():
    engines = [fake.FakeEngine(), fake.FakeEngine(), fake.FakeEngine()]
    left = iter(engines[1:])
    session = explorer.Session(
        "fake", "fake/model", engines[0], fake.words(), explorer.jobs.Jobs("fake"), lambda progress: next(left)
    )
    read, unread = session.run([3, 4], capture="all", logits=True), session.run([3, 4])
    hooks = session.hooks
    session.reboot()
    assert [engine.closed for engine in engines] == [1, 0, 0]
    assert session.hooks is not hooks
    again = session.run([3, 4], capture="all")
    assert torch.equal(again.logits, read.logits)
    with pytest.raises(explorer.SessionClosed, match="rebooted after this run"):
        _ = unread.logits
    assert torch.equal(unread.logits_at(), read.logits_at())
    patched = session.run([3, 4], explorer.Edit("blocks.0.hook_out", "patch", source=read))
    assert torch.equal(patched.logits, read.logits)  # what a run holds can still be patched from
    with pytest.raises(SpecError, match=r"from before a reboot, and did not capture blocks\.0\.hook_out; run it again"):
        session.run([3, 4], explorer.Edit("blocks.0.hook_out", "patch", source=unread))
    session.close()
    assert [engine.closed for engine in engines] == [1, 1, 0]
    with pytest.raises(explorer.SessionClosed, match="session is closed"):
        session.reboot()


def test_a_reboot_that_fails_can_be_tried_again():
    engines = [fake.FakeEngine(), fake.FakeEngine()]
    builds = iter([BootError("no memory"), engines[1]])

    def build(progress):
        made = next(builds)
        if isinstance(made, Exception):
            raise made
        return made

    session = explorer.Session("fake", "fake/model", engines[0], fake.words(), explorer.jobs.Jobs("fake"), build)
    with pytest.raises(BootError, match="no memory"):
        session.reboot()
    assert engines[0].closed == 1
    with pytest.raises(explorer.SessionClosed, match=r"no engine since its reboot failed; call session\.reboot\(\)"):
        session.run([3])
    session.reboot()
    assert session.run([3]).rows == 1
    session.close()
    assert engines[1].closed == 1


def test_a_job_may_reboot_while_others_wait_to():
    made = explorer.Session(
        "fake", "fake/model", fake.FakeEngine(), fake.words(), explorer.jobs.Jobs("fake"), lambda _: fake.FakeEngine()
    )
    others = threading.Thread(target=made.reboot)

    def reboot(job):
        others.start()
        while not made.jobs._queue:
            time.sleep(0.01)
        made.reboot()

    job = made.jobs.submit(reboot)
    job.result(timeout=10)
    others.join(10)
    assert not others.is_alive()
    assert made.run([3]).rows == 1
    made.close()


def test_a_reboot_that_waits_for_another_boot_can_be_cancelled():
    built = []
    made = explorer.Session(
        "fake", "fake/model", fake.FakeEngine(), fake.words(), explorer.jobs.Jobs("fake"), lambda _: built.append(1)
    )
    engine = made._engine
    with one_boot():
        job = made.jobs.submit(lambda job: made.reboot())
        while made.jobs._running is not job:
            time.sleep(0.01)
        job.cancel()
    with pytest.raises(explorer.Cancelled):
        job.result(timeout=10)
    assert made._engine is engine and not built
    assert made.run([3]).rows == 1
    made.close()


@pytest.mark.parametrize("ask", ["reboot", "run"])
def test_what_a_run_calls_while_it_goes_on_cannot_have_the_engine(ask):
    made = explorer.Session(
        "fake", "fake/model", fake.FakeEngine(), fake.words(), explorer.jobs.Jobs("fake"), lambda _: fake.FakeEngine()
    )
    engine = made._engine
    question = {"reboot": made.reboot, "run": lambda: made.run([3])}[ask]
    job = made.jobs.submit(lambda job: made.run([[3], [4]]), on_progress=lambda *_: question())
    with pytest.raises(explorer.ExplorerError, match=r"in the middle of a run: .* submit a job to session\.jobs"):
        job.result(timeout=10)
    assert made._engine is engine and not engine.closed
    assert made.run([3]).rows == 1
    done = made.jobs.submit(lambda job: made.run([3]))  # its callbacks come when the engine is free again
    done.add_done_callback(lambda job: question())
    done.result(timeout=10)
    assert made.run([3]).rows == 1
    made.close()


def test_a_session_without_a_recipe_cannot_reboot():
    with fake.session() as session, pytest.raises(explorer.SessionClosed):
        session.reboot()


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
