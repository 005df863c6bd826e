"""Compute threads of a caller are given back before the engine works."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from explorer import threads
from explorer.jobs import Jobs

linux = pytest.mark.skipif(
    not sys.platform.startswith("linux") or len(os.sched_getaffinity(0)) < 2, reason="counts threads of several cores"
)


def alive() -> int:
    """Threads of this process, native ones included."""
    return len(list(Path("/proc/self/task").iterdir()))


def settled(count: int) -> int:
    """How many threads are alive once those that were told to end have had the time to."""
    end = time.monotonic() + 5
    while alive() > count and time.monotonic() < end:
        time.sleep(0.001)
    return alive()


def compute() -> torch.Tensor:
    """Large enough that torch spreads it over its threads."""
    return torch.log_softmax(torch.arange(10**6, dtype=torch.float32), -1).exp().sum()


@linux
def test_a_pool_is_freed_and_made_anew() -> None:
    compute()
    threads.release_pool()
    time.sleep(0.1)
    without = alive()
    first = compute()
    assert alive() > without
    threads.release_pool()
    assert settled(without) == without
    assert compute() == first
    threads.release_pool()


@linux
def test_whoever_asks_the_engine_gives_its_pool_back() -> None:
    jobs = Jobs("explorer-pool")
    try:
        compute()
        threads.release_pool()
        time.sleep(0.1)
        without = alive()
        compute()
        assert jobs.call(lambda job: settled(without)) == without
        compute()
        assert jobs.submit(lambda job: settled(without)).result() == without
    finally:
        jobs.close(lambda job: None)


@linux
def test_a_second_pool_is_held_while_cores_are_shared() -> None:
    compute()
    threads.release_pool()
    time.sleep(0.1)
    without = alive()
    with pytest.raises(ZeroDivisionError), threads.sharing_cores():
        held = alive() - without  # its thread, and those that compute beside it
        raise ZeroDivisionError
    assert held == torch.get_num_threads()
    assert settled(without) == without


@linux
def test_a_job_keeps_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    callers: list[str] = []
    monkeypatch.setattr("explorer.jobs.release_pool", lambda: callers.append(threading.current_thread().name))
    jobs = Jobs("explorer-pool")
    try:
        jobs.call(lambda job: (jobs.submit(lambda job: None), jobs.call(lambda job: None)))
    finally:
        jobs.close(lambda job: None)
    assert callers == ["MainThread"]


def test_where_a_gpu_computes_a_pool_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[int] = []
    library = type("Library", (), {"omp_pause_resource_all": lambda _, kind: freed.append(kind)})
    monkeypatch.setattr(threads, "_libgomp", library)
    held = []
    for initialized in (False, True):
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda now=initialized: now)
        threads.release_pool()
        with threads.sharing_cores():
            held.append(any(thread.name == "explorer-sharing-cores" for thread in threading.enumerate()))
    assert (freed, held) == ([2], [True, False])


def test_without_libgomp_there_is_nothing_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    threads._libgomp.cache_clear()
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "torch" / "__init__.py"))
    assert threads._libgomp() is None
    threads.release_pool()
    with threads.sharing_cores():
        assert all(thread.name != "explorer-sharing-cores" for thread in threading.enumerate())
    threads._libgomp.cache_clear()
