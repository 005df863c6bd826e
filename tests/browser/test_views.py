"""The page's own logic in Chromium without Jupyter: the ES modules as they are, on a model that is a plain object."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from tests.browser import fake
from widgets import esm
from widgets.state import complete
from widgets.workbench import describe

MODEL = """(traits) => { const handlers = new Map(), sent = []; window.sent = sent;
    window.model = { handlers, get: (k) => traits[k], set: (k, v) => { traits[k] = v; model.fire('change:' + k); },
        save_changes: () => {}, send: (m) => sent.push(m),
        on: (e, f) => handlers.set(e, [...(handlers.get(e) ?? []), f]),
        off: (e, f) => handlers.set(e, (handlers.get(e) ?? []).filter((g) => g !== f)),
        fire: (e, ...args) => (handlers.get(e) ?? []).forEach((f) => f(...args)) } }"""


@pytest.fixture(scope="module")
def about() -> dict[str, Any]:
    session, _ = fake.session()
    try:
        return describe(session)
    finally:
        session.close()


def serve(opened: Page) -> None:
    """Makes it a blank page that can import the modules by name."""

    def answer(route: Route) -> None:
        name = route.request.url.rsplit("/", 1)[1]
        if name == "page.html":
            route.fulfill(content_type="text/html", body="<!doctype html><meta charset=utf-8><body><main></main>")
        else:
            route.fulfill(content_type="text/javascript", body=(esm.HERE / name).read_text(encoding="utf-8"))

    opened.route("http://page.test/*", answer)
    opened.goto("http://page.test/page.html")
    opened.add_style_tag(content=esm.css("workbench"))


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A blank page that can import the modules by name; an error on it fails the test."""
    opened = browser.new_page(viewport={"width": 1110, "height": 800})
    errors: list[str] = []
    opened.on("pageerror", lambda error: errors.append(str(error)))
    serve(opened)
    yield opened
    opened.close()
    assert errors == []


def traits(about: dict[str, Any], tokens: list[str], **state: Any) -> dict[str, Any]:
    rows = [[" a", 1, 0.5, 0.25, -0.25], [" b", 2, 0.125, 0.75, 0.625]]
    return {
        "about": about,
        "state": complete({"prompt": "".join(tokens), "hook": "blocks.6.hook_out", **state}),
        "tokens": {"prompt": {"text": "", "tokens": [[i, t, ""] for i, t in enumerate(tokens)]}},
        "result": {
            "prompt": "",
            "edited": True,
            "rows": rows,
            "kl": 0.5,
            "seconds": 0.04,
            "difference": {"tokens": [" a", " b"], "values": [1.5, -2.25]},
            "keys": {"clean": "c", "patched": "p"},
            "error": None,
        },
        "jobs": {"active": [], "last": None},
        "steps": {},
        "history": {"count": 0},
    }


def mount(page: Page, given: dict[str, Any]) -> None:
    page.evaluate(MODEL, given)
    page.evaluate(
        """async () => { const m = await import('http://page.test/workbench.js');
        window.dispose = m.default.render({ model, el: document.querySelector('main') }) }"""
    )


def answer(page: Page, rows: list[list[float | str]]) -> None:
    """Answers the page's last ask of the heatmap with these numbers."""
    page.evaluate(
        """(rows) => { const ask = sent.filter((m) => m.type === 'data' && m.view !== 'grid').at(-1);
        const flat = Float32Array.from(rows.flat().map((x) => x === 'nan' ? NaN : x === 'inf' ? Infinity
            : x === '-inf' ? -Infinity : x));
        const shape = [rows.length, rows[0].length];
        model.fire('msg:custom', { type: 'data', key: ask.key, error: null, shape }, [flat]) }""",
        rows,
    )


def test_a_flat_run_beside_a_sharp_one_is_seen(page: Page, about: dict[str, Any]) -> None:
    given = traits(about, ["The", " city"])
    sharp = [[f" clean{i}", i, p, 1e-6, 0] for i, p in enumerate((0.5, 0.2, 0.1, 0.05, 0.04, 0.03))]
    flat = [[f" flat{i}", 9 + i, 1e-6, p, 0] for i, p in enumerate((0.008, 0.007, 0.006, 0.005, 0.004, 0.003))]
    given["result"]["rows"] = sharp + flat
    mount(page, given)
    names = ["\u2423clean0", "\u2423clean1", "\u2423clean2", "\u2423flat0", "\u2423flat1", "\u2423flat2"]
    expect(page.locator(".rows [role=cell].t")).to_have_text(names)


def test_edits_that_were_not_run_are_said_beside_the_predictions(page: Page, about: dict[str, Any]) -> None:
    given = traits(about, ["The", " city"])
    given["result"] |= {"edited": False, "error": {"where": "edit", "index": 3, "message": "pos 9 is outside"}}
    mount(page, given)
    said = "The edits were not run: see what is wrong with edit 4."
    expect(page.locator(".pred .sum")).to_contain_text(said)
    expect(page.locator(".job .what")).to_have_text(said)


@pytest.mark.parametrize("token", [" a", "\u00a0", "\u200b", "\u27e8E4 BD\u27e9"])
def test_looking_at_a_token_of_the_difference_does_not_choose_it(page: Page, about: dict[str, Any], token: str) -> None:
    given = traits(about, ["The", " city"])
    given["result"]["difference"]["tokens"] = [token, " b"]
    mount(page, given)
    field = page.get_by_label("logit of this token")
    field.focus()
    field.blur()
    assert page.evaluate("model.get('state').compare") == [None, None]
    field.fill("\u2423Paris")
    field.press("Enter")
    assert page.evaluate("model.get('state').compare") == [" Paris", None]


def test_the_job_line_says_the_result_once_a_run_is_over(page: Page, about: dict[str, Any]) -> None:
    given = traits(about, ["The", " city"])
    given["jobs"]["last"] = {"label": "Run", "outcome": "done", "seconds": 0.05}
    mount(page, given)
    line = page.locator(".job .what")
    assert line.inner_text() == "\u2423a 50% to 25%, in 40 ms"
    assert page.locator(".axp > .sr").text_content() == "a 50% to 25%"
    page.evaluate("model.set('result', { ...model.get('result'), edited: false })")
    assert line.inner_text() == "\u2423a 50%, in 40 ms"
    page.evaluate("model.set('result', { ...model.get('result'), rows: [] })")
    assert line.inner_text() == ""


def test_names_of_the_grid_are_whole_words(page: Page, about: dict[str, Any]) -> None:
    mount(page, traits(about, ["The", " city"]))
    names = page.locator("thead tr:last-child th")
    assert {"scores", "pattern", "neurons"} < set(names.all_inner_texts())
    for width in (1110, 476):
        page.set_viewport_size({"width": width, "height": 800})
        cut = names.evaluate_all("(all) => all.filter((e) => e.scrollWidth > e.clientWidth).map((e) => e.textContent)")
        assert cut == []


def test_tokens_that_differ_say_what_the_other_prompt_has(page: Page, about: dict[str, Any]) -> None:
    given = traits(about, ["a", " b", " c"], source="a d")
    given["tokens"]["source"] = {"text": "a d", "tokens": [[0, "a", ""], [9, " d", ""]]}
    mount(page, given)
    titles = page.locator(".tok.diff").evaluate_all("(all) => all.map((e) => e.title)")
    assert titles == [
        "token 1, the source has \u2423d here, id 1",
        "token 2, the source ends before, id 2",
        "token 1, the prompt has \u2423b here, id 9",
    ]
    note = page.locator(".tokens .notes").last.inner_text()
    assert note.startswith("Unequal lengths: the source has 2 tokens, the prompt 3.")
    assert "Underlined: where the two prompts differ." in note


def test_attention_without_an_edit_is_no_change(page: Page, about: dict[str, Any]) -> None:
    given = traits(about, ["The", " city"], tab="attention", of="change")
    given["result"]["edited"] = False
    mount(page, given)
    answer(page, [[1.0, 0.0], [0.25, 0.75]])
    assert page.locator(".heat .unit").text_content() == "attention weight, layer 6, head 0: rows look at columns"


def test_tokens_are_text_in_every_view(page: Page, about: dict[str, Any]) -> None:
    evil = [
        "<img src=x onerror=window.pwned=1>",
        "<script>window.pwned=1</script>",
        "{{7*7}}",
        "\u202ertl",
        "\n",
        " &lt;",
    ]
    given = traits(about, evil, source="x", positions=[0, 1])
    given["tokens"]["source"] = given["tokens"]["prompt"]
    given["result"]["rows"] = [[text, i, 0.1, 0.2, 0.1] for i, text in enumerate(evil)]
    given["result"]["difference"]["tokens"] = evil[:2]
    given["result"]["error"] = {"where": "edit", "index": 0, "message": evil[0]}
    source = {"prompt": evil[1]}
    edit = {"hook": evil[0], "op": "patch", "pos": [0, 1], "source": source, "enabled": True}
    given["state"]["edits"] = [edit]
    given["jobs"] = {"active": [], "last": {"label": evil[0], "outcome": "cancelled", "seconds": 1}}
    mount(page, given)
    page.wait_for_timeout(100)
    assert page.evaluate("window.pwned") is None
    assert page.locator("main img, main script").count() == 0
    shown = page.locator(".strip").first.locator("bdi").all_inner_texts()
    assert shown == [evil[0].replace(" ", "\u2423"), evil[1], "{{7*7}}", "\u2039202E\u203artl", "\u23ce", "\u2423&lt;"]


def test_nan_and_infinity_are_said_and_do_not_spoil_the_scale(page: Page, about: dict[str, Any]) -> None:
    mount(page, traits(about, ["a", "b", "c"], tab="hook", of="clean"))
    answer(page, [[1, 2, -4, "nan"], [0.5, "inf", 1, 2], [3, 1, 2, 1]])
    assert page.locator(".heat .legend .num").all_inner_texts() == ["\u22124", "4"]
    page.locator("canvas.map").focus()
    page.keyboard.press("Home")
    for _ in range(2):
        page.keyboard.press("ArrowUp")
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    assert page.locator(".heat .readout b").inner_text() == "NaN"
    page.keyboard.press("ArrowDown")
    for _ in range(2):
        page.keyboard.press("ArrowLeft")
    assert page.locator(".heat .readout b").inner_text() == "+\u221e"
    assert "token 1 b, dimension 1" in page.locator(".heat .sr").inner_text()


def test_an_attention_sink_is_left_out_of_the_scale_and_named(page: Page, about: dict[str, Any]) -> None:
    mount(page, traits(about, ["sink", " b", " c", " d"], of="clean"))
    answer(page, [[3000, 10 + i, 20, 30] for i in range(12)])
    assert page.locator(".heat .legend .num").last.inner_text() == "30"
    notes = page.locator(".heat .notes").inner_text()
    assert "Left out of the scale, hatched: token 0 sink." in notes and "12 cells beyond" in notes


def test_a_change_of_one_position_keeps_its_scale(page: Page, about: dict[str, Any]) -> None:
    mount(page, traits(about, ["a", " b", " c", " d"], of="change"))
    answer(page, [[0, 0, 5, 0] for _ in range(12)])
    assert page.locator(".heat .legend .num").all_inner_texts() == ["0", "5"]
    assert page.locator(".heat .notes").inner_text() == ""


def test_pooling_keeps_a_lone_outlier(page: Page) -> None:
    pooled = page.evaluate(
        """async () => { const { pool } = await import('http://page.test/scale.js');
        const v = new Float32Array(1000 * 1000).fill(0.1);
        v[777 * 1000 + 333] = -9; v[5] = NaN; const p = pool(v, 1000, 1000, 100, 200);
        return [p.rows, p.cols, p.down, p.across, p.values[77 * 200 + 66], Number.isNaN(p.values[1]), p.values[0]] }"""
    )
    assert pooled == [100, 200, 10, 5, -9, True, pytest.approx(0.1)]


def test_a_thousand_by_a_thousand_cells_are_drawn_quickly(page: Page, about: dict[str, Any]) -> None:
    mount(page, traits(about, [f"t{i}" for i in range(1000)], tab="hook", of="clean"))
    took = page.evaluate(
        """async () => { const ask = sent.filter((m) => m.view === 'hook').at(-1);
        const v = new Float32Array(1e6).map((_, i) => Math.sin(i));
        const start = performance.now();
        model.fire('msg:custom', { type: 'data', key: ask.key, error: null, shape: [1000, 1000] }, [v]);
        await new Promise(requestAnimationFrame); return performance.now() - start }"""
    )
    print(f"\n1000 x 1000 cells drawn in {took:.0f} ms")
    assert "extreme of" in page.locator(".heat .notes").inner_text()
    assert took < 2000


def test_answers_to_other_keys_change_nothing(page: Page, about: dict[str, Any]) -> None:
    mount(page, traits(about, ["a", "b"], of="clean"))
    page.evaluate(
        """() => model.fire('msg:custom', { type: 'data', key: 'norms|clean||0|old', error: null, shape: [1, 2] },
        [new Float32Array([1, 2])])"""
    )
    assert page.locator(".mapbox .empty").is_visible()
    answer(page, [[1, 2]] * 12)
    assert page.locator(".mapbox .empty").is_hidden()


def test_a_dropped_ask_is_asked_again(page: Page, about: dict[str, Any]) -> None:
    mount(page, traits(about, ["a", "b"], of="clean"))
    asks = "sent.filter((m) => m.view === 'norms').length"
    assert page.evaluate(asks) == 1
    page.evaluate(
        """() => { const { key } = sent.find((m) => m.view === 'norms');
        model.fire('msg:custom', { type: 'data', key, dropped: true, shape: [] }, []) }"""
    )
    page.evaluate("model.set('state', { ...model.get('state'), positions: [0] })")
    assert page.evaluate(asks) == 2


def test_disposing_leaves_nothing(page: Page, about: dict[str, Any]) -> None:
    mount(page, traits(about, ["a", "b"]))
    assert page.evaluate("[...model.handlers.values()].flat().length") > 0
    page.evaluate("dispose()")
    assert page.evaluate("[...model.handlers.values()].flat().length") == 0
    assert page.locator("main *").count() == 0


def test_a_row_that_is_typed_in_keeps_its_focus(page: Page, about: dict[str, Any]) -> None:
    edit = {"hook": "blocks.1.hook_out", "op": "scale", "pos": 0, "factor": 1, "enabled": True}
    mount(page, traits(about, ["a", "b"], edits=[edit]))
    box = page.locator("input.amount")
    box.fill("2.5")
    page.wait_for_function("() => model.get('state').edits[0].factor === 2.5")
    assert page.evaluate("document.activeElement.className") == "amount"
    assert json.dumps(page.evaluate("model.get('state').edits[0]"), sort_keys=True) == json.dumps(
        edit | {"factor": 2.5}, sort_keys=True
    )


def test_the_spec_is_copied_as_the_session_takes_it(page: Page, about: dict[str, Any]) -> None:
    edits = [
        {"hook": "a", "op": "suppress", "pos": 1, "enabled": True},
        {"hook": "b", "op": "scale", "factor": 2, "enabled": False},
        {"hook": "a", "op": "add", "value": 1, "enabled": True},
    ]
    spec = page.evaluate("async (edits) => (await import('http://page.test/spec.js')).specOf(edits)", edits)
    assert spec == {"a": [{"op": "suppress", "pos": 1}, {"op": "add", "value": 1}]}
