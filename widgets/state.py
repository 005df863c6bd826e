"""The workbench's state: plain JSON, its defaults, and the part of it that asks for a run."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

State = dict[str, Any]

TABS = ("norms", "hook", "attention")
RUNS = ("clean", "patched", "change")
GRIDS = ("components", "heads")
PLACE = ("scale", "row", "col")

# The whole page follows from these fields. The page and Python write them; results never do.
DEFAULTS: State = {
    "prompt": "",
    "source": "",  # the second prompt, which patches read from; empty: there is none
    "positions": [],  # the selected tokens; empty: the last one
    "source_positions": [],  # the selected tokens of the source; empty: the same as `positions`
    "hook": "",
    "hooks": [],  # all hooks of a chosen layer or component; they count while `hook` is one of them
    "heads": [],  # the selected heads of the hook; empty: all
    "edits": [],  # each an edit as JSON, with "enabled"
    "compare": [None, None],  # the two tokens of the logit difference; None: the two likeliest of the clean run
    "grid": "components",  # what the hook grid has across: components, or the heads of one
    "tab": "norms",
    "of": "patched",  # which run the heatmap shows
    "head": 0,  # the attention head shown
    "lines": False,  # attention as lines from the selected token, not as a map
    "zoom": {},  # of one map, by the page's name for it: {"map", "scale", "row", "col"}; empty: all maps are whole
    "table": False,  # the map as a table of numbers
    "projector": False,  # one and a half times as large, for a room
    "form": {"op": "suppress", "amount": "", "tokens": "", "source_tokens": ""},  # empty texts follow the selection
}
# A change of these is a step for undo and redo. The rest is how one looks at the experiment, and never a step.
EXPERIMENT = ("prompt", "source", "edits", "compare")
SCREEN = ("projector",)  # and no step, not even one back to the start, changes these
SELECTION = ("positions", "source_positions", "hook", "hooks", "heads")
EDIT_KEYS = {"hook", "op", "pos", "head", "value", "factor", "source", "source_pos", "phase", "enabled"}


def complete(raw: Mapping[str, Any]) -> State:
    """A full state from a partial one; `ValueError` names what is wrong with it."""
    unknown = set(raw) - set(DEFAULTS)
    if unknown:
        raise ValueError(f"workbench.state has no {sorted(unknown)}; it has {sorted(DEFAULTS)}")
    state = copy.deepcopy(DEFAULTS) | copy.deepcopy(dict(raw))
    for key, default in DEFAULTS.items():
        if not isinstance(state[key], type(default)):
            raise ValueError(f"workbench.state[{key!r}] must be a {type(default).__name__}, not {state[key]!r}")
    for key in ("positions", "source_positions", "heads"):
        if not all(type(item) is int for item in state[key]):
            raise ValueError(f"workbench.state[{key!r}] must hold whole numbers, not {state[key]!r}")
    if not all(isinstance(hook, str) for hook in state["hooks"]):
        raise ValueError(f"workbench.state['hooks'] must hold names of hooks, not {state['hooks']!r}")
    if len(state["compare"]) != 2 or not all(item is None or isinstance(item, str) for item in state["compare"]):
        raise ValueError("workbench.state['compare'] must hold two tokens, each a string or None")
    for key, allowed in (("tab", TABS), ("of", RUNS), ("grid", GRIDS)):
        if state[key] not in allowed:
            raise ValueError(f"workbench.state[{key!r}] must be one of {', '.join(allowed)}, not {state[key]!r}")
    zoom = state["zoom"]
    if zoom and not (
        set(zoom) == {"map", *PLACE}
        and isinstance(zoom["map"], str)
        and all(type(zoom[key]) in (int, float) and abs(zoom[key]) < 1e9 for key in PLACE)
    ):
        raise ValueError(f"workbench.state['zoom'] must be empty or hold map, scale, row and col, not {zoom!r}")
    state["form"] = DEFAULTS["form"] | state["form"]
    for edit in state["edits"]:
        if not isinstance(edit, dict) or not isinstance(edit.get("hook"), str) or not isinstance(edit.get("op"), str):
            raise ValueError(f"workbench.state['edits'] must hold edits, each with a hook and an op, not {edit!r}")
        if set(edit) - EDIT_KEYS:
            raise ValueError(f"an edit in workbench.state has unknown keys {sorted(set(edit) - EDIT_KEYS)}")
    json.dumps(state, allow_nan=False)  # plain JSON, or a clear error here rather than in the page
    return state


def enabled_edits(state: State) -> list[tuple[int, dict[str, Any]]]:
    """The edits that are switched on, each with its place in the list."""
    return [
        (index, {key: value for key, value in edit.items() if key != "enabled" and value is not None})
        for index, edit in enumerate(state["edits"])
        if edit.get("enabled", True)
    ]


def spec(state: State) -> dict[str, list[dict[str, Any]]]:
    """The edits that are switched on as a spec: `{hook: [edit, ...]}`."""
    out: dict[str, list[dict[str, Any]]] = {}
    for _, edit in enabled_edits(state):
        out.setdefault(edit["hook"], []).append({key: value for key, value in edit.items() if key != "hook"})
    return out


def asks(state: State) -> dict[str, Any]:
    """What decides the numbers: two states that ask the same need one run."""
    return {key: state[key] for key in ("prompt", "source", "compare")} | {"edits": enabled_edits(state)}


def digest(*parts: Any) -> str:
    """A short name for JSON data; views ask for arrays by it."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def selection(positions: Sequence[int], count: int) -> list[int]:
    """The tokens selected in a prompt of `count` tokens: those that exist, else the last one."""
    return [p for p in positions if 0 <= p < count] or ([count - 1] if count else [])
