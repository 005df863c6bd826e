"""The maps in Chromium without Jupyter: zoom, pan, the table, the current cell, heads and lines of attention."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Page, expect

from explorer import Edit
from explorer.engine.protocol import Attention
from explorer.jobs import Jobs
from explorer.session import Session
from widgets import data

from . import fake
from . import test_views as views
from .conftest import Lab
from .pages import axp, comes_to, open_workbench, settled

page, about = views.page, views.about  # the fixtures: a blank page, and what the kernel says about the model

TOKENS = ["When", " Mary", " and", " John", " went", " to", " the", " store"]


def notes(page: Page) -> str:
    return page.locator(".heat .notes").inner_text()


def spoken(page: Page) -> str:
    return page.locator(".heat > .sr").inner_text()


def open_hook(page: Page, about: dict[str, Any], rows: list[list[float | str]], **state: Any) -> None:
    """The map of one hook: as many tokens as rows."""
    tokens = [f" t{i}" for i in range(len(rows))]
    views.mount(page, views.traits(about, tokens, tab="hook", of="clean", **state))
    views.answer(page, rows)
    page.wait_for_timeout(50)


def wave(rows: int, cols: int) -> list[list[float | str]]:
    return [[((i * 7 + j * 3) % 11) - 5 for j in range(cols)] for i in range(rows)]


def fill(page: Page, side: int) -> float:
    """Answers with side x side cells, one of them far out; returns the milliseconds until they were painted."""
    took = page.evaluate(
        """async (n) => { const ask = sent.filter((m) => m.view === 'hook').at(-1);
        const v = new Float32Array(n * n).map((_, i) => Math.sin(i));
        await new Promise((f) => setTimeout(f)); // the next is a task of its own, as a message's is
        const start = performance.now();
        model.fire('msg:custom', { type: 'data', key: ask.key, error: null, shape: [n, n] }, [v]);
        await new Promise(requestAnimationFrame); await new Promise((f) => setTimeout(f));
        return performance.now() - start }""",
        side,
    )
    return float(took)


MOVE = """async ({ type, buttons }) => { const c = document.querySelector('canvas.map'), b = c.getBoundingClientRect();
    const times = []; const at = (i) => ({ clientX: b.left + b.width / 2 + 6 * i, clientY: b.top + b.height / 3 + 3 * i,
        bubbles: true, pointerId: 1, button: 0, buttons });
    const capture = c.setPointerCapture; c.setPointerCapture = () => {};
    if (buttons) c.dispatchEvent(new PointerEvent('pointerdown', at(0)));
    for (let i = 1; i <= 20; i++) { const start = performance.now(); c.dispatchEvent(new PointerEvent(type, at(i)));
        await new Promise(requestAnimationFrame); await new Promise((f) => setTimeout(f));
        times.push(performance.now() - start) }
    c.dispatchEvent(new PointerEvent('pointerup', at(20))); c.setPointerCapture = capture; return times }"""


@contextmanager
def watched(page: Page, tasks: list[float]) -> Iterator[None]:
    """The page's tasks meanwhile, in milliseconds of its thread's own time: how busy the machine is does not count."""
    browser = page.context.browser
    assert browser
    browser.start_tracing(page=page, categories=["toplevel", "devtools.timeline"])
    try:
        yield
    finally:
        found = json.loads(browser.stop_tracing())["traceEvents"]
    threads = {(e["pid"], e["tid"]) for e in found if e["name"] == "thread_name" and "RendererMain" in str(e["args"])}
    tasks += [e.get("tdur", 0) / 1000 for e in found if "RunTask" in e["name"] and (e["pid"], e["tid"]) in threads]


def test_a_million_cells_are_drawn_and_moved_quickly(
    page: Page, about: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    views.mount(page, views.traits(about, [f"t{i}" for i in range(1000)], tab="hook", of="clean"))
    page.wait_for_timeout(200)
    tasks: list[float] = []
    with watched(page, tasks):
        first = fill(page, 1000)
        hover = page.evaluate(MOVE, {"type": "pointermove", "buttons": 0})
        page.get_by_role("button", name="Zoom in").click()
        before = notes(page)
        pan = page.evaluate(MOVE, {"type": "pointermove", "buttons": 1})
        moved = notes(page)
        # From one map that is there to another: they are told apart by their keys.
        page.get_by_role("button", name="Patched", exact=True).click()
        fill(page, 1000)
        page.get_by_role("button", name="Clean", exact=True).click()
        page.wait_for_timeout(100)
    with capsys.disabled():  # recorded in every run, CI's too
        print(
            f"\n1,000 x 1,000 cells: drawn first in {first:.0f} ms; to the paint, medians of 20 (fastest): "
            f"hover {statistics.median(hover):.0f} ({min(hover):.0f}) ms, pan {statistics.median(pan):.0f} "
            f"({min(pan):.0f}) ms; the longest task takes {max(tasks):.0f} ms of the thread's own time"
        )
    assert moved != before, "nothing moved"
    assert min(hover) < 100 and min(pan) < 100  # the goal is 50; a busy machine runs this too
    assert len(tasks) > 40 and max(tasks) < 200


def picture(page: Page, canvas: str = "canvas.map") -> str:
    return str(page.evaluate("(q) => document.querySelector(q).toDataURL()", canvas))


def test_a_large_map_that_comes_before_its_page_has_whole_labels(page: Page, about: dict[str, Any]) -> None:
    traits = views.traits(about, [f" word{i}" for i in range(500)], tab="hook", of="clean")
    pictures = []
    for detached in (False, True):
        views.mount(page, traits)
        page.evaluate("window.main = document.querySelector('main')")
        if detached:
            page.evaluate("main.remove()")
        fill(page, 500)
        page.evaluate("document.body.append(main)")
        page.wait_for_function("document.querySelector('canvas.map').width > 300")  # 300 until it is drawn
        pictures.append(picture(page))
        page.evaluate("dispose()")
    assert pictures[0] == pictures[1]


def test_zoom_by_buttons_keys_and_wheel(page: Page, about: dict[str, Any]) -> None:
    open_hook(page, about, wave(30, 200))
    tool = {name: page.get_by_role("button", name=name) for name in ("Zoom in", "Zoom out", "Show the whole map")}
    expect(tool["Zoom out"]).to_have_attribute("aria-disabled", "true")
    tool["Zoom in"].click()
    assert "columns 0 to 99 of 200" in notes(page) or "columns 50 to 149 of 200" in notes(page)
    tool["Show the whole map"].click()
    assert "Shown:" not in notes(page)
    canvas = page.locator("canvas.map")
    canvas.focus()
    for key, shown in (("+", True), ("-", False), ("=", True), ("0", False)):
        page.keyboard.press(key)
        assert ("Shown:" in notes(page)) == shown, key
        assert ("Shown:" in spoken(page)) == shown, key
    for _ in range(12):
        page.keyboard.press("+")
    expect(tool["Zoom in"]).to_have_attribute("aria-disabled", "true")
    found = re.search(r"columns (\d+) to (\d+) of 200", notes(page))
    assert found and int(found[2]) - int(found[1]) < 20
    # The current cell stays in sight.
    page.keyboard.press("End")
    assert "to 199 of 200" in notes(page) and "dimension 199" in spoken(page)
    page.keyboard.press("0")
    box = canvas.bounding_box()
    assert box
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.mouse.wheel(0, -100)
    assert "Shown:" not in notes(page), "without Ctrl the wheel scrolls the notebook"
    under = page.locator(".heat .readout").inner_text()
    page.keyboard.down("Control")
    page.mouse.wheel(0, -100)
    page.keyboard.up("Control")
    expect(page.locator(".heat .notes")).to_contain_text("Shown:")
    page.mouse.move(box["x"] + box["width"] / 2 + 1, box["y"] + box["height"] / 2)
    assert re.match(r"token (1[3-7]) .* dimension (8\d|9\d|10\d)", under)
    now = [int(n) for n in re.findall(r"\d+", page.locator(".heat .readout").inner_text())[:3]]
    was = [int(n) for n in re.findall(r"\d+", under)[:3]]
    assert abs(now[0] - was[0]) <= 1 and abs(now[2] - was[2]) <= 3, "the cell under the pointer keeps its place"


def test_a_drag_moves_a_zoomed_map_and_chooses_nothing(page: Page, about: dict[str, Any]) -> None:
    open_hook(page, about, wave(30, 200))
    page.get_by_role("button", name="Zoom in").click()
    before = notes(page)
    box = page.locator("canvas.map").bounding_box()
    assert box
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x - 120, y - 20, steps=4)
    page.mouse.up()
    page.wait_for_timeout(50)
    assert "Shown:" in before and notes(page) != before
    assert page.evaluate("model.get('state').positions") == []
    page.mouse.click(x, y)
    assert page.evaluate("model.get('state').positions") != []


def test_two_fingers_zoom_the_map_and_one_is_left_to_the_page(page: Page, about: dict[str, Any]) -> None:
    open_hook(page, about, wave(30, 200))
    canvas = page.locator("canvas.map")
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    assert box
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    chrome = page.context.new_cdp_session(page)
    chrome.send("Emulation.setTouchEmulationEnabled", {"enabled": True, "maxTouchPoints": 2})

    def touch(kind: str, *across: float) -> None:
        points = [{"x": x + by, "y": y, "id": i} for i, by in enumerate(across)]
        chrome.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

    def pinch(*reaches: float) -> None:
        touch("touchStart", reaches[0])
        touch("touchStart", reaches[0], -reaches[0])
        for reach in reaches[1:]:
            touch("touchMove", reach, -reach)
        touch("touchEnd")
        page.wait_for_timeout(50)

    assert canvas.evaluate("(e) => getComputedStyle(e).touchAction") == "pan-x pan-y"
    pinch(40, 60, 90, 120)
    zoom = page.evaluate("model.get('state').zoom")
    assert zoom["scale"] == pytest.approx(3, rel=0.1)
    found = re.search(r"columns (\d+) to (\d+) of 200", notes(page))
    assert found and int(found[1]) < 100 < int(found[2]), "around the cell between the fingers"
    assert page.evaluate("[visualViewport.scale, model.get('state').positions]") == [1, []]
    pinch(120, 80, 20)
    assert page.evaluate("model.get('state').zoom") == {} and "Shown:" not in notes(page)


def test_zoom_and_table_come_back_with_the_state(page: Page, about: dict[str, Any]) -> None:
    rows = wave(30, 200)
    open_hook(page, about, rows)
    page.get_by_role("button", name="Zoom in").click()
    box = page.locator("canvas.map").bounding_box()
    assert box
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.mouse.down()
    page.mouse.move(box["x"] + 100, box["y"] + 100, steps=4)
    page.mouse.up()
    page.mouse.move(0, 0)
    page.wait_for_timeout(50)
    says, looks, zoom = notes(page), picture(page), page.evaluate("model.get('state').zoom")
    assert "Shown:" in says

    def again(**state: Any) -> None:
        page.evaluate("dispose()")
        open_hook(page, about, rows, **state)

    again(zoom=zoom)
    assert (notes(page), picture(page)) == (says, looks)
    page.evaluate("model.set('state', { ...model.get('state'), zoom: {} })")
    assert "Shown:" not in notes(page), "what another view of the page zooms is zoomed here"
    page.get_by_role("button", name="Show as table").click()
    assert page.evaluate("model.get('state').table")
    again(table=True)
    expect(page.locator("table.numbers")).to_be_visible()
    expect(page.get_by_role("button", name="Show as map")).to_have_attribute("aria-expanded", "true")
    again(zoom={**zoom, "map": "another"})
    assert "Shown:" not in notes(page) and page.locator("canvas.map").is_visible()


def test_zoom_and_table_outlive_a_reload_without_a_run(notebook: Lab) -> None:
    page = open_workbench(notebook, "w = session.explore('one two three four ' * 10); w")
    heat = axp(page).locator(".heat")

    def says() -> str:
        return heat.locator(".notes").last.inner_text()

    def reloaded() -> None:
        settled(notebook)
        before = says()
        jobs = notebook.evaluate("w._submitted")
        notebook.reload()
        expect(axp(page)).to_be_visible()
        comes_to(page, says, before)
        assert notebook.evaluate("w._submitted") == jobs

    settled(notebook)
    heat.get_by_role("button", name="Zoom in").click()
    expect(heat.locator(".notes").last).to_contain_text("Shown:")
    reloaded()
    heat.get_by_role("button", name="Attention").click()
    settled(notebook)
    heat.get_by_role("button", name="Zoom in").click()
    heat.get_by_role("button", name="Zoom in").click()
    expect(heat.locator(".notes").last).to_contain_text("Shown:")
    heat.get_by_role("button", name="Show as table").click()
    expect(heat.locator("table.numbers")).to_be_visible()
    reloaded()
    expect(heat.locator("table.numbers")).to_be_visible()
    assert notebook.evaluate("[w.steps['undo'], len(w.runs)]") == [None, 1]


def test_the_map_is_shown_as_a_table(page: Page, about: dict[str, Any]) -> None:
    rows = wave(4, 8)
    rows[1][2] = "nan"
    open_hook(page, about, rows)
    show = page.get_by_role("button", name="Show as table")
    expect(show).to_have_attribute("aria-expanded", "false")
    show.click()
    table = page.get_by_role("table", name="Activations at blocks.6.hook_out")
    expect(table.locator("th[scope=col]")).to_have_text(["token", *map(str, range(8))])
    expect(table.locator("th[scope=row]")).to_have_text([f"{i} \u2423t{i}" for i in range(4)])
    expect(table.locator("tbody tr").nth(1).locator("td").nth(2)).to_have_text("NaN")
    expect(table.locator("tbody tr").nth(0).locator("td").nth(0)).to_have_text("\u22125")
    expect(page.locator("canvas.map")).to_be_hidden()
    expect(page.get_by_role("region", name="The map as a table")).to_be_focused()
    page.keyboard.press("Escape")
    expect(table).to_be_hidden()
    expect(show).to_be_focused()
    expect(page.locator("canvas.map")).to_be_visible()


def test_a_large_table_shows_fifty_by_fifty_around_the_current_cell(page: Page, about: dict[str, Any]) -> None:
    open_hook(page, about, wave(80, 300), positions=[40])
    page.get_by_role("button", name="Show as table").click()
    table = page.locator("table.numbers")
    expect(table.locator("tbody tr")).to_have_count(50)
    expect(table.locator("thead th")).to_have_count(51)
    assert "rows 15 to 64 of 80, columns 0 to 49 of 300" in table.locator("caption").inner_text()
    page.keyboard.press("Escape")
    page.locator("canvas.map").focus()
    page.keyboard.press("End")
    page.get_by_role("button", name="Show as table").click()
    assert "columns 250 to 299 of 300" in table.locator("caption").inner_text()


def test_the_current_cell_is_announced_with_its_exact_value(page: Page, about: dict[str, Any]) -> None:
    open_hook(page, about, [[0.1, 2.0], [123.45678, -4.0], [1, 2]], positions=[1])
    page.locator("canvas.map").focus()
    expect(page.locator(".heat > .sr")).to_have_attribute("aria-live", "polite")
    assert spoken(page) == "token 1 \u2423t1, dimension 0: 123.45678"
    page.keyboard.press("ArrowUp")
    assert spoken(page) == "token 0 \u2423t0, dimension 0: 0.1"


def test_signs_are_seen_without_colour(page: Page, about: dict[str, Any]) -> None:
    page.add_style_tag(content=".axp { --neg: #888 !important; --pos: #888 !important }")
    open_hook(page, about, [[-5, 1, 5], [5, 1, -5]])
    assert "A dash: below zero." in notes(page)
    colours = page.evaluate(
        """() => { const c = document.querySelector('canvas.map'), g = c.getContext('2d');
        return [90, c.width - 150].map((x) => { const d = g.getImageData(x, 10, 110, c.height / 2 - 40).data;
            return new Set(new Uint32Array(d.buffer)).size }) }"""
    )
    assert colours[0] > 1 and colours[1] == 1, "the first cell is below zero, the last is not"


def test_what_is_masked_is_no_zero(page: Page, about: dict[str, Any]) -> None:
    views.mount(page, views.traits(about, TOKENS[:3], tab="attention", of="clean"))
    views.answer(page, [[1, "-inf", "-inf"], [0, 1, "-inf"], [0.5, 0, 0.5]])
    page.locator("canvas.map").focus()
    page.keyboard.press("ArrowRight")
    assert spoken(page).endswith("2 \u2423and looks at 1 \u2423Mary: 0")
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowRight")
    assert spoken(page).endswith("1 \u2423Mary looks at 2 \u2423and: masked")
    assert "Hatched: masked." in notes(page)
    page.get_by_role("button", name="Show as table").click()
    first = page.locator("table.numbers tbody tr").first.locator("td")
    expect(first).to_have_text(["1", "masked", "masked"])


def small(page: Page) -> None:
    """Answers the ask for all heads: four heads of three tokens."""
    page.evaluate(
        """() => { const ask = sent.filter((m) => m.view === 'attention' && m.head === -1).at(-1);
        model.fire('msg:custom', { type: 'data', key: ask.key, error: null, shape: [12, 3] },
            [new Float32Array(36).map((_, i) => (i % 9) / 9)]) }"""
    )


def test_all_heads_are_shown_small_and_chosen_by_click_or_arrows(page: Page, about: dict[str, Any]) -> None:
    views.mount(page, views.traits(about, TOKENS[:3], tab="attention", of="clean"))
    asks = "sent.filter((m) => m.view === 'attention').map((m) => m.head)"
    assert page.evaluate(asks) == [0], "the small ones come from the capture that the large one made"
    views.answer(page, [[1, 0, 0], [0, 1, 0], [0.5, 0, 0.5]])
    assert page.evaluate(asks) == [0, -1]
    small(page)
    heads = page.locator(".heat .heads").get_by_role("button")
    expect(heads).to_have_count(4)
    assert page.evaluate("[...document.querySelectorAll('.heat .heads canvas')].map((c) => c.width)") == [3] * 4
    heads.nth(2).click()
    assert page.evaluate("model.get('state').head") == 2
    page.keyboard.press("ArrowRight")
    assert page.evaluate("model.get('state').head") == 3
    expect(heads.nth(3)).to_be_focused()
    expect(heads.nth(3)).to_have_attribute("aria-pressed", "true")
    page.keyboard.press("Home")
    expect(heads.nth(0)).to_be_focused()
    assert [button.get_attribute("tabindex") for button in heads.all()] == ["0", "-1", "-1", "-1"]


def test_small_heads_that_come_before_their_page_are_drawn_in_it(page: Page, about: dict[str, Any]) -> None:
    views.mount(page, views.traits(about, TOKENS[:3], tab="attention", of="clean"))
    page.evaluate("window.main = document.querySelector('main'); main.remove()")
    views.answer(page, [[1, 0, 0], [0, 1, 0], [0.5, 0, 0.5]])
    small(page)
    page.evaluate("document.body.append(main)")
    drawn = """[...document.querySelectorAll('.heads canvas')].map((c) =>
        c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some(Boolean))"""
    comes_to(page, lambda: page.evaluate(drawn), [True] * 4)


def test_lines_from_a_token_with_the_weights(page: Page, about: dict[str, Any]) -> None:
    views.mount(page, views.traits(about, TOKENS[:3], tab="attention", of="clean", positions=[1]))
    views.answer(page, [[1, "-inf", "-inf"], [0.25, 0.75, "-inf"], [0.5, 0, 0.5]])
    page.get_by_role("button", name="Lines").click()
    assert page.evaluate("model.get('state').lines") is True
    seen = page.get_by_role("list", name="What it looks at").get_by_role("listitem")
    expect(seen.locator("b")).to_have_text(["0.250", "0.750", "masked"])
    expect(page.locator(".lines path")).to_have_count(2)
    tokens = page.get_by_role("listbox", name="The token that looks").get_by_role("option")
    expect(tokens.nth(1)).to_have_attribute("aria-selected", "true")
    tokens.nth(1).focus()
    page.keyboard.press("ArrowDown")
    assert page.evaluate("model.get('state').positions") == [2]
    expect(tokens.nth(2)).to_be_focused()
    expect(tokens.nth(2)).to_have_attribute(
        "aria-label", "2 \u2423and looks most at 0 When 0.5, 2 \u2423and 0.5, 1 \u2423Mary 0"
    )
    expect(seen.locator("b")).to_have_text(["0.500", "0.000", "0.500"])
    expect(page.locator("canvas.map")).to_be_hidden()
    page.get_by_role("button", name="Map").click()
    expect(page.locator("canvas.map")).to_be_visible()
    expect(page.locator(".lines")).to_be_hidden()


def test_lines_of_a_prompt_whose_tokens_come_before_its_numbers(page: Page, about: dict[str, Any]) -> None:
    views.mount(page, views.traits(about, TOKENS[:2], tab="attention", of="clean", lines=True))
    views.answer(page, [[1, "-inf"], [0.25, 0.75]])
    seen = page.get_by_role("list", name="What it looks at").get_by_role("listitem")
    expect(seen).to_have_count(2)
    longer = views.traits(about, TOKENS[:3], tab="attention", of="clean", lines=True)
    longer["result"]["keys"] = {"clean": "d", "patched": "d"}
    for trait in ("tokens", "result"):
        page.evaluate("([name, value]) => model.set(name, value)", [trait, longer[trait]])
    views.answer(page, [[1, "-inf", "-inf"], [0.25, 0.75, "-inf"], [0.5, 0, 0.5]])
    expect(seen.locator("b")).to_have_text(["0.500", "0.000", "0.500"])
    expect(page.get_by_role("listbox", name="The token that looks").get_by_role("option")).to_have_count(3)


def test_a_view_that_fails_does_not_keep_a_gesture_from_the_kernel(page: Page) -> None:
    """Its error is the page's: reported, and the next view draws."""
    found = page.evaluate(
        """async () => { const { createStore } = await import('http://page.test/store.js');
        const reported = [], seen = [], heard = []; let state = {}, saved = 0;
        window.reportError = (error) => reported.push(error.message);
        const store = createStore({ on: (name, fn) => name === 'change:state' && heard.push(fn), send: () => {},
            get: (name) => name === 'state' ? state : {}, save_changes: () => { saved += 1 },
            set: (_, value) => { state = value; heard.forEach((fn) => fn()) } });
        store.watch((s) => [s.state.a], (a) => { if (a) throw Error('broken view') });
        store.watch((s) => [s.state.a], (a) => seen.push(a ?? null));
        store.set({ a: 1 });
        return [reported, seen, saved] }"""
    )
    assert found == [["broken view"], [None, 1], 1]


def test_pooling_of_a_masked_map_keeps_what_is_seen(page: Page) -> None:
    pooled = page.evaluate(
        """async () => { const { pool } = await import('http://page.test/scale.js');
        const n = 8, v = new Float32Array(n * n);
        for (let q = 0; q < n; q++) for (let k = 0; k < n; k++) v[q * n + k] = k > q ? -Infinity : k === q ? 0.5 : 0.1;
        return [...pool(v, n, n, 4, 4, undefined, true).values].map((x) => (x === -Infinity ? 'masked' : x)) }"""
    )
    assert pooled[0] == 0.5 and pooled[1] == "masked" and pooled[4] == pytest.approx(0.1) and pooled[5] == 0.5


def test_what_lies_outside_a_window_is_masked() -> None:
    heads = np.full((1, 5, 5), 0.5, np.float32)
    shown = [[not hidden for hidden in row] for row in np.isneginf(data.masked(heads, 3)[0])]
    assert shown == [[0 <= q - k < 3 for k in range(5)] for q in range(5)]
    assert (data.masked(heads)[0] == np.where(np.tri(5, dtype=bool), 0.5, -np.inf)).all()
    # The workbench takes each layer's own window.
    words = fake.tokenizer()
    engine = fake.FakeEngine(len(words))
    engine.model = replace(
        engine.model, attention=tuple(Attention(0.3, window=2 if i % 2 else None) for i in range(12))
    )
    with Session("fake-model", "fake-model", engine, words, Jobs("fake-window")) as session:
        for layer, hidden in ((4, 6), (5, 9)):
            hook = f"blocks.{layer}.attn.hook_pattern"
            runs = session.compare("abcd", [Edit("embed.hook_out", "suppress")], capture=[hook])
            for array in (
                data.numbers("attention", [hook], runs.patched, session),
                data.change("attention", [hook], runs.clean, runs.patched, session),
            ):
                assert np.isneginf(array[0]).sum() == hidden and not np.isnan(array).any()


def test_small_heads_keep_the_extreme_of_each_block() -> None:
    heads = np.zeros((3, 100, 100), np.float32)
    heads[1, 99, 40] = -7
    heads[2] = -np.inf  # scores that are masked
    small = data.thumbnails(heads)
    assert small.shape == (3 * 25, 25)
    assert small[25 + 24, 10] == -7 and np.count_nonzero(small[:50]) == 1
    assert np.isneginf(small[50:]).all()
    assert (data.thumbnails(heads[:, :5, :5]) == heads[:, :5, :5].reshape(15, 5)).all()
