"""The first minute, in Chromium without Jupyter: steps to try, the menu of examples, what an operation does."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import Page, expect

from . import page as pages
from .pages import no_overflow
from .test_views import about as about  # fixtures
from .test_views import mount, traits
from .test_views import page as page
from .test_views_carry import dark_theme
from .test_workbench_axe import violations

DONE = "[...document.querySelectorAll('.first li')].map((e) => e.classList.contains('done'))"


def opened(page: Page, about: dict[str, Any], **state: Any) -> None:
    mount(page, traits(about, ["The", " Eiffel", " Tower", " is"], **state))


def change(page: Page, **state: Any) -> None:
    page.evaluate("(patch) => model.set('state', { ...model.get('state'), ...patch })", state)


def test_steps_are_checked_off_as_they_are_done(page: Page, about: dict[str, Any]) -> None:
    opened(page, about)
    first = page.get_by_role("region", name="First steps")
    expect(first.get_by_role("listitem")).to_have_count(4)
    assert page.evaluate(DONE) == [False] * 4
    page.get_by_label("Tokens of the prompt").locator('[data-p="1"]').click()
    assert page.evaluate(DONE) == [True, False, False, False]
    page.locator('td[data-hook="blocks.3.hook_out"]').click()
    page.get_by_role("button", name="Presets").click()
    page.get_by_role("menuitem", name="Zero this").click()
    assert page.evaluate(DONE) == [True, True, True, False]
    page.get_by_role("button", name="Undo").click(force=True)
    change(page, edits=[])
    page.evaluate("model.set('steps', { undo: null, redo: 'add edit', moves: 1 })")
    assert page.evaluate(DONE) == [True] * 4, "what was done stays so"
    expect(first.get_by_role("listitem").last).to_contain_text("Undo, done")


@pytest.mark.parametrize("storage", [True, False])
def test_steps_are_dismissed_for_good(page: Page, about: dict[str, Any], storage: bool) -> None:
    if not storage:
        page.evaluate("Object.defineProperty(window, 'localStorage', { get() { throw new Error('none here') } })")
    opened(page, about)
    page.get_by_role("button", name="Dismiss").press("Enter")
    expect(page.locator(".first")).to_be_hidden()
    assert page.evaluate("document.activeElement.classList.contains('axp')"), "the focus is not the notebook's"
    for reload in (False, True):
        page.evaluate("dispose()")
        if reload:
            page.reload()
        opened(page, about)
        shown = reload and not storage
        expect(page.locator(".first")).to_be_visible() if shown else expect(page.locator(".first")).to_be_hidden()
    page.evaluate("dispose()")


def test_a_page_without_storage_opens(page: Page) -> None:
    page.goto("about:blank")  # where localStorage throws
    pages.mount(page, ["a", " b"])
    expect(page.locator(".first li")).to_have_count(4)


def test_examples_are_a_menu(page: Page, about: dict[str, Any]) -> None:
    opened(page, about, edits=[{"hook": "blocks.1.hook_out", "op": "suppress"}], source="x", source_positions=[0])
    button = page.get_by_role("button", name="Examples")
    button.press("ArrowDown")
    items = page.get_by_role("menu", name="Examples").get_by_role("menuitem")
    expect(items).to_have_count(4)
    page.keyboard.press("End")
    page.keyboard.press("Enter")
    expect(button).to_be_focused()
    state = page.evaluate("model.get('state')")
    assert [state[key] for key in ("prompt", "source", "edits", "positions", "source_positions")] == [
        "The capital of France is",
        "The capital of Italy is",
        [],
        [3],
        [],
    ]
    button.click()
    items.filter(has_text="Induction").click()
    state = page.evaluate("model.get('state')")
    words = state["prompt"].split()
    assert state["source"] == "" and [*words[6:], state["compare"][0].strip()] == words[:6], "the next one is known"
    button.press("Enter")
    page.keyboard.press("Escape")
    expect(page.get_by_role("menu")).to_be_hidden()
    expect(button).to_be_focused()


def test_every_operation_says_what_it_does(page: Page, about: dict[str, Any]) -> None:
    opened(page, about, edits=[{"hook": "blocks.1.hook_out", "op": "scale", "factor": 2, "enabled": True}])
    words = about["words"]["ops"]
    tip = page.get_by_role("tooltip")
    menu = page.get_by_label("Operation")
    menu.hover()
    expect(tip).to_contain_text(words["suppress"]["about"])
    for name in words:
        page.mouse.move(0, 0)
        expect(tip).to_have_count(0)
        menu.select_option(name)
        menu.hover()
        for part in ("about", "shape", "formula", "place"):
            expect(tip).to_contain_text(words[name][part])
    page.mouse.move(0, 0)
    expect(tip).to_have_count(0)
    page.get_by_label("tokens of edit 1", exact=True).focus()
    while page.evaluate("document.activeElement.ariaLabel") != "op of edit 1":
        page.keyboard.press("Shift+Tab")
    expect(tip).to_contain_text(words["scale"]["about"])
    page.keyboard.press("ArrowDown")
    expect(tip).to_contain_text(words["add"]["about"])
    assert page.evaluate("model.get('state').edits[0].op") == "add"
    page.keyboard.press("Escape")
    expect(tip).to_have_count(0)


@pytest.mark.parametrize("dark", [False, True])
def test_the_first_page_fits_and_axe_finds_nothing(page: Page, about: dict[str, Any], dark: bool) -> None:
    opened(page, about)
    dark_theme(page, dark)
    for width in (1110, 700, 2000):
        page.set_viewport_size({"width": width, "height": 700})
        no_overflow(page)
    page.set_viewport_size({"width": 1126, "height": 600})  # the room of an output in JupyterLab at 1280 x 720
    page.get_by_label("Tokens of the prompt").locator('[data-p="1"]').click()
    for seen in (".first", ".tok.sel", ".pred .rows", "td.on", ".sum"):
        expect(page.locator(seen).first).to_be_in_viewport(ratio=1)
    page.get_by_role("button", name="Examples").click()
    no_overflow(page)
    assert violations(page) == []
