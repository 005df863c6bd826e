"""Patching in a session: sources of every form are run, held, and let go."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from explorer import Edit, SpecError

from . import fake

STREAM = "blocks.1.hook_out"
Z = "blocks.0.attn.o.hook_in"
A, B = "w0 w1 w2", "w5 w6 w7"


def test_a_source_is_run_held_and_let_go(session, engine):
    run = session.run([A, A], Edit(STREAM, "patch", source=B), capture=STREAM)[0]
    assert [[r.ids for r in batch] for batch in engine.batches] == [[(8, 9, 10)], [(3, 4, 5)] * 2]
    assert engine.held == {}
    assert torch.equal(run[STREAM], session.run(B, capture=STREAM)[STREAM])


def test_every_form_of_a_source_gives_the_same(session, engine):
    captured, bare = session.run(B, capture=STREAM), session.run(B)
    forms = [B, [8, 9, 10], {"prompt": B}, {"ids": [8, 9, 10]}, captured, bare, np.array([8, 9, 10])]
    rows = [session.run(A, Edit(STREAM, "patch", source=s, pos=[0, 2]), capture=STREAM)[STREAM] for s in forms]
    assert all(torch.equal(r, rows[0]) for r in rows)
    assert [len(b) for b in engine.batches].count(1) == len(engine.batches)


def test_patching_a_run_with_itself_changes_nothing(session):
    run = session.run(A, capture="all")
    for hook in (STREAM, Z, "blocks.0.attn.k.hook_out", "blocks.2.mlp.hook_post"):
        patched = session.run(A, Edit(hook, "patch", source=run))
        assert torch.equal(patched.logits_at(), run.logits_at()), hook


def test_a_patched_run_is_a_source(session):
    scaled = session.run(B, Edit(Z, "scale", factor=3))
    captured = session.run(B, scaled.spec, capture=STREAM)
    run = session.run(A, Edit(STREAM, "patch", source=scaled), capture=STREAM)
    assert torch.equal(run[STREAM], captured[STREAM])
    assert run.spec[STREAM]["source"] == {"ids": [8, 9, 10], "edits": {Z: {"op": "scale", "factor": 3}}}
    again = session.run(A, run.spec, capture=STREAM)
    assert torch.equal(again[STREAM], run[STREAM])


def test_sources_that_count_from_different_ends_are_two(session):
    run = session.generate("w1 w2", max_new_tokens=3)
    last = {"op": "patch", "pos": -1, "source_pos": "last"}
    recipes = [{"prompt": "w5 w6", "edits": {STREAM: last | {"source": s}}} for s in (run, run.recipe())]
    specs = [{"blocks.2.hook_out": {"op": "patch", "pos": -1, "source": recipe}} for recipe in recipes]
    for spec, got in zip(specs, session.run(["w7 w8"] * 2, specs), strict=True):
        assert torch.equal(got.logits, session.run("w7 w8", spec).logits)
    assert not torch.equal(*(session.run("w7 w8", spec).logits for spec in specs))
    wrong = {"prompt": "w5", "edits": {STREAM: {"op": "patch", "source": run, "source_pos": 9}}}
    with pytest.raises(SpecError, match=r"^edit 1 \(.*\): source: .*source_pos 9 is outside the source") as refused:
        session.run("w7", {STREAM: {"op": "patch", "source": wrong}})
    assert refused.value.edit_index == 0


def test_a_run_of_another_session_must_hold_what_is_patched(session):
    with fake.session(fake.FakeEngine(seed=1)) as other:
        captured, bare = other.run(A, capture=STREAM), other.run(A)
    assert torch.equal(session.run(A, Edit(STREAM, "patch", source=captured), capture=STREAM)[STREAM], captured[STREAM])
    with pytest.raises(SpecError, match="from another session, or from before a reboot, and did not capture"):
        session.run(A, Edit(STREAM, "patch", source=bare))


def test_held_sources_are_let_go_after_an_error(session, engine):
    execute = engine.execute

    def failing(requests, progress, cancelled):
        if not requests[0].hold:
            raise RuntimeError("out of memory")
        return execute(requests, progress, cancelled)

    engine.execute = failing
    with pytest.raises(RuntimeError, match="out of memory"):
        session.run(A, Edit(STREAM, "patch", source=B))
    assert engine.held == {}
