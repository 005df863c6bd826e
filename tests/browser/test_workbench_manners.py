"""How the workbench behaves in a notebook: hostile prompts, reloads, re-runs, keys, sizes, cancelling."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from .conftest import BOOT, KERNEL, Lab
from .pages import (
    EIFFEL,
    MARY,
    add_edit,
    alike,
    axp,
    becomes,
    choose,
    colours,
    comes_to,
    mary_and_john,
    no_overflow,
    open_workbench,
    predictions,
    settled,
)

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
    becomes(notebook, "w.result['prompt'] == w.state['prompt'] and w.result['error']", None)
    becomes(notebook, "w.state['prompt']", typed)
    texts = notebook.evaluate(f"[t.text for t in session.tokens({typed!r})]")
    shown = page.evaluate(
        "[...document.querySelectorAll('.axp .strip:not([hidden]) .tok bdi')].map(e => e.textContent)"
    )
    assert len(shown) == len(texts)
    signs = {" ": "\u2423", "\n": "\u23ce", "\t": "\u21e5", "\u00a0": "\u237d"}
    for text, seen in zip(texts, shown, strict=True):
        text = re.sub("\u27e8[0-9A-F ]+\u27e9", lambda bytes_: bytes_[0].replace(" ", "\u202f"), text)
        assert seen == "".join(
            signs.get(c) or (f"\u2039{ord(c):04X}\u203a" if ord(c) in (0x200D, 0x202C, 0x202E) else c) for c in text
        )
    choose(page, "blocks.3.hook_out")
    add_edit(page, "suppress")
    settled(notebook)
    # the other views: tables, attention as lines, a source and its edit, the history under a name of the same text
    patch = {"hook": "blocks.3.hook_out", "op": "patch", "pos": 0, "source": {"prompt": typed}}
    notebook.evaluate(f"setattr(w, 'state', w.state | {{'source': {typed!r}, 'edits': [{patch!r}]}})")
    settled(notebook)
    notebook.evaluate(f"w.keep(w.runs[0]['id'], name={typed!r})")
    axp(page).get_by_role("button", name="History").click()
    table = axp(page).get_by_role("button", name=re.compile("Show as (table|map)"))
    for view in ("Norms", "One hook", "Attention", "Lines"):
        axp(page).get_by_role("button", name=view, exact=True).click()
        settled(notebook)
        if view != "Lines":
            table.click()
            expect(axp(page).locator(".heat table")).to_be_visible()
            table.click()
        no_overflow(page)
    assert page.evaluate("window.pwned") is None
    assert axp(page).locator("script, img").count() == 0


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
            """(nth) => { const r = document.querySelectorAll('.axp')[nth];
            const text = (q) => [...r.querySelectorAll(q)].map(e => e.textContent);
            return { rows: text('.rows [role=row]'), tokens: text('.tok'), selected: text('.tok.sel'),
                big: text('.big'), edits: text('.edit'), unit: text('.unit'), notes: text('.heat .notes'),
                on: [...r.querySelectorAll('td.on')].map(e => e.dataset.hook),
                tint: [...r.querySelectorAll('td.c > div')].map(d => d.style.getPropertyValue('--tint')).join() } }""",
            nth,
        )
    )


def test_a_reloaded_page_and_a_second_view_show_the_same(notebook: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    page = open_workbench(notebook)
    mary_and_john(page)
    choose(page, "blocks.12.hook_out")
    add_edit(page, "patch")
    settled(notebook)
    axp(page).get_by_role("button", name="Change", exact=True).click()
    settled(notebook)
    page.mouse.move(0, 0)
    axp(page).get_by_label("Tokens of the prompt").locator('[data-p="9"]').focus()
    before, drawn = page_state(page), colours(page)
    assert before["edits"] and "change" in before["unit"][0] and len(set(drawn)) > 20
    # Every run of the engine is a job: which ones were asked for, and of what.
    notebook.evaluate("setattr(__import__('builtins'), 'asked', []) or setattr(w, 'submit', w._submit)")
    notebook.evaluate("setattr(w, '_submit', lambda *a, **k: asked.append([*a[:2], w.state]) or w.submit(*a, **k))")

    left = time.monotonic()
    notebook.reload()
    connected = time.monotonic()
    expect(axp(page).locator(".tok.sel").first).to_be_visible()
    page.wait_for_function("() => document.querySelector('.axp .mapbox .empty')?.hidden")
    shown = time.monotonic()
    with capsys.disabled():
        print(f"\nreload: same page {shown - connected:.1f} s after JupyterLab was, {shown - left:.1f} s with it")
    comes_to(page, lambda: page_state(page), before)
    comes_to(page, lambda: alike(drawn, colours(page)) > 0.95, True)
    settled(notebook)  # nothing is left to ask for
    assert notebook.evaluate("asked") == [], "a reload must not run the engine"

    page.evaluate(
        """async () => { const n = jupyterapp.shell.currentWidget.content, m = n.model.sharedModel;
        m.insertCells(m.cells.length, [{cell_type: 'code', source: 'w', metadata: {}, outputs: []}]);
        n.activeCellIndex = m.cells.length - 1;
        await jupyterapp.commands.execute('notebook:run-cell') }"""
    )
    expect(axp(page)).to_have_count(2)
    expect(axp(page).nth(1).locator(".mapbox .empty")).to_be_hidden()
    comes_to(page, lambda: page_state(page, 1), before)
    settled(notebook)
    assert notebook.evaluate("asked") == [], "a second view must not run the engine"
    axp(page).nth(1).get_by_label("Tokens of the prompt").locator('[data-p="4"]').click()
    expect(axp(page).nth(0).locator(".strip").first.locator(".tok.sel")).to_have_text("4\u2423went")


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
    comes_to(page, lambda: page_state(page), before)
    expect(axp(page)).to_have_count(1)
    assert counts[0] == counts[-1]
    assert notebook.evaluate("len(__import__('widgets.workbench').workbench.opened)") == 1


def test_a_box_run_again_is_there_after_a_reload(notebook: Lab) -> None:
    """The boxes of earlier runs stay in the kernel: JupyterLab shows nothing while one holds a widget that is gone."""
    page = open_workbench(notebook, f"import ipywidgets; w = session.explore({EIFFEL!r}); ipywidgets.VBox([w])")
    notebook.rerun()
    expect(axp(page).locator(".rows [role=row]").nth(3)).to_be_visible()
    settled(notebook)
    notebook.reload()
    expect(axp(page).locator(".rows [role=row]").nth(3)).to_be_visible()


def test_two_cells_keep_two_workbenches(notebook: Lab) -> None:
    notebook.run(f"a = session.explore({EIFFEL!r}); a", f"b = session.explore({MARY!r}); b")
    page = notebook.page
    expect(axp(page)).to_have_count(2)
    settled(notebook, "a")
    settled(notebook, "b")
    page.evaluate("jupyterapp.shell.currentWidget.content.activeCellIndex = 1")
    page.evaluate("jupyterapp.commands.execute('notebook:run-cell')")
    expect(axp(page)).to_have_count(2)
    assert notebook.evaluate("[a.comm is not None, b.comm is not None]") == [True, True]
    axp(page).nth(0).get_by_label("Tokens of the prompt").locator('[data-p="1"]').click()
    settled(notebook, "a")
    becomes(notebook, "[a.state['positions'], b.state['positions']]", [[1], []])


CELLS = """() => { const n = jupyterapp.shell.currentWidget.content;
    return [n.model.sharedModel.cells.map(c => c.source), n.activeCellIndex, n.mode,
            n.widgets.filter(c => n.isSelected(c)).length] }"""


def cells_of(page: Page) -> Any:
    return page.evaluate(CELLS)


# Whatever a key does to the notebook or to the focus, also if the next key takes it back.
WATCH = """() => { window.reached = []; const n = jupyterapp.shell.currentWidget.content;
    for (const signal of ['activeCellChanged', 'selectionChanged', 'stateChanged'])
        n[signal].connect(() => reached.push([signal, lastKey]));
    n.model.cells.changed.connect(() => reached.push(['cells', lastKey]));
    document.addEventListener('keydown', (e) => { window.lastKey = e.key }, true);
    const outside = (e) => !e.target.closest('.axp') && reached.push(['focus', lastKey]);
    document.addEventListener('focusin', outside) }"""


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
    # On the fake engine: every control is put back where it was, and a run of a model each time would take minutes.
    first = "from tests.browser import fake; fast, _ = fake.session()"
    notebook.run(first, f"w = fast.explore({EIFFEL!r}); w", "last = 1")
    page = notebook.page
    expect(axp(page).locator(".rows [role=row]").nth(3)).to_be_visible()
    axp(page).get_by_role("button", name="Dismiss").click()  # Enter would, and there would be fewer controls
    notebook.evaluate(f"setattr(w, 'state', w.state | {{'source': {EIFFEL.replace('city', 'town')!r}}})")
    choose(page, "blocks.6.attn.o.hook_in")  # the row of heads is open
    add_edit(page, "scale", "0.5")
    settled(notebook)
    notebook.evaluate("globals().update(saved=w.state) or None")
    count = page.evaluate(f"({CONTROLS})().length")
    assert count > 25
    cells = cells_of(page)
    assert cells[1:3] == [1, "command"], "the workbench's cell must be the active one, in command mode"
    page.evaluate(WATCH)
    for i in range(count):
        name = page.evaluate(
            f"""(i) => {{ const e = ({CONTROLS})()[i]; e.focus({{ preventScroll: true }}); window.held = e;
            return e.tagName + ' ' + (e.getAttribute('aria-label') ?? e.textContent) }}""",
            i,
        )
        assert page.evaluate("document.activeElement === held"), f"{name} takes no focus"
        for key in KEYS:
            page.keyboard.press(key)
        now = page.evaluate(f"[reached, ({CELLS})(), Boolean(document.activeElement?.closest('.axp'))]")
        assert now == [[], cells, True], f"a key in {name} reached the notebook, or lost the focus"
        if axp(page).locator('[aria-expanded="true"]').count() or axp(page).and_(page.locator(".wide")).count():
            page.keyboard.press("Escape")  # what Enter has opened
        settled(notebook)  # the page's last change has arrived
        if notebook.evaluate("w.state != saved"):
            notebook.evaluate("setattr(w, 'state', saved)")
            settled(notebook)
        left = page.evaluate(
            f"({CONTROLS})().map(e => e.tagName + ' ' + (e.getAttribute('aria-label') ?? e.textContent))"
        )
        assert len(left) == count, (name, left)
    # The same keys do reach the notebook from outside: the check above can fail.
    page.evaluate("document.activeElement.blur(); jupyterapp.shell.currentWidget.content.node.focus()")
    for _ in range(10):  # twice within a second deletes the cell
        if len(cells_of(page)[0]) == 3:
            page.keyboard.press("d")
    assert len(cells_of(page)[0]) == 2
    assert ["cells", "d"] in page.evaluate("reached")


def test_the_page_fits(notebook: Lab) -> None:
    page = open_workbench(notebook)
    mary_and_john(page)
    choose(page, "blocks.12.attn.hook_pattern")
    add_edit_at = "blocks.12.hook_out"
    choose(page, add_edit_at)
    add_edit(page, "patch")
    settled(notebook)
    page.evaluate("document.querySelector('.axp').scrollIntoView()")

    def span(part: str) -> tuple[float, float]:
        box = axp(page).locator(part).first.bounding_box()
        assert box
        return box["y"], box["y"] + box["height"]

    def out_of_sight() -> dict[str, tuple[float, float]]:
        parts = (".tok >> nth=13", "td.on", ".rows [role=cell] >> nth=29", ".big")
        return {part: (top, end) for part in parts for top, end in [span(part)] if not 0 < top < end < 690}

    comes_to(page, out_of_sight, {})  # at 1280 x 720
    (top, end), cell = span(".grid"), span("td.on")
    assert top + 34 < cell[0] and cell[1] < end
    try:
        for width in (700, 1110, 2000):
            page.set_viewport_size({"width": width + 170, "height": 900})
            off = f"Math.abs(document.querySelector('.axp').clientWidth - {width}) >= 15"
            comes_to(page, lambda look=off: page.evaluate(look), False)
            for tab in ("Norms", "One hook", "Attention"):
                axp(page).get_by_role("button", name=tab).click()
                expect(axp(page).locator(".mapbox .empty")).to_be_hidden()  # its numbers are there
                no_overflow(page)
    finally:
        page.set_viewport_size({"width": 1280, "height": 720})


def test_a_long_job_shows_and_can_be_cancelled(notebook: Lab) -> None:
    notebook.run(
        "from tests.browser import fake\nslow, engine = fake.session()\nw = slow.explore('slow'); w",
    )
    page = notebook.page
    expect(axp(page).locator(".rows [role=row]").nth(3)).to_be_visible()
    settled(notebook)  # the page has its own arrays
    notebook.evaluate("engine.gate.clear()")
    axp(page).get_by_role("button", name="One hook").click()
    expect(axp(page).locator(".job .what")).to_contain_text("Activations, ")
    box = axp(page).get_by_label("Prompt", exact=True)
    box.fill("slower")
    box.press("Enter")
    expect(axp(page).locator(".job .what")).to_contain_text("Run, ")  # the array of the old prompt has given way
    axp(page).get_by_role("button", name="Cancel").click()
    expect(axp(page).locator(".job .what")).to_have_text("Run cancelled")
    notebook.evaluate("engine.gate.set()")
    box.fill("quick")
    box.press("Enter")
    expect(axp(page).locator(".tok")).to_have_count(5)
    settled(notebook)
    becomes(notebook, "w.result['prompt']", "quick")
    notebook.evaluate("[w.close(), slow.close()]")


def test_a_kernel_that_runs_a_cell_is_told_apart_from_a_job(notebook: Lab) -> None:
    notebook.run(
        "import time\nfrom tests.browser import fake\nfast, engine = fake.session()\nw = fast.explore('one'); w", "1"
    )
    page = notebook.page
    what = axp(page).locator(".job .what")
    expect(axp(page).locator(".rows [role=row]").nth(3)).to_be_visible()
    settled(notebook)
    page.evaluate(
        """() => { const n = jupyterapp.shell.currentWidget.content; n.activeCellIndex = 1;
        n.model.cells.get(1).sharedModel.setSource("while not engine.calls > 10_000: time.sleep(0.02)");
        jupyterapp.commands.execute('notebook:run-cell') }"""
    )
    page.wait_for_function(f"() => {KERNEL}.status === 'busy'")
    choose(page, "blocks.4.mlp.hook_out")
    add_edit(page, "suppress")
    expect(what).to_contain_text("The kernel is running a cell")
    expect(axp(page).locator(".edit")).to_have_count(1)
    expect(axp(page).locator(".job").get_by_role("button", name="Cancel")).to_be_hidden()
    page.evaluate("jupyterapp.commands.execute('notebook:interrupt-kernel')")
    expect(what).not_to_contain_text("The kernel is running a cell")
    settled(notebook)
    becomes(notebook, "[len(w.state['edits']), w.result['edited']]", [1, True])
    page.evaluate("() => { kernelErrors.length = 0 }")  # the interrupted cell's own
    notebook.evaluate("[w.close(), fast.close()]")


def test_the_engine_booted_once(notebook: Lab) -> None:
    notebook.run(BOOT)
    assert notebook.evaluate("[session.info['engine'], session.name]") == ["vllm 0.32.0", "smollm2-135m"]
