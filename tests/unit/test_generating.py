"""Generating in a session: how many tokens, sampling, stopping, and edits of what is fed back."""

from __future__ import annotations

import numpy as np
import pytest

from explorer import Edit

STREAM = "blocks.1.hook_out"
A, B = "w0 w1 w2", "w5 w6 w7"


def test_generating(session, engine):
    run = session.generate(A, max_new_tokens=np.int64(3), temperature=np.float32(0.5), seed=np.int64(7))
    request = engine.batches[0][0]
    assert (request.max_new_tokens, request.temperature, request.seed, request.stop) == (3, 0.5, 7, None)
    assert type(request.max_new_tokens) is int
    assert len(run.generated) == 3
    assert len(session.generate([A, B], max_new_tokens=1)) == 2
    assert session.run(A, max_new_tokens=3).ids == session.generate(A, max_new_tokens=3).ids


def test_stopping_at_a_text(session):
    free = session.generate(A, max_new_tokens=4)
    words = [t.text for t in free.tokens[3:]]
    stopped = session.generate(A, max_new_tokens=4, stop=[words[0], "never"])
    assert stopped.ids == free.ids[:4]
    assert session.generate(A, max_new_tokens=4, stop="never").ids == free.ids
    assert session.generate(A, max_new_tokens=4, stop=[]).ids == free.ids


def test_steering_what_is_generated(session):
    steered = session.generate(A, Edit(STREAM, "set", value=1.0, phase="decode"), 3, capture=STREAM)
    assert steered[STREAM][3:].eq(1).all()
    assert not steered[STREAM][:3].eq(1).any()


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1 to generate, not 0"),
        ({"max_new_tokens": -1}, "max_new_tokens must be at least 1"),
        ({"max_new_tokens": True}, "must be a whole number of at least 0, not True"),
        ({"max_new_tokens": 1.5}, "must be a whole number of at least 0, not 1.5"),
        ({"max_new_tokens": "3"}, "not '3'"),
        ({"max_new_tokens": None}, "not None"),
        ({"max_new_tokens": 14}, "has 3 tokens and needs room for 14 more, but this session takes 16 in all"),
        ({"temperature": -0.1}, "temperature must be a number from 0 to 2, not -0.1"),
        ({"temperature": 2.5}, "temperature must be a number from 0 to 2, not 2.5"),
        ({"temperature": float("nan")}, "temperature must be"),
        ({"temperature": float("inf")}, "temperature must be"),
        ({"temperature": True}, "temperature must be"),
        ({"temperature": "hot"}, "temperature must be"),
        ({"seed": 1.0}, "seed must be a whole number, not 1.0"),
        ({"seed": True}, "seed must be"),
        ({"seed": -1}, "seed must be between 0 and .*, not -1"),
        ({"seed": 2**63}, "seed must be between"),
        ({"stop": ""}, "stop takes a string that is not empty, or a list of them, not ''"),
        ({"stop": ["a", ""]}, "stop takes"),
        ({"stop": 5}, "stop takes a string that is not empty, or a list of them, not 5"),
        ({"stop": [5]}, "stop takes"),
    ],
)
def test_wrong_sampling(session, engine, fields, says):
    with pytest.raises(ValueError, match=says):
        session.generate(A, **{"max_new_tokens": 3} | fields)
    assert engine.batches == []


def test_run_takes_no_negative_generation(session):
    with pytest.raises(ValueError, match="at least 0, not -1"):
        session.run(A, max_new_tokens=-1)
