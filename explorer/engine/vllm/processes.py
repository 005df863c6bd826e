"""Worker processes: how they start, and that they end together."""

from __future__ import annotations

import ctypes
import multiprocessing.connection
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from threading import Thread
from typing import Any

from ...errors import BootError

_PR_SET_PDEATHSIG = 1  # of Linux: a signal for when the thread that started this process ends


# in the kernel


def check_main() -> None:
    """Raise `BootError` in a worker that is being started: it runs the script that starts it, up to here."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise BootError(
            "boot: a script that boots several workers is run by each of them too: put what it does under "
            'if __name__ == "__main__":'
        )


def share_out_cores(workers: int) -> str:
    """This machine's cores dealt out to worker processes, as vLLM wants to be told: `0,1|2,3`."""
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // workers)
    starts = [i * share % len(cores) for i in range(workers)]  # with fewer cores than workers some share one
    return "|".join(",".join(map(str, cores[start : start + share])) for start in starts)


def last_error(text: str) -> str:
    """The last line of a traceback in a text."""
    found = re.findall(r"^[\w.]*(?:Error|Exception): .+$", text, re.MULTILINE)
    return found[-1].removeprefix("explorer.errors.BootError: boot: ") if found else "it left no message"


class Watch:
    """When one worker process dies, kills the others at once: they may wait for it for ever, and vLLM for them."""

    def __init__(self, processes: Sequence[Any], told_to_end: Callable[[], bool]) -> None:
        self._died: str | None = None
        self._over: Thread | None = None
        if processes:
            self._over = Thread(target=self._wait, args=(processes, told_to_end), daemon=True, name="vllm-watch")
            self._over.start()

    def died(self) -> str | None:
        """How a worker process ended without being told to, if one did in this second or before."""
        if self._over is not None:
            self._over.join(1)
        return self._died

    def _wait(self, processes: Sequence[Any], told_to_end: Callable[[], bool]) -> None:
        ended = multiprocessing.connection.wait([process.sentinel for process in processes])
        if not told_to_end():
            process = next(process for process in processes if process.sentinel == ended[0])
            self._died = f"{process.name} died (exit code {_exit_code(process)})"
            kill(processes)


def _exit_code(process: Any) -> int | None:
    """Of a process that has ended: vLLM waits for it in another thread, and one of the two is told, then the other."""
    process.join()
    for _ in range(100):
        if process.exitcode is not None:
            break
        time.sleep(0.01)
    return process.exitcode  # type: ignore[no-any-return]


def kill(processes: Sequence[Any]) -> None:
    """End processes at once."""
    for process in processes:
        process.kill()


# in a worker


def ignore_interrupts() -> None:
    """In a process of its own: Jupyter's interrupt goes to every process of the kernel, and is meant for the run."""
    if multiprocessing.parent_process() is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def end_with_parent() -> None:
    """In a process of its own: end when the kernel ends, even while waiting for another worker that ended with it."""
    if multiprocessing.parent_process() is not None and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
