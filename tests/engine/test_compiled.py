"""Compiled mode: idle it is plain compiled vLLM, bit for bit; whatever captures or edits is eager mode, bit for bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from copy import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import explorer
from explorer import BootError
from explorer.engine.vllm.boot import code_hash

from .compare import ask_plain, idle, log_probs, relative, same
from .test_edits import IDS, OTHER, SPECS


@pytest.fixture(scope="module")
def session(booted: Callable[..., explorer.Session]) -> explorer.Session:
    return booted("llama", mode="compiled")


def compiled_so_far() -> Any:
    """vLLM's own counts of what it traced, compiled and recorded in this process."""
    from vllm.compilation.counter import compilation_counter

    return copy(compilation_counter)


def test_idle_as_plain_compiled(session: explorer.Session, tmp_path: Path) -> None:
    assert session.info["mode"] == "compiled"
    prompts = [IDS, IDS[:1], OTHER * 2]
    plain = ask_plain(session, [*([p] for p in prompts), prompts], tmp_path)
    for b, prompt in enumerate(prompts):
        assert torch.equal(log_probs(session.run(prompt)), plain[f"{b}.0.next"])
    for p, run in enumerate(session.run(prompts)):
        assert torch.equal(log_probs(run), plain[f"3.{p}.next"])


def test_idle_runs_what_was_compiled(session: explorer.Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers' own Python never runs, or this mode would be eager under another name."""
    from vllm.model_executor.models.llama import LlamaModel

    calls: list[str] = []
    written = LlamaModel.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        calls.append("forward")
        return written(*args, **kwargs)

    monkeypatch.setattr(LlamaModel, "forward", forward)
    session.run(IDS)
    assert calls == []
    session.run(IDS, capture="blocks.0.hook_out")
    session.run(IDS, {"blocks.0.hook_out": {"op": "suppress"}})
    assert calls == ["forward", "forward"]


@pytest.mark.parametrize("name", SPECS)
def test_every_edit_as_in_eager_mode(session: explorer.Session, llama: explorer.Session, name: str) -> None:
    before = compiled_so_far()
    got, want = (s.compare(IDS, SPECS[name], capture="all") for s in (session, llama))
    assert relative(got.patched.logits, want.patched.logits) <= 5e-4
    assert relative(got.patched.logits, got.clean.logits) > 1e-2
    for hook in got.patched:
        if session.hooks[hook].component != "scores":
            assert relative(got.patched[hook], want.patched[hook]) <= 5e-4, hook
    assert compiled_so_far() == before  # nothing was traced or compiled again
    assert idle(session)


def test_generation_and_long_batches(session: explorer.Session, llama: explorer.Session) -> None:
    steer = explorer.Edit("blocks.0.hook_out", "scale", factor=1.7, phase="both")
    for edits in (None, steer):
        got, want = (
            s.generate([IDS, OTHER], edits, max_new_tokens=8, capture="blocks.*.hook_out") for s in (session, llama)
        )
        for one, other in zip(got, want, strict=True):
            assert one.ids == other.ids
            assert relative(one["blocks.1.hook_out"], other["blocks.1.hook_out"]) <= 5e-4
    assert session.generate(IDS, max_new_tokens=8).ids == llama.generate(IDS, max_new_tokens=8).ids


def test_after_an_edit_it_is_idle_again_bit_for_bit(session: explorer.Session) -> None:
    before = session.run(IDS)
    session.run([IDS] * 3, {"blocks.1.hook_in": {"op": "scale", "factor": 2.0}})
    assert same(session.run(IDS), before)


def test_a_mode_that_contradicts_itself(tiny_folder: Callable[[str], Path]) -> None:
    with pytest.raises(BootError, match="enforce_eager=True contradicts mode='compiled'"):
        explorer.boot(tiny_folder("llama"), mode="compiled", enforce_eager=True)
    with pytest.raises(BootError, match="the transformers engine does not take mode='compiled'"):
        explorer.boot(tiny_folder("llama"), engine="transformers", mode="compiled")


def test_an_eager_engine_shares_nothing_with_a_compiled_one(tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    """vLLM keeps rotary modules for the whole process; those of compiled engines differ in the last bit."""
    sizes = {"max_model_len": 200}  # no other test's
    prompts = [IDS, OTHER * 5, list(range(3, 150))]
    with (
        explorer.boot(tiny_folder("llama"), mode="compiled", **sizes) as compiled,
        explorer.boot(tiny_folder("llama"), **sizes) as eager,
    ):
        compiled.run(IDS)
        plain = ask_plain(eager, [prompts], tmp_path)
        for p, run in enumerate(eager.run(prompts)):
            assert torch.equal(log_probs(run), plain[f"0.{p}.next"])
            assert torch.equal(-run.loss, plain[f"0.{p}.prompt"])


def test_the_compile_cache_tells_hook_code_apart(session: explorer.Session) -> None:
    config = session._engine._llm.llm_engine.vllm_config  # type: ignore[union-attr]
    ours = config.additional_config
    assert ours["explorer"]["code"] == code_hash()

    def cached_as(additional: dict[str, object]) -> str:
        return str(dataclasses.replace(config, additional_config=additional).compute_hash())

    other_code = {**ours, "explorer": {**ours["explorer"], "code": "0" * 16}}
    assert cached_as(dict(ours)) == config.compute_hash()
    assert (
        len({cached_as(ours), cached_as(other_code), cached_as({})}) == 3
    )  # ours, after a change, and a plain engine's


def test_every_hook_fires_once_a_forward_pass(session: explorer.Session) -> None:
    session.worker.reset_fires()
    run = session.run(IDS, {"blocks.0.hook_out": {"op": "scale", "factor": 0.5}}, capture="all", max_new_tokens=3)
    fires = session.worker.fires()  # the prompt, and two of the three generated tokens
    tapped = {p.name for p in session.hooks if p.available and not p.derived_from and p.component != "logits"}
    assert len(run.generated) == 3 and set(fires) == tapped and set(fires.values()) == {3}
    session.worker.reset_fires()
    session.run(IDS)
    assert not any(session.worker.fires().values()), "an idle model has no hooks"
