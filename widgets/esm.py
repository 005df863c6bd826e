"""Joins the JavaScript modules of a widget into the one ES module that anywidget sends, with no build step."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).parent
_IMPORT = re.compile(r'^import \{([^}]*)\} from "\./(\w+)\.js";$', re.M)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function\*?|const|class)\s+(\w+))", re.M)


def join(entry: str, folder: Path = HERE) -> str:
    """The module `entry`.js with everything it imports, as one ES module.

    Each imported file becomes a function scope, so that files keep their own names. Two forms are understood, and
    anything else is an error here rather than in the page: `import { a, b } from "./file.js";` on one line, and
    `export` before a function, const or class. The entry keeps its `export default`.
    """
    parts: list[str] = []
    seen: set[str] = set()

    def add(name: str) -> None:
        if name in seen:
            return
        seen.add(name)
        source = _without_comments(f"{name}.js", (folder / f"{name}.js").read_text(encoding="utf-8"))
        for match in _IMPORT.finditer(source):
            add(match[2])
        names = _EXPORT.findall(source)
        body = _EXPORT.sub("", _IMPORT.sub(lambda m: f"const {{{m[1].replace(' as ', ': ')}}} = ${m[2]};", source))
        left = re.search(r"^(import|export)\b(?! default)", body, re.M)
        if left:
            raise ValueError(
                f"{name}.js: only plain named imports and exports can be joined: {body[left.start() :][:60]!r}"
            )
        if name == entry:
            parts.append(f"// {name}.js\n{body}")
        else:
            parts.append(f"// {name}.js\nconst ${name} = (() => {{\n{body}\nreturn {{ {', '.join(names)} }};\n}})();")

    add(entry)
    return "\n".join(parts)


def _without_comments(file: str, source: str) -> str:
    """Without the lines that are comments as a whole: every page would be sent them."""
    kept, template = [], False
    for number, line in enumerate(source.splitlines(keepends=True), 1):
        if not line.lstrip().startswith("//"):
            template ^= line.replace("\\`", "").count("`") % 2 == 1
            kept.append(line)
        elif template:
            raise ValueError(f"{file}, line {number}: in a template a line cannot begin with //: {line.strip()[:60]!r}")
    return "".join(kept)


def css(name: str, folder: Path = HERE) -> str:
    return (folder / f"{name}.css").read_text(encoding="utf-8")


def watch(on_change: Callable[[], None], folder: Path = HERE) -> threading.Event | None:
    """With ANYWIDGET_HMR=1, calls `on_change` whenever a .js or .css file is saved, until the event is set."""
    if os.environ.get("ANYWIDGET_HMR") not in ("1", "true"):
        return None
    stop = threading.Event()

    def stamps() -> list[float]:
        return [path.stat().st_mtime for path in sorted(folder.glob("*.*s"))]

    def loop(last: list[float]) -> None:
        while not stop.wait(0.5):
            now = stamps()
            if now != last:
                last = now
                on_change()

    threading.Thread(target=loop, args=(stamps(),), name="explorer-widgets-reload", daemon=True).start()
    return stop
