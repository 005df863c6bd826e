"""Edits as a program that is compiled into the model: tables say which rows it changes, and to what.

To edit otherwise than before is to fill tables; nothing is compiled or recorded again.
"""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import nn

from ...resolve import RowEdit
from ..host import to_device
from ..parts import Parts
from ..rows import Columns, Rows, Span, chosen, operate, rows_of
from ..taps import Handle, Handler, Tap
from . import internals

NAME = "explorer_tables"  # where the program finds its tables: a module in each module that has hook points
KEPT, SCALED, ADDED, SET = range(4)  # what an entry does to a column
MOST_ENTRIES = 1024
MOST_BYTES = 2**22  # that the entries of one width take


class ChangedWhere(NamedTuple):
    """All rows, new: those count that `where` `(rows, 1)` says; see `rows.Changed`."""

    where: torch.Tensor
    rows: torch.Tensor

    def put(self, x: torch.Tensor, columns: Columns | None = None) -> torch.Tensor:
        """See `Changed`."""
        if columns is None:
            return torch.where(self.where, self.rows, x)
        whole = x.clone()
        whole[:, columns] = torch.where(self.where, self.rows, x[:, columns])
        return whole

    def cleared(self, x: torch.Tensor) -> torch.Tensor:
        """See `Changed`."""
        return torch.where(self.where, 0, x)

    def divided(self, factor: float) -> ChangedWhere:
        """See `Changed`."""
        return self._replace(rows=self.rows / factor)


class Table(nn.Module):
    """What entries do to the columns of a row, for all hook points of one width. Entry 0 keeps."""

    how: torch.Tensor  # (entries, width)
    factor: torch.Tensor  # (entries, 1)
    value: torch.Tensor  # (entries, width)

    def __init__(self, width: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.size = min(MOST_ENTRIES, MOST_BYTES // (width * (1 + dtype.itemsize)))
        self._nothing = torch.zeros(1, 1, 1, dtype=dtype, device=device)
        self._filled: Sequence[Entry] = ()
        self._made_of: dict[int, ref[torch.Tensor]] = {}  # entries are told apart by where these are, or were
        self.register_buffer("how", torch.zeros(self.size, width, dtype=torch.uint8, device=device), persistent=False)
        self.register_buffer("factor", torch.ones(self.size, 1, dtype=torch.float32, device=device), persistent=False)
        self.register_buffer("value", torch.zeros(self.size, width, dtype=dtype, device=device), persistent=False)

    def changed(self, entry: torch.Tensor, x: torch.Tensor) -> ChangedWhere:
        """What their entries `(rows,)` make of the rows `(rows, width)` of a hook point."""
        how, value = self.how[entry], self.value[entry]
        scaled = torch.where(how == SCALED, (x * self.factor[entry]).to(x.dtype), x)
        new = torch.where(how == SET, value, torch.where(how == ADDED, x + value, scaled))
        return ChangedWhere((entry > 0)[:, None], new)

    def fill(self, plan: Plan) -> None:
        """Have the entries of a plan, from 1 on."""
        entries = list(plan.entries)
        made_of = {origin: ref(tensor) for origin, tensor in plan.tensors.items() if isinstance(origin, int)}
        if not entries or (entries == self._filled and made_of == self._made_of):
            return
        self._filled = ()  # should this fail halfway
        values = [self._values(entry, plan.tensors) for entry in entries]
        patterns = {how: number for number, how in enumerate(dict.fromkeys(how for how, _ in plan.ways))}
        pattern, rows, factor, how = to_device(
            self.how.device,
            array("q", [patterns[how] for how, _ in plan.ways]),
            array("q", [row for _, row in values]),
            array("f", [factor for _, factor in plan.ways]),
            array("B", b"".join(patterns)),
        )
        whole = slice(1, 1 + len(entries))
        self.how[whole] = how.view(len(patterns), -1).index_select(0, pattern)
        self.factor[whole, 0] = factor
        for _, run in groupby(range(len(entries)), lambda i: id(values[i][0])):
            first, *more = run
            end = first + 1 + len(more)
            taken = values[first][0].index_select(0, rows[first:end])
            self.value[1 + first : 1 + end].view(-1, *entries[first].blocks).copy_(taken)
        self._filled, self._made_of = entries, made_of

    def _values(self, entry: Entry, tensors: Mapping[Origin, torch.Tensor]) -> tuple[torch.Tensor, int]:
        """A tensor `(rows, heads | 1, width | 1)`, and its row with an entry's values; where it has none, others."""
        first, *more = entry.parts
        tensor = tensors.get(first.origin, self._nothing)
        if not more and (first.heads is None or isinstance(first.origin, tuple) or tensor.shape[1] == 1):
            return tensor, first.row
        values = self._nothing.repeat(1, *entry.blocks)
        for part in entry.parts:
            heads = chosen(part.heads)
            value = tensors.get(part.origin, self._nothing)[part.row : part.row + 1]
            value = value[:, heads] if isinstance(part.origin, tuple) else value
            values[:, heads] = operate(part.op, part.factor, values[:, heads], value)
        return values, 0


class Places(nn.Module):
    """What the program reads in one layer: for each hook point the entry of each row, and the tables.

    Named alike in all layers, so that they are compiled to the same code, and once.
    """

    def __init__(self, entries: Mapping[str, torch.Tensor], tables: Mapping[int, Table]) -> None:
        """`entries` `(rows,)` by hook point."""
        super().__init__()
        for name, entry in entries.items():
            self.register_buffer(_kind(name), entry, persistent=False)
        self.tables = nn.ModuleDict({str(width): table for width, table in tables.items()})


Origin = int | tuple[str, str] | None  # of values: where their tensor is, or whose rows of which hook point they are


class Part(NamedTuple):
    """An edit of one row, and which row of which tensor is its value."""

    op: str
    heads: tuple[int, ...] | None
    factor: float | None
    origin: Origin
    row: int


class Entry(NamedTuple):
    """The edits of one row `(heads, width)`, in order. Entries that are equal do the same."""

    blocks: tuple[int, int]
    parts: tuple[Part, ...]


@lru_cache(MOST_ENTRIES)
def fold(blocks: tuple[int, int], edits: Sequence[tuple[Any, ...]]) -> tuple[bytes, float] | None:
    """Op, heads and factor of edits of one row, in order, as what an entry does to each column, and by which factor.

    None when there is no entry that does exactly the same.
    """
    how, factor = [KEPT] * blocks[0], None
    for op, heads, by in edits:
        at = range(blocks[0]) if heads is None else heads
        before, kind = {how[head] for head in at}, {"scale": SCALED, "add": ADDED}.get(op, SET)
        if before == {SET}:
            continue  # to what is scaled, added to or replaced
        if kind != SET and (before != {KEPT} or (kind == SCALED and factor not in (None, by))):
            return None
        factor = by if kind == SCALED else factor
        for head in at:
            how[head] = kind
    return b"".join(bytes([kind]) * blocks[1] for kind in how), 1.0 if factor is None else factor


class Plan:
    """What a table, which has `room` for so many entries, has to hold for a step."""

    def __init__(self, room: int) -> None:
        self.entries: dict[Entry, int] = {}  # numbered from 1 on
        self.ways: list[tuple[bytes, float]] = []  # of the entries, as `fold` has it
        self.tensors: dict[Origin, torch.Tensor] = {}
        self._room = room

    def parts(self, edit: RowEdit, touched: Sequence[tuple[int, int]], rows: Rows) -> list[tuple[int, Part]]:
        """The part of an edit in each row that it touches (see `rows_of`)."""
        if not touched or edit.heads == ():  # none of the heads that it chooses is held here
            return []
        origin: Origin = None
        at: Sequence[int] = (0,)
        if edit.source is not None:
            origin, at = (edit.source[0], edit.hook), edit.source[1]
            if origin not in self.tensors:
                self.tensors[origin] = rows.source(edit)
        elif edit.value is not None:
            origin, at = id(edit.value), range(edit.value.shape[0])
            self.tensors[origin] = edit.value
        of_edit, each = (edit.op, edit.heads, edit.factor, origin), len(at) > 1
        return [(row, Part(*of_edit, at[place if each else 0])) for place, row in touched]

    def number(self, entry: Entry) -> int | None:
        """Which entry of the table that is; None when it can do no such thing, or is full."""
        number = self.entries.get(entry)
        if number is None and len(self.ways) < self._room:
            way = fold(entry.blocks, tuple(part[:3] for part in entry.parts))
            if way is not None:
                self.ways.append(way)
                number = self.entries[entry] = len(self.ways)
        return number


class Program:
    """The tables of a model's hook points, and the compiled model that reads them."""

    def __init__(self, runner: Any, parts: Parts, taps: Mapping[str, Tap], rows: Rows, dtype: torch.dtype) -> None:
        """`taps` are those of the hook points that can be edited."""
        self._taps, self._rows = taps, rows
        self._numbers = {name: number for number, name in enumerate(taps)}
        room = internals.most_rows(runner)
        # of each row, by hook point
        self._entry = torch.zeros(len(taps), room, dtype=torch.int32, device=runner.device)
        self._placed: tuple[array[int], array[int]] | None = (array("q"), array("i"))  # where, and which entries
        self._counts: list[tuple[str, Span, list[int]]] = []  # of the step that is set: hook, span, rows of each edit
        self._tables = {
            width: Table(width, dtype, runner.device) for width in {math.prod(t.shape) for t in taps.values()}
        }
        for prefix, modules in _by_layer(parts).items():
            entries = {
                name: self._entry[number]
                for name, number in self._numbers.items()
                if name.startswith((prefix, "embed."))
            }
            places = Places(entries, self._tables)
            for module in modules:
                if not isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):  # whose children are run
                    module.add_module(NAME, places)
        self._twin = internals.Twin(runner, parts.inner, self._attach)

    def _attach(self) -> list[Handle]:
        """Write the program into the model, while it is compiled."""
        return [tap.attach(_reading(_kind(name), math.prod(tap.shape))) for name, tap in self._taps.items()]

    def set(self, work: Mapping[str, Sequence[Span]]) -> bool:
        """Make a step's work what the program does; False when it cannot: a capture, or more than the tables hold."""
        plans = {width: Plan(table.size - 1) for width, table in self._tables.items()}
        counts: list[tuple[str, Span, list[int]]] = []
        places, numbers = array("q"), array("i")
        for name, spans in work.items():
            if name not in self._taps:
                return False
            shape = self._taps[name].shape
            blocks = shape if len(shape) == 2 else (1, shape[0])
            plan, first = plans[math.prod(shape)], self._numbers[name] * self._entry.shape[1]
            for span in spans:
                if name in span.held.capture:
                    return False
                edits = span.held.edits[name]
                touched = [rows_of(edit, span) for edit in edits]
                counts.append((name, span, [len(of_edit) for of_edit in touched]))
                by_row: dict[int, tuple[Part, ...]] = {}
                for edit, of_edit in zip(edits, touched, strict=True):
                    for row, part in plan.parts(edit, of_edit, self._rows):
                        by_row[row] = (*by_row.get(row, ()), part)
                for row, parts in by_row.items():
                    number = plan.number(Entry(blocks, parts))
                    if number is None:
                        return False
                    places.append(first + row)
                    numbers.append(number)
        for width, plan in plans.items():
            self._tables[width].fill(plan)
        if (places, numbers) != self._placed:
            self._placed = None  # should this fail halfway
            self._entry.zero_()
            if places:
                self._entry.view(-1).index_copy_(0, *to_device(self._entry.device, places, numbers))
            self._placed = places, numbers
        self._counts = counts
        return True

    def run(self, forward: Callable[[], Any]) -> Any:
        """Run the model with the program in it."""
        counts, self._counts = self._counts, []  # what it holds of requests is theirs
        hidden = self._twin.run(forward)
        for name, span, of_edits in counts:
            self._rows.count(name, span, of_edits)
        self._rows.fired.update({name for name, _, _ in counts})
        return hidden


def _by_layer(parts: Parts) -> dict[str, list[nn.Module]]:
    """The modules of each layer by how the names of its hook points start, and those outside of layers."""
    layers = {f"blocks.{i}.": list(layer.block.modules()) for i, layer in parts.layers.items()}
    inside = {id(module) for modules in layers.values() for module in modules}
    return layers | {"embed.": [module for module in parts.inner.modules() if id(module) not in inside]}


def _kind(name: str) -> str:
    """A hook point's name without its layer, as a name in Python."""
    return re.sub(r"^blocks\.\d+\.", "", name).replace(".", "_")


def _reading(kind: str, width: int) -> Handler:
    """What the program does at one hook point."""

    def handle(module: nn.Module, x: torch.Tensor) -> ChangedWhere:
        places: Any = getattr(module, NAME)
        return places.tables[str(width)].changed(getattr(places, kind)[: x.shape[0]], x)  # type: ignore[no-any-return]

    return handle
