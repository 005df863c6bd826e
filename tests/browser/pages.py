"""What the browser tests share: opening a workbench, acting on it, and reading what it shows."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

from playwright.sync_api import Locator, Page, expect

from .conftest import Lab

EIFFEL = "The Eiffel Tower is in the city of"
MARY = "When Mary and John went to the store, Mary gave a drink to"
JOHN = "When Mary and John went to the store, John gave a drink to"
OPEN = f"w = session.explore({EIFFEL!r}); w"


def axp(page: Page) -> Locator:
    return page.locator(".axp")


def open_workbench(notebook: Lab, cell: str = OPEN) -> Page:
    # A fresh cell, so that it takes nothing over.
    notebook.run(cell)
    page = notebook.page
    expect(axp(page).locator(".rows [role=row]").nth(3)).to_be_visible()
    return page


def number(text: str) -> float:
    return float(text.replace("\u2212", "-").replace("+", "").replace("%", ""))


def predictions(page: Page) -> dict[str, tuple[float, ...]]:
    """What the page shows: token -> clean, patched and change in percent; patched and change only with an edit."""
    rows = page.evaluate(
        """() => [...document.querySelectorAll('.axp .rows [role=row]')].slice(1)
            .map(r => [...r.children].map(c => c.textContent))"""
    )
    return {row[0].replace("\u2423", " "): tuple(number(text) for text in row[2:] if text != "\u2013") for row in rows}


def settled(notebook: Lab, name: str = "w") -> None:
    """Waits until nothing is under way any more: no change of the page, no job, no array."""
    look = f"[{name}.state, {name}.result.get('seconds'), {name}.jobs]"
    last, same, deadline = None, 0, time.monotonic() + 120  # the grid of a long prompt, on a busy machine
    while same < 2:
        assert time.monotonic() < deadline, f"still busy: {last}"
        # First this: the page sends a change when the kernel has taken the one before, as the answer tells it.
        notebook.evaluate("0")
        notebook.evaluate(f"{name}._session.jobs.call(lambda job: None)")
        now = notebook.evaluate(look)
        same = same + 1 if now == last and not now[2]["active"] else 0
        last = now
        notebook.page.wait_for_timeout(50)


def becomes(notebook: Lab, expression: str, value: Any) -> None:
    """Asserts that an expression in the kernel comes to have a value: what the page does reaches it a little later."""
    comes_to(notebook.page, lambda: notebook.evaluate(expression), value)


def comes_to(page: Page, read: Callable[[], Any], value: Any) -> None:
    """Asserts that what is read comes to be a value: what is drawn follows what was sent a little later."""
    deadline = time.monotonic() + 20
    while (now := read()) != value and time.monotonic() < deadline:
        page.wait_for_timeout(50)
    assert now == value, f"it is {now!r}"


def colours(page: Page, nth: int = 0) -> list[str]:
    """The map's colours at 800 places. Not all pixels: a map is a pixel higher or wider by where the page puts it."""
    return list(
        page.evaluate(
            """(nth) => { const c = document.querySelectorAll('.axp')[nth].querySelector('canvas.map');
            const x = c.getContext('2d');
            return Array.from({ length: 800 }, (_, i) => x.getImageData(c.width * (i % 40 + 0.5) / 40,
                c.height * (Math.floor(i / 40) + 0.5) / 20, 1, 1).data.join()) }""",
            nth,
        )
    )


def alike(some: list[str], others: list[str]) -> float:
    """The share of places that have the same colour."""
    return sum(a == b for a, b in zip(some, others, strict=True)) / len(some)


def hover(page: Page, across: float, down: float, says: str) -> re.Match[str]:
    """Points at a place of the map, as shares of its size, until the value beside the scale reads like `says`."""
    readout = axp(page).locator(".heat .readout")
    deadline = time.monotonic() + 20
    while not (found := re.match(says, readout.inner_text())):
        assert time.monotonic() < deadline, f"{readout.inner_text()!r} is not like {says!r}"
        box = axp(page).locator("canvas.map").bounding_box()
        assert box
        for shift in (0, 1):  # the map may just have been drawn anew under the pointer
            page.mouse.move(box["x"] + box["width"] * across + shift, box["y"] + box["height"] * down)
        page.wait_for_timeout(50)
    return found


def example(page: Page, name: str) -> None:
    axp(page).get_by_role("button", name="Examples").click()
    axp(page).get_by_role("menuitem", name=name).click()


def mary_and_john(page: Page) -> None:
    """Takes the example, and waits for its tokens: an edit made before goes by those of the prompt shown till then."""
    example(page, "Mary and John")
    expect(axp(page).locator(".strip").first.locator(".tok.diff")).to_have_text(["9\u2423Mary"])


def choose(page: Page, hook: str) -> None:
    axp(page).locator(f'td[data-hook="{hook}"]').click()


def add_edit(page: Page, op: str, amount: str | None = None) -> None:
    axp(page).get_by_label("Operation").select_option(op)
    if amount is not None:
        axp(page).get_by_label("Factor or value").fill(amount)
    axp(page).get_by_role("button", name="Add edit").click()


def no_overflow(page: Page) -> None:
    """Nothing sticks out sideways, and the sections lie below or beside each other."""
    look = """() => { const r = document.querySelector('.axp'), b = r.getBoundingClientRect(); const out = [];
        if (r.scrollWidth > r.clientWidth + 1) out.push('.axp scrolls sideways');
        for (const e of r.querySelectorAll('*')) { const c = e.getBoundingClientRect();
            if (c.width && c.right > b.right + 1 && !e.closest('.sr, .grid, .tok')) out.push(e.className || e.tagName) }
        const s = [...r.querySelectorAll('.bar, .tokens, .pred, .hooks, .heat, .edits, .job')];
        const boxes = s.map(e => [e.className, e.getBoundingClientRect()]);
        const apart = (a, c) => a.left >= c.right - 1 || c.left >= a.right - 1
            || a.top >= c.bottom - 1 || c.top >= a.bottom - 1;
        for (const [n, a] of boxes) for (const [m, c] of boxes) if (n < m && !apart(a, c)) out.push(n + ' over ' + m);
        return out }"""
    comes_to(page, lambda: page.evaluate(look), [])  # the page lays itself out anew after a change of size
