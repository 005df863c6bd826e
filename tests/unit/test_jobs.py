"""The worker thread: order, slots, cancel, progress, errors, and the way out."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time

import pytest

from explorer import jobs as subject
from explorer.errors import Cancelled, SessionClosed
from explorer.jobs import Job, Jobs

WAIT = 10  # seconds after which a test fails instead of hanging


@pytest.fixture
def jobs():
    queue = Jobs("test")
    yield queue
    queue.close(lambda job: None)


class Gate:
    """A job that has begun and goes on when told to, or when it is cancelled."""

    def __init__(self) -> None:
        self.begun, self.open = threading.Event(), threading.Event()

    def __call__(self, job: Job) -> str:
        self.begun.set()
        end = time.monotonic() + WAIT
        while not self.open.wait(0.001):
            if job.cancelled or time.monotonic() > end:
                raise Cancelled("cancelled")
        return "through"


def test_jobs_run_one_after_the_other_in_one_thread(jobs):
    seen = []
    made = [jobs.submit(lambda job, i=i: seen.append((i, threading.current_thread()))) for i in range(20)]
    made[-1].result(WAIT)
    assert [i for i, _ in seen] == list(range(20))
    assert len({thread for _, thread in seen}) == 1
    assert seen[0][1] is not threading.current_thread()
    assert seen[0][1].name == "test"
    assert seen[0][1].daemon


def test_a_result_is_the_value_or_the_error(jobs):
    assert jobs.submit(lambda job: 42).result(WAIT) == 42
    failed = jobs.submit(lambda job: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        failed.result(WAIT)
    assert isinstance(failed.error, ZeroDivisionError)
    assert jobs.call(lambda job: "goes on") == "goes on"


def test_even_an_exit_is_handed_over(jobs):
    def leave(job):
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        jobs.call(leave)
    assert jobs.call(lambda job: 1) == 1


def test_waiting_has_a_limit(jobs):
    gate = Gate()
    job = jobs.submit(gate)
    assert not job.wait(0.01)
    assert not job.done
    with pytest.raises(TimeoutError, match=r"has not ended within 0\.01 seconds"):
        job.result(0.01)
    gate.open.set()
    assert job.result(WAIT) == "through"
    assert job.done


# --- cancel and slots -------------------------------------------------------------------------------------------------


def test_a_cancelled_job_that_waits_never_runs(jobs):
    gate, ran = Gate(), []
    first = jobs.submit(gate)
    second = jobs.submit(lambda job: ran.append(1))
    second.cancel()
    gate.open.set()
    with pytest.raises(Cancelled, match="before it started"):
        second.result(WAIT)
    assert first.result(WAIT) == "through"
    assert not ran


def test_a_running_job_hears_of_its_cancel(jobs):
    gate = Gate()
    job = jobs.submit(gate)
    assert gate.begun.wait(WAIT)
    job.cancel()
    with pytest.raises(Cancelled):
        job.result(WAIT)


def test_a_job_that_does_not_listen_ends_with_its_value(jobs):
    begun, go = threading.Event(), threading.Event()
    job = jobs.submit(lambda job: (begun.set(), go.wait(WAIT), 7)[-1])
    begun.wait(WAIT)
    job.cancel()
    go.set()
    assert job.result(WAIT) == 7


def test_the_latest_of_a_slot_wins(jobs):
    gate, ran = Gate(), []
    running = jobs.submit(gate, slot="view")
    gate.begun.wait(WAIT)
    waiting = [jobs.submit(lambda job, i=i: ran.append(i), slot="view") for i in range(5)]
    other = jobs.submit(lambda job: ran.append("other"), slot="another")
    nowhere = jobs.submit(lambda job: ran.append("none"))
    waiting[-1].result(WAIT)
    other.result(WAIT)
    nowhere.result(WAIT)
    assert ran == [4, "other", "none"]
    for job in (running, *waiting[:-1]):
        assert job.done
        with pytest.raises(Cancelled):
            job.result(WAIT)


def test_the_running_one_of_a_slot_may_go_on(jobs):
    gate, ran = Gate(), []
    running = jobs.submit(gate, slot="view")
    gate.begun.wait(WAIT)
    for i in range(3):
        last = jobs.submit(lambda job, i=i: ran.append(i), slot="view", interrupt=False)
    assert not running.cancelled
    gate.open.set()
    last.result(WAIT)
    assert running.error is None and ran == [2]


def test_dropped_jobs_end_at_once(jobs):
    gate, ended = Gate(), []
    jobs.submit(gate)
    gate.begun.wait(WAIT)
    waiting = jobs.submit(lambda job: None, slot="view")
    waiting.add_done_callback(ended.append)
    jobs.submit(lambda job: None, slot="view")
    assert ended == [waiting]
    gate.open.set()


# --- progress and callbacks -------------------------------------------------------------------------------------------


def test_progress_is_throttled_and_the_last_always_delivered(jobs, monkeypatch):
    now, seen = [100.0], []
    monkeypatch.setattr(subject.time, "monotonic", lambda: now[0])

    def work(job):
        for i in range(1, 101):
            now[0] += 0.001
            job.progress(i, 100, f"step {i}")

    job = jobs.submit(work, on_progress=lambda *args: seen.append(args))
    job.result(WAIT)
    assert [done for done, _, _ in seen] == [1, 51, 100]
    assert seen[-1] == (100, 100, "step 100")


def test_progress_without_anyone_to_hear_it(jobs):
    assert jobs.call(lambda job: job.progress(1, 2)) is None


def test_callbacks_come_once_the_job_has_ended(jobs):
    gate, ended = Gate(), []
    job = jobs.submit(gate)
    job.add_done_callback(lambda j: ended.append(j.done))
    job.add_done_callback(lambda j: ended.append(j.result()))
    assert ended == []
    gate.open.set()
    jobs.call(lambda job: None)
    assert ended == [True, "through"]
    job.add_done_callback(lambda j: ended.append("at once"))
    assert ended[-1] == "at once"


def test_a_callback_that_fails_is_logged_and_the_thread_goes_on(jobs, caplog):
    gate, ended = Gate(), []
    job = jobs.submit(gate)
    job.add_done_callback(lambda j: 1 / 0)
    job.add_done_callback(ended.append)
    with caplog.at_level(logging.ERROR, "explorer.jobs"):
        gate.open.set()
        assert job.result(WAIT) == "through"
        assert jobs.call(lambda job: "still here") == "still here"
    assert ended == [job]
    assert "ZeroDivisionError" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.ERROR, "explorer.jobs"):
        job.add_done_callback(lambda j: 1 / 0)  # it has ended: called at once, in this thread
    assert "ZeroDivisionError" in caplog.text


def test_a_job_that_ends_while_another_is_queued_stays_in_sight(jobs):
    """Queueing looks twice at the running job: it must not vanish in between."""
    gate = Gate()
    job = jobs.submit(gate)
    assert gate.begun.wait(WAIT)
    with jobs._changed:  # as `submit` holds it
        gate.open.set()
        assert job.wait(WAIT)
        time.sleep(0.05)
        assert jobs._running is job
    jobs.call(lambda job: None)


# --- call -------------------------------------------------------------------------------------------------------------


def test_a_call_inside_a_job_is_part_of_it(jobs):
    def outer(job):
        assert jobs.current is job
        return jobs.call(lambda inner: (inner is job, threading.current_thread()))

    same, thread = jobs.call(outer)
    assert same
    assert thread.name == "test"
    assert jobs.current is None


def test_an_interrupt_cancels_the_job_and_waits_for_it(jobs):
    gate, ended = Gate(), []

    def work(job):
        try:
            return gate(job)
        finally:
            time.sleep(0.02)
            ended.append(job.cancelled)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Thread(target=lambda: (gate.begun.wait(WAIT), os.kill(os.getpid(), signal.SIGINT))).start()
        with pytest.raises(KeyboardInterrupt):
            jobs.call(work)
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended == [True]
    assert jobs.call(lambda job: 1) == 1


@pytest.mark.parametrize("queued", [False, True])
def test_an_interrupt_while_a_call_is_queued(jobs, monkeypatch, queued):
    enqueue, ran = jobs._enqueue, []

    def interrupted(job):
        if queued:
            enqueue(job)
        raise KeyboardInterrupt

    gate = Gate()
    jobs.submit(gate)
    monkeypatch.setattr(jobs, "_enqueue", interrupted)
    threading.Timer(0.05, gate.open.set).start()
    with pytest.raises(KeyboardInterrupt):
        jobs.call(lambda job: ran.append(1))
    monkeypatch.undo()
    assert jobs.call(lambda job: 1) == 1
    assert not ran


# --- close ------------------------------------------------------------------------------------------------------------


def test_closing_cancels_all_and_runs_the_last_in_the_thread():
    jobs = Jobs("closing")
    gate, names = Gate(), []
    running, waiting = jobs.submit(gate), jobs.submit(lambda job: names.append("never"))
    gate.begun.wait(WAIT)
    jobs.close(lambda job: names.append(threading.current_thread().name))
    assert names == ["closing"]
    for job in (running, waiting):
        with pytest.raises(Cancelled):
            job.result(WAIT)
    jobs._thread.join(WAIT)
    assert not jobs._thread.is_alive()
    jobs.close(lambda job: names.append("a second close does nothing"))
    assert names == ["closing"]
    with pytest.raises(SessionClosed, match="the session is closed"):
        jobs.submit(lambda job: None)
    with pytest.raises(SessionClosed):
        jobs.call(lambda job: None)


def test_closing_from_inside_a_job_does_not_wait_for_itself():
    jobs, ended = Jobs("inside"), threading.Event()
    jobs.call(lambda job: jobs.close(lambda last: ended.set()))
    assert ended.wait(WAIT)
    jobs._thread.join(WAIT)
    assert not jobs._thread.is_alive()


def test_what_closing_raises_is_raised():
    jobs = Jobs("failing")
    with pytest.raises(ZeroDivisionError):
        jobs.close(lambda job: 1 / 0)
    jobs._thread.join(WAIT)
    assert not jobs._thread.is_alive()
