"""What can be taken back, and what was found: the steps of a workbench for undo and redo, and its runs."""

from __future__ import annotations

import copy
import itertools
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .state import EXPERIMENT, SCREEN, SELECTION, State, digest, enabled_edits, spec

STEPS = 200
RUNS = 100  # beside the pinned ones
PAUSE = 1.0  # seconds; a number that changes again within them is still the same gesture
AMOUNTS = ("factor", "value")
_ids = itertools.count(1)  # of steps: one of its own also where they outlive the workbench


@dataclass
class Page:
    """The state after a step, and what the step did."""

    id: int
    state: State
    name: str = ""
    amount: str | None = None  # the number that the step changed, if it did nothing else
    when: float = 0.0


class Steps:
    """The pages that undo and redo go through.

    A step is a change of the experiment: the prompts, the edits, the compared tokens. What only changes how one looks
    at it (the chosen tokens, hook and heads; the tab, the run and the head shown; what stands in the form) is no step,
    and does not cost the steps that could be redone: looking around is safe. Undo and redo bring the tokens, hook and
    heads back with the experiment, as they were last seen there, because a step is understood where it was made; the
    tab and the form stay. The start alone is kept whole: undo back to it gives the first page again. Only how large the
    page is stays even then.
    """

    def __init__(self, first: State) -> None:
        self._pages = [Page(next(_ids), copy.deepcopy(first))]
        self._at = 0
        self._held = False

    @property
    def current(self) -> int:
        """A name for the step that led to the page shown; a gesture keeps it until it ends."""
        return self._pages[self._at].id

    @property
    def names(self) -> dict[str, str | None]:
        """What the next undo and the next redo would do; None where there is nothing."""
        after = self._pages[self._at + 1 :]
        return {"undo": self._pages[self._at].name if self._at else None, "redo": after[0].name if after else None}

    def hold(self, held: bool) -> None:
        """A slider is held: what happens to its number until it is let go is one gesture, however long it takes."""
        self._held = held
        if held:
            self._pages[self._at].amount = None

    def record(self, state: State, *, live: bool = False, name: str | None = None) -> None:
        """Takes note of a new state. `live` changes may come many times in one gesture."""
        here, state = self._pages[self._at], copy.deepcopy(state)
        if part(state, EXPERIMENT) == part(here.state, EXPERIMENT):
            if self._at:
                here.state = state
            return
        now, amount = time.monotonic(), amount_changed(here.state, state) if live else None
        same = amount is not None and amount == here.amount and self._at + 1 == len(self._pages)
        if same and now - here.when < (float("inf") if self._held else PAUSE):
            here.state, here.when = state, now
            return
        self._pages[self._at + 1 :] = [Page(next(_ids), state, name or describe(here.state, state), amount, now)]
        self._pages = self._pages[-STEPS - 1 :]
        self._at = len(self._pages) - 1

    def undo(self, now: State) -> State | None:
        """The state one step back from `now`; None where there is none."""
        return self._move(self._at - 1, now)

    def redo(self, now: State) -> State | None:
        return self._move(self._at + 1, now)

    def _move(self, to: int, now: State) -> State | None:
        if not 0 <= to < len(self._pages):
            return None
        whole = 0 in (to, self._at)
        self._at = to
        page = self._pages[to]
        page.amount = None  # what comes next is another gesture
        return {**copy.deepcopy(page.state), **part(now, SCREEN)} if whole else taken(page.state, now)


def part(state: State, keys: tuple[str, ...]) -> dict[str, Any]:
    return {key: state[key] for key in keys}


def taken(past: State, now: State) -> State:
    """`now` with the experiment and the selection of `past`."""
    return {**now, **copy.deepcopy(part(past, EXPERIMENT + SELECTION))}


def amount_changed(before: State, after: State) -> str | None:
    """Which number of which edit changed, if nothing else did: a slider or a number field sends it many times."""
    if any(before[key] != after[key] for key in EXPERIMENT if key != "edits"):
        return None
    if len(before["edits"]) != len(after["edits"]):
        return None
    changed = [(i, a, b) for i, (a, b) in enumerate(zip(before["edits"], after["edits"], strict=True)) if a != b]
    if len(changed) != 1:
        return None
    [(index, old, new)] = changed
    keys = [key for key in old.keys() | new.keys() if old.get(key) != new.get(key)]
    return f"{keys[0]} of edit {index + 1}" if len(keys) == 1 and keys[0] in AMOUNTS else None


def describe(before: State, after: State) -> str:
    """A step in a few words, as they follow "Undo:"."""
    changed = [key for key in EXPERIMENT if before[key] != after[key]]
    if changed == ["edits"]:
        return _edits_changed(before["edits"], after["edits"])
    if "prompt" in changed:
        return "change the prompt" if "source" not in changed else "change both prompts"
    return "change the source" if "source" in changed else "compare other tokens"


def _edits_changed(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> str:
    if len(after) != len(before):
        verb, count = ("add", "remove")[len(after) < len(before)], abs(len(after) - len(before))
        return f"{verb} edit" if count == 1 else f"{verb} {count if after else 'all'} edits"
    changed = [i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
    if len(changed) > 1:
        return "reorder edits" if all(edit in after for edit in before) else "change edits"
    [index] = changed
    old, new = before[index], after[index]
    keys = [key for key in old.keys() | new.keys() if old.get(key) != new.get(key)]
    if keys == ["enabled"]:
        return f"switch edit {index + 1} {'on' if new['enabled'] else 'off'}"
    return f"change {keys[0]} of edit {index + 1}" if len(keys) == 1 else f"change edit {index + 1}"


@dataclass
class Kept:
    """A run: what was asked, and what it found."""

    id: int
    key: str
    step: int
    state: State
    found: dict[str, Any]
    name: str = ""
    pinned: bool = False
    when: float = field(default_factory=time.time)


class Runs:
    """The runs of a workbench, oldest first: equal questions are one run, and of a gesture only the last is kept."""

    def __init__(self) -> None:
        self._ids = itertools.count(1)
        self._runs: list[Kept] = []
        self._changes = 0
        self._lock = threading.Lock()  # the worker thread adds, the kernel's main thread does the rest

    def add(self, state: State, result: Mapping[str, Any], step: int) -> None:
        """Keeps what a run of `state` found, unless it found nothing that could be compared."""
        if not result["rows"] or (result["error"] and result["error"]["where"] == "edit"):
            return
        found = {key: copy.deepcopy(result.get(key)) for key in ("rows", "difference", "kl", "edited", "seconds")}
        key = question(state)
        with self._lock:
            self._changes += 1
            last = self._runs[-1] if self._runs else None
            replaced = None
            if last and last.step == step and last.key != key and not (last.pinned or last.name):
                replaced = self._runs.pop()
            same = next((run for run in self._runs if run.key == key), None)
            if same:
                same.found = found
                return
            number = replaced.id if replaced else next(self._ids)
            self._runs.append(Kept(number, key, step, copy.deepcopy(state), found))
            loose = [run for run in self._runs if not run.pinned]
            for run in loose[: max(0, len(loose) - RUNS)]:
                self._runs.remove(run)

    def get(self, number: int) -> Kept:
        for run in self._runs:
            if run.id == number:
                return run
        raise KeyError(f"the history has no run {number}; it has {[run.id for run in self._runs]}")

    def has(self, number: Any) -> bool:
        return any(run.id == number for run in self._runs)

    def keep(self, number: int, name: str | None = None, pinned: bool | None = None) -> None:
        with self._lock:
            run = self.get(number)
            run.name = run.name if name is None else name.strip()[:120]
            run.pinned = run.pinned if pinned is None else pinned
            self._changes += 1

    def forget(self, number: int) -> None:
        with self._lock:
            self._runs.remove(self.get(number))
            self._changes += 1

    def summary(self, state: State) -> dict[str, Any]:
        """What the page needs to know before it asks for the list; `key` changes with the list."""
        key, runs = question(state), list(self._runs)
        shown = next((run.id for run in runs if run.key == key), None)
        return {"count": len(runs), "shown": shown, "key": self._changes}

    def listed(self) -> list[dict[str, Any]]:
        """The runs as plain JSON, newest first."""
        return [
            {
                "id": run.id,
                "name": run.name,
                "pinned": run.pinned,
                "when": run.when,
                "about": about(run.state),
                **copy.deepcopy(part(run.state, ("prompt", "source"))),
                "spec": spec(copy.deepcopy(run.state)),
                **copy.deepcopy(run.found),
            }
            for run in reversed(list(self._runs))
        ]


def question(state: State) -> str:
    """A short name for what decides the numbers: equal names, equal runs. The source counts where an edit reads it."""
    return digest(state["prompt"], state["compare"], [edit for _, edit in enabled_edits(state)])


def about(state: State) -> str:
    """The edits of a run in a line: "patch blocks.12.hook_out at 9"."""
    return "; ".join(_edit_in_words(edit) for _, edit in enabled_edits(state)) or "no edits"


def _edit_in_words(edit: dict[str, Any]) -> str:
    words = f"{edit['op']} {edit['hook']}"
    for key in AMOUNTS:
        if key in edit:
            words += f" {'by ' if key == 'factor' else ''}{_short(edit[key], 'numbers')}"
    if "pos" in edit:
        words += f" at {_short(edit['pos'], 'tokens')}"
    return words + (f" head {_short(edit['head'], 'heads')}" if "head" in edit else "")


def _short(value: Any, many: str) -> str:
    if not isinstance(value, list):
        return f"{value:g}" if isinstance(value, float) else str(value)
    return ", ".join(_short(item, many) for item in value) if len(value) <= 4 else f"{len(value)} {many}"
