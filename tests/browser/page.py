"""The workbench's page alone, on a model that only remembers: no kernel, no notebook, a tenth of a second each."""

from __future__ import annotations

import base64
from typing import Any

from playwright.sync_api import Page

from widgets import esm
from widgets.state import complete

ABOUT = {
    "name": "fake-model",
    "engine": "fake 1",
    "device": "cpu",
    "dtype": "float32",
    "mode": "eager",
    "layers": 2,
    "heads": 4,
    "columns": [
        {
            "component": "resid_post",
            "group": "residual",
            "name": "blocks.{i}.hook_out",
            "about": "the stream after the block",
            "shape": [48],
            "heads": 0,
            "editable": True,
            "derived": False,
            "missing": {},
        }
    ],
    "grid": [],
}
MOUNT = """async ([source, css, given, dark, width]) => {
    const bytes = (text) => new DataView(Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer);
    const revived = (x) => x?.base64 !== undefined ? bytes(x.base64)
        : Array.isArray(x) ? x.map(revived)
        : x && typeof x === "object" ? Object.fromEntries(Object.entries(x).map(([key, y]) => [key, revived(y)])) : x;
    const values = revived(given);
    document.body.replaceChildren();
    document.body.dataset.jpThemeLight = String(!dark);
    document.body.style.cssText = `margin: 8px; background: ${dark ? "#111" : "#fff"}`;
    const colours = { "ui-font-color1": "#e6edf3", "layout-color1": "#111", "border-color2": "#3d434a" };
    for (const [name, value] of Object.entries(dark ? colours : {}))
        document.body.style.setProperty(`--jp-${name}`, value);
    document.head.replaceChildren(Object.assign(document.createElement("style"), { textContent: css }));
    const heard = {};
    window.saved = 0;
    window.sent = [];
    window.model = {
        heard,
        get: (name) => values[name],
        set: (name, value) => { values[name] = value; for (const fn of [...(heard[`change:${name}`] ?? [])]) fn() },
        on: (name, fn) => (heard[name] ??= []).push(fn),
        off: (name, fn) => { heard[name] = (heard[name] ?? []).filter((other) => other !== fn) },
        save_changes: () => { saved += 1 },
        send: (message) => sent.push(message),
        fire: (event, ...args) => { for (const fn of [...(heard[event] ?? [])]) fn(...args) },
    };
    const el = document.createElement("div");
    el.style.width = `${width}px`;
    document.body.append(el);
    const url = URL.createObjectURL(new Blob([source], { type: "text/javascript" }));
    window.unmount = (await import(url)).default.render({ model, el });
}"""


def row(token: str | tuple[str, str], ids: dict[str, int]) -> list[Any]:
    text, kind = (token, "") if isinstance(token, str) else token
    return [ids.setdefault(text, len(ids)), text, kind]


def tokens(*texts: str | tuple[str, str], ids: dict[str, int]) -> dict[str, Any]:
    """The tokens of a prompt: texts, or (text, "bos" or "special"); equal texts have equal ids."""
    return {
        "text": "".join(t if isinstance(t, str) else t[0] for t in texts),
        "tokens": [row(token, ids) for token in texts],
    }


def mount(
    page: Page,
    prompt: list[Any],
    source: list[Any] | None = None,
    *,
    dark: bool = False,
    width: int = 1110,
    **state: Any,
) -> None:
    """Opens the page on these tokens. `model`, `saved` and `unmount` are there for the tests to use."""
    ids: dict[str, int] = {}
    both = {"prompt": tokens(*prompt, ids=ids), "source": tokens(*source or [], ids=ids)}
    full = complete(
        {"prompt": both["prompt"]["text"], "source": both["source"]["text"], "hook": "blocks.1.hook_out"} | state
    )
    result = {"prompt": full["prompt"], "edited": False, "rows": [], "difference": None, "keys": {}, "error": None}
    values = {
        "state": full,
        "about": ABOUT,
        "tokens": both,
        "result": result,
        "jobs": {"active": [], "last": None},
        "steps": {},
        "history": {"count": 0},
    }
    page.evaluate(MOUNT, [esm.join("workbench"), esm.css("workbench"), values, dark, width])


def mount_view(page: Page, view: Any, *, dark: bool = False, width: int = 1110) -> None:
    """Opens the page of a widget of one view on its traits as they are."""
    traits = {key: value for key, value in view.get_state().items() if key != "layout" and key[0] != "_"}
    page.evaluate("window.unmount?.(); window.unmount = null")
    page.evaluate(MOUNT, [view._esm, view._css, portable(traits), dark, width])


def portable(value: Any) -> Any:
    if isinstance(value, memoryview):
        return {"base64": base64.b64encode(value).decode()}
    if isinstance(value, dict):
        return {key: portable(each) for key, each in value.items()}
    return [portable(each) for each in value] if isinstance(value, list) else value
