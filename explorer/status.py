"""One line on stdout that says how far something is: rewritten in place where somebody watches, else what stays."""

from __future__ import annotations

import sys
import time


class StatusLine:
    """A context manager: an error clears the line, else it ends with the last thing shown.

    In a file or a pipe only lines that stay are written.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._live = sys.stdout.isatty() or _in_notebook()
        self._start = time.monotonic()
        self._shown = ""

    def __call__(self, stage: str) -> None:
        """A stage whose length is not known."""
        self._show(f"{self._what}: {stage} ...")

    def bar(self, fraction: float, stage: str) -> None:
        """A stage whose progress is known."""
        done = round(20 * fraction)
        self._show(f"{self._what}: [{'#' * done}{'.' * (20 - done)}] {fraction:4.0%} {stage}")

    def count(self, done: int, total: int | None) -> None:
        """So many of so many, or of an unknown number."""
        self._show(f"{self._what}: {done}" + ("" if total is None else f" of {total}"))

    def say(self, text: str) -> None:
        """A line that stays."""
        self._show(text)
        self._end()

    @property
    def seconds(self) -> float:
        """Since it was made."""
        return time.monotonic() - self._start

    def __enter__(self) -> StatusLine:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        if not error:
            if self._shown:
                self._end()
        elif self._live:
            self._show("")
            sys.stdout.write("\r")

    def _show(self, text: str) -> None:
        if self._live:
            sys.stdout.write("\r" + text.ljust(len(self._shown)))
            sys.stdout.flush()
        self._shown = text

    def _end(self) -> None:
        sys.stdout.write("\n" if self._live else self._shown + "\n")
        sys.stdout.flush()
        self._shown = ""


def _in_notebook() -> bool:
    """A notebook rewrites a line as a terminal does, but since ipykernel 7 its stdout says that it is none."""
    return type(sys.stdout).__module__.startswith("ipykernel.")
