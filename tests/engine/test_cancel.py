"""Jobs that are cancelled or fail part of the way: either engine is usable and clean afterwards."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import explorer
from explorer import Cancelled, SessionClosed

from .compare import before_each_pass, holder, idle, same
from .conftest import ENGINES

IDS = [1, 17, 45, 80, 31, 9, 120, 64]
HOOK = "blocks.0.hook_out"
SPEC = {HOOK: {"op": "patch", "source": {"ids": IDS[::-1]}, "pos": [1, 2]}}


@pytest.fixture
def clean(either: explorer.Session) -> Callable[[], None]:
    """Call it after the accident: the engine holds nothing, and clean and patched runs are what they were."""
    before = either.run([IDS, IDS], [None, SPEC], capture="all")

    def check() -> None:
        assert idle(either)
        after = either.run([IDS, IDS], [None, SPEC], capture="all")
        assert same(after[0], before[0]) and same(after[1], before[1])

    return check


def test_cancelled_between_two_passes(either: explorer.Session, clean: Callable[[], None]) -> None:
    prompts = [IDS * 25] * 30  # more tokens than one forward pass takes
    seen: list[tuple[int, int]] = []

    def on_progress(done: int, total: int, message: str) -> None:
        seen.append((done, total))
        job.cancel()

    started = threading.Event()

    def work(job: Any) -> Any:
        started.wait()  # until `job` is there for `on_progress`
        return either.run(prompts, SPEC, HOOK)

    job = either.jobs.submit(work, on_progress=on_progress)
    started.set()
    with pytest.raises(Cancelled):
        job.result(timeout=60)
    assert seen
    clean()


def test_cancelled_in_the_middle_of_a_generation(either: explorer.Session, clean: Callable[[], None]) -> None:
    passes = 0

    def fourth_cancels() -> None:
        nonlocal passes
        passes += 1
        if passes == 4:
            job.cancel()

    ready = threading.Event()
    with before_each_pass(either, fourth_cancels):
        job = either.jobs.submit(lambda job: (ready.wait(), either.generate([IDS] * 3, SPEC, 200, capture="all"))[1])
        ready.set()
        with pytest.raises(Cancelled):
            job.result(timeout=60)
    assert 4 <= passes <= 6, "it stops between two passes, not at the end"
    clean()


def test_cancelled_before_it_started(either: explorer.Session, clean: Callable[[], None]) -> None:
    gate = threading.Event()
    first = either.jobs.submit(lambda job: gate.wait())
    second = either.jobs.submit(lambda job: either.run(IDS))
    second.cancel()
    gate.set()
    assert first.result(timeout=60)
    with pytest.raises(Cancelled):
        second.result(timeout=60)
    clean()


def test_the_latest_job_of_a_view_wins(either: explorer.Session, clean: Callable[[], None]) -> None:
    gate = threading.Event()
    running = either.jobs.submit(lambda job: (gate.wait(), either.generate(IDS, max_new_tokens=200))[1], slot="view")
    waiting = either.jobs.submit(lambda job: either.run(IDS), slot="view")
    latest = either.jobs.submit(lambda job: either.run(IDS[:3]), slot="view")
    gate.set()
    assert latest.result(timeout=60).ids == tuple(IDS[:3])
    for job in (running, waiting):
        with pytest.raises(Cancelled):
            job.result(timeout=60)
    clean()


def test_ctrl_c_in_the_waiting_thread(either: explorer.Session, clean: Callable[[], None]) -> None:
    started = threading.Event()

    def first_interrupts() -> None:
        if not started.is_set():
            started.set()
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # type: ignore[arg-type]

    with before_each_pass(either, first_interrupts), pytest.raises(KeyboardInterrupt):
        either.generate([IDS] * 8, SPEC, 240)
    assert started.is_set()
    clean()


def test_an_error_inside_a_pass(either: explorer.Session, clean: Callable[[], None]) -> None:
    own = holder(either)._rows
    handle, calls = own.handle, []

    def failing(name: str, spans: Any, module: Any, x: torch.Tensor) -> Any:
        calls.append(name)
        if name == "blocks.1.hook_out":
            raise RuntimeError("out of luck")
        return handle(name, spans, module, x)

    with mock.patch.object(own, "handle", failing), pytest.raises(RuntimeError, match="out of luck"):
        either.generate([IDS, IDS[:4]], SPEC | {"blocks.1.hook_out": {"op": "suppress"}}, 5, capture="all")
    assert calls
    clean()


def test_progress_counts_finished_runs(either: explorer.Session) -> None:
    seen: list[tuple[int, int]] = []
    prompts = [*[IDS * 25] * 12, IDS]  # more tokens than one forward pass takes
    job = either.jobs.submit(
        lambda job: either.run(prompts, SPEC, max_new_tokens=3),
        on_progress=lambda done, total, message: seen.append((done, total)),
    )
    assert len(job.result(timeout=60)) == 13
    counts = [done for done, _ in seen]
    assert counts == sorted(counts) and counts[-1] == 13 and all(total == 13 for _, total in seen)


def test_progress_is_of_runs_that_have_ended(either: explorer.Session) -> None:
    """Not of those that a forward pass came to: all of them generate on."""
    passes, seen = 0, []

    def count() -> None:
        nonlocal passes
        passes += 1

    with before_each_pass(either, count):
        job = either.jobs.submit(
            lambda job: either.generate([IDS] * 3, max_new_tokens=5),
            on_progress=lambda done, total, message: seen.append((done, passes)),
        )
        job.result(timeout=60)
    assert all(passes == 5 for done, passes in seen if done), seen


def test_many_threads_ask_at_once(either: explorer.Session) -> None:
    want = [either.run(IDS[: n + 1]) for n in range(8)]
    got: dict[int, Any] = {}
    threads = [threading.Thread(target=lambda n=n: got.setdefault(n, either.run(IDS[: n + 1]))) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(same(got[n], want[n]) for n in range(8))


@pytest.mark.parametrize("engine", ENGINES)
def test_closed_while_it_works(tiny_folder: Callable[[str], Path], engine: str) -> None:
    session = explorer.boot(tiny_folder("llama"), engine=engine, max_model_len=128)
    job = session.jobs.submit(lambda job: session.generate(IDS, max_new_tokens=100))
    waiting = session.jobs.submit(lambda job: session.run(IDS))
    session.close()
    for ended in (job, waiting):
        with pytest.raises((Cancelled, SessionClosed)):
            ended.result(timeout=60)
    with pytest.raises(SessionClosed):
        session.jobs.submit(lambda job: None)
