"""`python -m explorer`: fetch the bundled models, and say which there are."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .errors import ModelNotFound
from .models import BUNDLED, Progress, convert, converted_folder, fetch, is_converted


def _bar(label: str) -> Progress:
    """Progress on stderr: one line redrawn on a terminal, elsewhere a line at each tenth."""
    live = sys.stderr.isatty()
    shown = -1

    def show(fraction: float, message: str) -> None:
        nonlocal shown
        if not live and int(10 * fraction) == shown:
            return
        shown = int(10 * fraction)
        done = round(20 * fraction)
        line = f"{label} [{'#' * done}{'.' * (20 - done)}] {fraction:4.0%} {message}"
        end = "" if live and fraction < 1 else "\n"
        print(("\r\033[K" if live else "") + line, end=end, file=sys.stderr, flush=True)

    return show


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m explorer", description="The bundled models.")
    commands = parser.add_subparsers(dest="command", required=True)
    get = commands.add_parser("fetch", help="fetch and convert a bundled model into the cache")
    get.add_argument("name", help=", ".join(sorted(BUNDLED)))
    commands.add_parser("list", help="the bundled models and where they are")
    options = parser.parse_args(arguments)
    if options.command == "list":
        for name, model in sorted(BUNDLED.items()):
            print(f"{name}: {model.about}; {converted_folder(name) if is_converted(name) else 'not fetched'}")
        return 0
    try:
        if not is_converted(options.name):
            fetch(options.name, _bar(f"fetch {options.name}"))
            convert(options.name, _bar(f"convert {options.name}"))
        print(f"{options.name}: {converted_folder(options.name)}")
    except (ModelNotFound, OSError) as error:
        print(f"{options.name}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
