"""The views as widgets of their own: each alone in Chromium, and linked in a real JupyterLab."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Browser, Page, expect

from tests.browser.fake import one_session as one_session  # a fixture
from widgets import AttentionView, Heatmap, HookPicker, LogitCompare, SpecEditor, TokenPicker, views

from .conftest import ROOT, Lab
from .page import mount_view
from .pages import alike, axp, becomes, colours, comes_to
from .test_workbench_axe import violations

EVIL = [
    "<img src=x onerror=window.pwned=1>",
    "</script><script>window.pwned=1</script>",
    "{{7*7}}",
    "\u202ertl",
    "\n",
    " &lt;",
]
SHOWN = [
    "<img\u2423src=x\u2423onerror=window.pwned=1>",
    EVIL[1],
    "{{7*7}}",
    "\u2039202E\u203artl",
    "\u23ce",
    "\u2423&lt;",
]
RNG = np.random.default_rng(0)
PATTERN = np.tril(RNG.random((4, 6, 6))) + np.eye(6) / 2
EDIT = {"blocks.1.hook_out": [{"op": "suppress", "pos": 1}, {"op": "scale", "factor": 2}]}


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A blank page; an error on it fails the test."""
    opened = browser.new_page(viewport={"width": 1130, "height": 800})
    opened.set_default_timeout(10000)
    errors: list[str] = []
    opened.on("pageerror", lambda error: errors.append(str(error)))
    opened.goto("about:blank")
    opened.evaluate("document.documentElement.lang = 'en', document.title = 'views'")
    yield opened
    opened.close()
    for view in list(views.opened):
        view.close()
    assert errors == []


def heatmap(**more: Any) -> Heatmap:
    values = [[1.0, -2.0, float("nan"), 4.0, 0.5, 0.0], [0.25, float("inf"), 3.0, -1.0, 2.0, 1.0]]
    return Heatmap(values, columns=EVIL, rows=[EVIL[0], "layer 1"], title=EVIL[0], unit=EVIL[1], **more)


def predictions(session: Any) -> LogitCompare:
    view = LogitCompare(session.compare("When Mary", EDIT))
    rows = [[text, i, 0.1, 0.2, 0.1] for i, text in enumerate(EVIL)]
    view.result = {**view.result, "rows": rows, "difference": {"tokens": EVIL[:2], "values": [1.0, -1.0]}}
    return view


def edits(session: Any) -> SpecEditor:
    view = SpecEditor(session, EDIT, EVIL, source=EVIL[0])
    patch = {"hook": "blocks.2.hook_out", "op": "patch", "pos": [0, 1], "source": {"prompt": EVIL[1]}, "enabled": False}
    view.set_state({"edits": [*view.edits, patch, {"hook": EVIL[0], "op": "suppress", "enabled": True}]})
    return view


MAKE: dict[str, Callable[[Any], Any]] = {
    "Heatmap": lambda session: heatmap(selected_columns=[1]),
    "TokenPicker": lambda session: TokenPicker(EVIL, positions=[1]),
    "HookPicker": lambda session: HookPicker(session, "blocks.2.attn.o.hook_in", heads=[1]),
    "SpecEditor": edits,
    "LogitCompare": predictions,
    "AttentionView": lambda session: AttentionView(PATTERN, EVIL, head=1, positions=[2]),
}


def trait(page: Page, name: str) -> Any:
    return page.evaluate(f"model.get({name!r})")


@pytest.mark.parametrize("name", MAKE)
def test_tokens_are_text(page: Page, session: Any, name: str) -> None:
    mount_view(page, MAKE[name](session))
    expect(axp(page)).to_be_visible()
    page.wait_for_timeout(100)
    assert page.evaluate("window.pwned") is None
    assert axp(page).locator("img, script").count() == 0
    shown = axp(page).inner_text()
    if name in ("TokenPicker", "LogitCompare"):
        assert all(text in shown for text in SHOWN)
    if name == "Heatmap":
        assert EVIL[0] in shown and EVIL[1] in shown
        axp(page).get_by_role("button", name="Show as table").click()
        expect(axp(page).locator("table.numbers thead th").nth(4)).to_have_text("3 \u2039202E\u203artl")
        assert page.evaluate("window.pwned") is None and axp(page).locator("img, script").count() == 0


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("name", MAKE)
def test_axe_finds_nothing(page: Page, session: Any, name: str, dark: bool) -> None:
    mount_view(page, MAKE[name](session), dark=dark)
    expect(axp(page)).to_be_visible()
    assert violations(page) == []
    if name == "AttentionView":
        axp(page).get_by_role("button", name="Lines").click()
        assert violations(page) == []
    if name == "Heatmap":
        axp(page).get_by_role("button", name="Show as table").click()
        assert violations(page) == []


@pytest.mark.parametrize("name", MAKE)
def test_it_fits_and_leaves_nothing(page: Page, session: Any, name: str) -> None:
    for width in (420, 700, 1110):
        mount_view(page, MAKE[name](session), width=width)
        assert (
            page.evaluate(
                """() => { const r = document.querySelector('.axp'), b = r.getBoundingClientRect();
            return [...r.querySelectorAll('*')].filter((e) => { const c = e.getBoundingClientRect();
                return c.width && c.right > b.right + 1 && !e.closest('.sr, .grid, .tok, .sheet') })
                .map((e) => e.className || e.tagName) }"""
            )
            == []
        )
    assert page.evaluate("Object.values(model.heard).flat().length") > 0
    page.evaluate("unmount()")
    assert page.evaluate("Object.values(model.heard).flat().length") == 0
    assert axp(page).count() == 0


@pytest.mark.parametrize("name", MAKE)
def test_keys_stay_inside(page: Page, session: Any, name: str) -> None:
    mount_view(page, MAKE[name](session))
    page.evaluate("window.keys = []; document.addEventListener('keydown', (event) => keys.push(event.key))")
    axp(page).locator('button:visible, input:visible, [tabindex="0"]:visible').first.focus()
    for key in ("d", "d", "x", "a", "z", "Enter", "ArrowDown", "Shift+ArrowUp"):
        page.keyboard.press(key)
    assert set(page.evaluate("keys")) <= {"Shift"}
    page.keyboard.press("Escape")
    page.keyboard.press("Control+s")
    assert page.evaluate("keys").count("Escape") <= 1 and "s" in page.evaluate("keys")


def test_a_click_on_a_token_chooses_its_position(page: Page) -> None:
    mount_view(page, TokenPicker(["The", " city", " of", " The"]))
    assert axp(page).locator(".tok.sel").count() == 0
    axp(page).locator("[data-p='1']").click()
    assert trait(page, "positions") == [1]
    axp(page).locator("[data-p='3']").click(modifiers=["Control"])
    assert trait(page, "positions") == [1, 3]
    axp(page).get_by_role("button", name="last").click()
    assert trait(page, "positions") == [3]
    axp(page).get_by_label("Positions in the prompt").fill("0:2")
    axp(page).get_by_label("Positions in the prompt").press("Enter")
    assert trait(page, "positions") == [0, 1]
    page.evaluate("model.set('positions', [2])")  # as Python does
    expect(axp(page).locator(".tok.sel")).to_have_text("2\u2423of")
    page.evaluate("model.set('positions', [])")
    expect(axp(page).locator(".tok.sel")).to_have_count(0)
    assert axp(page).locator("[data-p='0']").get_attribute("title") == "token 0"


def cell(page: Page, across: float, down: float) -> None:
    box = axp(page).locator("canvas.map").bounding_box()
    assert box
    page.mouse.click(box["x"] + box["width"] * across, box["y"] + box["height"] * down)


def test_a_click_on_a_cell_chooses_its_row_and_column(page: Page) -> None:
    mount_view(page, Heatmap([[1, 2, 3], [4, 5, 6]], columns=["a", "b", "c"], unit="nats"))
    expect(axp(page).locator(".unit")).to_have_text("nats")
    assert axp(page).locator(".heads").is_hidden() and axp(page).locator(".head .seg:visible").count() == 0
    cell(page, 0.9, 0.2)
    assert (trait(page, "selected_rows"), trait(page, "selected_columns")) == ([0], [2])
    expect(axp(page).locator(".readout")).to_have_text("row 0, column 2 c: 3")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    assert (trait(page, "selected_rows"), trait(page, "selected_columns")) == ([1], [2])
    before = picture(page)
    page.evaluate("model.set('selected_columns', [0])")
    comes_to(page, lambda: picture(page) != before, True)


def picture(page: Page, nth: int = 0) -> str:
    return str(axp(page).nth(nth).locator("canvas.map").evaluate("(canvas) => canvas.toDataURL()"))


def test_nan_and_infinity_are_marks(page: Page) -> None:
    mount_view(page, heatmap())
    axp(page).locator("canvas.map").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect(axp(page).locator(".readout b")).to_have_text("NaN")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowLeft")
    expect(axp(page).locator(".readout b")).to_have_text("+\u221e")
    expect(axp(page).locator(".readout")).to_contain_text("layer 1, column 1 ")
    assert axp(page).locator(".legend .num").all_inner_texts() == ["\u22124", "4"]


def test_a_large_map_is_asked_for_by_its_key(page: Page) -> None:
    view = Heatmap(np.ones((800, 800)))
    mount_view(page, view)
    [ask] = page.evaluate("sent")
    assert ask["type"] == "data" and axp(page).locator(".mapbox .empty").is_visible()
    page.evaluate(
        """({ key }) => model.fire('msg:custom', { type: 'data', key, shape: [800, 800] },
        [new Float32Array(640000).fill(1)])""",
        ask,
    )
    expect(axp(page).locator(".mapbox .empty")).to_be_hidden()
    view.values = np.zeros((700, 900))
    page.evaluate("(result) => model.set('result', result)", view.result)
    assert page.evaluate("sent.length") == 2 and page.evaluate("sent[1].key") != ask["key"]


def test_a_click_in_the_grid_chooses_a_hook_and_its_heads(page: Page, session: Any) -> None:
    mount_view(page, HookPicker(session))
    axp(page).locator('td[data-hook="blocks.4.attn.q.hook_out"]').click()
    assert (trait(page, "hook"), trait(page, "heads"), trait(page, "hooks")) == ("blocks.4.attn.q.hook_out", [], [])
    axp(page).locator(".headrow").get_by_role("button", name="head 2").click()
    assert trait(page, "heads") == [2]
    axp(page).get_by_role("rowheader", name="layer 5", exact=True).click()
    assert len(trait(page, "hooks")) > 5 and trait(page, "hook") in trait(page, "hooks")
    page.evaluate("model.set('hooks', []); model.set('heads', []); model.set('hook', 'blocks.7.hook_out')")
    expect(axp(page).locator("td.on")).to_have_attribute("data-hook", "blocks.7.hook_out")
    assert "tinted" not in axp(page).inner_text() and page.evaluate("sent") == []


def test_edits_are_added_where_the_traits_say(page: Page, session: Any) -> None:
    mount_view(page, SpecEditor(session, tokens=["The", " city", " of"], positions=[1]))
    hook = axp(page).get_by_label("Hook", exact=True)
    hook.fill("blocks.99.hook_out")
    hook.press("Enter")
    expect(axp(page).locator(".error:visible")).to_contain_text("There is no hook \u201cblocks.99.hook_out\u201d")
    hook.fill("blocks.3.attn.o.hook_in")
    hook.press("Enter")
    expect(axp(page).locator(".error:visible")).to_have_count(0)
    assert trait(page, "hook") == "blocks.3.attn.o.hook_in"
    axp(page).get_by_role("button", name="Add edit").click()
    assert trait(page, "edits") == [{"hook": "blocks.3.attn.o.hook_in", "op": "suppress", "pos": 1, "enabled": True}]
    source = axp(page).get_by_label("Source", exact=True)
    source.fill("A town")
    source.press("Enter")
    assert trait(page, "source") == "A town"
    axp(page).get_by_label("Operation").select_option("patch")
    axp(page).get_by_role("button", name="Add edit").click()
    assert trait(page, "edits")[1]["source"] == {"prompt": "A town"}
    axp(page).get_by_label("op of edit 1").select_option("scale")
    axp(page).get_by_label("edit 1, factor by slider").press("ArrowRight")
    page.wait_for_function("model.get('edits')[0].factor === 1.02")


def test_without_tokens_an_edit_is_for_all_of_them(page: Page, session: Any) -> None:
    mount_view(page, SpecEditor(session))
    axp(page).get_by_role("button", name="Add edit").click()
    assert trait(page, "edits") == [{"hook": "blocks.6.hook_out", "op": "suppress", "enabled": True}]
    expect(axp(page).locator(".list [data-key=tokens]")).to_have_attribute("placeholder", "all")
    axp(page).get_by_role("button", name="Presets").click()
    head = axp(page).get_by_role("menuitem", name="One head")
    expect(head).to_contain_text("at all tokens")
    head.click()
    assert trait(page, "edits")[1] == {"hook": "blocks.6.attn.o.hook_in", "op": "suppress", "enabled": True, "head": 0}


def test_what_the_model_cannot_take_is_said_at_the_edit(page: Page, session: Any) -> None:
    view = SpecEditor(session, EDIT, ["a", "b"])
    view.set_state({"edits": [*view.edits, {"hook": "blocks.1.hook_out", "op": "suppress", "pos": 9, "enabled": True}]})
    mount_view(page, view)
    expect(axp(page).locator(".edit .error:visible")).to_contain_text("pos 9 is outside")


def test_the_two_tokens_are_typed(page: Page, session: Any) -> None:
    mount_view(page, LogitCompare(session.compare("When Mary", EDIT)))
    field = axp(page).get_by_label("minus this token")
    field.fill("\u2423Paris")
    field.press("Enter")
    assert trait(page, "compare") == [None, " Paris"]
    mount_view(page, LogitCompare(session.run("When Mary")))
    assert axp(page).locator(".rows [role=row]").count() == 7


def test_heads_and_lines_of_plain_attention(page: Page) -> None:
    mount_view(page, AttentionView(PATTERN, positions=[2]))
    expect(axp(page).locator(".unit")).to_have_text("attention weight, head 0: rows look at columns")
    expect(axp(page).locator(".notes").last).to_contain_text("Hatched: masked.")
    axp(page).get_by_role("button", name="head 3").click()
    assert trait(page, "head") == 3
    expect(axp(page).locator(".unit")).to_contain_text("head 3")
    axp(page).get_by_role("button", name="Lines").click()
    axp(page).get_by_role("option").nth(4).click()
    assert trait(page, "positions") == [4]
    assert trait(page, "state")["lines"] is True, "a reload shows the same"
    mount_view(page, AttentionView(np.ones((2, 3, 3))))
    expect(axp(page).locator(".unit")).to_have_text("attention weight, head 0: rows look at columns")
    assert "masked" not in axp(page).locator(".notes").last.inner_text()


def example() -> str:
    """What the README shows."""
    section = (ROOT / "README.md").read_text(encoding="utf-8").split("### Views by themselves")[1]
    return section.split("```python\n")[1].split("```")[0]


def test_linked_views_in_a_notebook_follow_each_other_and_outlive_a_reload(notebook: Lab) -> None:
    notebook.run(example())
    page = notebook.page
    tokens, heat, attention = (axp(page).nth(i) for i in range(3))
    expect(attention.locator(".mapbox .empty")).to_be_hidden()
    expect(heat.locator(".mapbox .empty")).to_be_hidden()
    before = [picture(page, 1), picture(page, 2)]
    tokens.locator("[data-p='3']").click()
    becomes(notebook, "[heatmap.selected_columns, attention.positions]", [[3], [3]])
    comes_to(page, lambda: [picture(page, n) != before[n - 1] for n in (1, 2)], [True, True])
    attention.get_by_role("button", name="Lines").click()
    expect(attention.get_by_role("option", selected=True)).to_contain_text("Tower")
    attention.get_by_role("option").nth(7).click()
    expect(tokens.locator(".tok.sel")).to_have_text("7\u2423city")
    becomes(notebook, "[picker.positions, heatmap.selected_columns]", [[7], [7]])
    becomes(notebook, "attention.state['lines']", True)
    page.mouse.move(0, 0)
    page.evaluate("document.activeElement.blur()")
    drawn = colours(page, 1)
    notebook.reload()
    expect(axp(page)).to_have_count(3)
    expect(tokens.locator(".tok.sel")).to_have_text("7\u2423city")
    expect(attention.get_by_role("option", selected=True)).to_contain_text("city")
    comes_to(page, lambda: alike(drawn, colours(page, 1)) > 0.95, True)
    tokens.locator("[data-p='1']").click()
    expect(attention.get_by_role("option", selected=True)).to_contain_text("E")
    notebook.evaluate("[v.close() for v in list(__import__('widgets.views').views.opened)]")
    expect(axp(page)).to_have_count(0)
