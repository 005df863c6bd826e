"""Positions: the rows that an expression such as `"3:7"`, `-1` or `"last"` chooses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .given import Refuse, integers, plural


@dataclass(frozen=True)
class Extent:
    """How long a run is: `prompt` tokens, and `rows` rows in all (more than `prompt` when it generates)."""

    prompt: int
    rows: int


def positions(pos: Any, phase: str, extent: Extent, name: str, whose: str, refuse: Refuse) -> range | tuple[int, ...]:
    """The absolute positions that an expression chooses, in the order given."""
    first = extent.prompt if phase == "decode" else 0
    stop = extent.prompt if phase == "prompt" else extent.rows
    if first >= stop:
        raise refuse(
            "it would match no row: no generated token is fed back; generate at least 2 tokens, or use phase='both'"
        )
    if _everywhere(pos):
        return range(first, stop)
    if isinstance(pos, str) and pos != "last":
        chosen = _slice(pos, first, extent.prompt, stop, name, whose, refuse)
        if not chosen:
            raise refuse(f"{name} {pos!r} would match no row")
        return chosen
    given = (-1,) if isinstance(pos, str) else integers(pos, name, refuse)
    rows = tuple(p + extent.prompt if p < 0 else p for p in given)
    for g, p in zip(("last",) if isinstance(pos, str) else given, rows, strict=True):
        if not 0 <= p < extent.rows:
            counted = extent.prompt if p < 0 else extent.rows  # what negative ones count from
            tokens = plural(counted, "token" if counted == extent.prompt else "row")
            raise refuse(f"{name} {g} is past the {whose}, which has {tokens} (0 to {counted - 1})")
        if not first <= p < stop:
            part = "the generated tokens have" if phase == "decode" else "the prompt has"
            hint = ""
            if whose == "source":  # where a patch reads when it was not said
                part, hint = "the source's prompt has", "; source_pos= reaches what the source generated"
            raise refuse(f"{name} {g} is outside phase={phase!r}: {part} positions {first} to {stop - 1}{hint}")
    return distinct(rows, name, refuse)


def source_positions(pos: Any, source_pos: Any, phase: str, extent: Extent, refuse: Refuse) -> range | tuple[int, ...]:
    """Where a patch reads: `source_pos` anywhere in the source; without it what `pos` chooses, there."""
    if source_pos is not None:
        return positions(source_pos, "both", extent, "source_pos", "source", refuse)
    if phase == "decode":
        generated = range(extent.prompt, extent.rows)
        if _everywhere(pos) or (isinstance(pos, str) and pos.lstrip().startswith(":")):  # from the first generated on
            if not generated:
                return generated
        else:
            phase = "both"  # numbers are absolute; the source may be longer or shorter than the prompt
    return positions(pos, phase, extent, "pos", "source", refuse)


def _everywhere(pos: Any) -> bool:
    return pos is None or (isinstance(pos, str) and pos == "all")


def _slice(text: str, first: int, prompt: int, stop: int, name: str, whose: str, refuse: Refuse) -> range:
    parts = text.split(":")
    try:
        numbers = [int(p) if p.strip() else None for p in parts]
    except ValueError:
        numbers = []
    if not 2 <= len(numbers) <= 3:
        raise refuse(f"{name} {text!r} is not understood; write an int, a list, a slice such as '3:7', 'last' or 'all'")
    step = 1 if len(numbers) < 3 or numbers[2] is None else numbers[2]
    if step < 1:
        raise refuse(f"{name} {text!r}: the step must be at least 1")
    begin, end = (None if n is None else n + prompt if n < 0 else n for n in numbers[:2])
    begin = first if begin is None else begin
    end = stop if end is None else end
    if begin < first or end > stop:
        raise refuse(f"{name} {text!r} goes past the {whose}, which has positions {first} to {stop - 1} here")
    return range(begin, end, step)


def distinct(items: tuple[int, ...], name: str, refuse: Refuse) -> tuple[int, ...]:
    """The items, refused when one is named twice."""
    if len(set(items)) < len(items):
        raise refuse(f"{name} names {next(i for i in items if items.count(i) > 1)} twice")
    return items
