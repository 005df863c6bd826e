"""Undo, redo and the history in a real JupyterLab, by button and by key."""

from __future__ import annotations

from playwright.sync_api import expect

from .conftest import Lab
from .pages import EIFFEL, add_edit, axp, becomes, choose, no_overflow, open_workbench, predictions, settled


def test_undo_redo_and_the_history(notebook: Lab) -> None:
    page = open_workbench(notebook)
    settled(notebook)
    undo, redo = (axp(page).get_by_role("button", name=name, exact=True) for name in ("Undo", "Redo"))
    expect(undo).to_be_disabled()
    expect(redo).to_be_disabled()
    first, clean = notebook.evaluate("w.state"), predictions(page)
    cells = page.evaluate("jupyterapp.shell.currentWidget.content.model.sharedModel.cells.length")

    axp(page).get_by_label("Tokens of the prompt").locator('[data-p="3"]').click()
    choose(page, "blocks.12.hook_out")
    expect(undo).to_be_disabled()  # looking around is no step
    add_edit(page, "scale", "0.5")
    expect(undo).to_have_attribute("title", "Undo: add edit (Ctrl+Z)")
    # In a text field it is the browser's own, which takes back what was typed last, wherever that was: in the form.
    axp(page).get_by_label("Prompt", exact=True).press("Control+z")
    settled(notebook)
    becomes(notebook, "[w.steps['moves'], w.state['edits'][0]['factor']]", [0, 0.5])
    edited = predictions(page)
    factor = axp(page).get_by_label("factor of edit 1")
    for text in ("1.5", "2.5", "3.5"):  # one gesture
        factor.fill(text)
    becomes(notebook, "w.state['edits'][0]['factor']", 3.5)
    expect(undo).to_have_attribute("title", "Undo: change factor of edit 1 (Ctrl+Z)")
    settled(notebook)  # a run that the next change supersedes would not be kept

    axp(page).get_by_label("Remove edit 1").focus()
    page.keyboard.press("Control+z")
    becomes(notebook, "w.state['edits'][0]['factor']", 0.5)
    expect(factor).to_have_value("0.5")
    settled(notebook)
    assert predictions(page) == edited
    page.keyboard.press("Control+z")
    becomes(notebook, "w.state", first)
    expect(undo).to_be_disabled()
    page.keyboard.press("Control+z")  # there is nothing left, and the notebook does not take it
    settled(notebook)
    assert predictions(page) == clean
    page.keyboard.press("Control+Shift+z")
    becomes(notebook, "[w.state['edits'][0]['factor'], w.state['hook']]", [0.5, "blocks.12.hook_out"])
    redo.click()
    becomes(notebook, "w.state['edits'][0]['factor']", 3.5)
    expect(redo).to_be_disabled()
    undo.click()
    undo.click()
    becomes(notebook, "w.state", first)
    assert page.evaluate("jupyterapp.shell.currentWidget.content.model.sharedModel.cells.length") == cells

    # the history: the clean run, the first edit, and of the typed numbers the last
    settled(notebook)
    button = axp(page).get_by_role("button", name="History")
    expect(button).to_have_text("History 3")
    button.click()
    runs = axp(page).locator(".run")
    expect(runs).to_have_count(3)
    expect(runs.nth(0).get_by_label("Name of")).to_have_attribute("placeholder", "scale blocks.12.hook_out by 3.5 at 3")
    name = runs.nth(1).get_by_label("Name of")
    name.fill("halved <b>")
    name.press("Enter")
    becomes(notebook, "w.runs[1]['name']", "halved <b>")
    runs.nth(1).get_by_role("button", name="Pin").click()
    becomes(notebook, "w.runs[1]['pinned']", True)
    runs.nth(1).get_by_label("Compare").check()
    runs.nth(2).get_by_label("Compare").check()
    two = axp(page).locator(".two")
    expect(two.get_by_role("columnheader")).to_have_text(["run", "Run 1", "halved <b>"])
    expect(two.get_by_role("row").nth(2)).to_contain_text(EIFFEL)
    no_overflow(page)
    runs.nth(1).get_by_role("button", name="Restore").click()
    becomes(notebook, "[w.state['edits'][0]['factor'], w.steps['undo']]", [0.5, "restore halved <b>"])
    settled(notebook)
    assert predictions(page) == edited
    expect(runs.nth(1)).to_have_attribute("aria-current", "true")
    runs.nth(0).get_by_role("button", name="Delete").click()
    expect(runs).to_have_count(2)
    page.keyboard.press("Escape")
    expect(axp(page).locator(".past")).to_be_hidden()
    expect(button).to_be_focused()

    # a reload and a re-run of the cell keep both
    notebook.reload()
    for rerun in (False, True):
        if rerun:
            notebook.rerun()
            settled(notebook)  # before that the page may still show the closed one
        expect(undo).to_have_attribute("title", "Undo: restore halved <b> (Ctrl+Z)")
        expect(button).to_have_text("History 2")
        button.click()
        expect(runs.nth(0).get_by_label("Name of")).to_have_value("halved <b>")
    undo.click()
    becomes(notebook, "w.state", first)
