"""The workbench in a real JupyterLab in Chromium, with a real kernel and the real engine: what a user does and sees."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

from .conftest import BOOT, Lab

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
        """() => [...document.querySelectorAll('.axp .rows [role=row]')].slice(1).map(r => [...r.children].map(c => c.textContent))"""
    )
    return {row[0].replace("\u2423", " "): tuple(number(text) for text in row[2:] if text != "\u2013") for row in rows}


def settled(notebook: Lab, name: str = "w") -> None:
    """Waits until nothing is under way any more: no change of the page, no job, no array."""
    look = f"[{name}.state, {name}.result.get('seconds'), {name}.jobs]"
    last, same, deadline = None, 0, time.monotonic() + 30
    while same < 2:
        assert time.monotonic() < deadline, f"still busy: {last}"
        notebook.evaluate(f"{name}._session.jobs.call(lambda job: None)")
        now = notebook.evaluate(look)
        same = same + 1 if now == last and not now[2]["active"] else 0
        last = now
        notebook.page.wait_for_timeout(50)


def choose(page: Page, hook: str) -> None:
    axp(page).locator(f'td[data-hook="{hook}"]').click()


def add_edit(page: Page, op: str, amount: str | None = None) -> None:
    axp(page).get_by_label("Operation").select_option(op)
    if amount is not None:
        axp(page).get_by_label("Factor or value").fill(amount)
    axp(page).get_by_role("button", name="Add edit").click()


def shows_compare(notebook: Lab, prompt: str, spec: str, a: str, b: str) -> None:
    """The displayed numbers are those of `session.compare`, computed in the kernel without the widget."""
    settled(notebook)
    rows, difference, kl = notebook.evaluate(
        f"(lambda c: [[list(r) for r in c.top(6)], list(c.logit_diff({a!r}, {b!r})), c.kl()])(session.compare({prompt!r}, {spec}))"
    )
    shown = predictions(notebook.page)
    best = sorted(rows, key=lambda row: -max(row[2], row[3]))[:6]
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
    axp(page).get_by_label("Examples").select_option("Mary and John")
    expect(axp(page).locator(".strip").first.locator(".tok.diff")).to_have_text(["9\u2423Mary"])
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
    page.wait_for_function("() => document.querySelector('.axp input.amount').value === '-2'")
    page.wait_for_timeout(250)
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
    assert notebook.evaluate("w.state['positions']") == [0]


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
        f"float(session.run({EIFFEL!r}, capture='blocks.{layer}.hook_out')['blocks.{layer}.hook_out'][{token}].float().norm())"
    )
    expect(readout).to_contain_text(f"layer {layer}, token {token}")
    assert number(readout.locator("b").inner_text().replace(",", "")) == pytest.approx(norm, rel=1e-3)
    page.keyboard.press("Enter")
    expect(axp(page).locator("td.on")).to_have_attribute("data-hook", f"blocks.{layer}.hook_out")
    assert notebook.evaluate("w.state['positions']") == [token]
    expect(axp(page).locator(".heat .notes")).to_contain_text("Left out of the scale")  # the attention sink at token 0

    choose(page, "blocks.2.attn.k.hook_out")
    settled(notebook)
    box = canvas.bounding_box()
    assert box
    page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + box["height"] * 0.4)
    found = re.match(r"token (\d+) .*, dimension (\d+) of head (\d+): (.*)", readout.inner_text())
    assert found, readout.inner_text()
    p, d, head = map(int, found.groups()[:3])
    value = notebook.evaluate(
        f"float(session.run({EIFFEL!r}, capture='blocks.2.attn.k.hook_out')['blocks.2.attn.k.hook_out'][{p}, {head}, {d}])"
    )
    assert number(found[4]) == pytest.approx(value, rel=1e-3, abs=1e-3)

    choose(page, "blocks.9.attn.hook_pattern")
    settled(notebook)
    axp(page).locator(".heat .heads").get_by_role("button", name="head 4").click()
    settled(notebook)
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + box["height"] * 0.7)
    found = re.match(r"(\d+) .* looks at (\d+) .*: (.*)", readout.inner_text())
    assert found, readout.inner_text()
    weight = notebook.evaluate(
        f"float(session.run({EIFFEL!r}, capture='blocks.9.attn.hook_pattern').pattern(9)[4, {found[1]}, {found[2]}])"
    )
    assert number(found[3]) == pytest.approx(weight, rel=1e-3, abs=1e-4)


def test_errors_stand_where_the_gesture_was_made(notebook: Lab) -> None:
    page = open_workbench(notebook)
    add_edit(page, "scale")
    expect(axp(page).locator(".edits > .error:visible")).to_have_text(
        "This operation needs a factor: a number such as 0.5."
    )
    expect(axp(page).locator(".edit")).to_have_count(0)
    add_edit(page, "add", "1, 2, 3")
    alert = axp(page).locator(".edit .error:visible")
    expect(alert).to_contain_text("576")
    expect(alert).to_have_attribute("role", "alert")
    expect(axp(page).locator(".rows .empty")).to_have_text("No predictions: see the edit marked below.")
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
    assert " Paris" in predictions(page)


HOSTILE = {
    "html": "<script>window.pwned = 1</script><img src=x onerror='window.pwned = 1'>",
    "special tokens": "<|im_start|>user\nhi<|im_end|><|endoftext|>",
    "templates": "{{}} ${1} {{constructor.constructor('window.pwned = 1')()}} %s",
    "emoji": "\U0001f469\u200d\U0001f469\u200d\U0001f467 family \U0001f3f4\u200d\u2620\ufe0f",
    "cjk": "\u6771\u4eac\u306f\u65e5\u672c\u306e\u9996\u90fd",
    "right to left": "\u202eevil\u202c \u0627\u0644\u0633\u0644\u0627\u0645 \u05e9\u05dc\u05d5\u05dd",
    "white space": "a\n\n\tb  c \u00a0 d\r\ne",
    "long word": "W" * 500,
    "repeated": "the the the the the 1 10 1 10",
}


@pytest.mark.parametrize("prompt", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_prompts_are_shown_as_text(notebook: Lab, prompt: str) -> None:
    page = open_workbench(notebook)
    box = axp(page).get_by_label("Prompt", exact=True)
    box.fill(prompt)
    box.press("Enter")
    typed = box.input_value()  # a text field turns \r\n into \n
    page.wait_for_function("() => !document.querySelector('.axp .job.running')")
    settled(notebook)
    assert notebook.evaluate("w.result['prompt'] == w.state['prompt'] and w.result['error']") is None
    assert notebook.evaluate("w.state['prompt']") == typed
    texts = notebook.evaluate(f"[t.text for t in session.tokens({typed!r})]")
    shown = page.evaluate(
        "[...document.querySelectorAll('.axp .strip:not([hidden]) .tok bdi')].map(e => e.textContent)"
    )
    assert len(shown) == len(texts)
    signs = {" ": "\u2423", "\n": "\u23ce", "\t": "\u21e5", "\u00a0": "\u237d"}
    for text, seen in zip(texts, shown, strict=True):
        assert seen == "".join(
            signs.get(c) or (f"\u2039{ord(c):04X}\u203a" if ord(c) in (0x200D, 0x202C, 0x202E) else c) for c in text
        )
    choose(page, "blocks.3.hook_out")
    add_edit(page, "suppress")
    settled(notebook)
    assert page.evaluate("window.pwned") is None
    assert axp(page).locator("script, img").count() == 0
    no_overflow(page)


@pytest.mark.parametrize(
    ("prompt", "says"), [("", "The prompt is empty"), ("long " * 9000, "9000 tokens")], ids=["empty", "too long"]
)
def test_prompts_that_cannot_run_are_refused_in_one_sentence(notebook: Lab, prompt: str, says: str) -> None:
    page = open_workbench(notebook)
    before = predictions(page)
    box = axp(page).get_by_label("Prompt", exact=True)
    box.fill(prompt.strip())
    box.press("Enter")
    alert = axp(page).locator(".error:visible")
    expect(alert).to_contain_text(says)
    assert alert.count() == 1 and len(alert.inner_text().splitlines()) == 1
    expect(axp(page).locator(".rows .empty")).to_have_text("No predictions: see the prompt above.")
    box.fill(EIFFEL)
    box.press("Enter")
    expect(alert).to_have_count(0)
    settled(notebook)
    assert predictions(page) == before


def page_state(page: Page, nth: int = 0) -> dict[str, Any]:
    """What one view of the page shows, without the pixels."""
    return dict(
        page.evaluate(
            """(nth) => { const r = document.querySelectorAll('.axp')[nth]; const text = (q) => [...r.querySelectorAll(q)].map(e => e.textContent);
            return { rows: text('.rows [role=row]'), tokens: text('.tok'), selected: text('.tok.sel'), big: text('.big'), edits: text('.edit'),
                on: [...r.querySelectorAll('td.on')].map(e => e.dataset.hook), unit: text('.unit'), notes: text('.heat .notes'),
                tint: [...r.querySelectorAll('td.c > div')].map(d => d.style.getPropertyValue('--tint')).join() } }""",
            nth,
        )
    )


def picture(page: Page, nth: int = 0) -> str:
    """The heatmap's pixels."""
    return str(page.evaluate("(nth) => document.querySelectorAll('.axp canvas.map')[nth].toDataURL()", nth))


def test_a_reloaded_page_and_a_second_view_show_the_same(notebook: Lab) -> None:
    page = open_workbench(notebook)
    axp(page).get_by_label("Examples").select_option("Mary and John")
    choose(page, "blocks.12.hook_out")
    add_edit(page, "patch")
    settled(notebook)
    axp(page).get_by_role("button", name="Change").click()
    settled(notebook)
    page.mouse.move(0, 0)
    axp(page).get_by_label("Tokens of the prompt").locator('[data-p="9"]').focus()
    before, pixels = page_state(page), picture(page)
    assert before["edits"] and "change" in before["unit"][0]
    notebook.evaluate("setattr(__import__('builtins'), 'runs', []) or runs.append(session._engine.execute)")
    notebook.evaluate("setattr(session._engine, 'execute', lambda *a: runs.append(1) or runs[0](*a))")

    page.evaluate("jupyterapp.commands.execute('docmanager:save')")
    page.wait_for_function("() => !jupyterapp.shell.currentWidget.context.model.dirty")
    started = time.monotonic()
    notebook.open()
    expect(axp(page).locator(".tok.sel").first).to_be_visible()
    page.wait_for_function("() => document.querySelector('.axp .mapbox .empty')?.hidden")
    print(f"\nreload: same page after {time.monotonic() - started:.1f} s, JupyterLab included")
    page.wait_for_timeout(300)
    assert page_state(page) == before
    assert picture(page) == pixels
    assert notebook.evaluate("len(runs)") == 1, "a reload must not run the engine"

    page.evaluate(
        """async () => { const m = jupyterapp.shell.currentWidget.content.model.sharedModel;
        m.insertCells(m.cells.length, [{cell_type: 'code', source: 'w', metadata: {}, outputs: []}]);
        jupyterapp.shell.currentWidget.content.activeCellIndex = m.cells.length - 1; await jupyterapp.commands.execute('notebook:run-cell') }"""
    )
    expect(axp(page)).to_have_count(2)
    expect(axp(page).nth(1).locator(".mapbox .empty")).to_be_hidden()
    page.wait_for_timeout(300)
    assert page_state(page, 1) == before
    assert notebook.evaluate("len(runs)") == 1, "a second view must not run the engine"
    axp(page).nth(1).get_by_label("Tokens of the prompt").locator('[data-p="4"]').click()
    expect(axp(page).nth(0).locator(".strip").first.locator(".tok.sel")).to_have_text("4\u2423went")
    notebook.evaluate("setattr(session._engine, 'execute', runs[0])")


def test_running_the_cell_again_goes_on_and_leaves_one(notebook: Lab) -> None:
    page = open_workbench(notebook)
    choose(page, "blocks.4.mlp.hook_out")
    add_edit(page, "suppress")
    settled(notebook)
    before = page_state(page)
    counts = []
    for _ in range(5):
        notebook.rerun()
        expect(axp(page).locator(".rows [role=row]").nth(3)).to_be_visible()
        settled(notebook)
        counts.append(
            notebook.evaluate(
                "[len(__import__('ipywidgets').widget._instances), __import__('threading').active_count()]"
            )
        )
    page.wait_for_timeout(300)
    assert page_state(page) == before
    assert axp(page).count() == 1
    assert counts[0] == counts[-1]
    assert notebook.evaluate("len(__import__('widgets.workbench').workbench.opened)") == 1


def test_two_cells_keep_two_workbenches(notebook: Lab) -> None:
    notebook.run(f"a = session.explore({EIFFEL!r}); a", f"b = session.explore({MARY!r}); b")
    page = notebook.page
    expect(axp(page)).to_have_count(2)
    page.evaluate("jupyterapp.shell.currentWidget.content.activeCellIndex = 1")
    page.evaluate("jupyterapp.commands.execute('notebook:run-cell')")
    expect(axp(page)).to_have_count(2)
    assert notebook.evaluate("[a.comm is not None, b.comm is not None]") == [True, True]
    axp(page).nth(0).get_by_label("Tokens of the prompt").locator('[data-p="1"]').click()
    settled(notebook, "a")
    assert notebook.evaluate("[a.state['positions'], b.state['positions']]") == [[1], []]


def cells_of(page: Page) -> Any:
    return page.evaluate(
        """() => { const n = jupyterapp.shell.currentWidget.content;
        return [n.model.sharedModel.cells.map(c => c.source), n.activeCellIndex, n.mode,
                n.widgets.filter(c => n.isSelected(c)).length] }"""
    )


KEYS = [
    "d",
    "d",
    "x",
    "a",
    "z",
    "Enter",
    "ArrowUp",
    "ArrowDown",
    "Shift+ArrowUp",
    "Shift+ArrowDown",
    "ArrowLeft",
    "ArrowRight",
]
CONTROLS = """() => [...document.querySelectorAll('.axp :is(button, input, select, textarea, canvas, td, [tabindex])')]
    .filter(e => e.tabIndex >= 0 && !e.disabled && e.offsetParent && !e.closest('[hidden]'))"""


def test_keys_pressed_inside_stay_inside(notebook: Lab) -> None:
    notebook.run("first = 1", OPEN, "last = 1")
    page = notebook.page
    expect(axp(page).locator(".rows [role=row]").nth(3)).to_be_visible()
    axp(page).get_by_label("Examples").select_option("Mary and John")
    choose(page, "blocks.12.attn.o.hook_in")  # the row of heads is open
    add_edit(page, "scale", "0.5")
    settled(notebook)
    notebook.evaluate("globals().update(saved=w.state) or None")
    count = page.evaluate(f"({CONTROLS})().length")
    assert count > 25
    cells = cells_of(page)
    assert cells[1:3] == [1, "command"], "the workbench's cell must be the active one, in command mode"
    for i in range(count):
        name = page.evaluate(
            f"""(i) => {{ const e = ({CONTROLS})()[i]; e.focus({{ preventScroll: true }}); window.held = e;
            return e.tagName + ' ' + (e.getAttribute('aria-label') ?? e.textContent) }}""",
            i,
        )
        assert page.evaluate("document.activeElement === held"), f"{name} takes no focus"
        for key in KEYS:
            page.keyboard.press(key)
            assert cells_of(page) == cells, f"{key} in {name} reached the notebook"
            inside = page.evaluate(
                "document.activeElement?.closest('.axp') !== null && document.activeElement !== document.body"
            )
            assert inside, f"{key} in {name} lost the focus"
        notebook.evaluate("setattr(w, 'state', saved)")
        settled(notebook)
        left = page.evaluate(
            f"({CONTROLS})().map(e => e.tagName + ' ' + (e.getAttribute('aria-label') ?? e.textContent))"
        )
        assert len(left) == count, (name, left)
    # The same keys do reach the notebook from outside: the check above can fail.
    page.evaluate("document.activeElement.blur(); jupyterapp.shell.currentWidget.content.node.focus()")
    page.keyboard.press("d")
    page.keyboard.press("d")
    page.wait_for_function("() => jupyterapp.shell.currentWidget.content.model.sharedModel.cells.length === 2")


def no_overflow(page: Page) -> None:
    """Nothing sticks out sideways, and the sections lie below or beside each other."""
    wide = page.evaluate(
        """() => { const r = document.querySelector('.axp'), b = r.getBoundingClientRect(); const out = [];
        if (r.scrollWidth > r.clientWidth + 1) out.push('.axp scrolls sideways');
        for (const e of r.querySelectorAll('*')) { const c = e.getBoundingClientRect();
            if (c.width && c.right > b.right + 1 && !e.closest('.sr') && !e.closest('.grid') && !e.closest('.tok')) out.push(e.className || e.tagName) }
        const s = [...r.querySelectorAll('.bar, .tokens, .pred, .hooks, .heat, .edits, .job')].map(e => [e.className, e.getBoundingClientRect()]);
        for (const [n, a] of s) for (const [m, c] of s) if (n < m && a.left < c.right - 1 && c.left < a.right - 1 && a.top < c.bottom - 1 && c.top < a.bottom - 1)
            out.push(n + ' over ' + m);
        return out }"""
    )
    assert wide == []


def test_the_page_fits(notebook: Lab) -> None:
    page = open_workbench(notebook)
    axp(page).get_by_label("Examples").select_option("Mary and John")
    choose(page, "blocks.12.attn.hook_pattern")
    add_edit_at = "blocks.12.hook_out"
    choose(page, add_edit_at)
    add_edit(page, "patch")
    settled(notebook)
    page.evaluate("document.querySelector('.axp').scrollIntoView()")
    page.wait_for_timeout(200)
    for part in (".tok >> nth=13", "td.on", ".rows [role=cell] >> nth=29", ".big"):
        box = axp(page).locator(part).first.bounding_box()
        assert box and box["y"] > 0 and box["y"] + box["height"] < 690, f"{part} is out of sight at 1280 x 720: {box}"
    grid = axp(page).locator(".grid").bounding_box()
    cell = axp(page).locator("td.on").bounding_box()
    assert grid and cell and grid["y"] + 34 < cell["y"] and cell["y"] + cell["height"] < grid["y"] + grid["height"]
    try:
        for width in (700, 1110, 2000):
            page.set_viewport_size({"width": width + 170, "height": 900})
            page.wait_for_timeout(300)
            measured = page.evaluate("document.querySelector('.axp').clientWidth")
            assert abs(measured - width) < 15, measured
            for tab in ("Norms", "One hook", "Attention"):
                axp(page).get_by_role("button", name=tab).click()
                no_overflow(page)
    finally:
        page.set_viewport_size({"width": 1280, "height": 720})


def test_first_paint_and_bytes(notebook: Lab) -> None:
    """Recorded: from running the cell, with the session booted before, to the painted page; what went over the wire."""
    notebook.run("1")
    notebook.page.wait_for_timeout(500)
    notebook.frames.clear()
    times = notebook.page.evaluate(
        """async (cell) => { const n = jupyterapp.shell.currentWidget.content, m = n.model.sharedModel;
        m.insertCells(1, [{cell_type: 'code', source: cell, metadata: {}, outputs: []}]); n.activeCellIndex = 1;
        const start = performance.now(), seen = {}; const frame = () => new Promise(requestAnimationFrame);
        jupyterapp.commands.execute('notebook:run-cell');
        const want = { page: '.axp .bar b', numbers: '.axp .rows [role=cell]', map: '.axp .mapbox .empty[hidden]' };
        while (Object.keys(seen).length < 3 && performance.now() - start < 20000) { await frame();
            for (const [k, q] of Object.entries(want)) if (!(k in seen) && document.querySelector(q)) seen[k] = performance.now() - start }
        return seen }""",
        OPEN,
    )
    settled(notebook)
    received = sum(size for _, size in notebook.frames)
    print(
        f"\nfirst paint {times['page']:.0f} ms, numbers {times['numbers']:.0f} ms, map {times['map']:.0f} ms; "
        f"{received / 1000:.0f} kB over the websocket in {len(notebook.frames)} frames, grid of norms included"
    )
    assert received < 300_000


def test_click_to_new_numbers(notebook: Lab) -> None:
    """Recorded: from a click to the new numbers in the next painted frame, beside the engine's own time."""
    page = open_workbench(notebook)
    axp(page).get_by_label("Examples").select_option("Mary and John")
    for layer in (12, 20):
        choose(page, f"blocks.{layer}.hook_out")
        add_edit(page, "suppress")
    settled(notebook)
    clicks, engine, alone = [], [], []
    for _ in range(20):
        clicks.append(
            page.evaluate(
                """async () => { const big = document.querySelector('.axp .sum b.num'), old = big.textContent, start = performance.now();
                document.querySelector('.axp .edit:nth-child(2) input').click();
                while (document.querySelector('.axp .sum b.num').textContent === old) { await new Promise(requestAnimationFrame);
                    if (performance.now() - start > 15000) return NaN }
                return performance.now() - start }"""
            )
        )
        settled(notebook)
        engine.append(notebook.evaluate("w.result['seconds']") * 1000)
        alone.append(
            notebook.evaluate(
                "(lambda t: [session.compare(w.state['prompt'], w.spec), t() - start][1] if not globals().update(start=t()) else 0)"
                "(__import__('time').perf_counter)"
            )
            * 1000
        )
    click, run, compare = (statistics.median(values) for values in (clicks, engine, alone))
    print(
        f"\nclick to new numbers: median {click:.0f} ms of 20; the run itself {run:.0f} ms, "
        f"session.compare alone {compare:.0f} ms; ours on top {click - run:.0f} ms"
    )
    assert all(value == value for value in clicks), "a click did not change the numbers"
    assert click < run * 1.5 + 300


def test_a_long_job_shows_and_can_be_cancelled(notebook: Lab) -> None:
    notebook.run(
        "from tests.browser import fake\nslow, engine = fake.session()\nw = slow.explore('slow'); w",
    )
    page = notebook.page
    expect(axp(page).locator(".rows [role=row]").nth(3)).to_be_visible()
    notebook.evaluate("engine.gate.clear()")
    box = axp(page).get_by_label("Prompt", exact=True)
    box.fill("slower")
    box.press("Enter")
    expect(axp(page).locator(".job .what")).to_contain_text("Run, ")
    axp(page).get_by_role("button", name="Cancel").click()
    expect(axp(page).locator(".job .what")).to_have_text("Run cancelled")
    notebook.evaluate("engine.gate.set()")
    box.fill("quick")
    box.press("Enter")
    expect(axp(page).locator(".tok")).to_have_count(5)
    settled(notebook)
    assert notebook.evaluate("w.result['prompt']") == "quick"
    notebook.evaluate("[w.close(), slow.close()]")


def test_the_engine_booted_once(notebook: Lab) -> None:
    notebook.run(BOOT)
    assert notebook.evaluate("[session.info['engine'], session.name]") == ["vllm 0.32.0", "smollm2-135m"]
