"""The workbench's views as widgets of their own, on plain data: to put together, and to link to each other."""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np
import torch
import traitlets

from explorer import Comparison, NotFinite, Run, SpecError
from explorer.given import plain, plural, short
from explorer.plan import Plan
from explorer.specs import Edit, parse, to_json

from . import data, esm
from .page import Page
from .state import DEFAULTS, enabled_edits, spec
from .words import METRICS
from .workbench import describe, opening, problem, token_row

CHECKED_AGAINST = ("tokens", "hook")
INLINE = 2 << 20  # bytes of arrays that travel with a widget: larger ones are asked for by the page
opened: weakref.WeakSet[View] = weakref.WeakSet()


class Refusal(traitlets.TraitError, ValueError):
    """What was given cannot be shown: one sentence says why."""


class Passing(threading.local):
    """A change on its way through linked views, which get it one trait at a time.

    A view that follows may hold the new hook and still the heads of the one before. To drop those at once would go back
    along the links, against the heads that are on their way: it drops what does not fit when the change is through.
    """

    first: Any = None  # the view where the change began, which holds all of it

    @contextmanager
    def begin(self, view: Any) -> Iterator[None]:
        if self.first is not None:
            yield
            return
        self.first, self.later = view, list[Callable[[], None]]()
        try:
            yield
        finally:
            self.first = None
            for drop in self.later:
                drop()

    def follows(self, view: Any) -> bool:
        """Whether the view changes because another one did."""
        return self.first is not None and self.first is not view

    def drop(self, view: Any, drop: Callable[[], None]) -> None:
        if self.follows(view):
            self.later.append(drop)
        else:
            drop()


passing = Passing()


def drops(name: str) -> Callable[[Callable[[Any], None]], Any]:
    """What no longer fits when the trait `name` has changed is dropped by this method."""
    return lambda method: traitlets.observe(name)(lambda view, _: passing.drop(view, lambda: method(view)))


class View(Page):
    """What the views share: the state that no other trait holds, the arrays that the page draws, and a clean end."""

    _module: str
    state = traitlets.Dict().tag(sync=True)  # how the page is looked at: plain JSON, as the workbench's
    about = traitlets.Dict().tag(sync=True)
    result = traitlets.Dict().tag(sync=True)
    arrays = traitlets.Dict().tag(sync=True)

    def __init__(self, look: Mapping[str, Any], **given: Any) -> None:
        self._held: dict[str, data.Array] = {}
        self._shown = 0
        super().__init__(state=copy.deepcopy(DEFAULTS | dict(look)), **given)
        self._closed = False
        self.on_msg(self._on_message)
        opened.add(self)

    def _end(self) -> None:
        opened.discard(self)
        self.on_msg(self._on_message, remove=True)
        self._held = {}

    def set_state(self, sync_data: dict[str, Any]) -> None:
        """What the page sends: first what the rest is checked against, also where links pass it on."""
        super().set_state(dict(sorted(sync_data.items(), key=lambda item: item[0] not in CHECKED_AGAINST)))

    def notify_change(self, change: Any) -> None:
        with passing.begin(self):
            super().notify_change(change)

    @contextmanager
    def hold_trait_notifications(self) -> Iterator[None]:
        """Traits changed in here are checked, and told of, together at its end."""
        with passing.begin(self), super().hold_trait_notifications():
            yield

    def _hold(self, arrays: dict[str, data.Array]) -> None:
        """Shows other arrays, by name: 0 or a head."""
        self._held = arrays
        self._shown += 1
        here = sum(array.nbytes for array in arrays.values()) <= INLINE
        with self.hold_sync():
            self.arrays = {n: {"shape": list(a.shape), "bytes": data.raw(a)} for n, a in arrays.items()} if here else {}
            self.result = {"keys": {"clean": str(self._shown)}}

    def _on_message(self, _: Any, message: dict[str, Any], buffers: Any) -> None:
        if message.get("type") == "data":
            array = self._held.get(str(message["head"]))
            self.send(*data.answer(message["key"], array, dropped=array is None))


class _Tokens(traitlets.HasTraits):
    """Tokens, and the positions chosen in them."""

    tokens = traitlets.List().tag(sync=True)
    positions = traitlets.List().tag(sync=True)

    @traitlets.validate("tokens")
    def _check_tokens(self, proposal: Any) -> list[list[Any]]:
        return token_rows(proposal["value"])

    @traitlets.validate("positions")
    def _check_positions(self, proposal: Any) -> list[int]:
        return places(proposal["value"], len(self.tokens), "positions", "tokens")

    @drops("tokens")
    def _drop_positions(self) -> None:
        self.positions = [p for p in self.positions if p < len(self.tokens)]


class _Hooks(traitlets.HasTraits):
    """A hook of a session's model, and heads chosen in it."""

    hook = traitlets.Unicode().tag(sync=True)
    heads = traitlets.List().tag(sync=True)
    _session: Any

    @traitlets.validate("hook")
    def _check_hook(self, proposal: Any) -> str:
        return served(self._session, proposal["value"])

    @traitlets.validate("heads")
    def _check_heads(self, proposal: Any) -> list[int]:
        return places(proposal["value"], self._head_count, "heads", f"heads of {self.hook}")

    @drops("hook")
    def _drop_heads(self) -> None:
        self.heads = [head for head in self.heads if head < self._head_count]

    @property
    def _head_count(self) -> int:
        return self._session.hooks[self.hook].heads or 0


class Heatmap(View):
    """Any numbers in rows and columns, as a map on a canvas.

    Colours are zero-centred where a number is below zero; NaN and infinities are marks. A click on a cell, or Enter,
    chooses its row and its column.

    Args:
        values: (rows, columns) numbers, a list of lists, an array or a tensor; kept as float32.
        rows: a label for each row, or the Tokens of a prompt; None numbers them.
        columns: the same for columns.
        title: a line above the map.
        unit: what the numbers are, beside the scale.

    Traits that can be set, observed and linked: those above (change `values` and its labels together in
    `with heatmap.hold_trait_notifications():`), and
        selected_rows, selected_columns: lists of ints, from 0.
    """

    _module = "plainmap"
    _esm = traitlets.Unicode(esm.join("plainmap")).tag(sync=True)
    values = traitlets.Any()
    rows = traitlets.List(None, allow_none=True).tag(sync=True)
    columns = traitlets.List(None, allow_none=True).tag(sync=True)
    title = traitlets.Unicode().tag(sync=True)
    unit = traitlets.Unicode().tag(sync=True)
    selected_rows = traitlets.List().tag(sync=True)
    selected_columns = traitlets.List().tag(sync=True)

    def __init__(
        self,
        values: Any,
        rows: Sequence[Any] | None = None,
        columns: Sequence[Any] | None = None,
        title: str = "",
        unit: str = "",
        *,
        selected_rows: Sequence[int] = (),
        selected_columns: Sequence[int] = (),
    ) -> None:
        super().__init__(
            {"tab": "plain"},
            values=numbers(values, ("rows", "columns")),
            rows=labels(rows, "rows"),
            columns=labels(columns, "columns"),
            title=title,
            unit=unit,
            selected_rows=list(selected_rows),
            selected_columns=list(selected_columns),
        )

    @traitlets.validate("values")
    def _check_values(self, proposal: Any) -> data.Array:
        values = numbers(proposal["value"], ("rows", "columns"))
        for side, name in enumerate(("rows", "columns")):
            fits(getattr(self, name), values.shape[side], name, name[:-1])
        return values

    @traitlets.validate("rows", "columns")
    def _check_labels(self, proposal: Any) -> list[str] | None:
        name = proposal["trait"].name
        found = labels(proposal["value"], name)
        fits(found, np.shape(self.values)[name == "columns"], name, name[:-1])
        return found

    @traitlets.validate("selected_rows", "selected_columns")
    def _check_selected(self, proposal: Any) -> list[int]:
        name = proposal["trait"].name
        side = name.removeprefix("selected_")
        return places(proposal["value"], np.shape(self.values)[side == "columns"], name, side)

    @traitlets.observe("values")
    def _on_values(self, _: Any) -> None:
        with self.hold_sync():
            self.about = {"columns": [], "rows": len(self.values)}
            self._hold({"0": self.values})

    @drops("values")
    def _drop_selected(self) -> None:
        rows, columns = self.values.shape
        self.selected_rows = [row for row in self.selected_rows if row < rows]
        self.selected_columns = [column for column in self.selected_columns if column < columns]


class TokenPicker(View, _Tokens):
    """The tokens of a prompt, to choose from by mouse, touch, keys, words, or by finding text.

    Args:
        tokens: what `session.tokens(prompt)` gives, or texts.
        positions: those chosen at first.

    Traits that can be set, observed and linked:
        positions: list of ints, from 0, in order; none may be chosen.
        tokens: `[id, text, "bos" | "special" | ""]` each; set as above.
    """

    _module = "tokenpicker"
    _esm = traitlets.Unicode(esm.join("tokenpicker")).tag(sync=True)

    def __init__(self, tokens: Sequence[Any], positions: Sequence[int] = ()) -> None:
        super().__init__({}, tokens=token_rows(tokens), positions=list(positions))


class HookPicker(View, _Hooks):
    """The grid of a model's hooks, layers by components, to choose from.

    Args:
        session: an open session; what it cannot serve is dimmed, with the reason.
        hook: the one chosen at first: a name or an alias. None: the stream in the middle of the model.
        heads: the heads chosen at first.

    Traits that can be set, observed and linked:
        hook: canonical name.
        hooks: all of a layer or a component that a header chose, `hook` among them; else empty.
        heads: list of ints: query heads, key-value heads on k, rot_k and v; empty means all.
    """

    _module = "hookpicker"
    _esm = traitlets.Unicode(esm.join("hookpicker")).tag(sync=True)
    hooks = traitlets.List().tag(sync=True)

    def __init__(self, session: Any, hook: str | None = None, heads: Sequence[int] = ()) -> None:
        self._session = session
        super().__init__({}, about=describe(session), hook=first_hook(session, hook), heads=list(heads))

    @traitlets.validate("hooks")
    def _check_hooks(self, proposal: Any) -> list[str]:
        return [served(self._session, name) for name in proposal["value"]]

    @drops("hook")
    def _drop_hooks(self) -> None:
        if self.hook not in self.hooks:
            self.hooks = []


class SpecEditor(View, _Hooks, _Tokens):
    """The list of edits of a spec: add, change, move, duplicate, switch off, remove.

    Args:
        session: an open session; edits are checked against its model.
        spec: a spec in any form that `session.run` takes.
        tokens: of the prompt that the spec is for, as for `TokenPicker`; positions are checked against them, and new
            edits go to `positions`. Without them new edits go to all positions.
        hook: where the next edit goes.
        source: a second prompt, which new patches read from.

    Traits that can be set, observed and linked:
        spec: `{hook: [edit, ...]}`, JSON that `session.run` takes: the edits that are switched on. While the page holds
            an edit that the model cannot take it stays as it was, and the page says why at the edit. Setting it
            sets the whole list: edits that are switched off go.
        hook, heads, positions: where the next edit goes, as in `HookPicker` and `TokenPicker`.
        tokens, source: as above.
    """

    _module = "speceditor"
    _esm = traitlets.Unicode(esm.join("speceditor")).tag(sync=True)
    spec = traitlets.Any()
    edits = traitlets.List().tag(sync=True)  # the page's list, with those that are switched off
    source = traitlets.Unicode().tag(sync=True)

    def __init__(
        self,
        session: Any,
        spec: Any = None,
        tokens: Sequence[Any] | None = None,
        *,
        hook: str | None = None,
        positions: Sequence[int] = (),
        source: str = "",
    ) -> None:
        self._session = session
        rows = [] if tokens is None else token_rows(tokens)
        given = self._read(spec, len(rows))
        super().__init__(
            {},
            about=describe(session),
            result={"error": None},
            tokens=rows,
            positions=list(positions),
            hook=first_hook(session, hook),
            source=source,
            spec=given,
            edits=listed(given),
        )

    @traitlets.validate("tokens")
    def _check_tokens(self, proposal: Any) -> list[list[Any]]:
        return token_rows(proposal["value"]) if proposal["value"] else []

    @traitlets.validate("spec")
    def _check_spec(self, proposal: Any) -> dict[str, list[dict[str, Any]]]:
        return self._read(proposal["value"], len(self.tokens))

    @traitlets.observe("spec")
    def _on_spec(self, _: Any) -> None:
        if self.spec != spec({"edits": self.edits}):
            self.edits = listed(self.spec)

    @traitlets.observe("edits", "tokens")
    def _on_edits(self, change: Any) -> None:
        """The spec follows the page, unless the model cannot take what is there."""
        on = enabled_edits({"edits": self.edits})
        error = None
        try:
            found = self._json([Edit(**edit) for _, edit in on], len(self.tokens))
            if change["name"] == "edits" or self.result["error"]:  # or the spec had stayed behind
                self.spec = found
        except SpecError as refused:
            wrong = refused.edit_index
            error = problem("edit", refused, None if wrong is None else on[wrong][0])
        self.result = {"error": error}

    def _read(self, given: Any, count: int) -> dict[str, list[dict[str, Any]]]:
        try:
            return self._json(given, count)
        except SpecError as error:
            refuse(error)

    def _json(self, given: Any, count: int) -> dict[str, list[dict[str, Any]]]:
        """A spec as JSON with canonical names. `SpecError` for one that would not run on a prompt of `count` tokens."""
        session = self._session
        edits = parse(given)
        if count:
            Plan(session.hooks, session.model.dtype, session.encode).add((0,) * count, edits)
        for index, edit in enumerate(edits):
            if not session.hooks.require(edit.hook).editable:
                raise SpecError(f"{edit.hook} can be captured but not edited", index)
        named = [replace(edit, hook=session.hooks.require(edit.hook).name) for edit in edits]
        return {hook: e if isinstance(e, list) else [e] for hook, e in to_json(named).items()}


class LogitCompare(View):
    """The likeliest next tokens of one run or two, and the logit difference of two tokens.

    Args:
        found: what `session.compare` gives, or a Run. The session may be closed afterwards.
        compare: the two tokens whose logits are compared: texts of one token; None for the likeliest and the second.

    The trait `compare` can be set, observed and linked. `difference` holds the numbers.
    """

    _module = "logitcompare"
    _esm = traitlets.Unicode(esm.join("logitcompare")).tag(sync=True)
    compare = traitlets.List([None, None]).tag(sync=True)

    def __init__(self, found: Any, compare: Sequence[str | None] = (None, None)) -> None:
        if not isinstance(found, (Comparison, Run)):
            refuse(f"LogitCompare takes what session.compare(...) or session.run(...) gives, not {short(found)}")
        both = found if isinstance(found, Comparison) else None
        self._runs: Any = (both.clean if both else found, both)
        try:
            shown = data.predictions(*self._runs) | {"edited": both is not None, "keys": {}, "error": None}
        except NotFinite as error:
            refuse(error)
        self._rows = shown["rows"]
        about = {"words": {"metrics": METRICS}}
        super().__init__({}, about=about, result=shown, compare=list(compare))
        self._on_compare(None)

    @property
    def difference(self) -> tuple[float, float] | None:
        """logit(first) - logit(second), clean and patched; None where a text on the page is no token."""
        found = self.result["difference"]
        return found and tuple(found["values"])

    def _end(self) -> None:
        super()._end()
        self._runs = (None, None)

    @traitlets.validate("compare")
    def _check_compare(self, proposal: Any) -> list[str | None]:
        two = proposal["value"]
        if len(two) != 2 or not all(text is None or isinstance(text, str) for text in two):
            refuse(f"compare takes two tokens, each a text or None, not {short(two)}")
        if not self._by_page and not passing.follows(self):  # what is typed on a page is answered on the pages
            try:
                data.difference(two, self._rows, *self._runs)
            except ValueError as error:
                refuse(error)
        return list(two)

    @traitlets.observe("compare")
    def _on_compare(self, _: Any) -> None:
        found, error = None, None
        try:
            found = data.difference(self.compare, self._rows, *self._runs)
        except ValueError as wrong:
            error = problem("difference", wrong)
        self.result = {**self.result, "difference": found, "error": error}


class AttentionView(View, _Tokens):
    """Attention patterns: one head as a map or as lines, all heads small to choose from.

    Args:
        pattern: (heads, query, key), as `run.pattern(layer)` or `run["blocks.3.attn.hook_attn_scores"]` gives; kept as
            float32. Where all that a query would look ahead at is zero (or -inf), it is shown as masked.
        tokens: of the prompt, as for `TokenPicker`; None numbers them.
        head: the one shown at first.
        positions: the queries chosen at first.

    Traits that can be set, observed and linked: `pattern` and `tokens` (together in
    `with view.hold_trait_notifications():`), and
        head: int, from 0.
        positions: list of ints: the tokens that look; the last of them has the lines.
    """

    _module = "attentionview"
    _esm = traitlets.Unicode(esm.join("attentionview")).tag(sync=True)
    pattern = traitlets.Any()
    head = traitlets.Int(0).tag(sync=True)

    def __init__(
        self, pattern: Any, tokens: Sequence[Any] | None = None, head: int = 0, positions: Sequence[int] = ()
    ) -> None:
        heads = numbers(pattern, ("heads", "query", "key"))
        rows = token_rows(tokens) if tokens is not None else numbered(heads.shape[1])
        super().__init__({"tab": "attention"}, pattern=heads, tokens=rows, head=head, positions=list(positions))

    @traitlets.validate("pattern")
    def _check_pattern(self, proposal: Any) -> data.Array:
        heads = numbers(proposal["value"], ("heads", "query", "key"))
        if heads.shape[1] != heads.shape[2]:
            refuse(f"pattern must have as many queries as keys, not {heads.shape[1]} and {heads.shape[2]}")
        if self.tokens != numbered(len(self.tokens)):
            fits(self.tokens, heads.shape[1], "tokens", "position")
        return heads

    @traitlets.validate("tokens")
    def _check_tokens(self, proposal: Any) -> list[list[Any]]:
        rows = token_rows(proposal["value"])
        fits(rows, np.shape(self.pattern)[1], "tokens", "position")
        return rows

    @traitlets.validate("head")
    def _check_head(self, proposal: Any) -> int:
        return places([proposal["value"]], len(self.pattern), "head", "heads")[0]

    @traitlets.observe("pattern")
    def _on_pattern(self, _: Any) -> None:
        heads = self.pattern
        ahead = heads[:, ~np.tri(heads.shape[1], dtype=bool)]
        columns = [{"component": name, "name": name, "heads": len(heads)} for name in ("pattern", "scores")]
        scores = bool((heads[np.isfinite(heads)] < 0).any())
        with self.hold_sync():
            if len(self.tokens) != heads.shape[1]:
                self.tokens = numbered(heads.shape[1])
            self.about = {"columns": columns, "causal": bool(((ahead == 0) | np.isneginf(ahead)).all())}
            self.state = {**self.state, "hook": "scores" if scores else "pattern"}
            self._hold({str(head): each for head, each in enumerate(heads)} | {"-1": data.thumbnails(heads)})

    @drops("pattern")
    def _drop_head(self) -> None:
        self.head = min(self.head, len(self.pattern) - 1)


def refuse(why: object) -> NoReturn:
    raise Refusal(str(why)) from None


def listed(spec: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A spec as the page's list of edits."""
    return [{"hook": hook, **edit, "enabled": True} for hook, edits in spec.items() for edit in edits]


def numbers(given: Any, axes: tuple[str, ...]) -> data.Array:
    """Numbers of any library as a float32 array of its own, with these axes; none of them is empty."""
    shape = f"({', '.join(axes)})"
    if isinstance(given, torch.Tensor):
        given = given.detach().to("cpu")
        given = given.float().numpy() if given.is_floating_point() else given.numpy()
    try:
        array = np.ma.filled(np.ma.asarray(given, dtype=None if hasattr(given, "dtype") else float), np.nan)
    except (TypeError, ValueError):
        refuse(f"a map takes numbers in the shape {shape}, not {short(given)}")
    if array.dtype.kind not in "fiub":
        refuse(f"a map takes real numbers, not {array.dtype}")
    if array.ndim != len(axes):
        refuse(f"a map of {shape} takes {len(axes)} axes, but this has the shape {array.shape}")
    if not array.size:
        refuse(f"there is nothing to show: the shape {array.shape} holds no number")
    with np.errstate(over="ignore"):  # beyond float32 is infinite there
        return np.array(array, dtype=np.float32)


def labels(given: Any, name: str) -> list[str] | None:
    """Labels as texts: from texts, numbers or Tokens."""
    if given is None:
        return None
    if isinstance(given, str) or not hasattr(given, "__iter__"):
        refuse(f"{name} takes a list of labels, not {short(given)}")
    return [str(getattr(label, "text", label)) for label in given]


def fits(given: Sequence[Any] | None, count: int, name: str, one: str) -> None:
    if given is not None and len(given) != count:
        refuse(f"{name} has {len(given)} for {plural(count, one)}: give one each")


def places(given: Any, count: int, name: str, what: str) -> list[int]:
    """Whole numbers below `count`, each once and in order."""
    items = plain(given)
    if not isinstance(items, list) or not all(type(item) is int for item in items):
        refuse(f"{name} takes whole numbers, not {short(given)}")
    outside = [item for item in items if not 0 <= item < count]
    if outside and not count:
        refuse(f"{name} cannot hold {outside[0]}: there are no {what}")
    if outside:
        refuse(f"{name} cannot hold {outside[0]}: the {what} are 0 to {count - 1}")
    return sorted(set(items))


def token_rows(given: Any) -> list[list[Any]]:
    """Tokens for the page, [id, text, flag] each: from a session's Tokens, from texts, or from such rows."""
    if isinstance(given, str) or not hasattr(given, "__iter__"):
        refuse(f"tokens takes what session.tokens(prompt) gives, or a list of texts, not {short(given)}")
    rows = []
    for token in given:
        if isinstance(token, str):
            rows.append([token, token, ""])  # the same text is the same token
        elif isinstance(token, (list, tuple)) and len(token) == 3 and isinstance(token[1], str):
            rows.append(list(token))
        elif hasattr(token, "text") and hasattr(token, "bos"):
            rows.append(token_row(token))
        else:
            refuse(f"tokens takes what session.tokens(prompt) gives, or texts; {short(token)} is neither")
    if not rows:
        refuse("tokens is empty: give at least one token")
    return rows


def numbered(count: int) -> list[list[Any]]:
    """Tokens of which only the number is known."""
    return [[i, str(i), ""] for i in range(count)]


def served(session: Any, name: Any) -> str:
    """The canonical name of a hook that the session's model has."""
    try:
        return str(session.hooks.require(name).name)
    except SpecError as error:
        refuse(error)


def first_hook(session: Any, hook: str | None) -> str:
    return served(session, opening(session, "")["hook"] if hook is None else hook)


def reload() -> None:
    """Sends the JavaScript and CSS as they are on disk to every open page."""
    for view in list(opened):
        view._esm = esm.join(view._module)
        view._css = esm.css("workbench")


esm.watch(reload)
