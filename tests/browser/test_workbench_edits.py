"""The spec editor with the real engine: a patch by keyboard alone, edits changed in place, presets."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page, expect

from .conftest import Lab
from .pages import (
    JOHN,
    MARY,
    add_edit,
    axp,
    becomes,
    choose,
    comes_to,
    mary_and_john,
    number,
    open_workbench,
    predictions,
    settled,
)


def tab_to(page: Page, label: str) -> None:
    """Presses Tab until a control is reached."""
    look = "document.activeElement.getAttribute('aria-label') ?? document.activeElement.textContent"
    for _ in range(60):
        page.keyboard.press("Tab")
        if page.evaluate(look) == label:
            return
    raise AssertionError(f"Tab does not lead to {label}")


def test_a_patch_by_keyboard_alone(notebook: Lab) -> None:
    page = open_workbench(notebook)
    mary_and_john(page)
    settled(notebook)
    axp(page).get_by_label("Tokens of the prompt").locator('[tabindex="0"]').focus()
    page.keyboard.press("Home")
    for _ in range(9):
        page.keyboard.press("ArrowRight")
    while page.evaluate("!document.activeElement.matches('td.c')"):
        page.keyboard.press("Tab")
    for _ in range(3):
        page.keyboard.press("ArrowUp")  # from the middle of the model
    page.keyboard.press("Enter")
    expect(axp(page).locator("td.on")).to_have_attribute("data-hook", "blocks.12.hook_out")
    tab_to(page, "Operation")
    page.keyboard.press("p")
    tab_to(page, "Add edit")
    page.keyboard.press("Enter")
    expect(axp(page).locator(".edits .sr")).to_have_text("edit 1 added: patch at blocks.12.hook_out")
    patch = {"hook": "blocks.12.hook_out", "op": "patch", "pos": 9, "source": {"prompt": JOHN}, "enabled": True}
    becomes(notebook, "w.state['edits']", [patch])
    settled(notebook)
    expect(axp(page).locator("> .sr")).to_contain_text("John 75% to 0%")
    assert page.evaluate("document.activeElement.textContent") == "Add edit"

    # and on with it: a preset, moved before the patch, its tokens changed, both taken away
    tab_to(page, "Presets")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    becomes(notebook, "[edit['op'] for edit in w.state['edits']]", ["patch", "suppress"])
    for _ in range(60):
        page.keyboard.press("Shift+Tab")
        if page.evaluate("document.activeElement.getAttribute('aria-label')") == "tokens of edit 2":
            break
    page.keyboard.press("Alt+ArrowUp")
    becomes(notebook, "[edit['op'] for edit in w.state['edits']]", ["suppress", "patch"])
    page.keyboard.press("Control+a")
    page.keyboard.type("0:3")
    page.keyboard.press("Enter")
    becomes(notebook, "w.state['edits'][0]['pos']", "0:3")
    tab_to(page, "Remove edit 1")
    page.keyboard.press("Enter")
    page.keyboard.press("Enter")
    becomes(notebook, "w.state['edits']", [])
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Operation"


def test_a_token_dragged_from_the_source_changes_the_numbers_and_one_undo_takes_it_back(notebook: Lab) -> None:
    page = open_workbench(notebook)
    mary_and_john(page)
    choose(page, "blocks.12.hook_out")
    settled(notebook)
    clean = predictions(page)
    ways = [axp(page).get_by_label(f"Tokens of the {role}").locator('[data-p="9"]') for role in ("source", "prompt")]
    boxes = [way.bounding_box() for way in ways]
    (x, y), (to_x, to_y) = [(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2) for box in boxes if box]
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(to_x, to_y, steps=6)
    expect(axp(page).locator(".carry")).to_have_text("patch blocks.12.hook_out: pos 9 from pos 9 of the second prompt")
    assert notebook.evaluate("w.state['edits']") == []
    page.mouse.up()
    patch = {"hook": "blocks.12.hook_out", "op": "patch", "pos": 9, "source": {"prompt": JOHN}}
    becomes(notebook, "w.state['edits']", [patch | {"source_pos": 9, "enabled": True}])
    settled(notebook)
    rows = notebook.evaluate(f"[list(row) for row in session.compare({MARY!r}, [explorer.Edit(**{patch!r})]).top(6)]")
    shown = predictions(page)
    for text, _, before, after, _ in rows[:4]:
        assert shown[text][:2] == pytest.approx((before * 100, after * 100), abs=0.0501)
    assert shown[" Mary"][0] < 1 and shown[" Mary"][1] > 80
    axp(page).get_by_role("button", name="Undo").click()
    becomes(notebook, "w.state['edits']", [])
    settled(notebook)
    assert predictions(page) == clean


def test_the_mean_preset_is_the_mean_of_the_clean_run(notebook: Lab) -> None:
    page = open_workbench(notebook)
    mary_and_john(page)
    settled(notebook)
    for hook in ("blocks.12.mlp.hook_out", "blocks.12.attn.o.hook_in"):
        choose(page, hook)
        axp(page).get_by_role("button", name="Presets").click()
        axp(page).get_by_role("menuitem", name="Mean over positions").click()
        becomes(notebook, "[edit['hook'] for edit in w.state['edits']][-1:]", [hook])
    settled(notebook)
    mean = "(lambda name: session.run({!r}, capture=name)[name].mean(0))({!r})"
    off = "float((__import__('torch').tensor(w.state['edits'][{}]['value']) - {}).abs().max())"
    for index, hook in enumerate(("blocks.12.mlp.hook_out", "blocks.12.attn.o.hook_in")):
        assert notebook.evaluate(off.format(index, mean.format(MARY, hook))) < 1e-4
    rows = notebook.evaluate("[list(row) for row in session.compare(w.state['prompt'], w.spec).top(6)]")
    shown = predictions(page)
    assert {row[0]: pytest.approx((row[2] * 100, row[3] * 100), abs=0.0501) for row in rows[:4]} == {
        row[0]: shown[row[0]][:2] for row in rows[:4]
    }


def test_numbers_follow_the_slider_and_a_wrong_edit_is_said_at_its_row(notebook: Lab) -> None:
    page = open_workbench(notebook)
    mary_and_john(page)
    choose(page, "blocks.20.hook_out")
    add_edit(page, "scale", "1")
    add_edit(page, "suppress")
    axp(page).get_by_label("edit 2 enabled").uncheck()
    settled(notebook)
    notebook.evaluate("globals().update(seen=[])")
    notebook.evaluate("w.observe(lambda change: seen.append(change['new']['edits'][0].get('factor')), 'state')")
    slider = axp(page).get_by_label("edit 1, factor by slider")
    slider.scroll_into_view_if_needed()
    box = slider.bounding_box()
    assert box
    page.mouse.move(box["x"] + box["width"] * 0.75, box["y"] + box["height"] / 2)
    page.mouse.down()
    for step in range(40):
        page.mouse.move(box["x"] + box["width"] * (0.75 + step / 200), box["y"] + box["height"] / 2)
        page.wait_for_timeout(25)
    page.mouse.up()
    value = number(axp(page).get_by_label("factor of edit 1").input_value())
    becomes(notebook, "w.state['edits'][0]['factor']", value)
    settled(notebook)
    seen = notebook.evaluate("seen")
    assert value > 1.5 and seen == sorted(set(seen)) and len(seen) > 2, "live"
    kl = notebook.evaluate("session.compare(w.state['prompt'], w.spec).kl()")
    comes_to(page, lambda: float(axp(page).locator(".sum b.num").inner_text()), pytest.approx(kl, abs=0.0051))

    tokens = axp(page).get_by_label("tokens of edit 2", exact=True)
    tokens.fill("99")
    tokens.press("Enter")
    axp(page).get_by_label("edit 2 enabled").check()
    expect(axp(page).locator(".edit").nth(1).locator(".error:visible")).to_contain_text("99")
    assert axp(page).locator(".error:visible").count() == 1
    axp(page).get_by_label("Move edit 2 up").click()
    expect(axp(page).locator(".edit").nth(0).locator(".error:visible")).to_contain_text("99")
    tokens = axp(page).get_by_label("tokens of edit 1", exact=True)
    tokens.fill("last")
    tokens.press("Enter")
    expect(axp(page).locator(".error:visible")).to_have_count(0)
    settled(notebook)
    assert notebook.evaluate("[w.result['edited'], w.result['error']]") == [True, None]
