"""Booting, up to the engine: what is refused, which engine and tokenizer, and what a failure leaves."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import threading
import time

import pytest
import torch
import transformers

import explorer
from explorer import BootError
from explorer import booting as subject

from . import fake

A = "w0 w1 w2"


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """Where `boot` finds a model with the small model's words; how its engine is built is for the test to say."""
    monkeypatch.setattr(subject, "resolve", lambda model, progress: tmp_path)
    monkeypatch.setattr(subject, "load_tokenizer", lambda path: fake.words())
    return tmp_path


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


def test_boot(monkeypatch, capsys, folder):
    asked = {}

    def build(engine, path, options, stop_ids, progress):
        progress("loading weights")
        asked.update(
            engine=engine, path=path, options=options, stop_ids=stop_ids, thread=threading.current_thread().name
        )
        return fake.FakeEngine()

    monkeypatch.setattr(subject, "_build", build)
    monkeypatch.setattr(subject, "resolve", lambda model, progress: (progress(0.5, "fetching"), folder)[1])
    monkeypatch.setattr(subject, "find_spec", lambda name: object())
    with pytest.warns(UserWarning, match="enable_batching changes nothing here"):
        session = explorer.boot(folder, dtype=torch.bfloat16, enable_batching=True, max_num_seqs=4)
    with session:
        assert session.run(A).ids == (3, 4, 5)
    assert (asked["engine"], asked["path"]) == ("vllm", str(folder))
    assert asked["thread"].startswith("explorer-")
    assert asked["stop_ids"] == [2]
    assert (asked["options"]["dtype"], asked["options"]["max_num_seqs"]) == ("bfloat16", 4)
    assert "enable_batching" not in asked["options"]
    out = capsys.readouterr().out
    assert out.startswith("Session of ") and "ready in" in out and out.count("\n") == 1


def test_a_boot_that_fails_leaves_no_thread(monkeypatch, folder):
    def build(*args):
        raise BootError("boot: no")

    monkeypatch.setattr(subject, "_build", build)
    before = threading.active_count()
    with pytest.raises(BootError, match="boot: no"):
        explorer.boot(folder)
    for thread in threading.enumerate():
        if thread.name == f"explorer-{folder.name}":
            thread.join(5)
    assert threading.active_count() == before


def test_an_interrupted_boot_frees_what_was_built(monkeypatch, folder):
    engine, call = fake.FakeEngine(), subject.Jobs.call
    closed = []

    def interrupted(self, fn):
        call(self, fn)
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "close", lambda: closed.append(threading.current_thread().name))
    monkeypatch.setattr(subject.Jobs, "call", interrupted)
    monkeypatch.setattr(subject, "_build", lambda *_: engine)
    with pytest.raises(KeyboardInterrupt):
        explorer.boot(folder)
    assert closed == [f"explorer-{folder.name}"]


def test_boots_take_turns(monkeypatch, folder):
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
    threads = [threading.Thread(target=lambda: explorer.boot(folder).close()) for _ in range(3)]
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


def test_without_vllm_the_transformers_engine_and_a_line_that_says_so(monkeypatch, capsys, folder):
    engines = []
    monkeypatch.setattr(subject, "_build", lambda engine, *_: engines.append(engine) or fake.FakeEngine())
    monkeypatch.setattr(subject, "find_spec", lambda name: None)
    explorer.boot(folder).close()
    assert "vLLM is not installed: the transformers engine runs the model" in capsys.readouterr().out
    explorer.boot(folder, engine="transformers").close()
    assert "not installed" not in capsys.readouterr().out
    assert engines == ["transformers", "transformers"]


def test_a_head_that_gives_the_last_row_alone_is_said_at_boot_and_loss_is_refused(monkeypatch, capsys, folder):
    engine = fake.FakeEngine()
    engine.model = dataclasses.replace(engine.model, no_head="it wants more than rows")
    monkeypatch.setattr(subject, "_build", lambda *_: engine)
    with explorer.boot(folder) as session:
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
