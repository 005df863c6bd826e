"""The workbench in a real JupyterLab, with a real kernel and the real engine: what a user does and sees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import expect

from .conftest import Lab
from .pages import (
    EIFFEL,
    JOHN,
    MARY,
    add_edit,
    axp,
    becomes,
    choose,
    hover,
    mary_and_john,
    number,
    open_workbench,
    predictions,
    settled,
)


def shows_compare(notebook: Lab, prompt: str, spec: str, a: str, b: str) -> None:
    """The displayed numbers are those of `session.compare`, computed in the kernel without the widget."""
    settled(notebook)
    rows, difference, kl = notebook.evaluate(
        f"(lambda c: [[list(r) for r in c.top(6)], list(c.logit_diff({a!r}, {b!r})), c.kl()])"
        f"(session.compare({prompt!r}, {spec}))"
    )
    shown = predictions(notebook.page)

    def most(row: list[Any]) -> float:
        return -max(row[2], row[3])

    # the first of each run, then the second of each, as far as there are six; the largest on top
    ranks = zip(*(sorted(rows, key=lambda row: -row[run]) for run in (2, 3)), strict=True)
    chosen = {row[0]: row for rank in ranks for row in sorted(rank, key=most)}
    best = sorted(list(chosen.values())[:6], key=most)
    assert list(shown) == [row[0] for row in best]
    for text, _, clean, patched, change in best:
        assert shown[text] == pytest.approx((clean * 100, patched * 100, change * 100), abs=0.0501), text
    big = axp(notebook.page).locator(".big")
    assert [number(big.locator(".clean").inner_text()), number(big.locator(".patched").inner_text())] == pytest.approx(
        difference, abs=0.0501
    )
    assert float(axp(notebook.page).locator(".sum b.num").inner_text()) == pytest.approx(kl, abs=0.00501)


def test_opens_on_a_worked_state(notebook: Lab) -> None:
    page = open_workbench(notebook)
    expect(axp(page).locator(".tok")).to_have_count(9)
    expect(axp(page).locator('.tok[aria-selected="true"]')).to_have_text(["8\u2423of"])
    expect(axp(page).locator("td.on")).to_have_attribute("data-hook", "blocks.15.hook_out")
    expect(axp(page).locator(".mapbox .empty")).to_be_hidden()
    [[text, prob]] = notebook.evaluate(f"[list(row[::2]) for row in session.run({EIFFEL!r}).top(1)]")
    assert predictions(page)[text][0] == pytest.approx(prob * 100, abs=0.0501)
    assert text == " Paris"
    settled(notebook)
    tints = page.evaluate(
        "[...document.querySelectorAll('.axp td.c > div')].map(d => d.style.getPropertyValue('--tint'))"
    )
    assert len({tint for tint in tints if tint != "0%"}) > 20, "the grid is not tinted by norms"


def test_patching_by_clicks_changes_the_numbers_to_those_of_compare(notebook: Lab) -> None:
    page = open_workbench(notebook)
    mary_and_john(page)
    axp(page).get_by_label("Tokens of the prompt").locator('[data-p="9"]').click()
    choose(page, "blocks.12.hook_out")
    add_edit(page, "patch")
    expect(axp(page).locator(".edit")).to_have_count(1)
    edit = f"explorer.Edit('blocks.12.hook_out', 'patch', pos=9, source={JOHN!r})"
    shows_compare(notebook, MARY, f"[{edit}]", " Mary", " John")
    assert (
        number(axp(page).locator(".big .clean").inner_text()) < -4
        and number(axp(page).locator(".big .patched").inner_text()) > 4
    )

    # switched off, the numbers are the clean ones again; on, and a second edit, the spec's
    axp(page).get_by_label("edit 1 enabled").uncheck()
    expect(axp(page).locator(".big .patched")).to_have_text("")
    axp(page).get_by_label("edit 1 enabled").check()
    axp(page).get_by_label("Tokens of the prompt").locator('[data-p="13"]').click()
    choose(page, "blocks.20.attn.o.hook_in")
    axp(page).locator(".headrow").get_by_role("button", name="head 3").click()
    axp(page).locator(".headrow").get_by_role("button", name="head 5").click()
    add_edit(page, "scale", "0.5")
    second = "explorer.Edit('blocks.20.attn.o.hook_in', 'scale', pos=13, head=[3, 5], factor=0.5)"
    shows_compare(notebook, MARY, f"[{edit}, {second}]", " Mary", " John")
    axp(page).get_by_label("factor of edit 2").fill("-2")
    expect(axp(page).locator(".edit")).to_have_count(2)
    becomes(notebook, "w.state['edits'][1]['factor']", -2)
    shows_compare(notebook, MARY, f"[{edit}, {second.replace('0.5', '-2')}]", " Mary", " John")
    assert notebook.evaluate("session.run(w.state['prompt'], w.spec).top(1)[0].id") == notebook.evaluate(
        f"session.run({MARY!r}, [{edit}, {second.replace('0.5', '-2')}]).top(1)[0].id"
    )
    axp(page).get_by_label("Remove edit 2").click()
    shows_compare(notebook, MARY, f"[{edit}]", " Mary", " John")


def test_choosing_tokens_by_mouse_and_keys(notebook: Lab) -> None:
    page = open_workbench(notebook)
    strip = axp(page).get_by_label("Tokens of the prompt")
    chosen: Callable[[], list[int]] = lambda: page.evaluate(  # noqa: E731
        "[...document.querySelectorAll('.axp .strip .tok[aria-selected=true]')].map(e => +e.dataset.p)"
    )
    strip.locator('[data-p="2"]').click()
    assert chosen() == [2]
    strip.locator('[data-p="5"]').click(modifiers=["Shift"])
    assert chosen() == [2, 3, 4, 5]
    strip.locator('[data-p="3"]').click(modifiers=["Control"])
    assert chosen() == [2, 4, 5]
    page.keyboard.press("ArrowRight")
    assert chosen() == [4]
    page.keyboard.press("Shift+ArrowRight")
    assert chosen() == [4, 5]
    page.keyboard.press("End")
    assert chosen() == [8]
    page.keyboard.press("Home")
    assert chosen() == [0]
    assert strip.locator('[tabindex="0"]').count() == 1
    becomes(notebook, "w.state['positions']", [0])


def test_a_new_prompt_runs_by_itself(notebook: Lab) -> None:
    page = open_workbench(notebook)
    box = axp(page).get_by_label("Prompt", exact=True)
    box.fill("The capital of Japan is")
    box.press("Enter")
    expect(axp(page).locator(".tok")).to_have_count(5)
    settled(notebook)
    [text, prob] = notebook.evaluate("list(session.run('The capital of Japan is').top(1)[0][::2])")
    assert predictions(page)[text][0] == pytest.approx(prob * 100, abs=0.0501)


def test_the_map_shows_the_runs_numbers(notebook: Lab) -> None:
    page = open_workbench(notebook)
    settled(notebook)
    canvas = axp(page).locator("canvas.map")
    readout = axp(page).locator(".heat .readout")
    layer, token = 20, 3
    canvas.focus()
    page.keyboard.press("Home")
    for _ in range(token):
        page.keyboard.press("ArrowRight")
    for _ in range(layer - 15):
        page.keyboard.press("ArrowDown")
    norm = notebook.evaluate(
        f"float(session.run({EIFFEL!r}, capture='blocks.{layer}.hook_out')['blocks.{layer}.hook_out'][{token}].norm())"
    )
    expect(readout).to_contain_text(f"layer {layer}, token {token}")
    assert number(readout.locator("b").inner_text().replace(",", "")) == pytest.approx(norm, rel=1e-3)
    page.keyboard.press("Enter")
    expect(axp(page).locator("td.on")).to_have_attribute("data-hook", f"blocks.{layer}.hook_out")
    becomes(notebook, "w.state['positions']", [token])
    expect(axp(page).locator(".heat .notes")).to_contain_text("Left out of the scale")  # the attention sink at token 0

    choose(page, "blocks.2.attn.k.hook_out")
    settled(notebook)
    found = hover(page, 0.6, 0.4, r"token (\d+) .*, dimension (\d+) of head (\d+): (.*)")
    p, d, head = map(int, found.groups()[:3])
    value = notebook.evaluate(
        f"(lambda name: float(session.run({EIFFEL!r}, capture=name)[name][{p}, {head}, {d}]))"
        "('blocks.2.attn.k.hook_out')"
    )
    assert number(found[4]) == pytest.approx(value, rel=1e-3, abs=1e-3)

    choose(page, "blocks.9.attn.hook_pattern")
    settled(notebook)
    axp(page).locator(".heat .heads").get_by_role("button", name="head 4").click()
    expect(axp(page).locator(".heat .unit")).to_contain_text("head 4")  # said only with its numbers
    found = hover(page, 0.5, 0.7, r"(\d+) .* looks at (\d+) .*: (.*)")
    weight = notebook.evaluate(
        f"float(session.run({EIFFEL!r}, capture='blocks.9.attn.hook_pattern').pattern(9)[4, {found[1]}, {found[2]}])"
    )
    assert number(found[3]) == pytest.approx(weight, rel=1e-3, abs=1e-4)


def test_errors_stand_where_the_gesture_was_made(notebook: Lab) -> None:
    page = open_workbench(notebook)
    clean = predictions(page)
    add_edit(page, "scale")
    expect(axp(page).locator(".edits > .error:visible")).to_have_text(
        "This operation needs a factor: a number such as 0.5."
    )
    expect(axp(page).locator(".edit")).to_have_count(0)
    add_edit(page, "add", "1, 2, 3")
    alert = axp(page).locator(".edit .error:visible")
    expect(alert).to_contain_text("576")
    expect(alert).to_have_attribute("role", "alert")
    assert predictions(page) == clean, "what needs no edit stays"
    expect(axp(page).locator(".mapbox .empty")).to_be_hidden()
    axp(page).get_by_label("Remove edit 1").click()
    expect(axp(page).locator(".error:visible")).to_have_count(0)
    add_edit(page, "patch")
    expect(axp(page).locator(".edits > .error:visible")).to_contain_text("type a second prompt as Source")
    first = axp(page).get_by_label("logit of this token")
    first.fill("\u2423Paris and more")
    first.press("Enter")
    expect(axp(page).locator(".sum .error:visible")).to_contain_text("but one is needed")
    first.fill("\u2423Paris")
    first.press("Enter")
    expect(axp(page).locator(".error:visible")).to_have_count(1)  # the source is still missing
    source = axp(page).get_by_label("Source", exact=True)
    source.fill(JOHN)
    source.press("Enter")
    expect(axp(page).locator(".error:visible")).to_have_count(0)
    settled(notebook)
    expect(axp(page).locator(".error:visible")).to_have_count(0)
    assert " Paris" in predictions(page)
