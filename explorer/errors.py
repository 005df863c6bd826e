"""What goes wrong in words: the exceptions a user of the explorer can meet."""

from __future__ import annotations


class ExplorerError(Exception):
    """Anything the explorer refuses or cannot do; the message says what is wrong, where, and what to do."""


class _InOneLine:
    """For mistakes in what was asked: a notebook shows the message alone, not the way to it through our code."""

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]


class SpecError(_InOneLine, ExplorerError, ValueError):
    """A refused spec. Raised before anything runs; `edit_index` is the 0-based edit that is wrong, if one is."""

    def __init__(self, message: str, edit_index: int | None = None) -> None:
        super().__init__(message)
        self.edit_index = edit_index


class BootError(_InOneLine, ExplorerError, ValueError):
    """A model that cannot be booted as asked; raised before weights load wherever that can be known."""


class ModelNotFound(BootError):
    """The model asked for is not there; the message is one line and says what to type. A ValueError."""


class SessionClosed(ExplorerError, RuntimeError):
    """The session was closed, so the engine that would have to answer is gone."""


class EngineError(ExplorerError, RuntimeError):
    """The engine did something it must never do (a hook that did not fire, rows that are missing)."""


class NotFinite(_InOneLine, ExplorerError, ArithmeticError):
    """Logits that are NaN or infinite, which no prediction can be made of; the message says whether edits did it."""


class Cancelled(ExplorerError):
    """A job that was cancelled before it finished."""
