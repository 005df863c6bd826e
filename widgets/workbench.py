"""The workbench: one widget, one state, one comm; the kernel side of the page in workbench.js."""

from __future__ import annotations

import json
import logging
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import traitlets

from explorer import Cancelled, Comparison, Edit, NotFinite, Run, SessionClosed, SpecError
from explorer.threads import sharing_cores

from . import cells, data, esm
from .history import Runs, Steps, taken
from .page import Page
from .state import State, asks, complete, digest, spec
from .words import HOOKS, METRICS, OPS

log = logging.getLogger(__name__)
opened: weakref.WeakSet[Workbench] = weakref.WeakSet()
CLOSED = "The session is closed: boot a new one."
MOVED = "moved"  # the state changes by undo or redo: no step of its own


class Workbench(Page):
    """The workbench of one session. `session.explore(prompt)` makes it.

    `state` is all that the user chose, as plain JSON: setting it rebuilds the page, and the page writes it. `result`
    holds the numbers of the last run. The page never waits for the kernel and the kernel never waits for the engine:
    a change of the state only queues a job, the newest job of a kind wins, and what an older one found is dropped.
    """

    _esm = traitlets.Unicode(esm.join("workbench")).tag(sync=True)

    state = traitlets.Dict().tag(sync=True)
    about = traitlets.Dict().tag(sync=True)
    tokens = traitlets.Dict().tag(sync=True)
    result = traitlets.Dict().tag(sync=True)
    jobs = traitlets.Dict({"active": [], "last": None}).tag(sync=True)
    moves = traitlets.List().tag(sync=True)  # undo, redo and restore, as the page asks for them, each under a number
    steps = traitlets.Dict().tag(sync=True)  # what undo and redo would do next
    history = traitlets.Dict().tag(sync=True)  # how many runs are kept; the page asks for the list when it shows it

    def __init__(
        self, session: Any, state: Mapping[str, Any], steps: Steps | None = None, runs: Runs | None = None
    ) -> None:
        self._session = session
        self._asked: dict[str, Any] = {}
        self._gesture = 0  # the step that it belongs to
        self._waiting = False  # whether a run waits for its turn
        self._answered: tuple[int, dict[str, Any]] = (0, {})  # the same of the numbers shown
        self._keys: dict[str, str] = {}
        self._clean: tuple[Any, str, Run] | None = None  # the engine's model, the prompt and its run
        self._tokenised: tuple[tuple[str, str] | None, dict[str, Any] | None] = (None, None)
        self._arrays = data.ArrayCache()
        self._active: dict[int, tuple[Any, dict[str, Any]]] = {}
        self._submitted = 0
        self._newest: dict[str, int] = {}  # slot -> its last job, of the numbers asked for now
        self._showing = threading.RLock()
        self._closed = False
        self._opened = False
        self._step: str | None = None  # what the step being made is called, where the state alone does not tell
        self._moves = 0  # the last of the page's moves that was made: the page waits for it
        about = describe(session)
        super().__init__(state=state, about=about)
        self._steps = steps or Steps(self.state)
        self._runs = runs or Runs()
        self._opened = True
        self._show_history()
        self.on_msg(self._on_message)
        opened.add(self)
        self._refresh()

    @property
    def spec(self) -> dict[str, list[dict[str, Any]]]:
        """The enabled edits as a spec, as `session.run` takes it."""
        return spec(self.state)

    opened_with: str = ""  # the prompt that `explore` was called with

    def handover(self) -> dict[str, Any]:
        """What a workbench made by the next execution of the same cell takes over."""
        return {
            "opened_with": self.opened_with,
            "model": self.about["name"],
            "state": dict(self.state),
            "steps": self._steps,
            "runs": self._runs,
        }

    def _end(self) -> None:
        opened.discard(self)
        self._cancel()  # jobs still queued
        cells.forget(self)
        self.on_msg(self._on_message, remove=True)
        self._arrays.clear()
        self._clean = None

    # State: a change that asks for other numbers queues one run ----------------------------------------------------

    @traitlets.validate("state")
    def _check_state(self, proposal: Any) -> State:
        try:
            return complete(proposal["value"])
        except ValueError as error:
            raise traitlets.TraitError(str(error)) from None

    @traitlets.observe("state")
    def _on_state(self, change: Any) -> None:
        if not self._opened:
            return
        if self._step != MOVED:
            self._steps.record(self.state, live=self._by_page, name=self._step)
        self._refresh()
        self._show_history()

    def _refresh(self) -> None:
        wanted, gesture = asks(self.state), self._steps.current
        if wanted == self._asked:
            return
        follows = gesture == self._gesture  # a number goes on changing: what runs for its last value is shown too
        self._asked, self._gesture = wanted, gesture
        if not follows:
            self._give_way()
        elif self._waiting:
            return  # for the value that is the latest when its turn comes

        def work(job: Any) -> None:
            self._waiting = False
            gesture = self._gesture  # read first: a change that comes in between is another run's
            self._run(self._asked, gesture)

        def dropped(why: str | None) -> None:
            self._waiting = False
            if why and gesture == self._gesture:
                self._no_result(self._asked, why)

        self._waiting = True
        try:
            self._submit("run", "Run", work, dropped, interrupt=not follows)
        except SessionClosed:
            self._no_result(wanted, CLOSED)

    def _no_result(self, wanted: dict[str, Any], why: str) -> None:
        self._keys = {}
        self.result = blank(wanted) | {"error": problem("run", why)}

    def _run(self, wanted: dict[str, Any], gesture: int) -> None:
        """A clean and a patched run, in the worker thread."""
        started = time.perf_counter()
        edits = wanted["edits"]
        result = blank(wanted)
        try:
            bad_source = self._tokenise(wanted)
            if not self.tokens["prompt"]["tokens"]:
                raise data.Refused("The prompt is empty: type some text and press Enter.")
            result["error"] = bad_source
            clean = self._clean_run(wanted["prompt"])
            both = None
            try:
                changes = [Edit(**edit) for _, edit in edits]
                if clean and changes:
                    both = Comparison(clean, self._session.run(wanted["prompt"], changes))
                elif changes:
                    both = self._session.compare(wanted["prompt"], changes)
                if both:
                    both.patched.logits_at()
            except (SpecError, NotFinite) as error:  # what needs no edit is still shown
                wrong = getattr(error, "edit_index", None)
                both, index = None, edits[wrong][0] if wrong is not None else None
                result |= {"edited": False, "error": bad_source or problem("edit", error, index)}
            clean = both.clean if both else clean or self._session.run(wanted["prompt"])
            result |= data.predictions(clean, both)
            result["keys"] = run_keys(wanted) if both or not edits else {"clean": run_keys(wanted)["clean"]}
            try:
                result["difference"] = data.difference(wanted["compare"], result["rows"], clean, both)
            except ValueError as error:
                result["error"] = result["error"] or problem("difference", error)
        except Cancelled:
            raise
        except (ValueError, data.Refused) as error:
            result["error"] = problem("prompt", error)
        except SessionClosed:
            result["error"] = problem("run", CLOSED)
        except Exception as error:
            log.exception("the workbench's run failed")
            result["error"] = problem("run", f"The engine could not run this: {error}")
        result["seconds"] = time.perf_counter() - started
        if self._closed or gesture != self._gesture:
            return  # a newer change has already asked for other numbers
        self._answered = (gesture, wanted)
        self._keys = result["keys"]
        self.result = result
        state = self.state
        if asks(state) == wanted:
            self._runs.add(state, result, self._steps.current)
            self._show_history()

    def _clean_run(self, prompt: str) -> Run | None:
        """In float32 the clean run alone, made once for as long as the prompt and the engine stay.

        A row depends a little on the batch that it is in: both runs are made alone, so that an edit that does nothing
        changes nothing. In the types narrower than float32 both are made in one batch each time.
        """
        if self._session.info["dtype"] != "float32":
            return None
        model = self._session.model
        if self._clean is None or self._clean[0] is not model or self._clean[1] != prompt:
            self._clean = (model, prompt, self._session.run(prompt))
        return self._clean[2]

    def _tokenise(self, wanted: dict[str, Any]) -> dict[str, Any] | None:
        """Shows the tokens of both texts. What is wrong with the source is returned: the prompt can run without it."""
        prompt, source = texts = (wanted["prompt"], wanted["source"])
        if self._tokenised[0] == texts:
            return self._tokenised[1]
        rows, source_rows, wrong = self._tokens_of(prompt), [], None
        try:
            if source:
                self._session.encode(source)  # refuses what could not run
            source_rows = self._tokens_of(source)
        except ValueError as error:
            wrong = problem("source", str(error).replace("the prompt", "the source"))
        self.tokens = {
            "prompt": {"text": prompt, "tokens": rows},
            "source": {"text": source, "tokens": source_rows},
        }
        self._tokenised = (texts, wrong)
        return wrong

    def _tokens_of(self, text: str) -> list[list[Any]]:
        return [token_row(token) for token in self._session.tokens(text)] if text else []

    # Undo, redo and the history ------------------------------------------------------------------------------------

    def undo(self) -> None:
        """Takes back the last step; without one it does nothing."""
        self._become(self._steps.undo(self.state), MOVED)

    def redo(self) -> None:
        """Does again what the last undo took back."""
        self._become(self._steps.redo(self.state), MOVED)

    @property
    def runs(self) -> list[dict[str, Any]]:
        """The history: every run with what was asked and what it found, newest first, as plain JSON."""
        return self._runs.listed()

    def restore(self, run: int) -> None:
        """Goes back to a run of the history, by its id: one step, which undo takes back."""
        kept = self._runs.get(run)
        self._become(taken(kept.state, self.state), f"restore {kept.name or f'run {run}'}")

    def keep(self, run: int, *, name: str | None = None, pinned: bool | None = None) -> None:
        """Names a run of the history, or pins it: of the others only the latest 100 stay."""
        self._runs.keep(run, name, pinned)
        self._show_history()

    def forget(self, run: int) -> None:
        """Deletes a run from the history."""
        self._runs.forget(run)
        self._show_history()

    def set_state(self, sync_data: dict[str, Any]) -> None:
        """What the page sends: a state, and then the moves that were asked for after it."""
        super().set_state(sync_data)
        for move in sync_data.get("moves", ()):
            if move["id"] <= self._moves:
                continue  # made already: the page sends all that it has no answer to yet
            self._moves = move["id"]
            if move["type"] == "undo":
                self.undo()
            elif move["type"] == "redo":
                self.redo()
            elif self._runs.has(move["run"]):
                self.restore(move["run"])
            else:
                self._become(None, MOVED)  # another view has just deleted it

    def _become(self, state: State | None, step: str) -> None:
        self._step = step
        try:
            if state is not None:
                self.state = state
        finally:
            self._step = None
            self._show_history()

    def _show_history(self) -> None:
        with self._showing:  # the worker thread comes here too
            if not self._closed:
                self.steps = {**self._steps.names, "moves": self._moves}
                self.history = self._runs.summary(self.state)

    # Messages of the page ------------------------------------------------------------------------------------------

    def _on_message(self, _: Any, message: dict[str, Any], buffers: Any) -> None:
        kind, run = message.get("type"), message.get("run", 0)
        if kind == "ping":
            self.send({"type": "pong"})
        elif kind == "cancel":
            self._cancel()
        elif kind == "run":
            self._asked = {}
            self._refresh()
        elif kind == "data":
            self._pull(message)
        elif kind == "hold":
            self._steps.hold(bool(message["on"]))
        elif kind == "history":
            self.send({"type": "history", "key": self.history["key"], "runs": self._runs.listed()})
        elif not self._runs.has(run):
            self._show_history()  # another view has just deleted it
        elif kind == "keep":
            self.keep(run, name=message.get("name"), pinned=message.get("pinned"))
        elif kind == "forget":
            self.forget(run)

    # Arrays: pulled by the views, by key ---------------------------------------------------------------------------

    def _pull(self, ask: dict[str, Any]) -> None:
        """Answers from what is at hand, or queues a job. `ask`: view, hook, head, of and run; its key is echoed."""
        gesture, _ = self._answered
        shown = ask["run"] and ask["run"] == self._keys.get(run_of(ask))
        array = self._at_hand(ask) if shown else None
        if array is not None:
            self._reply(ask, array)
            return
        if not shown or (gesture != self._gesture and ask["run"] != run_keys(self._asked)[run_of(ask)]):
            self._reply(ask, dropped=True)  # the numbers move on; the page asks again with the new key
            return
        label = {"grid": "Norms of every hook"}.get(ask["view"], "Activations")

        def dropped(why: str | None) -> None:
            self._reply(ask, error=why, dropped=why is None)

        try:
            self._submit(f"data {ask['view']}", label, lambda job: self._fetch(job, ask), dropped)
        except SessionClosed:
            self._reply(ask, error=CLOSED)

    def _fetch(self, job: Any, ask: dict[str, Any]) -> None:
        _, wanted = self._answered
        shown = self._keys.get(run_of(ask))
        if shown != ask["run"]:  # a number goes on changing: what is drawn is the run shown now
            self._reply(ask, dropped=True)
            if not shown:
                return
            ask = {**ask, "run": shown, "key": ask["key"].removesuffix(ask["run"]) + shown}
        try:
            self._capture(job, ask, wanted)
            array = self._at_hand(ask) if ask["run"] == self._keys.get(run_of(ask)) else None
        except Cancelled:
            raise
        except SessionClosed:
            self._reply(ask, error=CLOSED)
        except (ValueError, data.Refused) as error:
            self._reply(ask, error=str(error))
        except Exception as error:
            log.exception("the workbench could not read activations")
            self._reply(ask, error=f"The engine could not read this: {error}")
        else:
            self._reply(ask, array, dropped=array is None)

    def _capture(self, job: Any, ask: dict[str, Any], wanted: Any) -> None:
        """Runs what `ask` needs and keeps it at hand: the clean run alone, or both in one batch."""
        session, view, prompt, keys = self._session, ask["view"], wanted["prompt"], run_keys(wanted)

        def keep(of: str, array: data.Array) -> None:
            self._arrays.put(array_key(ask, of, keys), array)

        if view == "grid":
            keep("clean", data.grid_norms(session, prompt, len(self.tokens["prompt"]["tokens"]), job.progress))
            return
        hooks = data.hooks_of(view, ask["hook"], session)
        if ask["of"] == "clean" or not wanted["edits"]:
            keep("clean", data.numbers(view, hooks, session.run(prompt, capture=hooks), session))
            return
        both = session.compare(prompt, [Edit(**edit) for _, edit in wanted["edits"]], capture=hooks)
        keep("clean", data.numbers(view, hooks, both.clean, session))
        keep("patched", data.numbers(view, hooks, both.patched, session))
        keep("change", data.change(view, hooks, both.clean, both.patched, session))

    def _at_hand(self, ask: dict[str, Any]) -> data.Array | None:
        keys = self._keys
        array = self._arrays.get(array_key(ask, ask["of"], keys)) if run_of(ask) in keys else None
        if array is None or ask["view"] != "attention":
            return array
        head = int(ask["head"])
        return data.thumbnails(array) if head < 0 else array[min(head, len(array) - 1)]

    def _reply(
        self, ask: dict[str, Any], array: data.Array | None = None, *, error: str | None = None, dropped: bool = False
    ) -> None:
        """Every ask is answered: with the array, an error, or that it was dropped and may be asked again."""
        if self._closed:
            return
        self.send(*data.answer(ask["key"], array, error=error, dropped=dropped))

    # Jobs: every long thing goes through the session's one worker thread -------------------------------------------

    def _submit(
        self,
        slot: str,
        label: str,
        work: Callable[[Any], None],
        dropped: Callable[[str | None], None],
        interrupt: bool = True,
    ) -> None:
        """Queues `work(job)`. If that raises `Cancelled`, `dropped(why)` is called; newer work is no reason."""
        self._submitted += 1
        number = self._newest[slot] = self._submitted
        started = time.time()
        entry = {"id": number, "label": label, "done": 0, "total": 0, "message": "", "stopped": False}

        def progress(done: int, total: int, message: str = "") -> None:
            entry.update(done=done, total=total, message=message)
            self._show_jobs()

        def finished(job: Any) -> None:
            self._active.pop(number, None)
            cancelled, why = isinstance(job.error, Cancelled), None
            if cancelled and entry["stopped"]:
                why = "The run was cancelled." if slot == "run" else "Cancelled."
            elif cancelled and self._newest.get(slot) == number:
                why = CLOSED  # nobody else cancels the newest job
            outcome = "closed" if why == CLOSED else "cancelled" if cancelled else "failed" if job.error else "done"
            last = {"label": label, "outcome": outcome, "seconds": time.time() - started}
            self._show_jobs(last if why or not cancelled else None)
            if cancelled and not self._closed:
                dropped(why)

        def shared(job: Any) -> None:
            with sharing_cores():  # the page draws meanwhile
                work(job)

        slot_id = f"{self.model_id} {slot}"
        job = self._session.jobs.submit(shared, slot=slot_id, interrupt=interrupt, on_progress=progress)
        self._active[number] = (job, entry)
        self._show_jobs()
        job.add_done_callback(finished)

    def _show_jobs(self, last: dict[str, Any] | None = None) -> None:
        with self._showing:  # two threads come here, and what is shown last must be the latest
            if not self._closed:
                active = [dict(entry) for _, entry in list(self._active.values())]
                self.jobs = {"active": active, "last": last or self.jobs["last"]}

    def _give_way(self) -> None:
        """Cancels every job of the numbers asked for before: the next ones must not wait for them."""
        obsolete, self._active, self._newest = self._active, {}, {}
        for job, _ in list(obsolete.values()):
            job.cancel()

    def _cancel(self) -> None:
        for job, entry in list(self._active.values()):
            entry["stopped"] = True
            job.cancel()


def explore(session: Any, prompt: str | None = None) -> Workbench:
    """The workbench of the running cell. Running the cell again closes its earlier one and goes on where that was."""
    prompt = "The Eiffel Tower is in the city of" if prompt is None else prompt
    place, past = cells.claim(session)
    if past and past["model"] != session.name:
        past = None
    if past and past["opened_with"] == prompt:
        workbench = Workbench(session, past["state"], past["steps"], past["runs"])
    else:  # another prompt in the cell is another page; what was found before stays
        workbench = Workbench(session, opening(session, prompt), runs=past["runs"] if past else None)
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
                **dict(zip(("axes", "formula", "place"), HOOKS[point.component], strict=True)),
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
    words = {"ops": OPS, "metrics": METRICS}
    about = {"name": session.name, **session.info, "columns": list(columns.values()), "grid": grid, "words": words}
    return json.loads(json.dumps(about, default=str))


def token_row(token: Any) -> list[Any]:
    """A token for the page: id, text, and what is special about it."""
    return [int(token.id), token.text, "bos" if token.bos else "special" if token.special else ""]


def blank(wanted: dict[str, Any]) -> dict[str, Any]:
    """A result without numbers."""
    edited = bool(wanted["edits"])
    return {"prompt": wanted["prompt"], "edited": edited, "rows": [], "difference": None, "keys": {}, "error": None}


def run_keys(wanted: dict[str, Any]) -> dict[str, str]:
    """Names of the two runs: equal names, equal numbers."""
    clean = digest(wanted["prompt"])
    return {
        "clean": clean,
        "patched": digest(wanted["prompt"], [edit for _, edit in wanted["edits"]]) if wanted["edits"] else clean,
    }


def run_of(ask: dict[str, Any]) -> str:
    """The run whose key an array goes by: a change is the patched run's."""
    return "clean" if ask["of"] == "clean" else "patched"


def array_key(ask: dict[str, Any], of: str, keys: dict[str, str]) -> str:
    """Where an array is kept: all heads of a hook together, clean arrays for as long as the prompt stays."""
    return f"{ask['view']} {ask['hook']} {of} {keys['clean' if of == 'clean' else 'patched']}"


def problem(where: str, what: object, index: int | None = None) -> dict[str, Any]:
    """An error for the page, with the gesture it belongs to."""
    return {"where": where, "index": index, "message": str(what)}


def reload() -> None:
    """Sends the JavaScript and CSS as they are on disk to every open page."""
    for workbench in list(opened):
        workbench._esm = esm.join("workbench")
        workbench._css = esm.css("workbench")


esm.watch(reload)
