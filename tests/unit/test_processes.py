"""Worker processes: how they start, and that they end together unless they were told to end."""

from __future__ import annotations

import multiprocessing
import threading
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


class Executor(SimpleNamespace):
    """What vLLM's executors are to a watch."""


@pytest.fixture
def executor(monkeypatch):
    """An executor with two worker processes that wait."""
    processes = [SLEEPERS.Process(target=time.sleep, args=(100,), name=f"sleeper-{i}", daemon=True) for i in range(2)]
    for process in processes:
        process.start()
    made = Executor(workers=[SimpleNamespace(proc=p) for p in processes], is_failed=False, shutting_down=False)
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


def test_one_thread_at_a_time_shuts_an_executor_down():
    """vLLM's own does when it sees a worker die: ZeroMQ ends a context in one thread, or with "Bad address"."""
    seen, inside = [], threading.Event()

    class Slow(Executor):
        def shutdown(self) -> None:
            seen.append("shut")
            inside.set()
            time.sleep(0.2)

    def destroy(linger: int) -> None:
        time.sleep(0.2)
        seen.append(f"closed, {linger}")

    socket = SimpleNamespace(context=SimpleNamespace(destroy=destroy))
    executor = Slow(rpc_broadcast_mq=SimpleNamespace(local_socket=socket), is_failed=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(internals, "_executor", lambda llm: executor)
        internals.watch(None)
    theirs = threading.Thread(target=lambda: executor.shutdown())
    theirs.start()
    assert inside.wait(10)
    internals._shut(executor)
    theirs.join()
    assert seen == ["shut", "closed, 0"] * 2


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
    monkeypatch.setattr(internals, "_executor", lambda llm: Executor(workers=["a Ray worker"]))
    assert internals.watch(None).died() is None
