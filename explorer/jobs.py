"""The one worker thread that owns an engine: jobs in order, progress, cancel."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from .errors import Cancelled, SessionClosed
from .threads import release_pool

log = logging.getLogger("explorer.jobs")

PROGRESS_SECONDS = 0.05  # more than 20 messages a second trip Jupyter's rate limit and lose the last one
OnProgress = Callable[[int, int, str], None]


class Job:
    """A function waiting, running or done. `fn(job)` runs in the worker thread."""

    def __init__(self, fn: Callable[[Job], Any], slot: str | None, on_progress: OnProgress | None) -> None:
        self.slot = slot
        self.error: BaseException | None = None
        self._fn = fn
        self._on_progress = on_progress
        self._value: Any = None
        self._cancel = threading.Event()
        self._done = threading.Event()
        self._callbacks: list[Callable[[Job], None]] = []
        self._lock = threading.Lock()
        self._reported = 0.0

    @property
    def cancelled(self) -> bool:
        """Whether someone asked it to stop; a running job looks at this between two steps."""
        return self._cancel.is_set()

    @property
    def done(self) -> bool:
        """Whether it has ended, in whatever way."""
        return self._done.is_set()

    def cancel(self) -> None:
        """Ask it to stop. A job that has not started never will."""
        self._cancel.set()

    def progress(self, done: int, total: int, message: str = "") -> None:
        """Report progress, from the worker thread; at most 20 times a second, the last one always."""
        now = time.monotonic()
        if self._on_progress and (done >= total or now - self._reported >= PROGRESS_SECONDS):
            self._reported = now
            self._on_progress(done, total, message)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it has ended; False when it has not within `timeout` seconds."""
        return self._done.wait(timeout)

    def result(self, timeout: float | None = None) -> Any:
        """Its value. Raises what it raised, `Cancelled` if it never ran, TimeoutError after `timeout` seconds."""
        if not self.wait(timeout):
            raise TimeoutError(f"the job has not ended within {timeout} seconds")
        if self.error is not None:
            raise self.error
        return self._value

    def add_done_callback(self, callback: Callable[[Job], None]) -> None:
        """Call `callback(job)` when it has ended, in whichever thread ends it; at once if it already has.

        What a callback raises is logged: the thread goes on.
        """
        with self._lock:
            if not self.done:
                self._callbacks.append(callback)
                return
        self._tell([callback])

    def _run(self) -> None:
        try:
            if self.cancelled:
                raise Cancelled("cancelled before it started")
            self._value = self._fn(self)
        except BaseException as error:  # handed to whoever asks for the result
            self.error = error
        self._finish()

    def _finish(self) -> None:
        with self._lock:
            self._done.set()
            callbacks, self._callbacks = self._callbacks, []
        self._tell(callbacks)

    def _tell(self, callbacks: Sequence[Callable[[Job], None]]) -> None:
        for callback in callbacks:
            try:
                callback(self)
            except Exception:
                log.exception("a callback of a finished job failed")


class Jobs:
    """A queue with one thread. Callbacks of widgets only enqueue here, so that the kernel never blocks."""

    def __init__(self, name: str) -> None:
        self._queue: deque[Job] = deque()
        self._running: Job | None = None
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    @property
    def closed(self) -> bool:
        """Whether it takes no more jobs."""
        return self._closed

    @property
    def current(self) -> Job | None:
        """The running job, seen from the worker thread; None from any other."""
        return self._running if threading.current_thread() is self._thread else None

    def submit(
        self,
        fn: Callable[[Job], Any],
        *,
        slot: str | None = None,
        interrupt: bool = True,
        on_progress: OnProgress | None = None,
    ) -> Job:
        """Queue `fn(job)`. In a slot the latest job wins: it drops the one that waits and cancels the one that runs.

        Without `interrupt` the one that runs goes on to its end, and this one comes next.
        """
        job = Job(fn, slot, on_progress)
        self._enqueue(job, interrupt)
        return job

    def _enqueue(self, job: Job, interrupt: bool = True) -> None:
        if self.current is None:
            release_pool()  # the caller waits, or has nothing to compute for now
        dropped: list[Job] = []
        with self._changed:
            if self._closed:
                raise SessionClosed("the session is closed; boot a new one")
            if job.slot is not None:
                dropped = [j for j in self._queue if j.slot == job.slot]
                self._queue = deque(j for j in self._queue if j.slot != job.slot)
                if interrupt and self._running is not None and self._running.slot == job.slot:
                    self._running.cancel()
            self._queue.append(job)
            self._changed.notify()
        for old in dropped:
            old.cancel()
            old._run()

    def call(self, fn: Callable[[Job], Any]) -> Any:
        """Run `fn(job)` in the worker thread and wait for it; from inside a job, run it as part of that job.

        An interrupt (Ctrl-C) cancels the job, waits until the engine has let go of it, and is raised again.
        """
        current = self.current
        if current is not None:
            return fn(current)
        job = Job(fn, None, None)
        try:
            self._enqueue(job)
            while not job.wait(0.2):
                pass  # an interrupt that comes just before a wait begins is only seen after it
            return job.result()
        except KeyboardInterrupt:
            job.cancel()
            with self._changed:
                pending = job in self._queue or job is self._running  # it may have been too early to be queued
            if pending:
                job.wait()
            raise

    def close(self, last: Callable[[Job], Any]) -> None:
        """Cancel everything, run `last` in the worker thread, and end it. A second call does nothing."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            dropped, self._queue = list(self._queue), deque()
            if self._running is not None:
                self._running.cancel()
            job = Job(last, None, None)
            self._queue.append(job)
            self._changed.notify()
        for old in dropped:
            old.cancel()
            old._run()
        if threading.current_thread() is not self._thread:
            job.result()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._queue:
                    if self._closed:
                        return
                    self._changed.wait()
                self._running = self._queue.popleft()
            self._running._run()
            with self._changed:  # whoever looks at it looks twice
                self._running = None
