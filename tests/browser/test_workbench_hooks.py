"""The hook grid and the tips: by themselves in Chromium, and in a real JupyterLab on the real engine."""
# ruff: noqa: F811 - a fixture of another module, and the arguments that take it

from __future__ import annotations

import json
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from explorer.catalogue import Catalogue
from explorer.hooks import KINDS
from tests.browser import fake
from widgets.state import complete
from widgets.words import HOOKS, KEYS, METRICS, OPS

from .conftest import Lab
from .pages import axp, becomes, choose, open_workbench, settled
from .test_views import about, mount, page, traits  # noqa: F401

WORDS = ["The", " city", " of", " light"]


def state(page: Page) -> dict[str, Any]:
    found: dict[str, Any] = page.evaluate("model.get('state')")
    return found


def hook_at_focus(page: Page) -> str:
    return str(page.evaluate("document.activeElement.getAttribute('aria-label')"))


def tip_of(page: Page) -> str:
    expect(page.locator(".tip")).to_have_count(1)
    return page.locator(".tip").inner_text()


@pytest.mark.parametrize("apart", [False, True], ids=["one", "apart"])
def test_every_hook_of_every_architecture_has_its_words(apart: bool) -> None:
    """All that differs between architectures is which of the table's kinds they have."""
    assert set(HOOKS) == {kind.component for kind in KINDS}
    for point in Catalogue(fake.session()[0].hooks.shape, apart=apart):
        axes, formula, place = HOOKS[point.component]
        assert point.about and formula and place.endswith(".")
        assert axes.count("\u00d7") == len(point.shape) - 1 + (2 if point.component in ("pattern", "scores") else 0)
        assert (point.heads is not None) == ("heads" in axes)


def test_every_operation_and_metric_has_its_words() -> None:
    from explorer import Edit

    for op in OPS:
        given = {"scale": {"factor": 1.0}, "patch": {"source": "a"}}.get(op, {"value": 1.0} if op != "suppress" else {})
        assert Edit("blocks.0.hook_out", op, **given).op == op  # type: ignore[arg-type]
    for words in (*OPS.values(), *METRICS.values()):
        assert tuple(words) == KEYS and all(words.values())


def test_a_state_of_the_grid_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\['hooks'\] must hold names of hooks"):
        complete({"hooks": [3]})
    with pytest.raises(ValueError, match="one of components, heads"):
        complete({"grid": "layers"})


def test_headers_choose_a_layer_or_a_component(page: Page, about: dict[str, Any]) -> None:
    mount(page, traits(about, WORDS))
    page.get_by_role("columnheader", name="z of every layer").click()
    shown = state(page)
    assert shown["hook"] == "blocks.6.attn.o.hook_in"
    assert shown["hooks"] == [f"blocks.{i}.attn.o.hook_in" for i in range(fake.LAYERS)]
    assert page.locator("td[aria-selected=true]").count() == fake.LAYERS
    expect(page.locator(".hooks .readout")).to_contain_text("12 hooks chosen")
    page.get_by_role("columnheader", name="resid_mid of every layer").click()
    assert len(state(page)["hooks"]) == fake.LAYERS - 1  # layer 3 has none
    page.get_by_role("rowheader", name="layer 3", exact=True).click()
    shown = state(page)
    assert shown["hook"].startswith("blocks.3.") and all(hook.startswith("blocks.3.") for hook in shown["hooks"])
    assert "blocks.3.ln2.hook_in" not in shown["hooks"] and "blocks.3.attn.hook_pattern" in shown["hooks"]
    page.get_by_role("rowheader", name="layer 3", exact=True).click()
    assert state(page)["hooks"] == []  # again: one hook
    choose(page, "blocks.5.mlp.hook_out")
    assert page.locator("td[aria-selected=true]").count() == 1


def test_the_grid_is_one_tab_stop_with_arrows(page: Page, about: dict[str, Any]) -> None:
    mount(page, traits(about, WORDS))
    page.locator("td[tabindex='0']").focus()
    moves = {
        "ArrowUp": "blocks.5.hook_out",
        "ArrowRight": "blocks.5.attn.q.hook_out",
        "Home": "blocks.5.hook_in",
        "ArrowLeft": "layer 5",
        "ArrowDown": "layer 6",
        "End": "blocks.6.mlp.hook_out",
        "PageUp": "blocks.0.mlp.hook_out",
        "PageDown": "blocks.11.mlp.hook_out",
        "Control+Home": "blocks.0.hook_in",
        "Control+End": "blocks.11.mlp.hook_out",
    }
    for key, name in moves.items():
        page.keyboard.press(key)
        if key.startswith("Page"):  # by as many layers as are in sight
            page.keyboard.press(key)
        assert hook_at_focus(page) == name, key
        assert page.locator("table [tabindex='0']").count() == 1
    page.keyboard.press("Control+Home")
    page.keyboard.press("ArrowUp")
    assert hook_at_focus(page) == "resid_pre of every layer"
    page.keyboard.press("ArrowLeft")  # there is nothing in the corner
    assert hook_at_focus(page) == "resid_pre of every layer"
    page.keyboard.press("Enter")
    assert len(state(page)["hooks"]) == fake.LAYERS
    assert hook_at_focus(page) == "resid_pre of every layer"


def test_a_number_jumps_to_its_layer(page: Page, about: dict[str, Any]) -> None:
    mount(page, traits(about, WORDS))
    page.locator("td[tabindex='0']").focus()
    page.keyboard.press("1")
    assert hook_at_focus(page) == "blocks.1.hook_out"
    page.keyboard.press("1")
    assert hook_at_focus(page) == "blocks.11.hook_out"
    page.keyboard.press("7")  # there is no layer 117
    assert hook_at_focus(page) == "blocks.7.hook_out"
    spoken = page.locator(".hooks > .sr")
    assert spoken.get_attribute("aria-live") == "polite"
    assert spoken.text_content() == "blocks.7.hook_out 48"
    names = about["grid"]
    page.evaluate(
        """(rows) => { const ask = sent.find((m) => m.view === 'grid');
        model.fire('msg:custom', { type: 'data', key: ask.key, error: null, shape: [rows, 4] },
            [new Float32Array(rows * 4).fill(2.5)]) }""",
        len(names),
    )
    page.keyboard.press("ArrowRight")
    assert spoken.text_content() == "blocks.7.attn.q.hook_out 4 \u00d7 12, norm 2.5"
    page.locator("td[data-hook='blocks.3.ln2.hook_in']").focus()
    assert spoken.text_content() == "blocks.3.ln2.hook_in 48, not available: this layer has none"


def test_the_stream_between_two_layers_is_one_place(page: Page, about: dict[str, Any]) -> None:
    edit = {"hook": "blocks.8.hook_in", "op": "suppress", "pos": 1}
    mount(page, traits(about, WORDS, edits=[edit]))
    marked = "(all) => all.map((e) => e.dataset.hook)"
    assert page.locator("td.on").evaluate_all(marked) == ["blocks.6.hook_out"]
    assert page.locator("td.same").evaluate_all(marked) == ["blocks.7.hook_in"]
    assert page.locator("td.ed").evaluate_all(marked) == ["blocks.8.hook_in"]
    assert page.locator("td.edsame").evaluate_all(marked) == ["blocks.7.hook_out"]
    page.locator("td[data-hook='blocks.7.hook_in']").hover()
    assert "The same place as blocks.6.hook_out." in tip_of(page)
    choose(page, "blocks.0.hook_in")
    assert page.locator("td.same").count() == 0  # what comes before is the embedding


def test_heads_open_below_and_are_chosen_by_keys(page: Page, about: dict[str, Any]) -> None:
    edit = {"hook": "blocks.6.attn.v.hook_out", "op": "suppress", "head": 1}
    mount(page, traits(about, WORDS, edits=[edit], hook="blocks.6.attn.v.hook_out"))
    heads = page.locator(".headrow")
    assert heads.inner_text().split() == ["key-value", "heads", "all", "0", "1"]
    assert heads.locator("button.ed").all_inner_texts() == ["1"]
    page.locator("td.on").focus()
    for key in ("ArrowDown", "ArrowRight", "Enter", "ArrowRight", "Enter"):
        page.keyboard.press(key)
    assert state(page)["heads"] == [0, 1]
    assert hook_at_focus(page) == "head 1"
    assert page.locator("table [tabindex='0']").count() == 1
    page.keyboard.press("ArrowDown")
    assert hook_at_focus(page) == "blocks.7.attn.v.hook_out"
    page.keyboard.press("ArrowUp")
    page.keyboard.press("Home")
    page.keyboard.press("Enter")
    assert state(page)["heads"] == []
    page.evaluate("model.set('state', { ...model.get('state'), hook: 'blocks.6.hook_out' })")
    assert page.evaluate("document.querySelector('table').contains(document.activeElement)")


def test_layers_by_heads(page: Page, about: dict[str, Any]) -> None:
    edit = {"hook": "blocks.6.attn.o.hook_in", "op": "suppress", "head": 2}
    mount(page, traits(about, WORDS, edits=[edit]))
    page.get_by_role("button", name="Heads", exact=True).click()
    assert state(page)["grid"] == "heads"
    assert page.locator("td.c").count() == 4 * fake.LAYERS
    assert [ask["hook"] for ask in page.evaluate("sent") if ask.get("view") == "heads"] == ["blocks.0.attn.o.hook_in"]
    cell = "td[data-hook='blocks.{}.attn.o.hook_in'][data-col='{}']"
    assert page.locator("td.ed").evaluate_all("(all) => all.map((e) => e.getAttribute('aria-label'))") == [
        "blocks.6.attn.o.hook_in head 2"
    ]
    page.locator(cell.format(9, 3)).click()
    assert [state(page)[key] for key in ("hook", "heads", "tab")] == ["blocks.9.attn.o.hook_in", [3], "hook"]
    assert page.locator("td[aria-selected=true]").count() == 1
    page.get_by_role("columnheader", name="head 1 of every layer").click()
    assert len(state(page)["hooks"]) == fake.LAYERS and state(page)["heads"] == [1]
    assert page.locator("td[aria-selected=true]").count() == fake.LAYERS
    page.get_by_role("rowheader", name="layer 4", exact=True).click()
    assert state(page)["hooks"] == ["blocks.4.attn.o.hook_in"] and state(page)["heads"] == []
    assert page.locator("td[aria-selected=true]").count() == 4
    page.get_by_label("Heads of", exact=True).select_option("pattern")
    page.locator("td[data-row='2'][data-col='1']").click()
    assert [state(page)[key] for key in ("hook", "head", "tab")] == ["blocks.2.attn.hook_pattern", 1, "attention"]
    assert page.locator("td[aria-selected=true]").count() == 1
    page.get_by_label("Heads of", exact=True).select_option("k")
    assert page.locator("td.c").count() == 2 * fake.LAYERS
    expect(page.locator("th.g")).to_have_text("key-value heads")


def test_each_hook_has_a_tip_by_pointer_key_and_touch(page: Page, about: dict[str, Any]) -> None:
    mount(page, traits(about, WORDS))
    for column in about["columns"]:
        page.locator(f"[data-hook='{column['name'].replace('{i}', '2')}']").first.hover()
        expect(page.locator(".tip b")).to_have_text(column["name"].replace("{i}", "2"))
        text = tip_of(page)
        assert all(part in text for part in (column["about"], column["formula"], column["place"], "shape"))
    page.locator("td[data-hook='blocks.3.ln2.hook_in']").hover()
    expect(page.locator(".tip b")).to_have_text("blocks.3.ln2.hook_in")
    assert "Not in this model: this layer has none" in tip_of(page)
    page.locator(".tip").hover()  # one can go there
    page.wait_for_timeout(300)
    tip_of(page)
    page.keyboard.press("Escape")
    expect(page.locator(".tip")).to_have_count(0)

    page.locator("td[tabindex='0']").focus()
    boxes = (
        "[...document.querySelectorAll('.tip')].concat(document.activeElement).map((e) => e.getBoundingClientRect())"
    )
    for size in ({"width": 1110, "height": 800}, {"width": 476, "height": 500}):
        page.set_viewport_size(size)
        for key in ("ArrowUp", "End", "Control+End", "Control+Home", "ArrowUp", "ArrowDown"):
            page.keyboard.press(key)
            tip, cell = page.evaluate(f"JSON.parse(JSON.stringify({boxes}))")
            apart = tip["right"] <= cell["left"] or cell["right"] <= tip["left"]
            assert apart or tip["bottom"] <= cell["top"] or cell["bottom"] <= tip["top"], (size, key)
            assert tip["left"] >= 0 and tip["right"] <= size["width"], (size, key)
            assert page.locator(":focus").get_attribute("aria-describedby") == page.locator(".tip").get_attribute("id")
    page.keyboard.press("Enter")  # what is being used need not be explained
    expect(page.locator(".tip")).to_have_count(0)
    page.locator("td[data-hook='blocks.2.attn.v.hook_out']").dispatch_event(
        "pointerup", {"pointerType": "touch", "bubbles": True}
    )
    assert "Values of each key-value head." in tip_of(page)
    page.mouse.click(2, 2)
    expect(page.locator(".tip")).to_have_count(0)
    page.get_by_role("button", name="KL(clean").focus()
    assert METRICS["kl"]["about"] in tip_of(page)
    page.emulate_media(reduced_motion="reduce")
    assert page.locator(".tip").evaluate("(e) => getComputedStyle(e).transitionDuration") == "0s"
    page.evaluate("dispose()")
    assert page.locator(".tip").count() == 0
    assert not page.locator("[title]").count()


def test_by_keys_alone_in_the_notebook(notebook: Lab) -> None:
    page = open_workbench(notebook)
    settled(notebook)
    axp(page).locator("td.on").focus()
    for key in ("1", "2", "End", "ArrowLeft", "ArrowLeft", "ArrowLeft"):
        page.keyboard.press(key)
    assert hook_at_focus(page) == "blocks.12.attn.o.hook_in"
    norm = notebook.evaluate(
        "(lambda n: float(session.run(w.state['prompt'], capture=n)[n][-1].norm()))('blocks.12.attn.o.hook_in')"
    )
    spoken = str(axp(page).locator(".hooks > .sr").text_content())
    assert spoken.startswith("blocks.12.attn.o.hook_in 9 \u00d7 64, norm ")
    assert float(spoken.rsplit(" ", 1)[1]) == pytest.approx(norm, rel=1e-3)
    assert "z = pattern \u00b7 v" in tip_of(page)
    page.keyboard.press("Escape")
    expect(axp(page).locator(".tip")).to_have_count(0)
    assert hook_at_focus(page) == "blocks.12.attn.o.hook_in", "Escape closed the tip, and the notebook did not hear it"
    for key in ("Enter", "ArrowDown", "ArrowRight", "ArrowRight", "Enter"):
        page.keyboard.press(key)
    becomes(notebook, "[w.state['hook'], w.state['heads']]", ["blocks.12.attn.o.hook_in", [1]])


def test_heads_of_every_layer_are_tinted_by_their_norms(notebook: Lab) -> None:
    page = open_workbench(notebook)
    choose(page, "blocks.12.attn.k.hook_out")
    axp(page).get_by_role("button", name="Heads", exact=True).click()
    settled(notebook)
    norms = notebook.evaluate(
        "(lambda r: [r[f'blocks.{i}.attn.k.hook_out'][-1].norm(dim=-1).tolist() for i in range(30)])"
        "(session.run(w.state['prompt'], capture='blocks.*.attn.k.hook_out'))"
    )
    most = max(max(layer) for layer in norms)
    look = "[...document.querySelectorAll('.axp td.c > div')].map((e) => parseInt(e.style.getPropertyValue('--tint')))"
    shown = page.evaluate(look)
    assert shown == pytest.approx([norm / most * 62 for layer in norms for norm in layer], abs=0.51)
    axp(page).locator("td[data-row='7'][data-col='2']").hover()
    expect(axp(page).locator(".hooks .readout")).to_contain_text("blocks.7.attn.k.hook_out head 2 64, norm ")
    axp(page).locator("td[data-row='7'][data-col='2']").click()
    becomes(
        notebook, "[w.state['hook'], w.state['heads'], w.state['grid']]", ["blocks.7.attn.k.hook_out", [2], "heads"]
    )
    saved = notebook.evaluate("w.state")
    notebook.run(f"import json; w = session.explore('other'); w.state = json.loads({json.dumps(json.dumps(saved))}); w")
    expect(axp(page).locator("td.on")).to_have_attribute("aria-label", "blocks.7.attn.k.hook_out head 2")
