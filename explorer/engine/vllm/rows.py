"""One table a step: which rows of the batch belong to which request, at which positions, and what to do with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class WireEdit:
    """A RowEdit as it reaches the worker, ready to be applied."""

    op: str
    rows: range | tuple[int, ...]
    heads: tuple[int, ...] | None
    factor: float | None
    value: torch.Tensor | None  # (rows | 1, heads | 1, width | 1)
    source: tuple[str, tuple[int, ...]] | None


@dataclass
class Held:
    """What the worker keeps for one request: its edits by hook, and the rows it captured, by hook and position."""

    edits: dict[str, list[WireEdit]]
    capture: tuple[str, ...]
    chunks: dict[str, dict[int, torch.Tensor]] = field(default_factory=dict)  # hook -> first position -> rows
    head_rows: dict[int, torch.Tensor] = field(default_factory=dict)
    last_logits: torch.Tensor | None = None
    edited: int = 0  # rows that edits were applied to

    def rows_of(self, hook: str) -> torch.Tensor:
        """All rows captured at a hook, in token order."""
        return join(self.chunks[hook])


@dataclass(frozen=True)
class Span:
    """Rows `[row, row + count)` of this step hold positions `[start, start + count)` of one request."""

    held: Held
    row: int
    count: int
    start: int


def keep(chunks: dict[int, torch.Tensor], start: int, rows: torch.Tensor) -> None:
    """Store rows by their first position. Rows of later positions are from before a preemption: all come again."""
    for later in [position for position in chunks if position > start]:
        del chunks[later]
    chunks[start] = rows


def join(chunks: dict[int, torch.Tensor]) -> torch.Tensor:
    """Chunks by first position, in token order. Where two overlap the later one counts."""
    out: list[torch.Tensor] = []
    end: int | None = None
    for start in sorted(chunks, reverse=True):
        rows = chunks[start] if end is None else chunks[start][: end - start]
        out.append(rows)
        end = start
    return out[0] if len(out) == 1 else torch.cat(out[::-1])


def read_edits(
    bodies: Iterable[dict[str, Any]], tensors: dict[str, torch.Tensor], device: torch.device
) -> dict[str, list[WireEdit]]:
    """The edits of a request, by hook, from their JSON form. KeyError for a tensor that was not sent along."""
    edits: dict[str, list[WireEdit]] = {}
    for body in bodies:
        rows = body["rows"]
        edit = WireEdit(
            op=body["op"],
            rows=range(*rows["range"]) if "range" in rows else tuple(rows["list"]),
            heads=None if body["heads"] is None else tuple(body["heads"]),
            factor=body["factor"],
            value=None if body["value"] is None else tensors[body["value"]].to(device),
            source=None if body["source"] is None else (body["source"]["key"], tuple(body["source"]["rows"])),
        )
        edits.setdefault(body["hook"], []).append(edit)
    return edits


def apply(
    x: torch.Tensor,
    shape: tuple[int, ...],
    edits: list[WireEdit],
    span: Span,
    value_of: Callable[[WireEdit], torch.Tensor | None],
) -> list[int]:
    """Apply edits, in order, to the rows of a span of `x` `(rows, width)`, in place. Returns the rows they touched."""
    touched: list[int] = []
    blocks = shape if len(shape) == 2 else (1, shape[0])
    for edit in edits:
        at = [(i, p) for i, p in enumerate(edit.rows) if span.start <= p < span.start + span.count]
        if not at:
            continue
        index = [span.row + p - span.start for _, p in at]
        block = x[index].reshape(len(index), *blocks)
        value = value_of(edit)
        if value is not None and value.shape[0] > 1:
            value = value[[i for i, _ in at]]
        heads = slice(None) if edit.heads is None else list(edit.heads)
        block[:, heads] = operate(edit, block[:, heads], value)
        x[index] = block.reshape(len(index), -1)
        touched += index
    span.held.edited += len(touched)
    return touched


def operate(edit: WireEdit, block: torch.Tensor, value: torch.Tensor | None) -> torch.Tensor:
    """One op on the chosen rows and heads, `(rows, heads, width)`."""
    if edit.op == "suppress":
        return torch.zeros_like(block)
    if edit.op == "scale":
        assert edit.factor is not None
        return block * edit.factor
    assert value is not None
    value = value.to(block.dtype)
    return block + value if edit.op == "add" else value.expand_as(block)
