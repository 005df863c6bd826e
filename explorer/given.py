"""What was given: numbers of any library as plain ones, and values as errors show them."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Callable
from typing import Any, TypeVar

from .errors import SpecError

Refuse = Callable[[str], SpecError]
Made = TypeVar("Made")


class Once:
    """Makes something of an object once, however often it was given: many prompts are patched from one source.

    Texts are told apart by what they say, other objects by which they are, and each is kept alive meanwhile. Of an
    object that is changed later the next `Once` knows nothing, so it is for a single call.
    """

    def __init__(self) -> None:
        self._made: dict[Any, tuple[Any, Any]] = {}

    def __call__(self, make: Callable[..., Made], given: Any, *how: Any) -> Made:
        """What `make(given, *how)` returned the first time."""
        key = (make, given if isinstance(given, str) else id(given), *how)
        made = self._made.get(key)
        if made is None:
            made = self._made[key] = (given, make(given, *how))
        return made[1]  # type: ignore[no-any-return]


def integers(given: Any, name: str, refuse: Refuse) -> tuple[int, ...]:
    """One whole number or several, of any library, as ints; refuses anything else, and none at all."""
    if type(given) is not list or any(type(item) is not int for item in given):  # else it is plain: most are, and long
        given = plain(given)
    items = given if isinstance(given, list) else [given]
    for item in items:
        if isinstance(item, bool) or not isinstance(item, int):
            raise refuse(f"{name} takes whole numbers, not {short(item)}")
    if not items:
        raise refuse(f"{name} is empty: it would match nothing")
    return tuple(items)


def whole(value: Any, name: str, hint: str = "") -> int:
    """A whole number of any library, as an int. ValueError for anything else, with a hint."""
    number = plain(value)
    if isinstance(number, bool) or not isinstance(number, int):
        raise ValueError(f"{name} must be a whole number, not {short(value)}{hint}")
    return number


def plain(value: Any) -> Any:
    """Arrays, ranges and numbers of other libraries as lists, ints and floats; anything else unchanged."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, (list, tuple, range)):
        return [plain(v) for v in value]
    if isinstance(value, (bool, int, float, str)) or value is None:
        return value
    if hasattr(value, "__index__"):
        return operator.index(value)
    return float(value) if isinstance(value, numbers.Real) else value


def plural(n: int, noun: str) -> str:
    """`1 edit`, `2 edits`."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def first_line(error: BaseException) -> str:
    """What an error of another library says, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]


def short(value: Any) -> str:
    """A value as errors show it."""
    text = repr(value)
    kind = type(value).__name__
    return text if len(text) <= 40 else f"{'an' if kind[0] in 'AEIOUaeiou' else 'a'} {kind}"
