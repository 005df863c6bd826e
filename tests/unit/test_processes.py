"""Worker processes: how they start, and that they end together unless they were told to end."""

from __future__ import annotations

import multiprocessing
import time
from types import SimpleNamespace

import pytest

from explorer import BootError
from explorer.engine.vllm import internals, processes


def test_cores_are_dealt_out_to_workers(monkeypatch):
    monkeypatch.setattr(processes.os, "sched_getaffinity", lambda pid: {7, 2, 3, 5, 11})
    assert processes.share_out_cores(2) == "2,3|5,7"
    assert processes.share_out_cores(5) == "2|3|5|7|11"
    assert processes.share_out_cores(6) == "2|3|5|7|11|2"


def test_a_script_without_a_main_guard_is_told(monkeypatch):
    processes.check_main()
    monkeypatch.setattr(processes.multiprocessing.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(BootError, match='put what it does under if __name__ == "__main__":'):
        processes.check_main()


SLEEPERS = multiprocessing.get_context("spawn")


@pytest.fixture
def executor(monkeypatch):
    """An executor with two worker processes that wait."""
    processes = [SLEEPERS.Process(target=time.sleep, args=(100,), name=f"sleeper-{i}", daemon=True) for i in range(2)]
    for process in processes:
        process.start()
    made = SimpleNamespace(workers=[SimpleNamespace(proc=p) for p in processes], is_failed=False, shutting_down=False)
    monkeypatch.setattr(internals, "_executor", lambda llm: made)
    yield made
    for process in processes:
        process.kill()
        process.join()


def test_one_that_dies_takes_the_others_with_it(executor):
    watch = internals.watch(None)
    first, second = (worker.proc for worker in executor.workers)
    second.kill()
    assert watch.died() == "sleeper-1 died (exit code -9)"
    first.join(10)
    assert first.exitcode == -9


def test_the_exit_code_may_come_late():
    """As where another thread was told first."""
    codes = iter([None, None, -9, -9])

    class Process:
        exitcode = property(lambda self: next(codes))

        def join(self):
            pass

    assert processes._exit_code(Process()) == -9


def test_one_that_was_told_to_end_does_not(executor):
    watch = internals.watch(None)
    executor.shutting_down = True
    first, second = (worker.proc for worker in executor.workers)
    second.terminate()
    second.join(10)
    assert watch.died() is None
    assert first.is_alive()


def test_without_worker_processes_nothing_is_watched(monkeypatch):
    monkeypatch.setattr(internals, "_executor", lambda llm: SimpleNamespace(workers=["a Ray worker"]))
    assert internals.watch(None).died() is None
