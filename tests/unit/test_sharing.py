"""What many prompts of a call have in common is made once; nothing is shared with what was given, or mixed up."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch

from explorer import Edit, SpecError
from explorer.given import Once
from explorer.specs import parse_batch

STREAM = "blocks.1.hook_out"
A, B = "w0 w1 w2", "w5 w6 w7"


def patches(source, count: int = 6, **fields):
    """Specs that all patch from one source, each elsewhere."""
    return [
        {f"blocks.{i % 3}.hook_out": {"op": "patch", "source": source, "pos": i // 3, **fields}} for i in range(count)
    ]


def test_something_is_made_of_an_object_once():
    once, asked = Once(), []

    def length(given, more=0):
        asked.append(given)
        return len(given) + more

    one, equal = [1, 2], [1, 2]
    assert [once(length, x) for x in (one, equal, one, "".join(["a", "b"]), "".join(["a", "b"]))] == [2] * 5
    assert asked == [one, equal, "ab"]
    assert once(length, one, 5) == 7
    assert once(len, one) == 2
    assert Once()(length, one) == 2
    assert len(asked) == 5


def test_what_is_gone_is_not_taken_for_what_comes_after():
    once = Once()
    assert [once(tuple, [i]) for i in range(100)] == [(i,) for i in range(100)]  # lists may follow in the same place


def test_what_could_not_be_made_is_tried_again():
    once = Once()
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            once(lambda given: 1 / given, 0)


@pytest.mark.parametrize(
    "source", [B, [8, 9, 10], np.array([8, 9, 10]), {"prompt": B}, Edit], ids=lambda s: type(s).__name__
)
def test_a_source_of_many_prompts_is_run_once_and_gives_what_it_gives_alone(session, engine, source):
    source = session.run(B) if source is Edit else source
    specs = patches(source)
    runs = session.run([A] * 6, specs)
    assert [len(batch) for batch in engine.batches[-2:]] == [1, 6]
    for run, spec in zip(runs, specs, strict=True):
        assert torch.equal(run.logits, session.run(A, spec).logits)


def test_equal_sources_that_are_not_one_object_are_run_once(session, engine):
    specs = [spec for ids in ([8, 9, 10], [8, 9, 10]) for spec in patches(ids, 3)]
    runs = session.run([A] * 6, specs)
    assert [len(batch) for batch in engine.batches] == [1, 6]
    assert all(torch.equal(runs[i].logits, runs[i + 3].logits) for i in range(3))


def test_sources_that_differ_stay_apart(session, engine):
    specs = [{STREAM: {"op": "patch", "source": [3 + i] * 3}} for i in range(8)]
    runs = session.run([A] * 8, specs)
    assert [len(batch) for batch in engine.batches] == [8, 8]
    for i, run in enumerate(runs):
        assert torch.equal(run.logits, session.run([3 + i] * 3).logits)


class Fresh(Mapping):
    """A spec whose source is a new list each time it is read, and gone at once."""

    def __init__(self, first: int) -> None:
        self.first = first

    def __getitem__(self, key):
        return {"op": "patch", "source": [self.first, 9, 10]}

    def __iter__(self):
        return iter([STREAM])

    def __len__(self):
        return 1


def test_sources_that_are_gone_when_the_next_is_read_are_not_mixed_up():
    specs = parse_batch([Fresh(i) for i in range(50)], 50)
    assert [spec[0].source.ids for spec in specs] == [(i, 9, 10) for i in range(50)]


def test_changing_what_was_given_changes_nothing_that_was_run(session):
    source, prompt, value = [8, 9, 10], [3, 4, 5], torch.ones(8)
    inner = {"ids": source, "edits": {"embed.hook_out": {"op": "add", "value": value}}}
    edits = [
        Edit(STREAM, "patch", source=source),
        Edit(STREAM, "add", value=value),
        Edit(STREAM, "patch", source=inner),
    ]
    runs = session.run([prompt] * 3, [[edit] for edit in edits])
    specs, logits = [run.spec for run in runs], [run.logits for run in runs]
    source[0] = 3
    prompt[0] = 8
    value.zero_()
    assert [run.spec for run in runs] == specs
    assert specs[0][STREAM]["source"] == {"ids": [8, 9, 10]} and specs[1][STREAM]["value"] == [1.0] * 8
    assert {run.ids for run in runs} == {(3, 4, 5)}
    for spec, before in zip(specs, logits, strict=True):
        assert torch.equal(session.run([3, 4, 5], spec).logits, before)
    again = session.run([prompt] * 3, [[edit] for edit in edits])  # the next call reads what is there now
    assert {run.ids for run in again} == {(8, 4, 5)}
    assert again[0].spec[STREAM]["source"] == {"ids": [3, 9, 10]} and again[1].spec[STREAM]["value"] == [0.0] * 8


def test_a_value_of_many_prompts_is_checked_at_each_place(session):
    value = np.ones(8)
    specs = [{STREAM: {"op": "add", "value": value}}, {"blocks.0.mlp.hook_post": {"op": "add", "value": value}}]
    with pytest.raises(
        SpecError, match=r"^prompt 2: edit 1 .*value has shape \(8,\) but blocks.0.mlp.out.hook_in takes"
    ):
        session.run([A] * 2, specs)
    value[3] = np.nan
    with pytest.raises(SpecError, match=r"^prompt 1: edit 1 \(blocks.1.hook_out, add\): value holds NaN"):
        session.run([A] * 2, specs)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (
            {STREAM: {"op": "patch", "source": A, "pos": 3}},
            r"edit 1 \(blocks.1.hook_out, patch\): pos 3 is outside the prompt",
        ),
        ({STREAM: {"op": "patch", "source": 5}}, r"edit 1 \(blocks.1.hook_out, patch\): source is 5; it must be"),
        ({STREAM: {"op": "patch", "source": ""}}, r"edit 1 \(blocks.1.hook_out, patch\): source: the prompt is empty"),
        ({STREAM: [{"op": "suppress"}, {"op": "patch"}]}, r"edit 2 \(blocks.1.hook_out, patch\): patch needs 'source'"),
        (
            {STREAM: {"op": "patch", "sauce": A}},
            r"edit 1 \(blocks.1.hook_out\): unknown key 'sauce'; did you mean 'source'",
        ),
    ],
)
def test_one_wrong_edit_among_many_is_named(session, engine, wrong, says):
    specs = patches(A, 256)
    specs = [{hook: body | {"pos": body["pos"] % 3} for hook, body in spec.items()} for spec in specs]
    specs[200] = wrong
    with pytest.raises(SpecError, match=f"^prompt 201: {says}"):
        session.run([A] * 256, specs)
    assert engine.batches == []


def test_what_a_run_holds_is_patched_from_and_stays_as_it_is(session):
    held = session.run("w5 w6 w7 w8", capture=STREAM)
    before = held[STREAM]
    where = [(0, 2), ([0, 1], "1:3"), ("0:2", "0:4:2"), ([0, 1], [3, 3])]
    specs = [{STREAM: {"op": "patch", "source": held, "pos": pos, "source_pos": of}} for pos, of in where]
    runs = session.run([A] * 4, specs, capture=STREAM)
    for run, (pos, rows) in zip(runs, ((0, [2]), ([0, 1], [1, 2]), ([0, 1], [0, 2]), ([0, 1], [3, 3])), strict=True):
        assert torch.equal(run[STREAM][pos].reshape(-1, 8), before[rows])
        run.view(STREAM).zero_()
    assert torch.equal(held[STREAM], before)


def test_a_prompt_given_many_times_is_tokenized_once(session, monkeypatch):
    asked, encode = [], session._tokenizer.encode
    monkeypatch.setattr(session._tokenizer, "encode", lambda text, **how: asked.append(text) or encode(text, **how))
    runs = session.run([A, B, A, [3, 4, 5]], [{STREAM: {"op": "patch", "source": B, "pos": i % 3}} for i in range(4)])
    assert [run.ids for run in runs] == [(3, 4, 5), (8, 9, 10), (3, 4, 5), (3, 4, 5)]
    assert sorted(asked) == [A, B, B]  # as prompts, and once more as a source
