"""Positions: the rows that an expression such as `"3:7"`, `-1` or `"last"` chooses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .errors import SpecError
from .given import Refuse, integers


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
            "phase='decode' would match no row: it edits generated tokens that are fed back, and this run feeds none; "
            "generate at least 2 tokens, or use phase='both'"
        )
    if type(pos) is int:  # most are
        row = pos + extent.prompt if pos < 0 else pos
        if first <= row < stop:
            return (row,)

    def part() -> str:
        chosen_from = f"positions {first} to {stop - 1}" if stop - first > 1 else f"position {first} alone"
        return f"{_part(phase, whose, extent)} {chosen_from}"

    def outside(what: Any, row: int) -> SpecError:
        from_end = " (counted from the prompt's end)" if what == "last" or "-" in str(what) else ""
        hint = ""
        if whose == "source":
            hint = "; source_pos= says where to read" if name == "pos" else ""
        elif 0 <= row < first:
            hint = "; phase='both' reaches the prompt"
        elif stop <= row < extent.rows:
            hint = "; phase='both' reaches generated tokens"
        return refuse(f"{name} {what!r}{from_end} is outside {part()}{hint}")

    if _everywhere(pos):
        return range(first, stop)
    if isinstance(pos, str) and pos != "last":
        begin, end, step = _slice(pos, first, extent.prompt, stop, name, refuse)
        if begin < first or end > stop:
            raise outside(pos, begin if begin < first else end - 1)
        if begin >= end:
            raise refuse(f"{name} {pos!r} would match no row of {part()}")
        return range(begin, end, step)
    if isinstance(pos, slice):
        raise refuse(f"{name} takes a slice as text, such as '3:7', not {pos}")
    given = (-1,) if isinstance(pos, str) else integers(pos, name, refuse)
    rows = tuple(p + extent.prompt if p < 0 else p for p in given)
    for g, p in zip(("last",) if isinstance(pos, str) else given, rows, strict=True):
        if not first <= p < stop:
            raise outside(g, p)
    return rows if name == "source_pos" else distinct(rows, name, refuse)  # a row may be read twice, not edited twice


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


def _part(phase: str, whose: str, extent: Extent) -> str:
    """What positions are chosen from, with its verb."""
    if phase == "decode":
        return f"the generated tokens that are fed back{' in the source' * (whose == 'source')}, which have"
    if phase == "both" and extent.rows > extent.prompt:
        return "the source, which has" if whose == "source" else "the run, which has"
    return "the source's prompt, which has" if whose == "source" else "the prompt, which has"


def _everywhere(pos: Any) -> bool:
    return pos is None or (isinstance(pos, str) and pos == "all")


def _slice(text: str, first: int, prompt: int, stop: int, name: str, refuse: Refuse) -> tuple[int, int, int]:
    """Begin, end and step of a slice as it is written."""
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
    return begin, end, step


def distinct(items: tuple[int, ...], name: str, refuse: Refuse) -> tuple[int, ...]:
    """The items, refused when one is named twice."""
    if len(set(items)) < len(items):
        raise refuse(f"{name} names {next(i for i in items if items.count(i) > 1)} twice")
    return items
