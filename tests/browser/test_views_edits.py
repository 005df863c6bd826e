"""The spec editor in Chromium without Jupyter: every field changed in place, moved by keys, presets, many edits."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import Page, expect

from .pages import no_overflow
from .test_views import about as about  # fixtures
from .test_views import mount, traits
from .test_views import page as page

TOKENS = ["When", " Mary", " and", " John", " went", " to"]
SUPPRESS = {"hook": "blocks.1.hook_out", "op": "suppress", "pos": 1, "enabled": True}
SCALE = {"hook": "blocks.2.attn.o.hook_in", "op": "scale", "pos": [1, 2], "factor": 0.5, "enabled": True}
PATCH = {"hook": "blocks.3.hook_out", "op": "patch", "pos": 3, "source": {"prompt": "b"}, "enabled": True}


def opened(page: Page, about: dict[str, Any], edits: list[dict[str, Any]], **state: Any) -> None:
    given = traits(about, TOKENS, edits=edits, **state)
    given["tokens"]["source"] = {"text": state.get("source", ""), "tokens": given["tokens"]["prompt"]["tokens"]}
    mount(page, given)
    page.evaluate("window.seen = []; model.on('change:state', () => seen.push(model.get('state').edits))")


def edits(page: Page) -> Any:
    return page.evaluate("model.get('state').edits")


def focused(page: Page) -> Any:
    return page.evaluate("document.activeElement.getAttribute('aria-label') ?? document.activeElement.textContent")


def fill(page: Page, label: str, text: str) -> None:
    box = page.get_by_label(label, exact=True)
    box.fill(text)
    box.press("Enter")


def test_every_field_of_an_edit_is_changed_in_place(page: Page, about: dict[str, Any]) -> None:
    opened(page, about, [SUPPRESS, SCALE, PATCH], source="a")
    fill(page, "tokens of edit 1", "0, 2:5, -1")
    assert edits(page)[0] == SUPPRESS | {"pos": [0, 2, 3, 4, -1]}
    assert page.get_by_label("tokens of edit 1", exact=True).input_value() == "0, 2:5, -1"
    fill(page, "tokens of edit 1", " 2: 4 ")
    assert edits(page)[0]["pos"] == "2:4"
    fill(page, "tokens of edit 1", "4, ::3, last")
    expect(page.locator(".edit .error:visible")).to_contain_text("\u201c::3\u201d needs both ends here")
    fill(page, "tokens of edit 1", "4, 0:3, last")
    assert edits(page)[0]["pos"] == [4, 0, 1, 2, -1], "in the order they are written"
    fill(page, "heads of edit 2", "last")
    expect(page.locator(".edit .error:visible")).to_contain_text("\u201clast\u201d says no head: write 3, or 1, 4")
    fill(page, "tokens of edit 1", "")
    assert edits(page)[0] == {key: value for key, value in SUPPRESS.items() if key != "pos"}
    expect(page.get_by_label("heads of edit 1")).to_be_hidden()  # the stream has none
    fill(page, "heads of edit 2", "3, 0")
    assert edits(page)[1] == SCALE | {"head": [3, 0]}
    page.get_by_label("op of edit 2").select_option("add")
    assert "factor" not in edits(page)[1] and edits(page)[1]["value"] == 0.5
    page.get_by_label("op of edit 2").select_option("suppress")
    assert {"factor", "value"}.isdisjoint(edits(page)[1])
    expect(page.get_by_label("value of edit 2")).to_be_hidden()
    fill(page, "source of edit 3", "another")
    assert edits(page)[2]["source"] == {"prompt": "another"}
    fill(page, "source tokens of edit 3", "2")
    assert edits(page)[2] == PATCH | {"source": {"prompt": "another"}, "source_pos": 2}
    fill(page, "source of edit 3", "")  # the source above
    assert edits(page)[2]["source"] == {"prompt": "a"}
    page.get_by_label("edit 3 enabled").uncheck()
    assert edits(page)[2]["enabled"] is False
    page.get_by_label("op of edit 3").select_option("set")
    assert {"source", "source_pos"}.isdisjoint(edits(page)[2]) and edits(page)[2]["value"] == 0
    page.locator(".edit").nth(1).get_by_role("button", name="blocks.2.attn.o.hook_in").click()
    state = page.evaluate("model.get('state')")
    assert [state["hook"], state["positions"], state["heads"]] == ["blocks.2.attn.o.hook_in", [1, 2], [3, 0]]


def test_a_text_that_is_no_edit_is_refused_at_its_row(page: Page, about: dict[str, Any]) -> None:
    opened(page, about, [SUPPRESS, SCALE])
    fill(page, "tokens of edit 1", "the second")
    error = page.locator(".edit .error:visible")
    expect(error).to_contain_text("\u201cthe\u201d says no token: write 9, or 1, 4, or 3:7")
    page.get_by_label("op of edit 2").select_option("patch")
    assert error.count() == 2 and "type a second prompt as Source" in error.nth(1).inner_text()
    assert page.get_by_label("op of edit 2").input_value() == "scale"
    assert edits(page) == [SUPPRESS, SCALE]
    fill(page, "tokens of edit 1", "2")
    fill(page, "factor of edit 2", "3")
    page.get_by_label("factor of edit 2").blur()
    expect(error).to_have_count(0)
    assert edits(page) == [SUPPRESS | {"pos": 2}, SCALE | {"factor": 3}]


def test_edits_move_by_keys_and_the_focus_goes_along(page: Page, about: dict[str, Any]) -> None:
    opened(page, about, [SUPPRESS, SCALE, PATCH], source="b")
    said = page.locator(".edits .sr")
    page.get_by_label("tokens of edit 3", exact=True).focus()
    page.keyboard.press("Alt+ArrowUp")
    assert edits(page) == [SUPPRESS, PATCH, SCALE] and focused(page) == "tokens of edit 2"
    assert said.text_content() == "edit 3 moved up: now edit 2"
    page.keyboard.press("5")  # typed and moved at once: it belongs to the edit that moves
    page.keyboard.press("Alt+ArrowUp")
    moved = edits(page)[0]
    assert moved["hook"] == PATCH["hook"] and "5" in str(moved["pos"]) and edits(page)[1:] == [SUPPRESS, SCALE]
    page.keyboard.press("Alt+ArrowUp")
    assert said.text_content() == "edit 1 is the first already" and focused(page) == "tokens of edit 1"
    page.get_by_label("Move edit 1 down").press("Enter")
    page.keyboard.press("Enter")
    assert [edit["op"] for edit in edits(page)] == ["suppress", "scale", "patch"]
    assert focused(page) == "Move edit 3 down"
    page.get_by_label("Duplicate edit 1").press("Enter")
    assert edits(page)[:2] == [SUPPRESS, SUPPRESS] and focused(page) == "Duplicate edit 1"
    page.get_by_label("Remove edit 4").press("Enter")
    assert focused(page) == "Remove edit 3" and said.text_content() == "edit 4 removed"
    for left in (2, 1, 0):
        page.keyboard.press("Enter")
        assert len(edits(page)) == left
    assert focused(page) == "Operation"
    expect(page.locator(".edits .empty")).to_contain_text("No edits yet: choose tokens and a hook above")


def test_slider_and_number_are_one_field(page: Page, about: dict[str, Any]) -> None:
    opened(page, about, [SCALE, SCALE])
    slider, number = page.get_by_label("edit 1, factor by slider"), page.get_by_label("factor of edit 1")
    page.evaluate(
        """() => { const s = document.querySelector('input[type=range]');
        for (let i = 0; i <= 100; i++) { s.value = i / 50; s.dispatchEvent(new Event('input', { bubbles: true })) } }"""
    )
    page.wait_for_function("model.get('state').edits[0].factor === 2")
    assert number.input_value() == "2" and page.evaluate("seen.length") < 5, "each change redraws the page"
    number.fill("1.26")
    assert slider.input_value() == "1.26"
    page.wait_for_function("model.get('state').edits[0].factor === 1.26")
    page.evaluate("model.set('result', { ...model.get('result'), seconds: 60 })")
    page.evaluate("model.set('jobs', { active: [{ label: 'Run' }], last: null })")
    number.fill("1.5")
    page.wait_for_timeout(300)
    assert edits(page)[0]["factor"] == 1.26  # the numbers of the one before are far away
    page.evaluate("model.set('jobs', { active: [], last: null })")
    page.wait_for_function("model.get('state').edits[0].factor === 1.5")
    number.fill("-7.25")
    assert slider.get_attribute("min") == "-8"
    page.get_by_label("Remove edit 1").click()  # before it was sent: it goes to its own edit, not to the next
    assert edits(page) == [SCALE]
    assert page.evaluate("seen.map((edits) => [edits.length, edits[0].factor]).slice(-2)") == [[2, -7.25], [1, 0.5]]
    slider.press("ArrowRight")
    page.wait_for_function("model.get('state').edits[0].factor === 0.52")
    page.evaluate("(edits) => model.set('state', { ...model.get('state'), edits })", [SCALE | {"factor": 1.5}])
    assert number.input_value() == "1.5"  # a change from Python


def test_undo_goes_with_the_change_made_before_it(page: Page, about: dict[str, Any]) -> None:
    """ipywidgets keeps a change back until the kernel has taken the one before: a message would overtake it."""
    opened(page, about, [SCALE])
    page.evaluate("model.set('steps', { undo: 'change factor of edit 1', redo: null, moves: 4 })")
    page.evaluate("model.set('jobs', { active: [{ label: 'Run' }], last: null })")
    page.evaluate("model.set('result', { ...model.get('result'), seconds: 60 })")
    number = page.get_by_label("factor of edit 1")
    number.fill("0.75")
    slider = page.get_by_label("edit 1, factor by slider")
    slider.press("Control+z")
    assert edits(page)[0]["factor"] == 0.75, "what waits goes first"
    slider.press("Control+z")
    assert page.evaluate("sent.filter((m) => m.type === 'undo')") == []
    assert page.evaluate("model.get('moves')") == [{"type": "undo", "id": 5}, {"type": "undo", "id": 6}]
    page.evaluate("model.set('jobs', { active: [], last: null })")
    number.fill("0.25")  # made on the page that the undo is about to bring
    page.wait_for_function("model.get('state').edits[0].factor === 0.25")
    page.evaluate("(edits) => model.set('state', { ...model.get('state'), edits })", [SCALE])
    page.evaluate("model.set('steps', { undo: 'x', redo: null, moves: 6 })")
    assert edits(page)[0]["factor"] == 0.25
    slider.press("Control+z")
    assert page.evaluate("model.get('moves')") == [{"type": "undo", "id": 7}]


def preset(page: Page, name: str) -> Any:
    page.get_by_role("button", name="Presets").press("Enter")
    page.get_by_role("menuitem", name=name).press("Enter")
    return (edits(page) or [None])[-1]


def clean_run(page: Page, rows: list[list[float]]) -> dict[str, Any]:
    """Answers the page's last ask of a hook's activations."""
    ask: dict[str, Any] = page.evaluate(
        """(rows) => { const ask = sent.filter((m) => m.view === 'hook').at(-1);
        const message = { type: 'data', key: ask.key, error: null, shape: [rows.length, rows[0].length] };
        model.fire('msg:custom', message, [Float32Array.from(rows.flat())]); return ask }""",
        rows,
    )
    return ask


def test_presets_add_the_edit_they_name(page: Page, about: dict[str, Any]) -> None:
    opened(page, about, [], source="b", positions=[1, 3], source_positions=[0, 2], hook="blocks.4.hook_out", head=2)
    assert preset(page, "Zero this") == {
        "hook": "blocks.4.hook_out",
        "op": "suppress",
        "pos": [1, 3],
        "enabled": True,
    }
    assert page.locator(".edits .sr").text_content() == "edit 1 added: suppress at blocks.4.hook_out"
    assert focused(page) == "Presets"
    patch = preset(page, "Patch from the second prompt")
    assert patch["source"] == {"prompt": "b"} and patch["source_pos"] == [0, 2]
    head = preset(page, "One head")
    assert [head["hook"], head["op"], head["head"]] == ["blocks.4.attn.o.hook_in", "suppress", 2]
    count = len(edits(page))
    page.evaluate("model.set('state', { ...model.get('state'), source: '', hook: 'blocks.4.attn.hook_pattern' })")
    preset(page, "Zero this")
    assert len(edits(page)) == count, "a pattern cannot be edited"
    expect(page.locator(".menu > [aria-disabled]")).to_have_count(3)
    page.keyboard.press("End")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowUp")
    page.keyboard.press("Enter")
    assert edits(page)[-1]["hook"] == "blocks.4.attn.o.hook_in" and len(edits(page)) == count + 1
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Escape")
    expect(page.locator(".edits .menu")).to_be_hidden()
    assert focused(page) == "Presets"


def test_the_mean_is_that_of_the_clean_run_in_the_shape_of_the_hook(page: Page, about: dict[str, Any]) -> None:
    opened(page, about, [], positions=[1], hook="blocks.4.hook_out")
    assert preset(page, "Mean over positions") is None  # on its way
    ask = clean_run(page, [[1] * 48, [2] * 24 + [6] * 24])
    assert [ask["of"], ask["hook"]] == ["clean", "blocks.4.hook_out"]
    mean = {"hook": "blocks.4.hook_out", "op": "set", "pos": 1, "enabled": True, "value": [1.5] * 24 + [3.5] * 24}
    assert edits(page) == [mean]
    assert preset(page, "Mean over positions") == mean and len(edits(page)) == 2  # known in the page: at once
    for heads, value in (
        ([], [[i + 0.5] * 12 for i in range(4)]),
        ([2], [2.5] * 12),
        ([1, 3], [[1.5] * 12, [3.5] * 12]),
    ):
        hook = "blocks.5.attn.o.hook_in"
        page.evaluate("(patch) => model.set('state', { ...model.get('state'), ...patch })", {"hook": hook})
        page.evaluate("(heads) => model.set('state', { ...model.get('state'), heads })", heads)
        preset(page, "Mean over positions")
        if not heads:
            clean_run(page, [[i + 0.5 for i in range(4) for _ in range(12)]] * 3)
        assert edits(page)[-1]["value"] == value
    count = len(edits(page))
    page.evaluate("model.set('state', { ...model.get('state'), hook: 'blocks.7.hook_out', heads: [] })")
    preset(page, "Mean over positions")
    page.evaluate("model.set('result', { ...model.get('result'), keys: { clean: 'other', patched: 'other' } })")
    clean_run(page, [[1] * 48])
    assert len(edits(page)) == count, "another prompt's mean is not wanted any more"


@pytest.mark.parametrize("width", [700, 1110])
def test_thirty_edits_scroll_in_their_section(page: Page, about: dict[str, Any], width: int) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    opened(page, about, [PATCH | {"source": {"prompt": "a long text " * 9}}, SCALE, SUPPRESS] * 10, source="b")
    no_overflow(page)
    look = """() => { const l = document.querySelector('.edits .list'), out = [];
        const over = (a, b) => a.left < b.right - 1 && b.left < a.right - 1
            && a.top < b.bottom - 1 && b.top < a.bottom - 1;
        for (const row of l.children) { const all = [...row.querySelectorAll('button, input, select, code')]
                .map((e) => [e.dataset.key, e.getBoundingClientRect()]).filter(([, b]) => b.width);
            all.forEach(([e, a], i) => all.slice(i + 1).forEach(([f, b]) => over(a, b) && out.push([e, f]))) }
        return [out, l.clientHeight < 260 && l.scrollHeight > 600] }"""
    assert page.evaluate(look) == [[], True]
    page.get_by_role("button", name="Add edit").click()
    expect(page.locator(".edit").last).to_be_in_viewport()
    page.get_by_label("Move edit 31 up").press("Enter")
    assert focused(page) == "Move edit 30 up"


@pytest.mark.parametrize("text", ["0,5", "[1,2,3]", "1 2"])
def test_a_factor_of_several_numbers_is_refused_in_the_form(page: Page, text: str) -> None:
    said = page.evaluate(
        """async (text) => { const { amountOf } = await import('http://page.test/editfields.js');
        try { return [amountOf(text, 'factor')] } catch (error) { return error.message } }""",
        text,
    )
    assert said.startswith("A factor is one number, with a point, such as 0.5;") and text in said
