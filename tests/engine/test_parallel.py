"""Two worker processes, tensor- or pipeline-parallel: everything as in one process, and as in transformers."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import explorer

from .. import tiny
from ..reference import reference
from .compare import core, relative
from .test_edits import IDS, OTHER, SPECS

SIZES = {"max_model_len": 160, "max_num_batched_tokens": 48, "max_num_seqs": 4}  # chunks, and batches that queue
KINDS = {"tensor": {"tensor_parallel_size": 2}, "pipeline": {"pipeline_parallel_size": 2}}
LONG = [[(7 * n + start) % 150 + 3 for n in range(length)] for start, length in enumerate((100, 5, 33, 64, 90, 1, 70))]


@pytest.fixture(scope="module", params=KINDS)
def session(request: pytest.FixtureRequest, tiny_folder: Callable[[str], Path]) -> Iterator[explorer.Session]:
    before = workers()
    with explorer.boot(tiny_folder("llama"), **SIZES, **KINDS[request.param]) as session:
        assert len(workers() - before) == 2
        yield session
    assert workers() == before, "a worker process outlived its session"


def workers() -> set[psutil.Process]:
    """The worker processes of this one; Python's own helper, which tracks shared memory, is none."""
    children = psutil.Process().children(recursive=True)
    return {c for c in children if "resource_tracker" not in " ".join(c.cmdline())}


def assert_same(got: explorer.Run, want: explorer.Run) -> None:
    """The same numbers from another split of the same sums."""
    assert got.ids == want.ids and got.captured == want.captured
    assert relative(got.logits, want.logits) <= 2e-5
    for hook in got.captured:
        if hook.endswith(("hook_pattern", "hook_attn_scores")):
            seen = torch.isfinite(want[hook])
            assert torch.equal(torch.isfinite(got[hook]), seen)
            assert float((got[hook] - want[hook])[seen].abs().max()) <= 2e-5 * float(want[hook][seen].abs().max()), hook
        else:
            assert relative(got[hook], want[hook]) <= 2e-5, hook


def test_every_hook_as_in_one_process_and_as_in_transformers(
    session: explorer.Session, llama: explorer.Session
) -> None:
    prompts = [IDS, OTHER[:1], OTHER * 3]
    for ids, got, one in zip(
        prompts, session.run(prompts, capture="all"), llama.run(prompts, capture="all"), strict=True
    ):
        assert_same(got, one)
        want = reference(session.model_path).run(ids)
        assert set(got.captured) == set(want.rows)
        for hook in got.captured:
            if not hook.endswith(("hook_pattern", "hook_attn_scores")):
                assert relative(got[hook], want[hook]) <= 1e-4, hook
        torch.testing.assert_close(got.loss, want.loss, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", SPECS)
def test_every_edit(session: explorer.Session, llama: explorer.Session, name: str) -> None:
    got, one = (s.run(IDS, SPECS[name], capture="all") for s in (session, llama))
    assert_same(got, one)
    assert relative(got.logits, reference(session.model_path).run(IDS, SPECS[name]).logits) <= 1e-4


def test_a_source_that_is_a_run(session: explorer.Session) -> None:
    """Its values are sent to the workers; the source run in the same call never leaves them."""
    hook = "blocks.1.attn.hook_z"
    source = session.run(OTHER, capture=hook)
    here, sent = (
        session.run(IDS, explorer.Edit(hook, "patch", source=s, head=[3, 0], pos=[9, 2]), capture=hook)
        for s in (OTHER, source)
    )
    assert torch.equal(here.logits, sent.logits)
    assert torch.equal(sent[hook][[9, 2]][:, [3, 0]], source[hook][[9, 2]][:, [3, 0]])


def test_a_spec_a_prompt_in_chunks_and_queues(session: explorer.Session, llama: explorer.Session) -> None:
    specs = [
        {
            "blocks.0.hook_out": {"op": "scale", "factor": 0.5 + n / 4, "pos": -1},
            "blocks.1.attn.hook_v": {"op": "suppress", "head": n % 2, "pos": "::2"},
        }
        if n % 3
        else None
        for n in range(len(LONG))
    ]
    for got, want in zip(*(s.run(LONG, specs, capture="all") for s in (session, llama)), strict=True):
        assert_same(got, want)


def test_answers_larger_than_what_workers_share(session: explorer.Session) -> None:
    """vLLM's queue of answers holds 16 MiB; what is larger takes another way."""
    runs = session.run(LONG * 8, capture="all")
    stream = [run["blocks.0.hook_out"] for run in runs]
    assert sum(run[hook].nbytes for run in runs for hook in run) > 2 * 2**24
    for i, rows in enumerate(stream[len(LONG) :]):
        torch.testing.assert_close(rows, stream[i % len(LONG)], atol=1e-4, rtol=1e-4)


def test_generation_with_edits_on_generated_tokens(session: explorer.Session, llama: explorer.Session) -> None:
    edits = [
        explorer.Edit("blocks.1.attn.hook_z", "scale", head=[0, 3], factor=-1.5, phase="decode"),
        explorer.Edit("blocks.0.mlp.hook_post", "add", value=0.2, phase="both"),
    ]
    for spec in (None, edits):
        got, want = (s.generate([IDS, OTHER[:3], [5]], spec, 12, capture="all") for s in (session, llama))
        for one, other in zip(got, want, strict=True):
            assert len(one.generated) == 12
            assert_same(one, other)
    assert session.generate(IDS, edits, 12).ids != session.generate(IDS, None, 12).ids
    drawn = [session.generate(IDS, max_new_tokens=8, temperature=1.0, seed=5).ids for _ in range(2)]
    assert drawn[0] == drawn[1]


def test_an_edit_that_makes_nan_does_not_spoil_later_runs(session: explorer.Session) -> None:
    """Another stage's or another head's, too: each worker clears the cache blocks that may have it."""
    before = [session.run(IDS[:n]).logits_at() for n in range(1, 8)]
    overflow = [{"op": "scale", "factor": 3e38}] * 2
    for edits in (
        {"blocks.0.hook_out": overflow},
        {"blocks.0.hook_out": overflow, "blocks.1.hook_out": {"op": "set", "value": 0.5}},
        {"blocks.1.attn.hook_v": [edit | {"head": 1} for edit in overflow]},
    ):
        session.run([IDS * 4] * 24, edits)
        for _ in range(3):
            again = [run.logits_at() for run in session.run([IDS[:n] for n in range(1, 8)] * 4)]
            for got, want in zip(again, before * 4, strict=True):
                torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_each_hook_fires_once_a_forward_pass(session: explorer.Session) -> None:
    names = {p.name for p in session.hooks if not p.derived_from and p.component != "logits"}
    session.worker.reset_fires()
    assert session.worker.fires() == {}
    session.run(IDS, capture="all")
    assert session.worker.fires() == dict.fromkeys(names, 1)
    session.run(IDS)  # nothing to do, nothing attached
    session.generate(IDS, {"blocks.0.attn.hook_z": {"op": "scale", "factor": 2.0, "head": 0, "phase": "both"}}, 5)
    assert session.worker.fires() == dict.fromkeys(names, 1) | {"blocks.0.attn.o.hook_in": 6}
    session.worker.detach()
    session.worker.detach()
    session.worker.reset_fires()
    assert session.worker.fires() == {}


def checkpoint(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A Llama checkpoint's tensors under vLLM's names: projections that read the same input are one."""
    tensors = dict(model.named_parameters())
    for i in range(model.config.num_hidden_layers):
        layer = f"model.layers.{i}."
        for whole, parts in {"self_attn.qkv_proj": "qkv", "mlp.gate_up_proj": ("gate", "up")}.items():
            block = layer + whole.split(".")[0]
            own = [tensors.pop(f"{block}.{part}_proj.weight") for part in parts]
            tensors[f"{layer}{whole}.weight"] = torch.cat(own)
    return tensors


def test_every_parameter_as_in_the_checkpoint(session: explorer.Session) -> None:
    for name, want in checkpoint(reference(session.model_path).model).items():
        assert torch.equal(session.worker.parameter(name), want), name
    with pytest.raises(ValueError, match=r"no parameter 'model.norm.wait'; did you mean model\.norm\.weight\?"):
        session.worker.parameter("model.norm.wait")
    with pytest.raises(ValueError, match="no parameter 'forward'"):
        session.worker.parameter("forward")


def test_a_question_that_fails_leaves_it_usable(session: explorer.Session) -> None:
    before = session.run(IDS)
    with pytest.raises(explorer.EngineError, match="a worker failed at explorer_logits: RuntimeError: "):
        session._call(lambda engine, job: engine.logits(torch.zeros(2, 5)))
    with pytest.raises(explorer.EngineError, match="a worker failed at explorer_parameter: AttributeError: "):
        session._call(lambda engine, job: engine.parameter(5))  # past the session's own refusal
    broken = explorer.engine.protocol.Request("broken", (3, 4), capture=("blocks.9.hook_out",))
    with pytest.raises(explorer.EngineError, match=r"failed at explorer_open: ValueError: no tap for blocks\.9"):
        session._call(lambda engine, job: engine.execute([broken], job.progress, lambda: False))
    assert_same(session.run(IDS), before)


def test_cancel_and_interrupts_leave_it_usable(session: explorer.Session) -> None:
    before = session.run(IDS, capture="all")
    seen: list[int] = []

    def on_progress(done: int, total: int, message: str) -> None:
        seen.append(done)
        job.cancel()

    job = session.jobs.submit(lambda job: session.generate(LONG, max_new_tokens=20), on_progress=on_progress)
    for worker in workers():  # Jupyter's interrupt goes to every process of the kernel
        worker.send_signal(signal.SIGINT)
    with pytest.raises(explorer.Cancelled):
        job.result(timeout=60)
    assert seen and not core(session).scheduler.has_unfinished_requests()
    assert_same(session.run(IDS, capture="all"), before)


def test_a_killed_worker_is_one_error_and_reboot_mends_it(session: explorer.Session) -> None:
    before, unread = session.run(IDS, capture="all", logits=True), session.run(IDS)
    scheduler = core(session).scheduler
    schedule, steps = scheduler.schedule, []

    def third_kills(*args: Any, **kwargs: Any) -> Any:
        steps.append(time.monotonic())
        if len(steps) == 3:
            max(workers(), key=lambda worker: worker.pid).kill()
        return schedule(*args, **kwargs)

    scheduler.schedule = third_kills
    died = r"lost its worker processes \(VllmWorker-1 died \(exit code -9\)\); session\.reboot\(\)"
    with pytest.raises(explorer.EngineError, match=died):
        session.generate([IDS] * 4, max_new_tokens=100)
    assert time.monotonic() - steps[2] < 10
    with pytest.raises(explorer.EngineError, match=died):
        session.run(IDS)
    assert not workers()
    session.reboot()
    assert_same(session.run(IDS, capture="all"), before)
    with pytest.raises(explorer.SessionClosed, match="rebooted"):
        _ = unread.logits
    assert unread.top(1)[0].id == before.top(1)[0].id


def test_a_worker_that_cannot_start_says_why(tiny_folder: Callable[[str], Path]) -> None:
    before = workers()
    with pytest.raises(explorer.BootError, match=r"a worker process failed to start: .*layers\.1"):
        explorer.boot(tiny_folder("llama"), **SIZES, tensor_parallel_size=2, hf_overrides={"num_hidden_layers": 1})
    assert workers() == before


def test_one_key_value_head_for_two_workers(tmp_path: Path) -> None:
    """Both hold it, an edit is theirs both, and it comes back once."""
    folder = tiny.make(tmp_path / "tiny-one-key", num_key_value_heads=1)
    files = set(os.listdir("/dev/shm"))
    with explorer.boot(folder, **SIZES, tensor_parallel_size=2) as session:
        ref = reference(folder)
        for part in "qkv":
            spec = {f"blocks.0.attn.hook_{part}": {"op": "scale", "factor": -2.0, "head": 0, "pos": [3, 4]}}
            want = ref.run(
                IDS, {f"blocks.0.attn.{part}.hook_out": {"op": "scale", "factor": -2.0, "head": 0, "pos": [3, 4]}}
            )
            run = session.run(IDS, spec, capture="all")
            assert relative(run.logits, want.logits) <= 1e-4
            qkv = "model.layers.1.self_attn.qkv_proj.weight"
            assert torch.equal(session.worker.parameter(qkv), checkpoint(ref.model)[qkv])
            for hook in (f"blocks.{i}.attn.{x}.hook_out" for i in (0, 1) for x in "qkv"):
                assert run[hook].shape == want[hook].shape
                assert relative(run[hook], want[hook]) <= 1e-4, hook
    assert set(os.listdir("/dev/shm")) <= files, "shared memory was left behind"
