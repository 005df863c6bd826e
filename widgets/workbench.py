"""The workbench: one widget, one state, one comm; the kernel side of the page in workbench.js."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import anywidget
import numpy as np
import traitlets
from explorer import Edit, SpecError

from . import cells, data, esm
from .state import State, asks, complete, digest, enabled_edits, spec

log = logging.getLogger(__name__)
TOP = 6  # rows of the prediction table come from the union of both top six


class Workbench(anywidget.AnyWidget):
    """The workbench of one session. `session.explore(prompt)` makes it.

    `state` is all that the user chose, as plain JSON: setting it rebuilds the page, and the page writes it. `result`
    holds the numbers of the last run. The page never waits for the kernel and the kernel never waits for the engine:
    a change of the state only queues a job, the newest job of a kind wins, and what an older one found is dropped.
    """

    _esm = traitlets.Unicode(esm.join("workbench")).tag(sync=True)
    _css = traitlets.Unicode(esm.css("workbench")).tag(sync=True)

    state = traitlets.Dict().tag(sync=True)
    about = traitlets.Dict().tag(sync=True)
    tokens = traitlets.Dict().tag(sync=True)
    result = traitlets.Dict().tag(sync=True)
    jobs = traitlets.Dict({"active": [], "last": None}).tag(sync=True)

    def __init__(self, session: Any, state: Mapping[str, Any], place: Any = None) -> None:
        self._session = session
        self._place = place
        self._asked: dict[str, Any] | None = None
        self._keys: dict[str, str] = {}
        self._arrays = data.ArrayCache()
        self._active: dict[int, tuple[Any, dict[str, Any]]] = {}
        self._submitted = 0
        self._closed = False
        about = describe(session)
        super().__init__(state=state, about=about)
        self.on_msg(self._on_message)
        self._refresh()

    @property
    def spec(self) -> dict[str, list[dict[str, Any]]]:
        """The enabled edits as a spec, as `session.run` takes it."""
        return spec(self.state)

    def handover(self) -> dict[str, Any]:
        """What a workbench made by the next execution of the same cell takes over."""
        return {"opened_with": self.opened_with, "model": self.about["name"], "state": dict(self.state)}

    opened_with: str = ""

    def close(self) -> None:
        """Removes the page and the widget; jobs still queued are cancelled. A second close is fine."""
        if self._closed:
            return
        self._closed = True
        self._cancel()
        cells.forget(self)
        self.on_msg(self._on_message, remove=True)
        self._arrays.clear()
        super().close()

    # State: a change that asks for other numbers queues one run ----------------------------------------------------

    @traitlets.validate("state")
    def _check_state(self, proposal: Any) -> State:
        try:
            return complete(proposal["value"])
        except ValueError as error:
            raise traitlets.TraitError(str(error)) from None

    @traitlets.observe("state")
    def _on_state(self, change: Any) -> None:
        if self._asked is not None:
            self._refresh()

    def _refresh(self) -> None:
        wanted = asks(self.state)
        if wanted != self._asked:
            self._asked = wanted
            self._submit("run", "Run", lambda job: self._run(job, wanted))

    def _run(self, job: Any, wanted: dict[str, Any]) -> None:
        """One clean and one patched run in one batch, in the worker thread."""
        started = time.perf_counter()
        edits = wanted["edits"]
        result: dict[str, Any] = {"rows": [], "edited": bool(edits), "error": None, "keys": {}, "prompt": wanted["prompt"]}
        try:
            self._tokenise(wanted)
            if not self.tokens["prompt"]["tokens"]:
                raise data.Refused("The prompt is empty: type some text and press Enter.")
            built = [Edit(**edit) for _, edit in edits]
            both = self._session.compare(wanted["prompt"], built) if built else None
            clean = both.clean if both else self._session.run(wanted["prompt"])
            result |= self._predictions(clean, both)
            result["keys"] = run_keys(wanted)
            result |= self._difference(wanted["compare"], result["rows"], clean, both)
        except SpecError as error:
            index = edits[error.edit_index][0] if error.edit_index is not None else None
            result["error"] = problem("edit", error, index)
        except (ValueError, data.Refused) as error:
            result["error"] = problem("prompt", error)
        except Exception as error:
            log.exception("the workbench's run failed")
            result["error"] = problem("run", f"The engine could not run this: {error}")
        result["seconds"] = time.perf_counter() - started
        if job.cancelled or self._closed or wanted != self._asked:
            return  # a newer change has already asked for other numbers
        self._keys = result["keys"]
        self.result = result

    def _tokenise(self, wanted: dict[str, Any]) -> None:
        known = self.tokens
        texts = {role: wanted[role] for role in ("prompt", "source")}
        if {role: known[role]["text"] for role in texts if role in known} == texts:
            return
        self.tokens = {
            role: {"text": text, "tokens": [token_row(t) for t in self._session.tokens(text)] if text else []}
            for role, text in texts.items()
        }

    def _predictions(self, clean: Any, both: Any) -> dict[str, Any]:
        if both is None:
            rows = [[text, int(token), prob, prob, 0.0] for text, token, prob, _ in clean.top(TOP)]
            return {"rows": rows, "kl": 0.0}
        rows = [[text, int(token), *data.finite(numbers)] for text, token, *numbers in both.top(TOP)]
        return {"rows": rows, "kl": data.finite([both.kl()])[0]}

    def _difference(self, chosen: list[str | None], rows: list[Any], clean: Any, both: Any) -> dict[str, Any]:
        likeliest = sorted(rows, key=lambda row: row[2], reverse=True)
        tokens = [text if text is not None else rank[1] for text, rank in zip(chosen, likeliest, strict=False)]
        names = [text if text is not None else rank[0] for text, rank in zip(chosen, likeliest, strict=False)]
        try:
            values = both.logit_diff(*tokens) if both else [clean.logit_diff(*tokens)] * 2
        except ValueError as error:
            return {"difference": None, "error": problem("difference", error)}
        return {"difference": {"tokens": names, "values": data.finite(values)}}

    # Arrays: pulled by the views, by key ---------------------------------------------------------------------------

    def _on_message(self, _: Any, message: dict[str, Any], buffers: Any) -> None:
        if message.get("type") == "cancel":
            self._cancel()
        elif message.get("type") == "data":
            self._pull(message)

    def _pull(self, ask: dict[str, Any]) -> None:
        """Answers from what is at hand, or queues a job. `ask` names view, hook, head, of and run; its key is echoed."""
        if ask["run"] != self._keys.get(run_of(ask)):
            return  # the numbers have moved on; the page asks again with the new key
        array = self._at_hand(ask)
        if array is not None:
            self._reply(ask, array)
            return
        label = {"grid": "Norms of every hook"}.get(ask["view"], "Activations")
        wanted = self._asked
        self._submit(f"data {ask['view']}", label, lambda job: self._fetch(job, ask, wanted))

    def _fetch(self, job: Any, ask: dict[str, Any], wanted: Any) -> None:
        try:
            self._capture(job, ask, wanted)
            array = self._at_hand(ask)
        except (ValueError, data.Refused) as error:
            self._reply(ask, None, str(error))
        except Exception as error:
            log.exception("the workbench could not read activations")
            self._reply(ask, None, f"The engine could not read this: {error}")
        else:
            if array is not None and not job.cancelled and ask["run"] == self._keys.get(run_of(ask)):
                self._reply(ask, array)

    def _capture(self, job: Any, ask: dict[str, Any], wanted: Any) -> None:
        """Runs what `ask` needs and keeps it at hand: the clean run alone, or both in one batch."""
        view, hook, prompt, keys = ask["view"], ask["hook"], wanted["prompt"], run_keys(wanted)
        if view == "grid":
            positions = len(self.tokens["prompt"]["tokens"])
            array = data.grid_norms(self._session, prompt, positions, job.progress)
            self._arrays.put(array_key(ask, keys["clean"]), array)
            return
        capture = data.hooks_of(view, hook, self._session)
        if ask["of"] == "clean" or not wanted["edits"]:
            runs = {"clean": self._session.run(prompt, capture=capture)}
        else:
            both = self._session.compare(prompt, [Edit(**edit) for _, edit in wanted["edits"]], capture=capture)
            runs = {"clean": both.clean, "patched": both.patched}
        for of, run in runs.items():
            self._arrays.put(array_key(ask, keys[of]), data.numbers(view, hook, run, self._session))

    def _at_hand(self, ask: dict[str, Any]) -> data.Array | None:
        arrays = {of: self._arrays.get(array_key(ask, key)) for of, key in self._keys.items()}
        if ask["of"] == "change":
            if arrays["clean"] is None or arrays["patched"] is None:
                return None
            # -inf - -inf where both are masked: the masked cells stay what they were.
            with np.errstate(invalid="ignore"):
                change = arrays["patched"] - arrays["clean"]
            array = np.where(np.isneginf(arrays["clean"]), arrays["clean"], change)
        else:
            array = arrays[run_of(ask)]
        if array is None or ask["view"] != "attention":
            return array
        return array[min(max(int(ask["head"]), 0), len(array) - 1)]

    def _reply(self, ask: dict[str, Any], array: data.Array | None, error: str | None = None) -> None:
        if self._closed:
            return
        answer = {"type": "data", "key": ask["key"], "error": error, "shape": list(array.shape) if array is not None else []}
        self.send(answer, buffers=[] if array is None else [np.ascontiguousarray(array, "<f4").data])

    # Jobs: every long thing goes through the session's one worker thread -------------------------------------------

    def _submit(self, slot: str, label: str, work: Callable[[Any], None]) -> None:
        self._submitted += 1
        number = self._submitted
        started = time.time()
        entry = {"id": number, "label": label, "done": 0, "total": 0, "message": "", "started": started}

        def progress(done: int, total: int, message: str = "") -> None:
            entry.update(done=done, total=total, message=message)
            self._show_jobs()

        def finished(job: Any) -> None:
            self._active.pop(number, None)
            outcome = "cancelled" if job.cancelled else "failed" if job.error else "done"
            self._show_jobs({"label": label, "outcome": outcome, "seconds": time.time() - started})

        job = self._session.jobs.submit(work, slot=f"{self.model_id} {slot}", on_progress=progress)
        self._active[number] = (job, entry)
        self._show_jobs()
        job.add_done_callback(finished)

    def _show_jobs(self, last: dict[str, Any] | None = None) -> None:
        if not self._closed:
            active = [dict(entry) for _, entry in list(self._active.values())]
            self.jobs = {"active": active, "last": last or self.jobs["last"]}

    def _cancel(self) -> None:
        for job, _ in list(self._active.values()):
            job.cancel()


def explore(session: Any, prompt: str | None = None) -> Workbench:
    """The workbench of the running cell. Running the cell again closes its earlier one and goes on where that was."""
    prompt = "The Eiffel Tower is in the city of" if prompt is None else prompt
    place, past = cells.claim(session)
    if past and past["opened_with"] == prompt and past["model"] == session.name:
        state = past["state"]
    else:
        state = opening(session, prompt)
    workbench = Workbench(session, state)
    workbench.opened_with = prompt
    place.shown.append(workbench)
    return workbench


def opening(session: Any, prompt: str) -> State:
    """The first page: the prompt's last token and the stream in the middle of the model."""
    streams = [point.name for point in session.hooks if point.component == "resid_post"]
    return complete({"prompt": prompt, "hook": streams[len(streams) // 2]})


def describe(session: Any) -> dict[str, Any]:
    """The model and its hook points for the page: one entry a component, layers filled into the name there."""
    columns: dict[str, dict[str, Any]] = {}
    for point in session.hooks:
        name = point.name if point.layer is None else point.name.replace(f"blocks.{point.layer}.", "blocks.{i}.", 1)
        column = columns.setdefault(
            point.component,
            {
                "component": point.component,
                "group": point.group,
                "name": name,
                "about": point.about,
                "shape": list(point.shape),
                "heads": point.heads,
                "editable": point.editable,
                "derived": bool(point.derived_from),
                "missing": {},
            },
        )
        column["editable"] = column["editable"] or point.editable
        if not point.available:
            column["missing"][str(point.layer)] = point.reason
    grid = [point.name for point in data.grid_points(session)]
    return json.loads(json.dumps({"name": session.name, **session.info, "columns": list(columns.values()), "grid": grid}, default=str))


def token_row(token: Any) -> list[Any]:
    """A token for the page: id, text, and what is special about it."""
    return [int(token.id), token.text, "bos" if token.bos else "special" if token.special else ""]


def run_keys(wanted: dict[str, Any]) -> dict[str, str]:
    """Names of the two runs: equal names, equal numbers."""
    clean = digest(wanted["prompt"])
    return {"clean": clean, "patched": digest(wanted["prompt"], [edit for _, edit in wanted["edits"]]) if wanted["edits"] else clean}


def run_of(ask: dict[str, Any]) -> str:
    """The run whose key an array goes by: a change is the patched run's."""
    return "clean" if ask["of"] == "clean" else "patched"


def array_key(ask: dict[str, Any], run: str) -> str:
    return f"{ask['view']} {ask['hook'] if ask['view'] in ('hook', 'attention') else ''} {run}"


def problem(where: str, what: object, index: int | None = None) -> dict[str, Any]:
    """An error for the page, with the gesture it belongs to."""
    return {"where": where, "index": index, "message": str(what)}


__all__ = ["Workbench", "enabled_edits", "explore"]
