"""Rows: which rows of a forward pass belong to which request, and the one place where they are edited and captured."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol
from weakref import WeakValueDictionary

import torch
from torch import nn

from ..errors import EngineError
from ..resolve import RowEdit
from ..specs import OPS
from .host import FEW, MOST, Parcel, to_host
from .protocol import Request, Result

if TYPE_CHECKING:
    from .taps import Tap

Columns = slice | torch.Tensor  # which columns of a tensor `(rows, width)`


class Changed(Protocol):
    """Rows of a hook point that changed."""

    def put(self, x: torch.Tensor, columns: Columns | None = None) -> torch.Tensor:
        """`x` `(rows, width)` with what changed written to it, or to some of its columns."""

    def cleared(self, x: torch.Tensor) -> torch.Tensor:
        """`x` `(rows, width)` with zeros in the rows that changed."""

    def divided(self, factor: float) -> Changed:
        """The same rows changed to `1 / factor` of it."""


class ChangedRows(NamedTuple):
    """Some rows: their indices, and their new values."""

    at: torch.Tensor
    rows: torch.Tensor

    def put(self, x: torch.Tensor, columns: Columns | None = None) -> torch.Tensor:
        """See `Changed`."""
        whole = self.rows
        if columns is not None:
            whole = x[self.at]
            whole[:, columns] = self.rows
        return x.index_copy(0, self.at, whole)

    def cleared(self, x: torch.Tensor) -> torch.Tensor:
        """See `Changed`."""
        return x.index_fill(0, self.at, 0)

    def divided(self, factor: float) -> ChangedRows:
        """See `Changed`."""
        return self._replace(rows=self.rows / factor)


@dataclass
class Held:
    """What is kept for one live request: its edits by hook, and the rows it captured, by hook and first position."""

    edits: dict[str, list[RowEdit]]
    capture: Collection[str]
    stays: bool = False  # what it captures is for patches to read, on the device
    rows: int = 0  # that it will have when its generation does not stop early
    width: int = 0  # of all hook points that it captures
    parcel: Parcel | None = None  # takes what a pass on a GPU captures, while it runs
    chunks: dict[str, dict[int, torch.Tensor]] = field(default_factory=dict)
    head_rows: dict[int, torch.Tensor] = field(default_factory=dict)
    last_logits: dict[int, torch.Tensor] = field(default_factory=dict)  # of its latest rows, by position
    edited: dict[str, list[int]] = field(default_factory=dict)  # hook -> rows that each of its edits came to
    elsewhere: tuple[str, ...] = ()  # hooks of edits that another pipeline stage applies


@dataclass(frozen=True)
class Span:
    """Rows `[row, row + count)` of this pass hold positions `[start, start + count)` of one request."""

    held: Held
    row: int
    count: int
    start: int

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """Its rows of a tensor that has a row for each token of the pass."""
        return x[self.row : self.row + self.count]

    @property
    def end(self) -> int:
        """Position of its last row."""
        return self.start + self.count - 1

    @property
    def last(self) -> bool:
        """Whether its request feeds nothing after this pass."""
        return self.end + 1 >= self.held.rows


class Rows:
    """The live requests of an engine, and what to do with their rows at each hook point."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """`shapes` are the hook points that can be tapped, in forward order, with their shape a token."""
        self.held: dict[str, Held] = {}
        self.fired: Counter[str] = Counter()  # hook -> passes in which it fired with something to do
        self._shapes = shapes
        self._order = {name: number for number, name in enumerate(shapes)}

    def prepare(self, edits: Sequence[RowEdit], capture: Sequence[str], stays: bool = False, rows: int = 0) -> Held:
        """What to hold for a request. ValueError for a hook point that has no tap, and for an edit that fits none."""
        for name in (*capture, *(edit.hook for edit in edits)):
            if name not in self._shapes:
                raise ValueError(f"no tap for {name}")
        by_hook: dict[str, list[RowEdit]] = {}
        for edit in edits:
            problem = misfit(edit, self._shapes[edit.hook])
            if problem is not None:
                raise ValueError(f"{edit.op} at {edit.hook}: {problem}")
            by_hook.setdefault(edit.hook, []).append(edit)
        captured = dict.fromkeys(capture)
        width = sum(math.prod(self._shapes[name]) for name in captured)
        return Held(by_hook, captured, stays, rows, width)

    def release(self, keys: Sequence[str]) -> None:
        """Forget requests, finished or not."""
        for key in keys:
            self.held.pop(key, None)

    def work(self, spans: Sequence[Span]) -> dict[str, list[Span]]:
        """The hook points where this pass has something to do, and for whom; in forward order, as taps must attach."""
        work: dict[str, list[Span]] = {}
        for span in spans:
            for name in dict.fromkeys((*span.held.edits, *span.held.capture)):
                work.setdefault(name, []).append(span)
        return {name: work[name] for name in sorted(work, key=self._order.__getitem__)}

    @contextmanager
    def attached(
        self, taps: Mapping[str, Tap], work: Mapping[str, Sequence[Span]], device: torch.device
    ) -> Iterator[None]:
        """Meanwhile hook points do the work of a pass. What they captured is on its way to the host then."""
        handles, parcels = [], self._parcels(work) if device.type == "cuda" else []
        try:
            for name, spans in work.items():
                handles.append(taps[name].attach(partial(self.handle, name, spans)))
            yield
            for parcel in parcels:
                parcel.send()
        finally:
            for handle in reversed(handles):
                handle.remove()

    def handle(self, name: str, spans: Sequence[Span], _: nn.Module, x: torch.Tensor) -> ChangedRows | None:
        """Edit, then capture, the rows `(rows, width)` of one hook point; returns those that edits changed."""
        self.fired[name] += 1
        touched: set[int] = set()
        editing = [span for span in spans if name in span.held.edits]
        if editing:
            x = x.clone()
        for span in editing:
            edits = span.held.edits[name]
            rows_of_edits = apply(x, self._shapes[name], edits, span, self.value)
            self.count(name, span, [len(rows) for rows in rows_of_edits])
            touched.update(*rows_of_edits)
        for span in spans:
            if name in span.held.capture:
                self._capture(name, span, x)
        if not touched:
            return None
        index = torch.tensor(sorted(touched), device=x.device)
        return ChangedRows(index, x[index])

    def _capture(self, name: str, span: Span, x: torch.Tensor) -> None:
        held = span.held
        rows = x if span.count == x.shape[0] else span.of(x)
        if held.stays:
            self._keep(held.chunks, span.start, name, rows.clone())
        elif held.parcel is None:
            self._keep(held.chunks, span.start, name, to_host(rows))
        else:
            held.parcel.add(name, rows)

    def _keep(self, chunks: dict[str, dict[int, torch.Tensor]], start: int, name: str, rows: torch.Tensor) -> None:
        keep(chunks.setdefault(name, {}), start, rows.view(-1, *self._shapes[name]))

    def _parcels(self, work: Mapping[str, Sequence[Span]]) -> list[Parcel]:
        """Give a parcel to each request that captures in a pass: who keeps a Run keeps nothing that others captured."""
        spans = {id(span): span for spans in work.values() for span in spans if span.held.width and not span.held.stays}
        parcels = []
        for span in spans.values():
            sent = partial(self._keep, span.held.chunks, span.start)
            parcels.append(Parcel(span.held.width * span.count, sent, max(MOST // len(spans), FEW)))
            span.held.parcel = parcels[-1]
        return parcels

    def count(self, name: str, span: Span, of_edits: Sequence[int]) -> None:
        """Note how many rows of a span each edit at a hook point came to."""
        before = span.held.edited.get(name, [0] * len(of_edits))
        span.held.edited[name] = [n + more for n, more in zip(before, of_edits, strict=True)]

    def value(self, edit: RowEdit) -> torch.Tensor | None:
        """The value of `add` and `set`, or the held rows that `patch` copies: `(rows | 1, heads | 1, width | 1)`."""
        if edit.source is None:
            return edit.value
        return self.source(edit)[chosen(edit.source[1])][:, chosen(edit.heads)]

    def source(self, edit: RowEdit) -> torch.Tensor:
        """All that is held of what `patch` copies from, `(rows, heads | 1, width)`."""
        assert edit.source is not None
        rows = join(self.held[edit.source[0]].chunks[edit.hook])
        return rows if rows.dim() == 3 else rows[:, None]


def misfit(edit: RowEdit, shape: tuple[int, ...]) -> str | None:
    """Why an edit cannot be applied at a hook point of `shape`: checked once more where it would do harm."""
    heads, width = shape if len(shape) == 2 else (1, shape[0])
    if edit.op not in OPS:
        return "there is no such op"
    for key in OPS[edit.op]:
        if getattr(edit, key) is None:
            return f"it has no {key}"
    if edit.heads and not 0 <= min(edit.heads) <= max(edit.heads) < heads:
        return f"there are heads 0 to {heads - 1}, not {edit.heads}"
    if edit.value is not None:
        block = (len(edit.rows), heads if edit.heads is None else len(edit.heads), width)
        given = tuple(edit.value.shape)
        if len(given) != 3 or any(n not in (1, whole) for n, whole in zip(given, block, strict=True)):
            return f"a value of shape {given} does not fill {block}"
    return None


def chosen(indices: Sequence[int] | None) -> slice | list[int]:
    """Indices, or all, as what picks them: a slice where one does, for a GPU would have to be sent a list."""
    if indices is None:
        return slice(None)
    here = list(indices)
    in_a_row = bool(here) and here == list(range(here[0], here[0] + len(here)))
    return slice(here[0], here[0] + len(here)) if in_a_row else here


def rows_of(edit: RowEdit, span: Span) -> list[tuple[int, int]]:
    """Of the rows that an edit names, those in a span: which of them it is, and which row of the pass."""
    rows, end = edit.rows, span.start + span.count
    places = range(len(rows))
    if isinstance(rows, range) and rows.step == 1:  # it may be long, and a span one row
        places = range(max(0, span.start - rows.start), min(len(rows), end - rows.start))
    return [(i, span.row + rows[i] - span.start) for i in places if span.start <= rows[i] < end]


def apply(
    x: torch.Tensor,
    shape: tuple[int, ...],
    edits: Sequence[RowEdit],
    span: Span,
    value_of: Callable[[RowEdit], torch.Tensor | None],
) -> list[list[int]]:
    """Apply edits, in order, to the rows of a span of `x` `(rows, width)`, in place. Returns the rows of each."""
    touched: list[list[int]] = []
    blocks = shape if len(shape) == 2 else (1, shape[0])
    for edit in edits:
        at = rows_of(edit, span)
        index = [row for _, row in at]
        touched.append(index)
        if not index or edit.heads == ():  # none of the heads that it chooses is held here
            continue
        block = x[index].reshape(len(index), *blocks)
        value = value_of(edit)
        if value is not None and value.shape[0] > 1:
            value = value[[i for i, _ in at]]
        heads = slice(None) if edit.heads is None else list(edit.heads)
        block[:, heads] = operate(edit.op, edit.factor, block[:, heads], value)
        x[index] = block.reshape(len(index), -1)
    return touched


def operate(op: str, factor: float | None, block: torch.Tensor, value: torch.Tensor | None) -> torch.Tensor:
    """One op on the chosen rows and heads, `(rows, heads, width)`."""
    if op == "suppress":
        return torch.zeros_like(block)
    if op == "scale":
        assert factor is not None
        return block * factor
    assert value is not None
    value = value.to(device=block.device, dtype=block.dtype)
    return block + value if op == "add" else value.expand_as(block)


def keep_head_rows(spans: Sequence[Span], hidden: torch.Tensor) -> None:
    """Keep what the unembedding reads: one copy for all spans of a pass, which are in order.

    In the host's memory when they are all of their requests' rows, else on the device until they are read.
    """
    if spans:
        first, end = spans[0].row, spans[-1].row + spans[-1].count
        whole = all(span.last and not span.start for span in spans)
        copy = to_host(hidden[first:end]) if whole else hidden[first:end].clone()
        for span in spans:
            keep(span.held.head_rows, span.start, copy[span.row - first : span.row - first + span.count])


class LastLogits:
    """The logits that requests were served last, each by the position of its row."""

    def __init__(self) -> None:
        # by `id`: whose rows are parts of the last batch's, while somebody else holds them
        self._latest: WeakValueDictionary[int, Held] = WeakValueDictionary()

    def keep(self, spans: Sequence[Span | None], logits: torch.Tensor) -> None:
        """Keep a row of logits `(spans, d_vocab)` for each span: of requests that are over float32, in the host.

        And of each the row before: when vLLM runs ahead, one more step has begun before a text is seen to have ended.
        """
        ours = {i: span for i, span in enumerate(spans) if span is not None}
        over = {i: span for i, span in ours.items() if span.last}
        going = {i: span for i, span in ours.items() if not span.last}
        in_host = _copied(over, logits, lambda rows: to_host(rows, torch.float32))
        for span, row in (*in_host, *_copied(going, logits, torch.clone)):
            rows = span.held.last_logits
            while len(rows) > 1:
                del rows[next(iter(rows))]
            rows[span.end] = row
            self._latest.pop(id(span.held), None)
        for held in self._latest.values():  # one that left would keep the rows of all others
            rows = held.last_logits
            held.last_logits = {end: row if end + 1 >= held.rows else row.clone() for end, row in rows.items()}
        self._latest = WeakValueDictionary({id(span.held): span.held for span in ours.values()})


def _copied(
    spans: Mapping[int, Span], logits: torch.Tensor, copy: Callable[[torch.Tensor], torch.Tensor]
) -> Iterable[tuple[Span, torch.Tensor]]:
    """Each span with its row of one copy for all of them: vLLM's sampler works in place."""
    if not spans:
        return ()
    rows = logits if len(spans) == len(logits) else logits[list(spans)]
    return zip(spans.values(), copy(rows), strict=True)


def keep(chunks: dict[int, torch.Tensor], start: int, rows: torch.Tensor) -> None:
    """Store rows by their first position. Rows of later positions are from before a preemption: all come again."""
    while chunks and next(reversed(chunks)) > start:  # they are in order
        chunks.popitem()
    chunks[start] = rows


def join(chunks: dict[int, torch.Tensor], most: int | None = None) -> torch.Tensor:
    """Chunks by first position, in token order, `most` rows of them. Where two overlap the later one counts."""
    out: list[torch.Tensor] = []
    end: int | None = None
    for start in sorted(chunks, reverse=True):
        rows = chunks[start] if end is None else chunks[start][: end - start]
        out.append(rows)
        end = start
    whole = out[0] if len(out) == 1 else torch.cat(out[::-1])
    return whole if most is None or whole.shape[0] <= most else whole[:most]


def check(request: Request, result: Result, edited: Mapping[str, Sequence[int]]) -> None:
    """Nothing silent: every row was seen, and every edit touched every row it named.

    `edited` counts the rows of each edit, by hook.
    """
    rows = len(request.ids) + max(0, len(result.generated) - 1)
    for name in request.capture:
        got = result.captures[name].shape[0] if name in result.captures else 0
        if got != rows:
            raise EngineError(
                f"{name} captured {got} rows of {rows}: the hook did not fire as it must; please report this"
            )
    for name in {edit.hook for edit in request.edits}:
        expected = [sum(1 for p in edit.rows if p < rows) for edit in request.edits if edit.hook == name]
        counts = edited.get(name, [0] * len(expected))
        for got, want in zip(counts, expected, strict=True):
            if got < want:  # more where vLLM fed a token twice, after it had to give up its cache
                raise EngineError(
                    f"an edit at {name} touched {got} rows of {want}: the hook did not fire as it must; "
                    "please report this"
                )
