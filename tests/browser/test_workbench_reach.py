"""The page for every eye and hand, measured in Chromium: large, narrow, in the whole window, still, focused, dark."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from scripts.chromium import find_chromium

from . import test_views as views
from .conftest import CHROMIUM_ARGS
from .pages import no_overflow
from .test_workbench_maps import small, wave

page, about = views.page, views.about  # the fixtures: a blank page, and what the kernel says about the model

TOKENS = ["When", " Mary", " and", " John", " went", " to", " the", " store", ",", " Mary", " gave", " a", " drink"]
PATCH = {"hook": "blocks.6.hook_out", "op": "patch", "pos": 9, "source": {"prompt": "When John"}}


def open_page(page: Page, about: dict[str, Any], *, width: int | None = None, **state: Any) -> None:
    """The whole page with two prompts, an edit, and the numbers of its map."""
    rows = wave(len(TOKENS) if state.get("tab") == "attention" else 12, len(TOKENS))
    given = views.traits(about, TOKENS, **{"positions": [9], "edits": [PATCH], "of": "patched", **state})
    given["tokens"]["source"] = {"text": "", "tokens": [[i + (i == 9), t, ""] for i, t in enumerate(TOKENS)]}
    if width:
        page.set_viewport_size({"width": width, "height": 900})
    views.mount(page, given)
    views.answer(page, rows)
    page.wait_for_timeout(50)


def button(page: Page, name: str) -> Locator:
    return page.get_by_role("button", name=name, exact=True)


def heights(page: Page) -> list[float]:
    """How large things are on the screen: a token, a button, a number, the line of a title, a cell of the hook grid."""
    parts = [".tok", ".bar button", ".rows .num:not(.h)", ".edits .head b", "td.c > div", ".tok"]
    found: list[float] = page.evaluate(
        "(all) => all.map((q) => document.querySelector(q).getBoundingClientRect().height)", parts
    )
    return found


def sideways(page: Page) -> list[int]:
    seen: list[int] = page.evaluate("[document.documentElement.scrollWidth - innerWidth]")
    return seen


def every_tab_fits(page: Page) -> None:
    no_overflow(page)
    assert sideways(page) == [0]
    for tab in ("One hook", "Attention"):
        button(page, tab).click()
        views.answer(page, wave(len(TOKENS), len(TOKENS)))
        no_overflow(page)


def test_for_a_projector_all_is_half_as_large_again(page: Page, about: dict[str, Any]) -> None:
    open_page(page, about)
    before, map_before = heights(page), page.locator("canvas.map").bounding_box()
    switch = button(page, "Projector")
    expect(switch).to_have_attribute("aria-pressed", "false")
    switch.click()
    expect(switch).to_have_attribute("aria-pressed", "true")
    assert page.evaluate("model.get('state').projector") is True
    # Borders are whole pixels, so that not everything comes out at exactly 1.5.
    assert [large / was for large, was in zip(heights(page), before, strict=True)] == pytest.approx([1.5] * 6, rel=0.1)
    page.locator("canvas.map").scroll_into_view_if_needed()
    box = page.locator("canvas.map").bounding_box()
    assert box and map_before
    pixels = page.evaluate("(() => { const c = document.querySelector('canvas.map'); return [c.width, c.height] })()")
    assert pixels == pytest.approx([box["width"], box["height"]], abs=1), "the map is drawn as large as it is seen"
    # A cell of the map is where it is seen.
    page.mouse.move(box["x"] + box["width"] * 0.98, box["y"] + 12)
    assert page.locator(".heat .readout").inner_text().startswith("layer 0, token 12 ")
    switch.click()
    assert heights(page) == before
    now = page.locator("canvas.map").bounding_box()
    assert now and [now["width"], now["height"]] == [map_before["width"], map_before["height"]]


def test_a_tip_of_a_large_page_stands_beside_its_word(page: Page, about: dict[str, Any]) -> None:
    open_page(page, about, projector=True)
    word = page.locator(".pred .term").last
    word.scroll_into_view_if_needed()
    word.hover()
    tip = page.locator(".tip")
    expect(tip).to_be_visible()
    a, b = word.bounding_box(), tip.bounding_box()
    assert a and b
    gap = max(b["y"] - a["y"] - a["height"], a["y"] - b["y"] - b["height"])
    assert 0 < gap < 20 and b["x"] >= 0 and b["x"] + b["width"] <= 1110


@pytest.mark.parametrize("projector", [False, True], ids=["as usual", "projector"])
@pytest.mark.parametrize("width", [700, 1110, 2000])
def test_nothing_overlaps_at_any_width(page: Page, about: dict[str, Any], width: int, projector: bool) -> None:
    open_page(page, about, width=width, projector=projector)
    every_tab_fits(page)
    button(page, "Full width").click()
    no_overflow(page)
    assert sideways(page) == [0]


@pytest.mark.parametrize("width", [470, 640])
def test_at_twice_the_size_nothing_overlaps(page: Page, about: dict[str, Any], width: int) -> None:
    """A browser at 200 % shows half as many CSS pixels: 1280 x 720 becomes 640 x 360, 470 wide in a notebook's cell."""
    page.set_viewport_size({"width": width, "height": 360})
    open_page(page, about, edits=[PATCH, {**PATCH, "op": "scale", "factor": 0.5}])
    every_tab_fits(page)


def test_the_page_fills_the_window_and_comes_back(page: Page, about: dict[str, Any]) -> None:
    open_page(page, about)
    # A cell of a notebook clips what it holds.
    page.evaluate(
        """document.querySelector('main').style.cssText =
            'width: 700px; margin: 150px; overflow: hidden; contain: layout paint style; content-visibility: auto'"""
    )
    root, wide = page.locator(".axp"), button(page, "Full width")
    before, cell = root.bounding_box(), page.locator("main").bounding_box()
    wide.click()
    expect(wide).to_have_attribute("aria-pressed", "true")
    expect(wide).to_be_focused()
    assert root.bounding_box() == {"x": 0, "y": 0, "width": 1110, "height": 800}
    assert page.evaluate("document.elementFromPoint(5, 400).closest('.axp') !== null")
    now = page.locator("main").bounding_box()
    assert cell and now and now["height"] == pytest.approx(cell["height"], abs=2), "the notebook would jump"
    box = page.locator("canvas.map").bounding_box()
    assert box and box["width"] > 600
    page.get_by_role("button", name="History").click()
    page.keyboard.press("Escape")
    expect(wide).to_have_attribute("aria-pressed", "true")  # that Escape was the history's
    page.keyboard.press("Escape")
    expect(wide).to_have_attribute("aria-pressed", "false")
    expect(wide).to_be_focused()
    assert root.bounding_box() == before
    wide.click()
    wide.click()
    assert root.bounding_box() == before


MOVING = """() => [...document.querySelectorAll('.axp, .axp *')].flatMap((e) => [null, '::before', '::after']
    .map((part) => [e, getComputedStyle(e, part)]).filter(([, s]) => /[1-9]/.test(s.transitionDuration)
        || s.animationName !== 'none' || s.scrollBehavior !== 'auto').map(([e]) => e.className))"""


def test_nothing_moves_where_motion_is_not_wanted(page: Page, about: dict[str, Any]) -> None:
    open_page(page, about)
    assert page.evaluate(MOVING), "without the wish something does move: what is looked for can be found"
    page.emulate_media(reduced_motion="reduce")
    page.locator(".pred .term").last.hover()
    expect(page.locator(".tip")).to_be_visible()
    assert page.evaluate(MOVING) == []
    page.evaluate("model.set('result', { ...model.get('result'), rows: [[' a', 1, 0.9, 0.1, -0.8]] })")
    button(page, "Projector").click()
    button(page, "Change").click()
    assert page.evaluate("document.getAnimations().length") == 0


CONTROLS = """() => [...document.querySelectorAll('.axp :is(button, input, select, textarea, canvas, td, [tabindex])')]
    .filter((e) => e.tabIndex >= 0 && !e.disabled && e.offsetParent && !e.closest('[hidden]'))"""


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_what_has_the_focus_is_seen(page: Page, about: dict[str, Any], dark: bool) -> None:
    """By the pixels around each control, before and after the Tab key has come to it."""
    page.set_viewport_size({"width": 1110, "height": 1100})
    if dark:
        darken(page)
    open_page(page, about, tab="attention")
    small(page)
    count = page.evaluate(f"({CONTROLS})().length")
    assert count > 40
    page.evaluate("document.querySelector('.axp').focus()")
    seen: set[int] = set()
    for _ in range(count):
        page.keyboard.press("Tab")
        at, x, y, width, height = page.evaluate(
            f"""() => {{ const e = document.activeElement, r = e.getBoundingClientRect();
            return [({CONTROLS})().indexOf(e), r.x, r.y, r.width, r.height] }}"""
        )
        if at < 0:
            break
        seen.add(at)
        clip = {"x": max(0, x - 4), "y": max(0, y - 4), "width": width + 8, "height": height + 8}
        focused = page.screenshot(clip=clip, caret="hide")
        name = page.evaluate("document.activeElement.outerHTML.slice(0, 120)")
        page.evaluate("window.held = document.activeElement; held.blur(); document.querySelector('.tip')?.remove()")
        assert page.screenshot(clip=clip, caret="hide") != focused, f"the focus is not seen on {name}"
        page.evaluate("held.focus({ preventScroll: true })")
    assert len(seen) >= count - 3, "the Tab key comes to all controls"


def darken(page: Page, dark: bool = True) -> None:
    """As JupyterLab does it."""
    page.evaluate(
        """(dark) => {
        const colours = { 'ui-font-color1': '#e6edf3', 'layout-color1': '#111', 'border-color2': '#3d434a' };
        for (const [name, value] of Object.entries(colours))
            if (dark) document.body.style.setProperty(`--jp-${name}`, value);
            else document.body.style.removeProperty(`--jp-${name}`);
        document.body.dataset.jpThemeLight = String(!dark) }""",
        dark,
    )


PAINTED = """() => { const pixel = (q, x, y) => { const c = document.querySelector(q);
        return [...c.getContext('2d').getImageData(x * c.width, y * c.height, 1, 1).data] };
    return [pixel('canvas.map', 0.5, 0.05), pixel('canvas.ramp', 0.02, 0.5),
        pixel('.heat .heads canvas', 0.1, 0.1)] }"""


def test_what_is_drawn_follows_a_change_of_the_theme(page: Page, about: dict[str, Any]) -> None:
    open_page(page, about, tab="attention")
    small(page)
    light = page.evaluate(PAINTED)
    page.evaluate("document.body.dataset.jpThemeLight = 'true'")
    page.wait_for_timeout(100)
    assert page.evaluate(PAINTED) == light
    darken(page)
    page.wait_for_timeout(100)
    dark = page.evaluate(PAINTED)
    assert all(sum(a) > sum(b) for a, b in zip(light[1:], dark[1:], strict=True)), "zero is bright, then dark"
    darken(page, False)
    page.wait_for_timeout(100)
    assert page.evaluate(PAINTED) == light


@pytest.fixture(params=[1, 1.5, 2], ids=lambda ratio: f"{ratio} pixels")
def screen(browser: Browser, request: pytest.FixtureRequest) -> Iterator[Page]:
    """A browser on a screen with that many pixels for each of CSS. (Emulated, it would lay the page out as on 1.)"""
    args = [*CHROMIUM_ARGS, f"--force-device-scale-factor={request.param}", "--window-size=1131,1000"]
    own = browser.browser_type.launch(executable_path=find_chromium(), args=args)
    opened = own.new_context(no_viewport=True).new_page()
    views.serve(opened)
    assert opened.evaluate("devicePixelRatio") == request.param
    yield opened
    own.close()


# The picture of the window against what was drawn on the canvas, pixel by pixel; and how many colours there are among
# the cells: where edges are blurred, they are many.
LOOK = """async (png) => {
    const image = new Image(); image.src = `data:image/png;base64,${png}`; await image.decode();
    const c = document.querySelector('canvas.map'), { left, top } = c.getBoundingClientRect();
    const copy = Object.assign(document.createElement('canvas'), { width: c.width, height: c.height });
    const words = (canvas, x = 0, y = 0, width = c.width, height = c.height) =>
        new Uint32Array(canvas.getContext('2d').getImageData(x, y, width, height).data.buffer);
    const ratio = devicePixelRatio;
    copy.getContext('2d').drawImage(image, -Math.round(left * ratio), -Math.round(top * ratio));
    const seen = words(copy), drawn = words(c), opaque = [...drawn.keys()].filter((i) => drawn[i] >>> 24 === 255);
    const cells = words(c, c.width >> 3, 10, c.width >> 1, c.height >> 1);
    return { off: opaque.filter((i) => drawn[i] !== seen[i]).length, opaque: opaque.length / drawn.length,
        colours: new Set(cells).size } }"""


@pytest.mark.parametrize("projector", [False, True], ids=["as usual", "projector"])
def test_maps_are_sharp(screen: Page, about: dict[str, Any], projector: bool) -> None:
    """Each pixel of the map is one of the screen, as it was drawn; cells meet without a mixed pixel between them."""
    open_page(screen, about, projector=projector, positions=[0], edits=[])
    screen.locator(".heat > .foot").scroll_into_view_if_needed()
    found = screen.evaluate(LOOK, base64.b64encode(screen.screenshot()).decode())
    assert found["opaque"] > 0.7 and found["off"] == 0
    assert 3 < found["colours"] <= 14, "eleven values, the gap, the dash of what is below zero"
