"""Edits as a program that is compiled into the model: tables say which rows it changes, and to what.

To edit otherwise than before is to fill tables; nothing is compiled or recorded again.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ...resolve import RowEdit
from ..parts import Parts
from ..rows import Columns, Rows, Span, rows_of
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
        self._filled: dict[Any, Entry] = {}
        self.register_buffer("how", torch.zeros(self.size, width, dtype=torch.uint8, device=device), persistent=False)
        self.register_buffer("factor", torch.ones(self.size, 1, dtype=torch.float32, device=device), persistent=False)
        self.register_buffer("value", torch.zeros(self.size, width, dtype=dtype, device=device), persistent=False)

    def changed(self, entry: torch.Tensor, x: torch.Tensor) -> ChangedWhere:
        """What their entries `(rows,)` make of the rows `(rows, width)` of a hook point."""
        how, value = self.how[entry], self.value[entry]
        scaled = torch.where(how == SCALED, (x * self.factor[entry]).to(x.dtype), x)
        new = torch.where(how == SET, value, torch.where(how == ADDED, x + value, scaled))
        return ChangedWhere((entry > 0)[:, None], new)

    def fill(self, entries: Mapping[Any, Entry]) -> None:
        """Have these entries, by what makes them, from 1 on."""
        if not entries or list(entries) == list(self._filled):
            return
        self._filled = {}  # should this fail halfway
        whole = slice(1, 1 + len(entries))
        self.how[whole] = torch.stack([entry.how for entry in entries.values()]).to(self.how.device)
        self.factor[whole, 0] = torch.tensor([entry.factor for entry in entries.values()]).to(self.factor)
        self.value[whole] = torch.stack([entry.value.to(self.value) for entry in entries.values()])
        self._filled = dict(entries)


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


class Entry(NamedTuple):
    """What is done to the columns of a row: `how` `(width,)` uint8, `factor`, `value` `(width,)`."""

    how: torch.Tensor
    factor: float
    value: torch.Tensor
    made_of: Sequence[torch.Tensor | None] = ()  # alive as long as this is: they are told apart by where they are


def fold(
    parts: Sequence[tuple[RowEdit, torch.Tensor | None]], shape: tuple[int, ...], dtype: torch.dtype
) -> Entry | None:
    """Edits of one row, in order, as one entry; None when there is none that does exactly the same.

    Each comes with its value for the row, `(heads | 1, width | 1)`.
    """
    blocks = shape if len(shape) == 2 else (1, shape[0])
    device = next((value.device for _, value in parts if value is not None), torch.device("cpu"))
    how = torch.zeros(blocks, dtype=torch.uint8)
    values = torch.zeros(blocks, dtype=dtype, device=device)
    factor: float | None = None
    for edit, value in parts:
        heads = slice(None) if edit.heads is None else list(edit.heads)
        before = how[heads]
        if edit.op == "suppress":
            how[heads], values[heads] = SET, 0
        elif edit.op == "scale":
            assert edit.factor is not None
            if (before == SET).all():
                values[heads] = values[heads] * edit.factor
            elif (before == KEPT).all() and factor in (None, edit.factor):
                how[heads], factor = SCALED, edit.factor
            else:
                return None
        else:
            assert value is not None
            value = value.to(values)
            if edit.op != "add":
                how[heads], values[heads] = SET, value
            elif (before == SET).all():
                values[heads] = values[heads] + value
            elif (before == KEPT).all():
                how[heads], values[heads] = ADDED, value
            else:
                return None
    made_of = [edit.value for edit, _ in parts]
    return Entry(how.reshape(-1), 1.0 if factor is None else factor, values.reshape(-1), made_of)


class Program:
    """The tables of a model's hook points, and the compiled model that reads them."""

    def __init__(self, runner: Any, parts: Parts, taps: Mapping[str, Tap], rows: Rows, dtype: torch.dtype) -> None:
        """`taps` are those of the hook points that can be edited."""
        self._taps, self._rows, self._dtype = taps, rows, dtype
        self._numbers = {name: number for number, name in enumerate(taps)}
        room = internals.most_rows(runner)
        # of each row, by hook point
        self._entry = torch.zeros(len(taps), room, dtype=torch.int32, device=runner.device)
        self._used = False
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
        plans = {width: _Plan() for width in self._tables}
        counts: list[tuple[str, Span, list[int]]] = []
        for name, spans in work.items():
            if name not in self._taps or any(name in span.held.capture for span in spans):
                return False
            shape = self._taps[name].shape
            table, plan = self._tables[math.prod(shape)], plans[math.prod(shape)]
            number = self._numbers[name]
            for span in spans:
                edits = span.held.edits[name]
                touched = [rows_of(edit, span) for edit in edits]
                counts.append((name, span, [len(of_edit) for of_edit in touched]))
                for row, parts in self._by_row(name, edits, touched).items():
                    if not plan.add(number, row, parts, shape, self._dtype) or len(plan.entries) >= table.size:
                        return False
        for width, plan in plans.items():
            self._tables[width].fill(plan.entries)
        if self._used:
            self._entry.zero_()
        rows = [row for plan in plans.values() for row in plan.rows]
        hooks, places, numbers = torch.tensor(rows or [(0, 0, 0)]).to(self._entry.device).unbind(1)
        self._entry[hooks, places] = numbers.to(self._entry.dtype)
        self._used = True
        self._counts = counts
        return True

    def _by_row(
        self, name: str, edits: Sequence[RowEdit], touched: Sequence[Sequence[tuple[int, int]]]
    ) -> dict[int, list[_Part]]:
        """The edits of each row, with its place among the values that they give."""
        by_row: dict[int, list[_Part]] = {}
        for edit, rows in zip(edits, touched, strict=True):
            if not rows or edit.heads == ():
                continue
            values = self._rows.value(edit)
            each = values is not None and values.shape[0] > 1
            for place, row in rows:
                by_row.setdefault(row, []).append(_Part(edit, values, place if each else 0))
        return by_row

    def run(self, forward: Callable[[], Any]) -> Any:
        """Run the model with the program in it."""
        hidden = self._twin.run(forward)
        counts, self._counts = self._counts, []  # what it holds of requests is theirs
        for name, span, of_edits in counts:
            self._rows.count(name, span, of_edits)
        self._rows.fired.update({name for name, _, _ in counts})
        return hidden


class _Part(NamedTuple):
    """One edit of one row; `values` `(rows | 1, heads | 1, width | 1)`, of which it takes one row."""

    edit: RowEdit
    values: torch.Tensor | None
    place: int

    def key(self) -> tuple[Any, ...]:
        """Equal for parts that do the same, while their tensors are alive."""
        edit = self.edit
        source = edit.source and (edit.source[0], edit.hook, edit.source[1][self.place])
        return edit.op, edit.heads, edit.factor, source, id(edit.value), 0 if source else self.place


class _Plan:
    """Entries that a step needs, by what makes them, and the rows they apply to."""

    def __init__(self) -> None:
        self.entries: dict[Any, Entry] = {}
        self.numbers: dict[Any, int] = {}
        self.rows: list[tuple[int, int, int]] = []

    def add(self, hook: int, row: int, parts: Sequence[_Part], shape: tuple[int, ...], dtype: torch.dtype) -> bool:
        """Edit a row of a hook point; False when no entry does what its edits do."""
        key = (shape, *(part.key() for part in parts))
        if key not in self.entries:
            entry = fold([(p.edit, None if p.values is None else p.values[p.place]) for p in parts], shape, dtype)
            if entry is None:
                return False
            self.entries[key] = entry
            self.numbers[key] = len(self.entries)
        self.rows.append((hook, row, self.numbers[key]))
        return True


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
