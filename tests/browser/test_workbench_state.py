"""The workbench's kernel side without a browser: state, runs, pulled arrays, jobs, cells; on a fake engine."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import ipywidgets
import numpy as np
import pytest
import torch
import traitlets
from hypothesis import given, settings

from explorer import Edit, threads
from tests.browser import fake
from tests.browser.states import states
from widgets import AttentionView, Heatmap, HookPicker, LogitCompare, SpecEditor, TokenPicker, cells, data, esm, explore
from widgets.state import DEFAULTS, asks, complete, selection, spec
from widgets.workbench import Workbench, opened, opening, run_keys

PROMPT = "When Mary and John went"


@pytest.fixture
def made() -> Iterator[tuple[Any, fake.FakeEngine]]:
    session, engine = fake.session()
    yield session, engine
    for workbench in list(opened):
        workbench.close()
    session.close()


@pytest.fixture
def workbench(made: tuple[Any, fake.FakeEngine]) -> Workbench:
    made_one = Workbench(made[0], opening(made[0], PROMPT))
    settle(made[0])
    return made_one


def settle(session: Any) -> None:
    """Waits until every job queued so far has ended."""
    session.jobs.call(lambda job: None)


def wait_until(condition: Callable[[], bool]) -> None:
    """For what the worker thread does while the fake engine's gate is closed."""
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def ask(workbench: Workbench, view: str, of: str = "clean", hook: str = "", head: int = 0) -> dict[str, Any]:
    run = workbench.result["keys"].get("clean" if of == "clean" else "patched", "")
    return {
        "type": "data",
        "key": f"{view} {of} {hook} {head}",
        "view": view,
        "of": of,
        "hook": hook,
        "head": head,
        "run": run,
    }


def pull(
    workbench: Workbench, message: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> list[tuple[dict[str, Any], Any]]:
    sent: list[tuple[dict[str, Any], Any]] = []
    monkeypatch.setattr(workbench, "send", lambda content, buffers=None: sent.append((content, buffers)))
    workbench._on_message(workbench, message, [])
    settle(workbench._session)
    return sent


def array(answer: tuple[dict[str, Any], Any]) -> np.ndarray[Any, Any]:
    assert answer[0]["error"] is None
    return np.frombuffer(answer[1][0], "<f4").reshape(answer[0]["shape"])


@given(states)
@settings(max_examples=200, deadline=None)
def test_a_state_survives_json_and_completion(partial: dict[str, Any]) -> None:
    state = complete(partial)
    assert state.keys() == DEFAULTS.keys()
    again = complete(json.loads(json.dumps(state)))
    assert again == state
    assert {key: again[key] for key in partial} == partial


def test_a_new_workbench_shows_a_given_state(workbench: Workbench) -> None:
    workbench.state = {
        **workbench.state,
        "positions": [1, 2],
        "edits": [{"hook": "blocks.1.hook_out", "op": "suppress", "pos": 1}],
    }
    settle(workbench._session)
    other = Workbench(workbench._session, json.loads(json.dumps(workbench.state)))
    settle(workbench._session)
    assert other.state == workbench.state
    assert {**other.result, "seconds": 0} == {**workbench.result, "seconds": 0}
    assert other.tokens == workbench.tokens


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"promt": "x"}, "promt"),
        ({"prompt": 3}, "must be a str"),
        ({"positions": [1.5]}, "whole numbers"),
        ({"positions": [True]}, "whole numbers"),
        ({"compare": ["a"]}, "two tokens"),
        ({"tab": "lens"}, "norms, hook, attention"),
        ({"edits": [{"op": "suppress"}]}, "a hook and an op"),
        ({"edits": [{"hook": "a", "op": "scale", "position": 3}]}, "position"),
    ],
)
def test_a_state_that_is_no_state_is_refused_and_changes_nothing(
    workbench: Workbench, bad: dict[str, Any], says: str
) -> None:
    before = workbench.state
    with pytest.raises(traitlets.TraitError, match=says):
        workbench.state = {**before, **bad}
    assert workbench.state == before


def test_the_numbers_are_those_of_compare(workbench: Workbench) -> None:
    from explorer import Edit

    session = workbench._session
    workbench.state = {
        **workbench.state,
        "edits": [{"hook": "blocks.1.hook_out", "op": "scale", "factor": 0.5, "pos": [1, 2]}],
    }
    settle(session)
    both = session.compare(PROMPT, [Edit("blocks.1.hook_out", "scale", factor=0.5, pos=[1, 2])])
    assert workbench.result["rows"] == [list(row) for row in both.top(6)]
    assert workbench.result["kl"] == both.kl()
    best, second = (row[1] for row in sorted(both.clean.top(2), key=lambda row: -row[2]))
    assert workbench.result["difference"]["values"] == list(both.logit_diff(best, second))
    assert session.run(PROMPT, spec(workbench.state)).top(3) == both.patched.top(3)


def test_changes_of_the_view_alone_run_nothing(workbench: Workbench, made: Any) -> None:
    calls, result = made[1].calls, workbench.result
    for patch in (
        {"positions": [0]},
        {"hook": "blocks.2.hook_out"},
        {"tab": "hook"},
        {"head": 2},
        {"of": "change"},
        {"heads": [1]},
        {"zoom": {"map": "norms", "scale": 2, "row": 1, "col": 1.5}},
        {"table": True},
    ):
        workbench.state = {**workbench.state, **patch}
    settle(workbench._session)
    assert made[1].calls == calls and workbench.steps["undo"] is None
    assert workbench.result is result


def test_of_many_changes_the_last_one_is_shown_and_few_run(workbench: Workbench, made: Any) -> None:
    shown: list[str] = []
    workbench.observe(lambda change: shown.append(change["new"]["prompt"]), "result")
    calls = made[1].calls
    made[1].gate.clear()
    for i in range(20):
        workbench.state = {**workbench.state, "prompt": f"{PROMPT} {i}"}
    made[1].gate.set()
    settle(workbench._session)
    assert shown == [f"{PROMPT} 19"]
    assert made[1].calls - calls <= 2


def test_numbers_follow_a_number_that_goes_on_changing(workbench: Workbench, made: Any) -> None:
    """What runs for a value of one gesture is shown; of those that wait the last runs; another step cuts in."""
    session, engine = made
    edit = {"hook": "blocks.1.hook_out", "op": "scale", "factor": 0.0, "pos": 1, "enabled": True}
    workbench.state = {**workbench.state, "edits": [edit]}
    settle(session)

    def drag(*values: float) -> None:
        for value in values:
            workbench.set_state({"state": {**workbench.state, "edits": [{**edit, "factor": value}]}})

    def patched(factor: float) -> str:
        return run_keys(asks({**workbench.state, "edits": [{**edit, "factor": factor}]}))["patched"]

    drag(0.1)
    settle(session)
    shown: list[str] = []
    workbench.observe(lambda change: shown.append(change["new"]["keys"]["patched"]), "result")
    calls = engine.calls
    engine.gate.clear()
    drag(0.2)
    wait_until(lambda: engine.calls == calls + 1)
    drag(*(v / 100 for v in range(21, 40)))
    assert sum(job["label"] == "Run" for job in workbench.jobs["active"]) == 2, "one runs, one waits"
    engine.gate.set()
    settle(session)
    assert engine.calls == calls + 2
    assert shown == [patched(0.2), patched(0.39)]
    assert workbench.state["edits"][0]["factor"] == 0.39
    engine.gate.clear()
    drag(0.5)
    wait_until(lambda: engine.calls == calls + 3)
    workbench.state = {**workbench.state, "prompt": PROMPT + "!"}  # another step
    engine.gate.set()
    settle(session)
    assert len(shown) == 3 and workbench.result["prompt"] == PROMPT + "!"


def test_the_clean_run_is_made_once_for_a_prompt(workbench: Workbench, made: Any, monkeypatch: Any) -> None:
    session, engine = made
    edit = {"hook": "blocks.1.hook_out", "op": "scale", "pos": 1}

    def requests(**patch: Any) -> int:
        before = engine.requests
        workbench.state = {**workbench.state, **patch}
        settle(session)
        return engine.requests - before  # type: ignore[no-any-return]

    def shown() -> list[list[float]]:
        return [row[2:] for row in workbench.result["rows"]]

    for factor in (0.1, 0.2):
        assert requests(edits=[{**edit, "factor": factor, "enabled": True}]) == 1
        both = session.compare(PROMPT, Edit(**edit, factor=factor))
        assert shown() == [[row.clean_prob, row.patched_prob, row.change] for row in both.top(data.TOP)]
    sizes: list[int] = []
    execute = engine.execute
    monkeypatch.setattr(engine, "execute", lambda asked, *more: sizes.append(len(asked)) or execute(asked, *more))
    assert requests(prompt=PROMPT + "?") == 2 and sizes == [1, 1]  # in one batch each would depend on the other
    assert requests(edits=[]) == 0
    assert requests(prompt=PROMPT + "!") == 1
    assert requests(edits=[{**edit, "factor": 0.1, "enabled": True}]) == 1
    monkeypatch.setitem(session.info, "dtype", "bfloat16")  # a row depends on its batch there
    assert requests(edits=[{**edit, "factor": 0.2, "enabled": True}]) == 2
    monkeypatch.setitem(session.info, "dtype", "float32")
    monkeypatch.setattr(session, "model", replace(session.model))  # as after a reboot
    assert requests(edits=[{**edit, "factor": 0.3, "enabled": True}]) == 2


def test_the_engine_shares_its_cores_with_the_page(workbench: Workbench, made: Any, monkeypatch: Any) -> None:
    session, engine = made
    settle(session)
    held: list[bool] = []
    execute = engine.execute

    def watched(*asked: Any) -> Any:
        held.append(any(thread.name == "explorer-sharing-cores" for thread in threading.enumerate()))
        return execute(*asked)

    monkeypatch.setattr(engine, "execute", watched)
    workbench.state = {**workbench.state, "prompt": PROMPT + "!"}
    settle(session)
    session.run(PROMPT)
    assert held == [threads._libgomp() is not None and not torch.cuda.is_initialized(), False]


def test_a_map_follows_a_number_that_goes_on_changing(workbench: Workbench, made: Any, monkeypatch: Any) -> None:
    """What was asked for one value, and comes to its turn after the next one's numbers, is drawn of those."""
    session, engine = made
    edit = {"hook": "blocks.1.hook_out", "op": "scale", "factor": 0.0, "pos": 1, "enabled": True}
    for factor in (0.1, 0.2):
        workbench.set_state({"state": {**workbench.state, "edits": [{**edit, "factor": factor}]}})
        settle(session)
    sent: list[Any] = []
    monkeypatch.setattr(workbench, "send", lambda content, buffers=None: sent.append((content, buffers)))
    asked = ask(workbench, "hook", "change", hook="blocks.2.hook_out")
    asked["key"] += asked["run"]
    engine.gate.clear()
    workbench.set_state({"state": {**workbench.state, "edits": [{**edit, "factor": 0.3}]}})
    workbench._on_message(workbench, asked, [])
    engine.gate.set()
    settle(session)
    assert [(answer["key"], answer["dropped"]) for answer, _ in sent] == [
        (asked["key"], True),
        (asked["key"].removesuffix(asked["run"]) + workbench.result["keys"]["patched"], False),
    ]
    again = ask(workbench, "hook", "change", hook="blocks.2.hook_out")
    calls = engine.calls
    workbench._on_message(workbench, again, [])
    assert engine.calls == calls and bytes(sent[-1][1][0]) == bytes(sent[1][1][0])


def test_a_result_that_was_overtaken_is_dropped(workbench: Workbench, monkeypatch: Any) -> None:
    """Even when the engine had finished it: a change that comes while it is being made into a result wins."""
    shown: list[str] = []
    workbench.observe(lambda change: shown.append(change["new"]["prompt"]), "result")
    predictions = data.predictions

    def overtaken(*args: Any) -> dict[str, Any]:
        monkeypatch.setattr(data, "predictions", predictions)
        workbench.state = {**workbench.state, "prompt": "second"}
        return predictions(*args)

    monkeypatch.setattr(data, "predictions", overtaken)
    workbench.state = {**workbench.state, "prompt": "first"}
    settle(workbench._session)
    settle(workbench._session)
    assert shown == ["second"]


def test_pulled_norms_are_the_runs_norms_and_carry_the_key(workbench: Workbench, made: Any, monkeypatch: Any) -> None:
    message = ask(workbench, "norms")
    sent = pull(workbench, message, monkeypatch)
    assert [content["key"] for content, _ in sent] == [message["key"]]
    run = workbench._session.run(PROMPT, capture="blocks.*.hook_out")
    expected = torch.stack([run[f"blocks.{i}.hook_out"].norm(dim=-1) for i in range(fake.LAYERS)])
    np.testing.assert_allclose(array(sent[0]), expected.numpy(), rtol=1e-6)
    calls = made[1].calls
    assert array(pull(workbench, message, monkeypatch)[0]).shape == expected.shape
    assert made[1].calls == calls  # a second view, or a reload, needs no run


def test_pulled_hooks_heads_and_changes(workbench: Workbench, monkeypatch: Any) -> None:
    edit = {"hook": "blocks.1.hook_out", "op": "suppress", "pos": 1}
    workbench.state = {**workbench.state, "edits": [edit]}
    settle(workbench._session)
    hook = "blocks.4.attn.o.hook_in"
    both = workbench._session.compare(
        PROMPT, {edit["hook"]: {"op": "suppress", "pos": 1}}, capture=[hook, "blocks.4.attn.hook_pattern"]
    )
    change = array(pull(workbench, ask(workbench, "hook", "change", hook), monkeypatch)[0])
    np.testing.assert_allclose(change, (both.patched[hook] - both.clean[hook]).flatten(1).numpy(), rtol=1e-5, atol=1e-6)
    pattern = array(
        pull(workbench, ask(workbench, "attention", "patched", "blocks.4.attn.hook_pattern", 2), monkeypatch)[0]
    )
    assert np.isneginf(pattern[0, 1]), "masked, which is no zero"
    np.testing.assert_array_equal(np.tril(pattern), both.patched.pattern(4)[2].numpy())
    scores = array(
        pull(workbench, ask(workbench, "attention", "change", "blocks.4.attn.hook_attn_scores", 1), monkeypatch)[0]
    )
    assert np.isneginf(scores[0, 1]) and np.isfinite(np.tril(scores)).all()


def test_the_grid_has_a_norm_for_every_hook_it_names(workbench: Workbench, monkeypatch: Any) -> None:
    names = workbench.about["grid"]
    grid = array(pull(workbench, ask(workbench, "grid"), monkeypatch)[0])
    assert grid.shape == (len(names), len(workbench.tokens["prompt"]["tokens"]))
    run = workbench._session.run(PROMPT, capture="blocks.5.attn.k.hook_out")
    expected = run["blocks.5.attn.k.hook_out"].flatten(1).norm(dim=-1)
    np.testing.assert_allclose(grid[names.index("blocks.5.attn.k.hook_out")], expected.numpy(), rtol=1e-6)
    assert "blocks.3.ln2.hook_in" not in names  # this model has none there


def test_arrays_of_a_run_that_is_gone_are_not_sent(workbench: Workbench, monkeypatch: Any) -> None:
    old = ask(workbench, "norms")
    workbench.state = {**workbench.state, "prompt": "another prompt"}
    settle(workbench._session)
    [(answer, buffers)] = pull(workbench, old, monkeypatch)
    assert answer["dropped"] and buffers == []
    [(answer, buffers)] = pull(workbench, ask(workbench, "norms"), monkeypatch)
    assert not answer["dropped"] and len(buffers) == 1


def test_a_hook_that_is_missing_is_answered_with_its_reason(workbench: Workbench, monkeypatch: Any) -> None:
    [(answer, buffers)] = pull(workbench, ask(workbench, "hook", hook="blocks.3.ln2.hook_in"), monkeypatch)
    assert "this layer has none" in answer["error"] and buffers == []


def test_edits_that_overflow_leave_the_clean_run(workbench: Workbench, made: Any, monkeypatch: Any) -> None:
    whole = made[1]._result

    def overflowing(request: Any) -> Any:
        result = whole(request)
        if request.edits:
            result.last_logits[0] = torch.nan
        return result

    monkeypatch.setattr(made[1], "_result", overflowing)
    clean = workbench.result
    workbench.state = {**workbench.state, "edits": [{"hook": "blocks.1.hook_out", "op": "scale", "factor": 3e38}]}
    settle(workbench._session)
    shown = workbench.result
    assert shown["error"]["where"] == "edit" and "are not finite: with this run's edits" in shown["error"]["message"]
    assert not shown["edited"] and [shown[key] for key in ("rows", "difference")] == [
        clean["rows"],
        clean["difference"],
    ]


def test_errors_say_where_they_belong(workbench: Workbench, made: Any) -> None:
    def error(**patch: Any) -> dict[str, Any]:
        workbench.state = {**workbench.state, **patch}
        settle(workbench._session)
        found: dict[str, Any] = workbench.result["error"]
        return found

    clean = workbench.result
    off = {"hook": "blocks.1.hook_out", "op": "suppress", "enabled": False}
    wrong = error(edits=[off, {"hook": "blocks.1.hook_out", "op": "suppress", "pos": 500}])
    assert (wrong["where"], wrong["index"]) == ("edit", 1) and "500" in wrong["message"]
    refused = workbench.result
    assert refused["keys"] == {"clean": clean["keys"]["clean"]} and not refused["edited"]
    assert [refused[key] for key in ("rows", "difference")] == [clean[key] for key in ("rows", "difference")]
    assert error(edits=[off]) is None
    assert error(compare=["several tokens", None])["where"] == "difference"
    assert workbench.result["rows"]
    assert error(compare=[None, None], prompt="")["where"] == "prompt"
    assert "max_model_len" in error(prompt="x" * 600)["message"]
    made[1].fail = RuntimeError("worker lost")
    assert error(prompt="fine")["where"] == "run" and "worker lost" in workbench.result["error"]["message"]
    assert error(prompt=PROMPT) is None and workbench.result["rows"]


@pytest.mark.parametrize("source", ["   ", "x" * 3000], ids=["empty", "too long"])
def test_a_source_that_cannot_run_is_said_at_the_source(workbench: Workbench, monkeypatch: Any, source: str) -> None:
    from explorer import tokens

    session, rows, strip = workbench._session, workbench.result["rows"], workbench.tokens["prompt"]
    encode = tokens.encode
    monkeypatch.setattr(  # a tokenizer that keeps no spaces
        "explorer.session.encode", lambda words, text, *args, **rest: encode(words, text.strip(), *args, **rest)
    )
    workbench.state = {**workbench.state, "source": source}
    settle(session)
    error = workbench.result["error"]
    assert error["where"] == "source" and error["message"].startswith("the source ")
    assert workbench.result["rows"] == rows and workbench.tokens["prompt"] == strip
    assert workbench.tokens["source"] == {"text": source, "tokens": []}
    patch = {"hook": "blocks.1.hook_out", "op": "patch", "pos": 1, "source": {"prompt": source}}
    workbench.state = {**workbench.state, "edits": [patch]}
    settle(session)
    assert workbench.result["error"] == error
    workbench.state = {**workbench.state, "source": "When Mary and June went", "edits": []}
    settle(session)
    assert workbench.result["error"] is None and workbench.tokens["source"]["tokens"]


def test_jobs_are_shown_and_cancelled(workbench: Workbench, made: Any) -> None:
    made[1].gate.clear()
    workbench.state = {**workbench.state, "prompt": "slow"}
    assert [job["label"] for job in workbench.jobs["active"]] == ["Run"]
    workbench._on_message(workbench, {"type": "cancel"}, [])
    settle(workbench._session)
    assert workbench.jobs["active"] == [] and workbench.jobs["last"]["outcome"] == "cancelled"
    made[1].gate.set()
    workbench.state = {**workbench.state, "prompt": "quick"}
    settle(workbench._session)
    assert workbench.result["prompt"] == "quick"


def test_the_jobs_shown_last_are_the_latest(workbench: Workbench, monkeypatch: Any) -> None:
    """The worker thread and the kernel's main thread both show them, at times at once."""
    looked = threading.Event()

    class Jobs(dict[int, Any]):
        def values(self) -> Any:
            found = list(super().values())
            if not looked.is_set():  # the first to look is slow to show what it saw
                looked.set()
                time.sleep(0.2)
            return found

    monkeypatch.setattr(workbench, "_active", Jobs())
    worker = threading.Thread(target=workbench._show_jobs)
    worker.start()
    assert looked.wait(10)
    workbench._active[1] = (None, {"label": "Run"})
    workbench._show_jobs()
    worker.join()
    assert workbench.jobs["active"] == [{"label": "Run"}]


def test_a_closed_workbench_is_silent(workbench: Workbench, made: Any) -> None:
    made[1].gate.clear()
    before = workbench.result
    workbench.state = {**workbench.state, "prompt": "late"}
    workbench.close()
    workbench.close()
    made[1].gate.set()
    settle(made[0])
    assert workbench.result is before
    assert workbench not in opened


def test_a_closed_workbench_leaves_its_boxes_and_links(workbench: Workbench) -> None:
    other = ipywidgets.Label()
    box, tab = ipywidgets.VBox([other, workbench]), ipywidgets.Tab([workbench])
    link, rest = (
        ipywidgets.jslink((workbench, "about"), (other, "value")),
        ipywidgets.jslink((box, "_dom_classes"), (tab, "_dom_classes")),
    )
    workbench.close()
    assert box.children == (other,) and tab.children == ()
    assert link.comm is None and rest.comm is not None


class Cell:
    """Stands in for the notebook: the cell that is being executed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.id, self.execution = "a", 0
        monkeypatch.setattr(cells, "running_cell", lambda: (self.id, str(self.execution)))

    def run(self, cell: str) -> None:
        self.id = cell
        self.execution += 1


def test_running_a_cell_again_hands_over_and_leaves_one(made: Any, monkeypatch: Any) -> None:
    cell = Cell(monkeypatch)
    cell.run("a")
    first = explore(made[0], PROMPT)
    cell.run("b")
    other = explore(made[0], PROMPT)
    first.state = {**first.state, "positions": [2], "source": "kept"}
    cell.run("a")
    again = explore(made[0], PROMPT)
    assert again.state == first.state
    assert first not in opened and other in opened and again in opened
    cell.run("a")
    fresh = explore(made[0], "another prompt in the cell")
    assert fresh.state["prompt"] == "another prompt in the cell" and fresh.state["source"] == ""
    assert {other, fresh} == set(opened)


def test_two_workbenches_of_one_cell_take_over_in_order(made: Any, monkeypatch: Any) -> None:
    cell = Cell(monkeypatch)
    cell.run("a")
    pair = [explore(made[0], "one"), explore(made[0], "two")]
    for i, workbench in enumerate(pair):
        workbench.state = {**workbench.state, "positions": [i]}
    cell.run("a")
    again = [explore(made[0], "one"), explore(made[0], "two")]
    assert [(w.state["prompt"], w.state["positions"]) for w in again] == [("one", [0]), ("two", [1])]
    assert set(opened) == set(again)


def test_fifty_runs_of_a_cell_leave_nothing_behind(made: Any, monkeypatch: Any) -> None:
    cell = Cell(monkeypatch)
    counts = []
    for _ in range(50):
        cell.run("a")
        explore(made[0], PROMPT)
        settle(made[0])
        counts.append((len(ipywidgets.widget._instances), threading.active_count(), len(cells._cells)))
    assert counts[4] == counts[-1]


def test_positions_that_a_shorter_prompt_lacks_fall_back_to_the_last_token() -> None:
    assert selection([2, 9], 5) == [2]
    assert selection([9], 5) == [4]
    assert selection([], 5) == [4]
    assert selection([0], 0) == []


def test_the_pages_are_small_whole_and_keep_to_themselves() -> None:
    made = [Workbench, Heatmap, TokenPicker, HookPicker, SpecEditor, LogitCompare, AttentionView]
    pages = [cls._esm.default_value for cls in made]
    joined = "\n".join(pages)
    for file in esm.HERE.glob("*.js"):
        assert f"// {file.name}" in joined, f"{file.name} is not part of a page"
    # with the first data at most 300 KB, which test_workbench_speed.py looks at
    assert max(len(page.encode()) for page in pages) + len(esm.css("workbench").encode()) < 200_000
    asked = joined.replace('"http://www.w3.org/2000/svg"', "")  # a name that SVG elements are made with, no address
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|https?://", asked)
    assert not re.search(r"https?://|@import", esm.css("workbench"))


def test_joining_refuses_what_it_does_not_understand(tmp_path: Any) -> None:
    (tmp_path / "a.js").write_text('import { x as y, z } from "./b.js";\nexport default { y };\n')
    (tmp_path / "b.js").write_text("export const x = 1;\nexport function z() {}\n")
    assert "const { x: y, z } = $b;" in esm.join("a", tmp_path)
    (tmp_path / "b.js").write_text("export { x };\n")
    with pytest.raises(ValueError, match=r"b\.js: only plain named"):
        esm.join("a", tmp_path)


def test_joining_drops_comments_but_no_text(tmp_path: Any) -> None:
    file = tmp_path / "a.js"
    file.write_text("// a ` in a comment\nconst a = `one\n  two \\` ${`three`}`;\n  // more\nconst b = `x`;\n")
    assert esm.join("a", tmp_path) == "// a.js\nconst a = `one\n  two \\` ${`three`}`;\nconst b = `x`;\n"
    file.write_text("const a = `one\n  // two\n`;\n")
    with pytest.raises(ValueError, match=r"a\.js, line 2: in a template a line cannot begin with //: '// two'"):
        esm.join("a", tmp_path)


def test_every_ask_is_answered_once(workbench: Workbench, made: Any, monkeypatch: Any) -> None:
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr(workbench, "send", lambda content, buffers=None: sent.append(content))
    made[1].gate.clear()
    for layer in range(4):  # the page moves from hook to hook faster than the engine
        workbench._on_message(workbench, ask(workbench, "hook", hook=f"blocks.{layer}.hook_out"), [])
    made[1].gate.set()
    settle(made[0])
    assert len({answer["key"] for answer in sent}) == len(sent) == 4
    assert [answer["dropped"] for answer in sent] == [True, True, True, False]
    made[1].gate.clear()
    workbench._on_message(workbench, ask(workbench, "hook", hook="blocks.5.hook_out"), [])
    workbench._on_message(workbench, {"type": "cancel"}, [])
    settle(made[0])
    made[1].gate.set()
    assert (sent[-1]["error"], sent[-1]["dropped"]) == ("Cancelled.", False)


def test_an_ask_that_is_answered_is_not_dropped_as_well(workbench: Workbench, monkeypatch: Any) -> None:
    sent: list[dict[str, Any]] = []

    def answered(content: dict[str, Any], buffers: Any = None) -> None:
        sent.append(content)
        workbench._cancel()  # just now, before the job has ended

    monkeypatch.setattr(workbench, "send", answered)
    workbench._on_message(workbench, ask(workbench, "norms"), [])
    settle(workbench._session)
    assert [(answer["error"], answer["dropped"]) for answer in sent] == [(None, False)]
    assert workbench.jobs["last"]["outcome"] == "done"


@pytest.mark.parametrize(
    "change",
    [{"prompt": "another prompt"}, {"edits": [{"hook": "blocks.1.hook_out", "op": "suppress", "pos": 1}]}],
    ids=["prompt", "edits"],
)
def test_new_numbers_do_not_wait_for_arrays_of_the_old(
    workbench: Workbench, made: Any, monkeypatch: Any, change: dict[str, Any]
) -> None:
    sent: list[dict[str, Any]] = []
    outcomes: list[str] = []
    monkeypatch.setattr(workbench, "send", lambda content, buffers=None: sent.append(content))
    workbench.observe(lambda change: outcomes.append(change["new"]["last"]["outcome"]), "jobs")
    grid = ask(workbench, "grid")
    made[1].gate.clear()
    calls = made[1].calls
    workbench._on_message(workbench, grid, [])
    wait_until(lambda: made[1].calls == calls + 1)  # this one runs, the next one waits
    workbench._on_message(workbench, ask(workbench, "hook", hook="blocks.4.hook_out"), [])
    workbench.state = {**workbench.state, **change}
    wait_until(lambda: made[1].calls == calls + 2)  # the new run has begun
    assert [(answer["error"], answer["dropped"]) for answer in sent] == [(None, True)] * 2
    assert [job["label"] for job in workbench.jobs["active"]] == ["Run"]
    made[1].gate.set()
    settle(made[0])
    assert made[1].calls == calls + 2
    assert workbench.result["keys"] and workbench.result["error"] is None
    assert workbench.jobs["active"] == [] and set(outcomes) == {"done"}
    grid = ask(workbench, "grid")  # the page asks again
    assert array(pull(workbench, grid, monkeypatch)[0]).shape[1] == len(workbench.tokens["prompt"]["tokens"])


def test_arrays_that_will_be_obsolete_are_not_waited_for(workbench: Workbench, made: Any, monkeypatch: Any) -> None:
    """While new numbers are on their way, the page still asks for arrays of those that it shows."""
    sent: list[dict[str, Any]] = []
    at_hand, other = ask(workbench, "norms"), ask(workbench, "grid")
    pull(workbench, at_hand, monkeypatch)
    monkeypatch.setattr(workbench, "send", lambda content, buffers=None: sent.append(content))
    made[1].gate.clear()
    workbench.state = {**workbench.state, "prompt": "another prompt"}
    for message in (at_hand, other):
        workbench._on_message(workbench, message, [])
    assert [(answer["key"], answer["dropped"]) for answer in sent] == [(at_hand["key"], False), (other["key"], True)]
    assert [job["label"] for job in workbench.jobs["active"]] == ["Run"]
    workbench._on_message(workbench, {"type": "cancel"}, [])
    settle(made[0])
    made[1].gate.set()
    assert [workbench.jobs["last"][key] for key in ("label", "outcome")] == ["Run", "cancelled"]


def test_a_cancelled_run_shows_no_old_numbers_and_can_be_run_again(workbench: Workbench, made: Any) -> None:
    made[1].gate.clear()
    workbench.state = {**workbench.state, "prompt": "slow"}
    workbench._on_message(workbench, {"type": "cancel"}, [])
    settle(made[0])
    made[1].gate.set()
    assert workbench.result["rows"] == [] and workbench.result["error"]["message"] == "The run was cancelled."
    workbench._on_message(workbench, {"type": "run"}, [])
    settle(made[0])
    assert workbench.result["rows"] and workbench.result["prompt"] == "slow" and workbench.result["error"] is None


def test_a_closed_session_is_said_on_the_page(workbench: Workbench, made: Any, monkeypatch: Any) -> None:
    message = ask(workbench, "norms")
    made[0].close()
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr(workbench, "send", lambda content, buffers=None: sent.append(content))
    workbench._on_message(workbench, message, [])
    assert "closed" in sent[0]["error"]
    workbench.state = {**workbench.state, "prompt": "too late"}
    assert workbench.result["error"]["where"] == "run" and "closed" in workbench.result["error"]["message"]


def test_closing_the_session_under_a_queued_run_is_said(made: Any, monkeypatch: Any) -> None:
    session, engine = made
    says = {"where": "run", "index": None, "message": "The session is closed: boot a new one."}
    engine.gate.clear()
    running, queued = (Workbench(session, opening(session, text)) for text in (PROMPT, "later"))
    session.close()
    for workbench in (running, queued):
        assert workbench.result["error"] == says and workbench.jobs["active"] == []
        assert workbench.jobs["last"]["outcome"] == "closed"
    other, engine = fake.session()
    workbench = Workbench(other, opening(other, PROMPT))
    settle(other)
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr(workbench, "send", lambda content, buffers=None: sent.append(content))
    engine.gate.clear()
    workbench._on_message(workbench, ask(workbench, "norms"), [])
    other.close()
    assert [(answer["error"], answer["dropped"]) for answer in sent] == [(says["message"], False)]


def test_saved_javascript_reaches_open_pages(tmp_path: Any, monkeypatch: Any) -> None:
    (tmp_path / "a.js").write_text("1")
    saved = threading.Event()
    monkeypatch.delenv("ANYWIDGET_HMR", raising=False)
    assert esm.watch(saved.set, tmp_path) is None
    monkeypatch.setenv("ANYWIDGET_HMR", "1")
    stop = esm.watch(saved.set, tmp_path)
    assert stop is not None
    assert not saved.wait(0.7)
    (tmp_path / "a.js").write_text("2")
    assert saved.wait(5)
    stop.set()
