"""The workbench's page alone, on a model that only remembers: no kernel, no notebook, a tenth of a second each."""

from __future__ import annotations

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
MOUNT = """async ([source, css, values, dark, width]) => {
    document.body.replaceChildren();
    document.body.dataset.jpThemeLight = String(!dark);
    document.body.style.cssText = `margin: 8px; background: ${dark ? "#111" : "#fff"}`;
    const colours = { "ui-font-color1": "#e6edf3", "layout-color1": "#111", "border-color2": "#3d434a" };
    for (const [name, value] of Object.entries(dark ? colours : {}))
        document.body.style.setProperty(`--jp-${name}`, value);
    document.head.replaceChildren(Object.assign(document.createElement("style"), { textContent: css }));
    const heard = {};
    window.saved = 0;
    window.model = {
        get: (name) => values[name],
        set: (name, value) => { values[name] = value; for (const fn of [...(heard[`change:${name}`] ?? [])]) fn() },
        on: (name, fn) => (heard[name] ??= []).push(fn),
        off: (name, fn) => { heard[name] = (heard[name] ?? []).filter((other) => other !== fn) },
        save_changes: () => { saved += 1 },
        send: () => {},
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
