"""Jobs that are cancelled or fail part of the way: the engine is usable and clean afterwards."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import explorer
from explorer import Cancelled, SessionClosed

from .compare import core, idle, same, worker

IDS = [1, 17, 45, 80, 31, 9, 120, 64]
HOOK = "blocks.0.hook_out"
SPEC = {HOOK: {"op": "patch", "source": {"ids": IDS[::-1]}, "pos": [1, 2]}}


@pytest.fixture
def clean(llama: explorer.Session) -> Callable[[], None]:
    """Call it after the accident: the engine holds nothing, and clean and patched runs are what they were."""
    before = llama.run([IDS, IDS], [None, SPEC], capture="all")

    def check() -> None:
        assert idle(llama)
        after = llama.run([IDS, IDS], [None, SPEC], capture="all")
        assert same(after[0], before[0]) and same(after[1], before[1])

    return check


def test_cancelled_between_two_steps(llama: explorer.Session, clean: Callable[[], None]) -> None:
    prompts = [[3 + n, 9, 20] for n in range(40)]
    seen: list[tuple[int, int]] = []

    def on_progress(done: int, total: int, message: str) -> None:
        seen.append((done, total))
        job.cancel()

    started = threading.Event()

    def work(job: Any) -> Any:
        started.wait()  # until `job` is there for `on_progress`
        return llama.run(prompts, SPEC, HOOK, max_new_tokens=9)

    job = llama.jobs.submit(work, on_progress=on_progress)
    started.set()
    with pytest.raises(Cancelled):
        job.result(timeout=60)
    assert seen
    clean()


def test_cancelled_in_the_middle_of_a_generation(llama: explorer.Session, clean: Callable[[], None]) -> None:
    steps = 0
    scheduler = core(llama).scheduler
    schedule = scheduler.schedule

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == 4:
            job.cancel()
        return schedule(*args, **kwargs)

    scheduler.schedule = counted
    ready = threading.Event()
    try:
        job = llama.jobs.submit(lambda job: (ready.wait(), llama.generate([IDS] * 3, SPEC, 200, capture="all"))[1])
        ready.set()
        with pytest.raises(Cancelled):
            job.result(timeout=60)
    finally:
        scheduler.schedule = schedule
    assert 4 <= steps <= 6, "it stops between two steps, not at the end"
    clean()


def test_cancelled_before_it_started(llama: explorer.Session, clean: Callable[[], None]) -> None:
    gate = threading.Event()
    first = llama.jobs.submit(lambda job: gate.wait())
    second = llama.jobs.submit(lambda job: llama.run(IDS))
    second.cancel()
    gate.set()
    assert first.result(timeout=60)
    with pytest.raises(Cancelled):
        second.result(timeout=60)
    clean()


def test_the_latest_job_of_a_view_wins(llama: explorer.Session, clean: Callable[[], None]) -> None:
    gate = threading.Event()
    running = llama.jobs.submit(lambda job: (gate.wait(), llama.generate(IDS, max_new_tokens=200))[1], slot="view")
    waiting = llama.jobs.submit(lambda job: llama.run(IDS), slot="view")
    latest = llama.jobs.submit(lambda job: llama.run(IDS[:3]), slot="view")
    gate.set()
    assert latest.result(timeout=60).ids == tuple(IDS[:3])
    for job in (running, waiting):
        with pytest.raises(Cancelled):
            job.result(timeout=60)
    clean()


def test_ctrl_c_in_the_waiting_thread(llama: explorer.Session, clean: Callable[[], None]) -> None:
    started = threading.Event()
    scheduler = core(llama).scheduler
    schedule = scheduler.schedule

    def interrupting(*args: Any, **kwargs: Any) -> Any:
        if not started.is_set():
            started.set()
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # type: ignore[arg-type]
        return schedule(*args, **kwargs)

    scheduler.schedule = interrupting
    try:
        with pytest.raises(KeyboardInterrupt):
            llama.generate([IDS] * 8, SPEC, 240)
    finally:
        scheduler.schedule = schedule
    assert started.is_set()
    clean()


def test_an_error_inside_a_step(llama: explorer.Session, clean: Callable[[], None]) -> None:
    rows = worker(llama)._rows
    handle, calls = rows.handle, []

    def failing(name: str, spans: Any, x: torch.Tensor) -> Any:
        calls.append(name)
        if name == "blocks.1.hook_out":
            raise RuntimeError("out of luck")
        return handle(name, spans, x)

    rows.handle = failing
    try:
        with pytest.raises(RuntimeError, match="out of luck"):
            llama.generate([IDS, IDS[:4]], SPEC | {"blocks.1.hook_out": {"op": "suppress"}}, 5, capture="all")
    finally:
        rows.handle = handle
    assert calls
    clean()


def test_progress_counts_finished_runs(llama: explorer.Session) -> None:
    seen: list[tuple[int, int]] = []
    job = llama.jobs.submit(
        lambda job: llama.run([IDS] * 6, SPEC), on_progress=lambda done, total, message: seen.append((done, total))
    )
    assert len(job.result(timeout=60)) == 6
    assert seen[-1] == (6, 6) and all(total == 6 for _, total in seen)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_many_threads_ask_at_once(llama: explorer.Session) -> None:
    want = [llama.run(IDS[: n + 1]) for n in range(8)]
    got: dict[int, Any] = {}
    threads = [threading.Thread(target=lambda n=n: got.setdefault(n, llama.run(IDS[: n + 1]))) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(same(got[n], want[n]) for n in range(8))


def test_closed_while_it_works(booted: Any, tiny_folder: Any) -> None:
    session = explorer.boot(tiny_folder("llama"), max_model_len=128)
    job = session.jobs.submit(lambda job: session.generate(IDS, max_new_tokens=100))
    waiting = session.jobs.submit(lambda job: session.run(IDS))
    session.close()
    for ended in (job, waiting):
        with pytest.raises((Cancelled, SessionClosed)):
            ended.result(timeout=60)
    with pytest.raises(SessionClosed):
        session.jobs.submit(lambda job: None)
