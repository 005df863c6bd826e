"""Rebooting a session: what stays readable, what a failure leaves, and who has to wait."""

from __future__ import annotations

import threading
import time

import pytest
import torch

import explorer
from explorer import BootError, SpecError
from explorer.engine.process import one_boot

from . import fake


def test_reboot_takes_a_new_engine_for_the_same_session():
    engines = [fake.FakeEngine(), fake.FakeEngine(), fake.FakeEngine()]
    left = iter(engines[1:])
    session = fake.session(engines[0], lambda progress: next(left))
    read, unread = session.run([3, 4], capture="all", logits=True), session.run([3, 4])
    hooks = session.hooks
    session.reboot()
    assert [engine.closed for engine in engines] == [1, 0, 0]
    assert session.hooks is not hooks
    again = session.run([3, 4], capture="all")
    assert torch.equal(again.logits, read.logits)
    with pytest.raises(explorer.SessionClosed, match="rebooted after this run"):
        _ = unread.logits
    assert torch.equal(unread.logits_at(), read.logits_at())
    patched = session.run([3, 4], explorer.Edit("blocks.0.hook_out", "patch", source=read))
    assert torch.equal(patched.logits, read.logits)  # what a run holds can still be patched from
    with pytest.raises(SpecError, match=r"from before a reboot, and did not capture blocks\.0\.hook_out; run it again"):
        session.run([3, 4], explorer.Edit("blocks.0.hook_out", "patch", source=unread))
    session.close()
    assert [engine.closed for engine in engines] == [1, 1, 0]
    with pytest.raises(explorer.SessionClosed, match="session is closed"):
        session.reboot()


def test_a_reboot_that_fails_can_be_tried_again():
    engines = [fake.FakeEngine(), fake.FakeEngine()]
    builds = iter([BootError("no memory"), engines[1]])

    def build(progress):
        made = next(builds)
        if isinstance(made, Exception):
            raise made
        return made

    session = fake.session(engines[0], build)
    with pytest.raises(BootError, match="no memory"):
        session.reboot()
    assert engines[0].closed == 1
    with pytest.raises(explorer.SessionClosed, match=r"no engine since its reboot failed; call session\.reboot\(\)"):
        session.run([3])
    session.reboot()
    assert session.run([3]).rows == 1
    session.close()
    assert engines[1].closed == 1


def test_a_job_may_reboot_while_others_wait_to():
    made = fake.session(fake.FakeEngine(), lambda _: fake.FakeEngine())
    others = threading.Thread(target=made.reboot)

    def reboot(job):
        others.start()
        while not made.jobs._queue:
            time.sleep(0.01)
        made.reboot()

    job = made.jobs.submit(reboot)
    job.result(timeout=10)
    others.join(10)
    assert not others.is_alive()
    assert made.run([3]).rows == 1
    made.close()


def test_a_reboot_that_waits_for_another_boot_can_be_cancelled():
    built = []
    made = fake.session(fake.FakeEngine(), lambda _: built.append(1))
    engine = made._engine
    with one_boot():
        job = made.jobs.submit(lambda job: made.reboot())
        while made.jobs._running is not job:
            time.sleep(0.01)
        job.cancel()
    with pytest.raises(explorer.Cancelled):
        job.result(timeout=10)
    assert made._engine is engine and not built
    assert made.run([3]).rows == 1
    made.close()


@pytest.mark.parametrize("ask", ["reboot", "run"])
def test_what_a_run_calls_while_it_goes_on_cannot_have_the_engine(ask):
    made = fake.session(fake.FakeEngine(), lambda _: fake.FakeEngine())
    engine = made._engine
    question = {"reboot": made.reboot, "run": lambda: made.run([3])}[ask]
    job = made.jobs.submit(lambda job: made.run([[3], [4]]), on_progress=lambda *_: question())
    with pytest.raises(explorer.ExplorerError, match=r"in the middle of a run: .* submit a job to session\.jobs"):
        job.result(timeout=10)
    assert made._engine is engine and not engine.closed
    assert made.run([3]).rows == 1
    done = made.jobs.submit(lambda job: made.run([3]))  # its callbacks come when the engine is free again
    done.add_done_callback(lambda job: question())
    done.result(timeout=10)
    assert made.run([3]).rows == 1
    made.close()


def test_a_session_without_a_recipe_cannot_reboot():
    with fake.session() as session, pytest.raises(explorer.SessionClosed):
        session.reboot()
