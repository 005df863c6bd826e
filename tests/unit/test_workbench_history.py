"""Undo, redo and the history of the workbench in the kernel, on a fake engine."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.browser.fake import one_session as one_session  # a fixture
from widgets import cells, explore, history
from widgets.history import RUNS, STEPS, Steps, describe
from widgets.state import EXPERIMENT, SELECTION, complete
from widgets.workbench import Workbench, opened, opening

PROMPT = "When Mary and John went"
HOOKS = ["blocks.1.hook_out", "blocks.2.attn.o.hook_in", "blocks.5.mlp.hook_out"]


@pytest.fixture
def workbench(session: Any) -> Iterator[Workbench]:
    yield Workbench(session, opening(session, PROMPT))
    for made in list(opened):
        made.close()


def settle(session: Any) -> None:
    session.jobs.call(lambda job: None)


def change(workbench: Workbench, **patch: Any) -> None:
    workbench.state = {**workbench.state, **patch}


def from_page(workbench: Workbench, **patch: Any) -> None:
    workbench.set_state({"state": {**workbench.state, **patch}})


def scale(factor: float, **more: Any) -> dict[str, Any]:
    return {"hook": HOOKS[0], "op": "scale", "factor": factor, "pos": 1, **more}


def says(workbench: Workbench, message: dict[str, Any]) -> None:
    workbench._on_message(workbench, message, [])


def asks(workbench: Workbench, *moves: dict[str, Any], **patch: Any) -> None:
    """What the page sends for undo, redo and restore, with a change that it made just before."""
    numbered = [{"id": workbench.steps["moves"] + n, **move} for n, move in enumerate(moves, 1)]
    workbench.set_state({"moves": numbered} | ({"state": {**workbench.state, **patch}} if patch else {}))


def gesture(state: dict[str, Any], dice: random.Random) -> dict[str, Any]:
    """What a user might do next, as a patch of the state."""
    edits = state["edits"]
    edit = {"hook": dice.choice(HOOKS), "op": "suppress", "pos": dice.randrange(4)}
    kinds: list[dict[str, Any]] = [
        {"prompt": dice.choice(["a", "b c", PROMPT]), "positions": []},
        {"source": dice.choice(["", "x y"]), "source_positions": []},
        {"compare": dice.choice([[None, None], [" a", None]])},
        {"edits": [*edits, edit]},
        {"edits": [*edits, scale(dice.random())]},
        {"edits": edits[1:]},
        {"edits": edits[::-1]},
        {"edits": [{**e, "enabled": dice.random() < 0.5} for e in edits]},
        {"positions": [dice.randrange(9)], "hook": dice.choice(HOOKS)},
        {"tab": dice.choice(["norms", "hook", "attention"])},
        {"of": dice.choice(["clean", "patched", "change"]), "head": dice.randrange(4)},
        {"form": {**state["form"], "amount": str(dice.random())}},
    ]
    return dice.choice(kinds)


@pytest.mark.parametrize("seed", range(200))
def test_any_sequence_can_be_taken_back_and_done_again(session: Any, seed: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(Workbench, "_refresh", lambda self: None)  # no runs: the state alone is looked at
    dice = random.Random(seed)
    workbench = Workbench(session, opening(session, PROMPT))
    first, last = workbench.state, workbench.state
    steps = 0
    for _ in range(dice.randrange(1, 30)):
        if dice.random() < 0.15:
            dice.choice([workbench.undo, workbench.redo])()
        else:
            change(workbench, **gesture(workbench.state, dice))
    last = workbench.state
    again = Workbench(session, json.loads(json.dumps(last)))
    assert again.state == last
    while workbench.steps["redo"]:
        workbench.redo()
    last = workbench.state
    while workbench.steps["undo"]:
        workbench.undo()
        steps += 1
    if steps:
        assert workbench.state == first
    for _ in range(steps):
        workbench.redo()
    assert workbench.steps["redo"] is None
    for keys in (EXPERIMENT, SELECTION):
        assert [workbench.state[key] for key in keys] == [last[key] for key in keys]
    for made in (workbench, again):
        made.close()


def test_a_hundred_steps_are_kept(workbench: Workbench) -> None:
    first = workbench.state
    for i in range(100):
        change(workbench, edits=[scale(float(i))])
    for _ in range(100):
        assert workbench.steps["undo"]
        workbench.undo()
    assert workbench.state == first and workbench.steps["undo"] is None
    workbench.undo()
    assert workbench.state == first
    for _ in range(100):
        workbench.redo()
    assert workbench.state["edits"] == [scale(99.0)]
    workbench.redo()
    for i in range(2 * STEPS):
        change(workbench, edits=[scale(float(i))])
    assert len(workbench._steps._pages) == STEPS + 1


def test_looking_around_is_no_step_and_costs_none(workbench: Workbench) -> None:
    for patch in (
        {"tab": "hook"},
        {"of": "clean"},
        {"head": 2},
        {"positions": [1]},
        {"hook": HOOKS[1]},
        {"heads": [1]},
    ):
        change(workbench, **patch)
    assert workbench.steps["undo"] is None
    change(workbench, edits=[scale(2.0)])
    change(workbench, prompt="another", positions=[])
    change(workbench, positions=[0], tab="attention")
    workbench.undo()
    assert workbench.state["prompt"] == PROMPT and workbench.state["positions"] == [1]
    assert workbench.state["tab"] == "attention", "the tab stays"
    change(workbench, positions=[2], hook=HOOKS[2])
    assert workbench.steps["redo"] == "change the prompt"
    workbench.redo()
    assert (workbench.state["prompt"], workbench.state["positions"]) == ("another", [0])
    workbench.undo()
    assert (workbench.state["positions"], workbench.state["hook"]) == ([2], HOOKS[2]), "as last seen there"
    change(workbench, source="a new branch")
    assert workbench.steps == {"undo": "change the source", "redo": None, "moves": 0}


def test_no_step_changes_how_large_the_page_is(workbench: Workbench) -> None:
    change(workbench, source=PROMPT)
    change(workbench, projector=True)
    workbench.undo()
    assert workbench.state["projector"] and not workbench.state["source"]
    change(workbench, projector=False)
    workbench.redo()
    assert not workbench.state["projector"] and workbench.state["source"]


def test_a_number_that_the_page_sends_many_times_is_one_step(workbench: Workbench, monkeypatch: Any) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    change(workbench, edits=[scale(1.0), scale(1.0)])
    for value in (1.1, 1.2, 1.3):
        now[0] += 0.2
        from_page(workbench, edits=[scale(value), scale(1.0)])
    now[0] += 0.2
    from_page(workbench, edits=[scale(1.3), scale(2.0)])  # another number: another step
    settle(workbench._session)
    now[0] += 5
    from_page(workbench, edits=[scale(1.3), scale(3.0)])  # long after: another step
    now[0] += 0.2
    from_page(workbench, edits=[scale(1.3, enabled=False), scale(3.0)])
    now[0] += 0.2
    from_page(workbench, edits=[scale(1.3, enabled=True), scale(3.0)])  # a box ticked twice is two gestures
    seen = []
    while workbench.steps["undo"]:
        seen.append((workbench.steps["undo"], [edit["factor"] for edit in workbench.state["edits"]]))
        workbench.undo()
    assert seen == [
        ("switch edit 1 on", [1.3, 3.0]),
        ("switch edit 1 off", [1.3, 3.0]),
        ("change factor of edit 2", [1.3, 3.0]),
        ("change factor of edit 2", [1.3, 2.0]),
        ("change factor of edit 1", [1.3, 1.0]),
        ("add 2 edits", [1.0, 1.0]),
    ]


def test_a_slider_is_one_step_until_it_is_let_go(workbench: Workbench, monkeypatch: Any) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    change(workbench, edits=[scale(1.0)])
    for drag in ((1.1, 1.2), (1.3, 1.4)):
        says(workbench, {"type": "hold", "on": True})
        for value in drag:
            from_page(workbench, edits=[scale(value)])
            now[0] += 30  # held, and thought about
        says(workbench, {"type": "hold", "on": False})
    factors = []
    while workbench.steps["undo"]:
        factors.append([edit["factor"] for edit in workbench.state["edits"]])
        workbench.undo()
    assert factors == [[1.4], [1.2], [1.0]]


def test_steps_have_names() -> None:
    def name(before: dict[str, Any], after: dict[str, Any]) -> str:
        return describe(complete(before), complete(after))

    one, two = scale(1.0), {"hook": HOOKS[1], "op": "set", "value": 1.0}
    assert name({}, {"edits": [one]}) == "add edit"
    assert name({"edits": [one, two]}, {"edits": [one]}) == "remove edit"
    assert name({"edits": [one, two]}, {"edits": []}) == "remove all edits"
    assert name({"edits": [one, two]}, {"edits": [two, one]}) == "reorder edits"
    assert name({"edits": [two]}, {"edits": [{**two, "value": 2.0}]}) == "change value of edit 1"
    assert name({"edits": [two]}, {"edits": [{**two, "pos": 2}]}) == "change pos of edit 1"
    assert name({"edits": [two]}, {"edits": [one]}) == "change edit 1"
    assert name({}, {"prompt": "a", "positions": [1]}) == "change the prompt"
    assert name({}, {"prompt": "a", "source": "b"}) == "change both prompts"
    assert name({}, {"source": "b"}) == "change the source"
    assert name({}, {"compare": ["a", None]}) == "compare other tokens"


def test_what_the_page_takes_back_is_always_answered(workbench: Workbench) -> None:
    change(workbench, source="x")
    asks(workbench, {"type": "undo"})
    assert workbench.state["source"] == ""
    asks(workbench, {"type": "redo"})
    assert workbench.state["source"] == "x"
    for kind in ("redo", "restore"):  # there is none: said all the same, for the page waits
        moves = workbench.steps["moves"]
        asks(workbench, {"type": kind, "run": 99})
        assert workbench.steps["moves"] == moves + 1


def test_what_the_page_takes_back_is_the_change_it_sent_before(workbench: Workbench) -> None:
    change(workbench, source="x")
    asks(workbench, {"type": "undo"}, {"type": "undo"}, {"type": "redo"}, source="y")
    assert workbench.state["source"] == "x" and workbench.steps["redo"] == "change the source"
    workbench.set_state({"moves": workbench.moves})  # sent again: made already
    assert workbench.state["source"] == "x"


def test_each_run_is_kept_once(workbench: Workbench, session: Any) -> None:
    settle(session)
    [first] = workbench.runs
    assert (first["prompt"], first["spec"], first["about"], first["edited"]) == (PROMPT, {}, "no edits", False)
    assert [first[key] for key in ("rows", "difference", "kl")] == [
        workbench.result[key] for key in ("rows", "difference", "kl")
    ]
    change(workbench, edits=[scale(0.5)])
    settle(session)
    change(workbench, positions=[1], tab="hook")  # the same numbers
    change(workbench, edits=[scale(0.5), scale(2.0, enabled=False)])
    workbench.undo()
    settle(session)
    newest = workbench.runs[0]
    assert len(workbench.runs) == 2 and newest["about"] == f"scale {HOOKS[0]} by 0.5 at 1"
    assert newest["spec"] == workbench.spec and newest["rows"] == workbench.result["rows"]
    assert workbench.history == {"count": 2, "shown": newest["id"], "key": workbench.history["key"]}
    workbench.undo()
    settle(session)
    assert len(workbench.runs) == 2 and workbench.history["shown"] == first["id"]
    change(workbench, edits=[{"hook": HOOKS[0], "op": "suppress", "pos": 500}])  # refused: it has no numbers
    settle(session)
    assert len(workbench.runs) == 2 and workbench.history["shown"] is None
    assert json.loads(json.dumps(workbench.runs)) == workbench.runs


def test_a_superseded_run_is_not_kept_and_a_drag_is_one(workbench: Workbench, session: Any) -> None:
    settle(session)
    gate = session._engine.gate
    gate.clear()
    for prompt in ("one", "two", "three"):
        change(workbench, prompt=prompt)
    gate.set()
    settle(session)
    assert [run["prompt"] for run in workbench.runs] == ["three", PROMPT]
    change(workbench, edits=[scale(1.0)])
    settle(session)
    for value in (1.1, 1.2, 1.3):
        from_page(workbench, edits=[scale(value)])
        settle(session)
    assert [run["about"].split()[3] for run in workbench.runs if run["edited"]] == ["1.3", "1"]


def test_a_run_is_restored_in_one_step(workbench: Workbench, session: Any) -> None:
    settle(session)
    change(workbench, edits=[scale(0.5)], positions=[1])
    settle(session)
    run, _ = workbench.runs
    workbench.keep(run["id"], name="halved", pinned=True)
    change(workbench, prompt="another", positions=[], edits=[], source="x")
    settle(session)
    before = workbench.state
    asks(workbench, {"type": "restore", "run": run["id"]})
    assert workbench.steps["undo"] == "restore halved"
    assert (workbench.state["prompt"], workbench.state["edits"]) == (PROMPT, [scale(0.5)])
    assert workbench.state["positions"] == [1]
    settle(session)
    assert workbench.result["rows"] == run["rows"] and len(workbench.runs) == 3
    workbench.undo()
    assert workbench.state == before
    with pytest.raises(KeyError, match="no run 99"):
        workbench.restore(99)


def test_runs_are_named_pinned_deleted_and_bounded(workbench: Workbench, session: Any, monkeypatch: Any) -> None:
    settle(session)
    [run] = workbench.runs
    key = workbench.history["key"]
    says(workbench, {"type": "keep", "run": run["id"], "name": "  first "})
    says(workbench, {"type": "keep", "run": run["id"], "pinned": True})
    assert (workbench.runs[0]["name"], workbench.runs[0]["pinned"]) == ("first", True)
    assert workbench.history["key"] == key + 2
    monkeypatch.setattr(history, "RUNS", 5)
    for i in range(8):
        change(workbench, prompt=f"prompt {i}")
        settle(session)
    assert [run["prompt"][-1] for run in workbench.runs[:-1]] == list("76543") and RUNS >= 100
    assert workbench.runs[-1]["name"] == "first", "what is pinned stays"
    says(workbench, {"type": "forget", "run": run["id"]})
    assert workbench.history["count"] == 5
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr(workbench, "send", lambda content, buffers=None: sent.append(content))
    says(workbench, {"type": "history"})
    assert sent == [{"type": "history", "key": workbench.history["key"], "runs": workbench.runs}]


def test_running_the_cell_again_keeps_steps_and_history(session: Any, monkeypatch: Any) -> None:
    execution = [0]
    monkeypatch.setattr(cells, "running_cell", lambda: ("a", str(execution[0])))
    first = explore(session, PROMPT)
    start = first.state
    change(first, edits=[scale(0.5)])
    settle(session)
    execution[0] += 1
    second = explore(session, PROMPT)
    settle(session)
    assert (second.steps["undo"], second.history["count"]) == ("add edit", 1)
    second.undo()
    settle(session)
    assert second.state == start and second.history["count"] == 2
    second.redo()
    assert second.state["edits"] == [scale(0.5)]
    execution[0] += 1
    third = explore(session, "another prompt in the cell")
    settle(session)
    assert third.steps["undo"] is None and third.history["count"] == 3, "what was found stays"
    third.close()


def test_steps_do_not_change_with_what_they_were_given() -> None:
    state = complete({"edits": [scale(1.0)]})
    steps = Steps(state)
    state["edits"][0]["factor"] = 5.0
    steps.record(state)
    found = steps.undo(state)
    assert found is not None and found["edits"] == [scale(1.0)]
