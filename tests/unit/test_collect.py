"""Collecting activations to shards, resuming, and stacking runs: on a fake engine."""

from __future__ import annotations

import json
import os
import stat
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from explorer import Session, SpecError, collect, stack
from explorer.errors import SessionClosed

from . import fake

HOOKS = ["blocks.0.hook_out", "blocks.1.attn.hook_z"]


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    monkeypatch.setattr(collect, "BATCH_TOKENS", 12)


def prompts(count: int = 9) -> list[list[int]]:
    return [[3 + (i + j) % 15 for j in range(1 + i % 5)] for i in range(count)]


def rows(folder: Path) -> dict[str, torch.Tensor]:
    """All shards, one after the other."""
    manifest = json.loads((folder / "collection.json").read_text())
    shards = [load_file(folder / shard["file"]) for shard in manifest["shards"]]
    assert [len(s["prompt"]) for s in shards] == [shard["rows"] for shard in manifest["shards"]]
    return {name: torch.cat([s[name] for s in shards]) for name in shards[0]}


def test_every_row_with_its_prompt_position_and_token(session: Session, tmp_path: Path) -> None:
    seen: list[tuple[int, int | None]] = []
    folder = session.collect(prompts(), HOOKS, tmp_path / "out", lambda *progress: seen.append(progress))
    got = rows(folder)
    want = session.run(prompts(), capture=HOOKS)
    assert set(got) == {"prompt", "position", "token", "blocks.0.hook_out", "blocks.1.attn.o.hook_in"}
    assert got["token"].tolist() == [i for run in want for i in run.ids]
    assert got["position"].tolist() == [p for run in want for p in range(run.rows)]
    assert got["prompt"].tolist() == [i for i, run in enumerate(want) for _ in range(run.rows)]
    for name in HOOKS:
        canonical = session.hooks.find(name).name
        assert torch.equal(got[canonical], torch.cat([run[name] for run in want]))
    assert seen[0] == (0, 9) and seen[-1] == (9, 9) and len(seen) > 3
    assert sorted(p.suffix for p in folder.iterdir() if p.suffix == ".partial") == []


def test_an_iterable_is_read_as_it_is_needed(session: Session, tmp_path: Path) -> None:
    read: list[int] = []

    def stream():
        for i, prompt in enumerate(prompts(30)):
            read.append(i)
            yield prompt

    behind: list[int] = []
    session.collect(stream(), HOOKS, tmp_path, lambda done, total: behind.append(len(read) - done))
    assert max(behind) <= 2 and len(read) == 30
    assert rows(tmp_path)["prompt"].max() == 29


class Interrupted(Exception):
    pass


def test_memory_is_bounded_by_bytes_however_wide_the_hooks(session: Session, tmp_path: Path, monkeypatch) -> None:
    wide = [point.name for point in session.hooks if point.editable]
    a_token = sum(session.run([3], capture=wide)[name].nbytes for name in wide)
    bound = 3 * a_token + 1
    monkeypatch.setattr(collect, "BATCH_BYTES", bound)
    batches: list[list[int]] = []  # the tokens of its prompts
    held: list[weakref.ref[torch.Tensor]] = []
    run = session.run

    def counted(batch, capture):
        assert all(ref() is None for ref in held), "rows of an earlier batch are still held"
        runs = run(batch, capture=capture)
        held[:] = [weakref.ref(r.view(name)) for r in runs for name in capture]
        batches.append([r.rows for r in runs])
        taken = sum(r[name].nbytes for r in runs for name in capture)
        assert taken <= bound or len(runs) == 1
        return runs

    monkeypatch.setattr(session, "run", counted)
    session.collect(prompts(), wide, tmp_path / "wide", lambda *_: None)
    assert batches == [[1, 2], [3], [4], [5], [1, 2], [3], [4]]  # no more prompts than fit, and no fewer
    batches.clear()
    session.collect(prompts(), HOOKS[:1], tmp_path / "narrow", lambda *_: None)
    assert max(map(sum, batches)) > 3  # the bound on tokens, of narrow hooks


def test_an_interrupted_collection_goes_on(session: Session, tmp_path: Path, monkeypatch) -> None:
    def stop(done: int, total: int | None) -> None:
        if done >= 4:
            raise Interrupted

    with pytest.raises(Interrupted):
        session.collect(prompts(), HOOKS, tmp_path, stop)
    before = {p.name: p.stat().st_mtime_ns for p in tmp_path.glob("shard-*")}
    started: list[int] = []
    session.collect(prompts(), HOOKS, tmp_path, lambda done, total: started.append(done))
    assert started[0] >= 4
    assert {n: (tmp_path / n).stat().st_mtime_ns for n in before} == before
    whole = session.collect(prompts(), HOOKS, tmp_path / "whole", lambda *_: None)
    for name, tensor in rows(whole).items():
        assert torch.equal(rows(tmp_path)[name], tensor)
    session.collect(prompts(), HOOKS, tmp_path, lambda *_: None)  # complete: nothing to do
    session.collect(prompts(12), HOOKS, tmp_path, lambda *_: None)  # more prompts at the end
    assert rows(tmp_path)["prompt"].max() == 11


def test_a_folder_of_another_collection_is_refused(session: Session, tmp_path: Path) -> None:
    session.collect(prompts(), HOOKS, tmp_path, lambda *_: None)
    with pytest.raises(ValueError, match=r"holds a collection with hooks=.*choose another folder"):
        session.collect(prompts(), HOOKS[:1], tmp_path)
    for other in (prompts()[1:], prompts()[:2]):
        with pytest.raises(ValueError, match=r"prompts 1 to \d+ are not those that shard-00000"):
            session.collect(other, HOOKS, tmp_path)


@pytest.mark.parametrize("hooks", [[], "unembed.hook_out", "blocks.0.attn.hook_pattern"])
def test_hooks_without_a_row_a_token_are_refused_before_anything_is_written(session, tmp_path, hooks) -> None:
    with pytest.raises(SpecError, match="collect"):
        session.collect(prompts(), hooks, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_bad_prompt_is_named_and_what_was_done_stays(session: Session, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"collect: prompt 8: .*this session takes 16 in all"):
        session.collect([*prompts(7), [3] * 40, [4]], HOOKS, tmp_path, lambda *_: None)
    assert len(rows(tmp_path)["prompt"]) > 0


@pytest.mark.parametrize(
    ("prompts", "folder", "says"),
    [
        ("w1 w2", "out", "put this one into a list"),
        (5, "out", "many prompts, .* not 5"),
        ({"w1": 1}, "out", "many prompts, .* not {'w1': 1}"),
        (["w1"], 5, "folder is named by a string or a Path, not by 5"),
        ([[3] * 40], "out", "prompt 1: .*this session takes 16 in all"),
        ([5], "out", "prompt 1: a prompt is text or a list of token ids, not int"),
    ],
)
def test_what_is_no_collection_leaves_no_folder(session: Session, tmp_path: Path, monkeypatch, prompts, folder, says):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=says):
        session.collect(prompts, HOOKS, folder, lambda *_: None)
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_folder_of_a_collection(session: Session, tmp_path: Path) -> None:
    file = tmp_path / "collection.json"
    file.write_text("nothing")
    with pytest.raises(ValueError, match=r"collection.json' is no collection \(.*; choose another folder"):
        session.collect(prompts(), HOOKS, tmp_path)
    with pytest.raises(ValueError, match=r"collection.json' is a file; choose another folder"):
        session.collect(prompts(), HOOKS, file)
    with pytest.raises(ValueError, match="progress is called with the prompts done and their number, 5 cannot be"):
        session.collect(prompts(), HOOKS, tmp_path / "out", 5)
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


def test_a_collection_of_no_prompts_is_one(session: Session, tmp_path: Path) -> None:
    folder = session.collect([], HOOKS, tmp_path / "out", lambda *_: None)
    assert json.loads((folder / "collection.json").read_text())["shards"] == []
    session.collect(prompts(), HOOKS, folder, lambda *_: None)
    assert rows(folder)["prompt"].max() == 8


def test_others_may_read_what_they_may_read_of_other_new_files(session: Session, tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        session.collect(prompts(3), HOOKS, tmp_path, lambda *_: None)
    finally:
        os.umask(before)
    assert {stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()} == {0o640}


def test_a_line_says_how_far_it_is(session: Session, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    session.collect(prompts(), HOOKS, tmp_path)
    out = capsys.readouterr().out
    assert out == "collect: 9 of 9\n"


def test_a_closed_session_collects_nothing(tmp_path: Path) -> None:
    session = fake.session()
    session.close()
    with pytest.raises(SessionClosed):
        session.collect(prompts(), HOOKS, tmp_path, lambda *_: None)


# --- stack ------------------------------------------------------------------------------------------------------------


def test_stack_pads_on_the_right(session: Session) -> None:
    runs = session.run(prompts(5), capture=HOOKS)
    for hook in HOOKS:
        stacked, mask = stack(runs, hook)
        assert stacked.shape == (5, 5, *session.hooks.find(hook).shape)
        assert stacked.dtype == runs[0][hook].dtype
        assert mask.tolist() == [[j <= i for j in range(5)] for i in range(5)]
        assert (stacked[~mask] == 0).all()
        assert torch.equal(stacked[mask], torch.cat([run[hook] for run in runs]))


def test_stack_of_logits(session: Session) -> None:
    runs = session.run(prompts(3), capture="logits")
    assert stack(runs, "logits")[0].shape == (3, 3, 20)


def test_stack_takes_any_number_of_runs_in_any_form(session: Session) -> None:
    run = session.run([3, 4], capture=HOOKS)
    stacked, _ = stack((run for _ in range(2)), session.hooks[HOOKS[0]])
    assert torch.equal(stacked[1], run[HOOKS[0]])


def test_what_cannot_be_stacked(session: Session) -> None:
    one = session.run([3, 4], capture=HOOKS)
    with pytest.raises(ValueError, match="at least one run"):
        stack([], HOOKS[0])
    with pytest.raises(ValueError, match="put this one into a list"):
        stack(one, HOOKS[0])
    with pytest.raises(ValueError, match="list of Runs; 5 is none"):
        stack(5, HOOKS[0])
    with pytest.raises(ValueError, match="list of Runs; None is none"):
        stack([one, None], HOOKS[0])
    with pytest.raises(SpecError, match="named by a string"):
        stack([one], 5)
    with fake.session(fake.FakeEngine(torch.bfloat16)) as other, pytest.raises(ValueError, match="different models: "):
        stack([one, other.run([3, 4], capture=HOOKS)], HOOKS[0])
    with pytest.raises(KeyError, match="was not captured"):
        stack(session.run(prompts(2)), HOOKS[0])
    heads = session.model.shape.heads
    for lengths in (prompts(2), [list(range(3, 3 + heads))]):  # also where there are as many tokens as heads
        with pytest.raises(ValueError, match="has no row a token"):
            stack(session.run(lengths, capture="blocks.0.attn.hook_pattern"), "blocks.0.attn.hook_pattern")
