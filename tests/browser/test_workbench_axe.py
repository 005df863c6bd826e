"""axe on the workbench in a real JupyterLab: every tab, with an error shown and an edit there, in both themes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from .conftest import Lab
from .pages import add_edit, axp, choose, example, open_workbench, settled

TAGS = ["wcag2a", "wcag2aa", "wcag21aa", "wcag22aa", "best-practice"]
# The fake engine answers at once; that its numbers mean nothing is all the same to axe.
FAKE = """from tests.browser import fake
quick, engine = fake.session()
w = quick.explore('When Mary and John went to the store'); w"""


def use_theme(page: Page, theme: str) -> None:
    page.evaluate(f"jupyterapp.commands.execute('apputils:change-theme', {{ theme: 'JupyterLab {theme}' }})")
    page.wait_for_function(f"document.body.dataset.jpThemeLight === '{str(theme == 'Light').lower()}'")


@pytest.fixture(params=["Light", "Dark"])
def theme(request: pytest.FixtureRequest, notebook: Lab) -> Iterator[str]:
    use_theme(notebook.page, request.param)
    yield request.param
    use_theme(notebook.page, "Light")


def violations(page: Page) -> list[str]:
    """What axe finds wrong within the workbench: rule, element, why. axe.min.js comes with its package."""
    page.mouse.move(0, 0)
    page.evaluate("Promise.all(document.getAnimations().map((animation) => animation.finished.catch(() => {})))")
    options = {"runOnly": {"type": "tag", "values": TAGS}, "resultTypes": ["violations"]}
    found = Axe().run(page, context=".axp", options=options).response
    assert found["passes"], "axe looked at nothing"
    return [
        f"{rule['id']}: {' '.join(map(str, node['target']))}: {node['html'][:150]}: {node['failureSummary']}"
        for rule in found["violations"]
        for node in rule["nodes"]
    ]


def test_axe_finds_nothing(notebook: Lab, theme: str) -> None:
    page = open_workbench(notebook, FAKE)
    example(page, "Mary and John")
    expect(axp(page).locator(".tok.diff")).not_to_have_count(0)  # a second prompt, and where the two differ
    settled(notebook)
    choose(page, "blocks.6.attn.o.hook_in")  # the row of heads is open
    add_edit(page, "scale", "0.5")
    add_edit(page, "add", "1, 2, 3")  # refused: an error at the edit
    expect(axp(page).locator(".edit .error:visible")).to_have_count(1)
    axp(page).locator(".edit input[type=checkbox]").first.click()  # switched off
    found = {}
    for tab in ("Norms", "One hook", "Attention"):
        axp(page).get_by_role("button", name=tab).click()
        settled(notebook)
        found[tab] = violations(page)
        show = axp(page).get_by_role("button", name="Show as table")
        show.click()
        found[f"{tab} as a table"] = violations(page)
        page.keyboard.press("Escape")
    axp(page).get_by_role("button", name="Lines").click()
    found["Lines"] = violations(page)
    notebook.evaluate("w.close()")
    notebook.evaluate("quick.close()")
    lines = [f"{name}: {line}" for name, each in found.items() for line in each]
    assert not lines, "\n".join(lines)


def test_axe_can_find_something(notebook: Lab) -> None:
    page = open_workbench(notebook, FAKE)
    page.evaluate("document.querySelector('.axp').append(document.createElement('button'))")
    assert any(line.startswith("button-name") for line in violations(page))
    notebook.evaluate("w.close()")
    notebook.evaluate("quick.close()")
