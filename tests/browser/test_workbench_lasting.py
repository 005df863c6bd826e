"""The workbench over time, in a real JupyterLab: run again and again, dragged, slowed, rebuilt from its state."""

from __future__ import annotations

import itertools
import json
import statistics
from typing import Any

import pytest
from hypothesis import given, settings
from playwright.sync_api import expect

from .conftest import Lab
from .pages import EIFFEL, add_edit, alike, axp, becomes, choose, colours, comes_to, open_workbench, settled
from .states import states
from .test_workbench_manners import page_state

FAKE = "from tests.browser import fake\ns, engine = fake.session()\n"
# The kernel has only one main thread, and no time for the page while a cell runs.
DRAG = """async ({ moves, every }) => { const seen = [];
    const slider = document.querySelector('.axp .edit input[type=range]');
    const shown = () => document.querySelector('.axp .pred').textContent;
    slider.dispatchEvent(new PointerEvent('pointerdown', { bubbles: true }));
    const begin = performance.now(); let text = shown();
    for (let i = 0; i < moves; i++) {
        const next = performance.now() + every;
        slider.value = Number(slider.max) * (0.2 + 0.6 * i / moves);
        slider.dispatchEvent(new InputEvent('input', { bubbles: true }));
        do { await new Promise(requestAnimationFrame);
            if (shown() !== text) { text = shown(); seen.push(performance.now() - begin) }
        } while (performance.now() < next) }
    slider.dispatchEvent(new PointerEvent('pointerup', { bubbles: true }));
    return { seen, took: (performance.now() - begin) / 1000, value: slider.valueAsNumber } }"""


def left_behind(notebook: Lab) -> tuple[list[int], list[int]]:
    """Widgets, threads and elements of outputs; the nodes and listeners that the browser holds, detached ones too."""
    devtools = notebook.page.context.new_cdp_session(notebook.page)
    devtools.send("Performance.enable")
    for _ in range(3):
        devtools.send("HeapProfiler.collectGarbage")
    held = {m["name"]: int(m["value"]) for m in devtools.send("Performance.getMetrics")["metrics"]}
    devtools.detach()
    kernel = "[len(__import__('ipywidgets').widget._instances), __import__('threading').active_count()]"
    shown = notebook.page.evaluate("document.querySelectorAll('.jp-OutputArea *').length")
    return [*notebook.evaluate(kernel), shown], [held["Nodes"], held["JSEventListeners"]]


LABEL = "import ipywidgets\nif 'label' in globals(): label.close()\nlabel = ipywidgets.Label('plain'); label"


def test_fifty_runs_of_the_cell_leave_nothing_behind(notebook: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the nodes that the browser holds JupyterLab keeps a few a run, of a plain label too: of ours no more."""
    notebook.run(FAKE, f"w = s.explore({EIFFEL!r}); w", LABEL)
    page = notebook.page
    found = {}
    for cell, run in itertools.product((2, 1), range(1, 51)):
        page.evaluate(f"jupyterapp.shell.currentWidget.content.activeCellIndex = {cell}")
        page.evaluate("jupyterapp.commands.execute('notebook:run-cell')")
        expect(axp(page)).to_have_count(1)
        if run in (5, 50):
            settled(notebook)
            expect(axp(page).locator(".rows [role=row]").nth(3)).to_be_visible()
            found[cell, run] = left_behind(notebook)
    with capsys.disabled():
        print("\nwidgets, threads, elements; nodes, listeners held, after 5 and after 50 runs of the cell:")
        for cell, name in ((1, "workbench"), (2, "plain label")):
            print(f"    {name}: {found[cell, 5]} {found[cell, 50]}")
    assert found[1, 50][0] == found[1, 5][0]
    grown, plain = (
        [after - before for before, after in zip(found[cell, 5][1], found[cell, 50][1], strict=True)] for cell in (1, 2)
    )
    assert grown[0] <= max(plain[0], 45) and grown[1] <= max(plain[1], 45)


def test_ten_random_states_through_the_page(notebook: Lab) -> None:
    """A page made from the JSON of a state shows what the page shows that was led there."""
    notebook.run(FAKE, f"w = s.explore({EIFFEL!r}); w")
    page = notebook.page
    expect(axp(page)).to_be_visible()

    @given(states)
    @settings(max_examples=10, deadline=None, derandomize=True, database=None)
    def check(partial: dict[str, Any]) -> None:
        text = json.dumps(partial)
        notebook.evaluate(f"setattr(w, 'state', __import__('json').loads({text!r}))")
        settled(notebook)
        state, led = notebook.evaluate("w.state"), page_state(page)
        again = "json.loads(json.dumps(w.state))"
        notebook.evaluate(f"globals().update(other=__import__('widgets').Workbench(s, {again})) or 1")
        show = "__import__('IPython.display').display.display(other)"
        page.evaluate(
            """async (cell) => { const n = jupyterapp.shell.currentWidget.content, m = n.model.sharedModel;
            m.deleteCellRange(2, m.cells.length);
            m.insertCells(2, [{cell_type: 'code', source: cell, metadata: {}, outputs: []}]); n.activeCellIndex = 2;
            await jupyterapp.commands.execute('notebook:run-cell') }""",
            show,
        )
        expect(axp(page)).to_have_count(2)
        settled(notebook, "other")
        comes_to(page, lambda: page_state(page, 1), led)
        becomes(notebook, "[w.state, other.state]", [state, state])
        notebook.evaluate("other.close()")

    check()


def test_numbers_follow_a_drag(notebook: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    """Recorded: new numbers a second while a slider is dragged, beside what the engine alone could do."""
    page = open_workbench(notebook)
    choose(page, "blocks.12.hook_out")
    add_edit(page, "scale", "0.5")
    settled(notebook)
    notebook.evaluate("globals().update(runs=[])")
    notebook.evaluate("w.observe(lambda change: runs.append(change['new']['seconds']), 'result')")
    dragged = page.evaluate(DRAG, {"moves": 180, "every": 16})
    settled(notebook)
    becomes(notebook, "w.state['edits'][0]['factor']", dragged["value"])
    times, took, run = dragged["seen"], dragged["took"], statistics.median(notebook.evaluate("runs")) * 1000
    assert len(times) > 1, "the numbers did not follow"
    gap = statistics.median(b - a for a, b in zip([0, *times], times, strict=False))
    with capsys.disabled():
        print(
            f"\ndragging for {took:.0f} s: {len(times) / took:.1f} new numbers a second, median wait {gap:.0f} ms; "
            f"the run itself {run:.0f} ms, so at most {1000 / run:.1f} a second"
        )
    assert gap < run * 1.5 + 200


def test_a_slow_engine_runs_few_and_ends_on_the_last(notebook: Lab) -> None:
    """20 changes within a second by the page, an engine of 500 ms: at most 4 runs; an edit made meanwhile stays."""
    notebook.run(FAKE, f"w = s.explore({EIFFEL!r}); w")
    page = notebook.page
    add_edit(page, "scale", "0.5")
    settled(notebook)
    notebook.evaluate("setattr(engine, 'delay', 0.5)")
    notebook.evaluate("globals().update(runs=[], waiting=[], execute=engine.execute)")
    count = "lambda requests, *a: [runs.append(1) if not requests[0].capture else None, execute(requests, *a)][1]"
    notebook.evaluate(f"setattr(engine, 'execute', {count})")
    many = "lambda change: waiting.append(sum(job['label'] == 'Run' for job in change['new']['active']))"
    notebook.evaluate(f"w.observe({many}, 'jobs')")
    dragged = page.evaluate(DRAG, {"moves": 20, "every": 50})
    settled(notebook)
    becomes(notebook, "w.state['edits'][0]['factor']", dragged["value"])
    assert 1 <= notebook.evaluate("len(runs)") <= 2 + dragged["took"] / 0.5  # 4 where the 20 changes took a second
    add_edit(page, "suppress")
    axp(page).get_by_label("edit 2 enabled").click()  # while it runs
    axp(page).get_by_label("edit 2 enabled").click()
    settled(notebook)
    state = notebook.evaluate("[e.get('factor', e['op']) for e in w.state['edits']]")
    assert state == [dragged["value"], "suppress"]
    assert notebook.evaluate("max(waiting)") <= 2  # one runs, one waits
    assert notebook.evaluate("w.result['edited'] and w._asked == __import__('widgets.state').state.asks(w.state)")


def test_a_click_is_seen_while_a_cell_runs(notebook: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    """Recorded: from a click on a token to the painted frame that marks it, with the kernel asleep in a cell."""
    page = open_workbench(notebook)
    settled(notebook)
    times = page.evaluate(
        """async () => { const k = jupyterapp.shell.currentWidget.sessionContext.session.kernel;
        const code = 'import os, time\\nwhile not os.path.exists("awake.txt"): time.sleep(0.01)';
        const asleep = k.requestExecute({ code, store_history: false });
        while (k.status !== 'busy') await new Promise((done) => setTimeout(done, 20));
        const frame = () => new Promise(requestAnimationFrame), times = [];
        const toks = [...document.querySelectorAll('.axp .strip .tok')];
        for (let i = 0; i < 20; i++) { const tok = toks[1 + (i % (toks.length - 1))];
            await frame(); const start = performance.now(); tok.click();
            while (!tok.classList.contains('sel')) await frame();
            await frame(); times.push(performance.now() - start) }
        const busy = k.status, contents = jupyterapp.serviceManager.contents;
        await contents.save('awake.txt', { type: 'file', format: 'text', content: '' });
        await asleep.done; await contents.delete('awake.txt'); return [busy, times] }"""
    )
    assert times[0] == "busy"
    with capsys.disabled():
        print(f"\nclick to highlight while the kernel sleeps: median {statistics.median(times[1]):.0f} ms of 20")
    settled(notebook)


@pytest.mark.parametrize("mode", ["contentVisibility", "full"])
def test_maps_are_drawn_below_the_fold_and_after_scrolling_away(notebook: Lab, mode: str) -> None:
    """As where they are seen at once: first drawn 40 cells below the fold, and scrolled 40 cells away and back."""
    page = notebook.page
    cell, far = f"w = s.explore({EIFFEL!r}); w", ["# far\n" * 5] * 40

    def go(at: int) -> None:
        page.evaluate(
            """async (at) => { const n = jupyterapp.shell.currentWidget.content;
            n.activeCellIndex = at; await n.scrollToItem(at, 'start') }""",
            at,
        )

    def shown() -> list[str]:
        settled(notebook)
        comes_to(page, lambda: page.evaluate("document.querySelector('.axp .mapbox .empty')?.hidden"), True)
        page.mouse.move(0, 0)
        return colours(page)

    config = "n.notebookConfig = { ...n.notebookConfig, windowingMode: mode }"
    page.evaluate(f"(mode) => {{ const n = jupyterapp.shell.currentWidget.content; {config} }}", mode)
    page.add_style_tag(content=".axp { width: 1000px }")  # whether or not the notebook has a scrollbar
    try:
        notebook.run(FAKE, cell, *far, *far)
        go(1)
        comes_to(page, lambda: len(set(shown())) > 50, True)
        at_once = shown()
        comes_to(page, lambda: alike(at_once, shown()), 1)
        notebook.run(FAKE, *far, cell, *far)
        for at in (0, 41, 81, 41, 0, 41):
            go(at)
            if at == 41:
                comes_to(page, lambda: alike(at_once, shown()) > 0.95, True)
            else:
                expect(axp(page)).not_to_be_in_viewport()
        changing = "Cannot read properties of null (reading 'observe')"  # JupyterLab's own, when the mode changes
        assert [text for text in notebook.console if text != changing] == []
    finally:
        # A mode that changed leaves cells in wrong places, and errors as they go, both JupyterLab's own.
        notebook.run("pass")
        notebook.close_all()  # or the page that comes asks for them while they go
        notebook.reload()
        notebook.console.clear()
