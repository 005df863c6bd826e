"""The prompts and their tokens: on the page alone, in real Chromium, and once in a real notebook."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from . import page as pages
from .conftest import Lab
from .pages import axp, becomes, open_workbench, settled

MARY = ["When", " Mary", " and", " John", " went", " to", " the", " store", ",", " Mary", " gave", " a", " drink"]
MARY.append(" to")
LONG = [(" word" if i % 7 else " the") + str(i % 13) for i in range(2000)]


@pytest.fixture(scope="module")
def tab(browser: Browser) -> Iterator[Page]:
    opened = browser.new_page(viewport={"width": 1200, "height": 900})
    opened.set_default_timeout(20000)
    yield opened
    opened.close()


@pytest.fixture
def sheet(tab: Page) -> Iterator[Page]:
    """A page on which nothing goes wrong unseen."""
    wrong: list[str] = []
    listen = lambda error: wrong.append(str(error))  # noqa: E731
    tab.on("pageerror", listen)
    yield tab
    tab.remove_listener("pageerror", listen)
    assert wrong == []


def chosen(page: Page, role: str = "prompt") -> list[int]:
    look = "(e) => [...e.querySelectorAll('.tok[aria-selected=true]')].map(t => +t.dataset.p)"
    return list(strip(page, role).evaluate(look))


def strip(page: Page, role: str = "prompt") -> Any:
    return page.get_by_label(f"Tokens of the {role}")


def state(page: Page, key: str) -> Any:
    return page.evaluate("(key) => model.get('state')[key]", key)


def said(page: Page, role: str = "prompt") -> str:
    return str(page.locator(".line", has=strip(page, role)).locator("[aria-live=polite]").inner_text())


def enter(page: Page, text: str, role: str = "prompt") -> None:
    field = page.get_by_label(f"Positions in the {role}")
    field.fill(text)
    field.press("Enter")


def test_columns_stand_under_each_other_on_every_line(sheet: Page) -> None:
    prompt = [" one" if i % 5 else " twentyone" for i in range(120)]
    source = [" \u6771\u4eac and more" if i % 9 == 4 else text for i, text in enumerate(prompt)]
    for width in (500, 1110):
        pages.mount(sheet, prompt, source, width=width)
        boxes = sheet.evaluate(
            """() => [...document.querySelectorAll('.strip')].map(s => [...s.querySelectorAll('.tok')].map(t => {
                const b = t.getBoundingClientRect(), r = s.getBoundingClientRect();
                return [b.left - r.left, b.top - r.top, b.width] }))"""
        )
        assert boxes[0] == boxes[1]
        assert len({top for _, top, _ in boxes[0]}) > 4
        fits = "() => [...document.querySelectorAll('.tok')].every(t => t.scrollWidth <= t.clientWidth)"
        assert sheet.evaluate(fits), "a token is wider than its box"
    assert sheet.locator(".strip").first.locator(".diff").count() == sum(i % 9 == 4 for i in range(120))


def test_unequal_lengths_are_said_on_the_strip(sheet: Page) -> None:
    pages.mount(sheet, MARY, MARY[:12])
    assert sheet.locator(".count").all_inner_texts() == ["14 \u2260 12", "12 \u2260 14"]
    expect(sheet.get_by_text("Unequal lengths: the source has 12 tokens, the prompt 14.")).to_be_visible()
    assert sheet.locator(".strip").first.locator(".diff").all_inner_texts() == ["12\n\u2423drink", "13\n\u2423to"]
    pages.mount(sheet, MARY, MARY)
    assert sheet.locator(".count").all_inner_texts() == ["14 tokens", "14 tokens"]
    expect(sheet.get_by_text("The two prompts are the same.")).to_be_visible()


def test_four_lines_then_it_scrolls_and_keeps_the_choice_in_view(sheet: Page) -> None:
    pages.mount(sheet, LONG[:400], LONG[:400], positions=[300])
    box = strip(sheet).bounding_box()
    lines = sheet.evaluate("() => document.querySelector('.strip .ln').getBoundingClientRect().height")
    assert box["height"] == pytest.approx(4 * lines, abs=1)
    seen = """(p) => [...document.querySelectorAll('.strip')].map(s => { const r = s.getBoundingClientRect(),
        b = s.querySelector(`[data-p="${p}"]`).getBoundingClientRect();
        return b.top >= r.top && b.bottom <= r.bottom })"""
    assert sheet.evaluate(seen, 300) == [True, True]
    sheet.evaluate("model.set('state', { ...model.get('state'), positions: [20] })")
    assert sheet.evaluate(seen, 20) == [True, True]
    strip(sheet).evaluate("(e) => { e.scrollTop = 300 }")
    tops = "() => [...document.querySelectorAll('.strip')].map(s => s.scrollTop)"
    sheet.wait_for_function(f"() => {{ const [a, b] = ({tops})(); return a === b && a === 300 }}")


def test_choosing_by_words(sheet: Page) -> None:
    pages.mount(sheet, MARY)
    field = sheet.get_by_label("Positions in the prompt")
    for text, positions, shown in [
        ("3:7", [3, 4, 5, 6], "3:7"),
        ("1, 4", [1, 4], "1, 4"),
        ("4 1", [1, 4], "1, 4"),
        ("-2:", [12, 13], "12, 13"),
        ("::6", [0, 6, 12], "0, 6, 12"),
        ("last", [13], "13"),
        ("0, 2:5, last", [0, 2, 3, 4, 13], "0, 2:5, 13"),
        ("all", list(range(14)), "all"),
    ]:
        enter(sheet, text)
        assert (chosen(sheet), state(sheet, "positions"), field.input_value()) == (positions, positions, shown)
    assert said(sheet) == "14 tokens chosen: 0 to 13"
    for text, says in [
        ("3:20", "\u201c3:20\u201d is outside the prompt, whose tokens are 0 to 13."),
        ("7:3", "\u201c7:3\u201d is outside"),
        ("-15", "\u201c-15\u201d is outside"),
        ("Mary", "\u201cMary\u201d says no token: write 9, or 1, 4, or 3:7"),
    ]:
        enter(sheet, text)
        expect(sheet.get_by_role("alert")).to_contain_text(says)
        assert chosen(sheet) == list(range(14)), "a refusal must change nothing"
    enter(sheet, "")
    expect(sheet.get_by_role("alert")).to_be_hidden()
    assert (chosen(sheet), state(sheet, "positions")) == ([13], [])

    strip(sheet).locator('[data-p="1"]').click()
    sheet.get_by_role("button", name="same as this token").click()
    assert (chosen(sheet), field.input_value()) == ([1, 9], "1, 9")
    sheet.get_by_role("button", name="last", exact=True).click()
    assert chosen(sheet) == [13]
    sheet.get_by_role("button", name="all", exact=True).click()
    assert chosen(sheet) == list(range(14))


def test_the_source_follows_the_prompt_until_it_is_chosen_apart(sheet: Page) -> None:
    pages.mount(sheet, MARY, MARY, positions=[9])
    follow = sheet.get_by_role("button", name="as the prompt")
    assert (chosen(sheet, "source"), follow.get_attribute("aria-pressed")) == ([9], "true")
    enter(sheet, "2:4", "source")
    assert (chosen(sheet, "source"), chosen(sheet), follow.get_attribute("aria-pressed")) == ([2, 3], [9], "false")
    follow.click()
    assert (chosen(sheet, "source"), state(sheet, "source_positions")) == ([9], [])


def test_text_is_found_across_tokens_and_stepped_through(sheet: Page) -> None:
    pages.mount(sheet, [*MARY, " \u27e8E7 8C\u27e9", "\u27e8AB\u27e9", "s\n"])
    field = sheet.get_by_label("Find in the prompt")
    hits = lambda css: sheet.evaluate("(q) => [...document.querySelectorAll(q)].map(e => +e.dataset.p)", css)  # noqa: E731
    for text, found, at in [
        ("mary", [1, 9], [1]),
        ("the st", [6, 7], [6, 7]),
        ("\u732b", [14, 15], [14, 15]),
        ("\u732bS", [14, 15, 16], [14, 15, 16]),
        ("\u23ce", [16], [16]),
        ("nowhere", [], []),
    ]:
        field.fill(text)
        assert (hits(".tok.hit"), hits(".tok.now")) == (found, at), text
    assert said(sheet) == "\u201cnowhere\u201d is not in the prompt"
    field.fill(" to")
    where = sheet.locator(".finder small").first
    assert where.inner_text() == "1 of 2"
    field.press("Enter")
    assert (where.inner_text(), hits(".tok.now")) == ("2 of 2", [13])
    assert said(sheet) == "2 of 2: space to, token 13"
    field.press("Enter")
    sheet.get_by_role("button", name="previous place").click()
    assert hits(".tok.now") == [13]
    assert state(sheet, "positions") == [], "finding chooses nothing"
    strip(sheet).locator("[tabindex='0']").focus()  # what was found is the strip's tab stop
    sheet.keyboard.press("Enter")
    assert state(sheet, "positions") == [13]
    field.focus()
    sheet.keyboard.press("Escape")
    assert (field.input_value(), hits(".tok.hit")) == ("", [])


def test_the_strip_is_one_tab_stop_with_the_usual_keys(sheet: Page) -> None:
    pages.mount(sheet, LONG[:300], LONG[:300])
    assert strip(sheet).locator("[tabindex='0']").count() == 1
    strip(sheet).locator('[data-p="40"]').click()
    press = sheet.keyboard.press
    press("ArrowRight")
    press("Shift+ArrowRight")
    press("Shift+ArrowRight")
    assert chosen(sheet) == [41, 42, 43]
    assert said(sheet).endswith("token 43; 3 tokens chosen: 41 to 43")
    press("Shift+ArrowLeft")
    assert chosen(sheet) == [41, 42]
    middle = """() => { const b = document.activeElement.getBoundingClientRect(); return (b.left + b.right) / 2 }"""
    line = "() => [...document.querySelector('.strip').children].indexOf(document.activeElement.closest('.ln'))"
    before, row = sheet.evaluate(middle), sheet.evaluate(line)
    press("ArrowDown")
    assert sheet.evaluate(line) == row + 1 and sheet.evaluate(middle) == pytest.approx(before, abs=40)
    press("PageDown")
    assert sheet.evaluate(line) == row + 5
    press("PageUp")
    press("ArrowUp")
    assert sheet.evaluate(line) == row
    press("Shift+End")
    assert chosen(sheet)[-1] == 299 and len(chosen(sheet)) > 200
    press("Home")
    assert chosen(sheet) == [0]
    press("Control+ArrowRight")
    press("Control+ArrowRight")
    assert chosen(sheet) == [0], "Ctrl moves without choosing"
    press(" ")
    assert chosen(sheet) == [0, 2]
    press("Control+a")
    assert len(chosen(sheet)) == 300
    assert strip(sheet).locator("[tabindex='0']").count() == 1


def test_tokens_are_told_apart_and_legible(sheet: Page) -> None:
    texts = [
        ("<s>", "bos"),
        "a\n",
        "  ",
        "\t",
        "\u27e8E4 BD\u27e9",
        "\u202e",
        ("<|im_end|>", "special"),
        "<b>hi</b>",
        "",
    ]
    pages.mount(sheet, texts)
    shown = [text.split("\n", 1) for text in strip(sheet).locator(".tok").all_inner_texts()]
    assert shown == [
        ["0 bos", "<s>"],
        ["1", "a\u23ce"],
        ["2", "\u2423\u2423"],
        ["3", "\u21e5"],
        ["4", "\u27e8E4\u202fBD\u27e9"],
        ["5", "\u2039202E\u203a"],
        ["6 special", "<|im_end|>"],
        ["7", "<b>hi</b>"],
        ["8", "\u2205"],
    ]
    names = [tok.get_attribute("aria-label") for tok in strip(sheet).locator(".tok").all()]
    assert names[0] == "<s>, token 0, beginning of sequence"
    assert names[1:4] == ["a new line, token 1", "2 spaces, token 2", "tab, token 3"]
    assert names[6] == "<|im_end|>, token 6, special token"
    pages.mount(sheet, [])
    expect(sheet.get_by_text("No tokens yet: type a prompt above and press Enter.")).to_be_visible()
    assert sheet.locator(".tokens .tools:visible").count() == 0


def test_touch_chooses(browser: Browser) -> None:
    context = browser.new_context(has_touch=True, viewport={"width": 700, "height": 900})
    page = context.new_page()
    pages.mount(page, MARY, width=680)
    strip(page).locator('[data-p="9"]').tap()
    assert chosen(page) == [9]
    page.get_by_role("button", name="same as this token").tap()
    assert chosen(page) == [1, 9]
    small = page.evaluate(
        """() => [...document.querySelectorAll('.tok, .tools button:not([hidden])')].filter(e => e.offsetParent)
            .map(e => e.getBoundingClientRect()).filter(b => b.width < 24 || b.height < 24).length"""
    )
    assert small == 0, "a control is too small for a finger"
    context.close()


def test_two_thousand_tokens_respond(sheet: Page, capsys: pytest.CaptureFixture[str]) -> None:
    """Recorded: from a click to the next painted frame, median of 20; and how many nodes a click touches."""
    source = [*LONG[:1000], " other", *LONG[1001:]]
    pages.mount(sheet, LONG, source)
    times, idle, touched = sheet.evaluate(
        """async () => {
        const painted = () => new Promise(done => requestAnimationFrame(() => {
            const channel = new MessageChannel(); channel.port1.onmessage = done; channel.port2.postMessage(0) }));
        const toks = [...document.querySelector('.strip').querySelectorAll('.tok')], times = [], idle = [];
        let touched = 0;
        const watch = new MutationObserver(seen => { touched += new Set(seen.map(s => s.target)).size });
        for (let i = 0; i < 60; i++) await painted();
        watch.observe(document.querySelector('.tokens'), { subtree: true, attributes: true, childList: true });
        for (let i = 0; i < 20; i++) {
            let start = performance.now(); await painted(); idle.push(performance.now() - start); await painted();
            start = performance.now(); toks[i * 3].click(); await painted(); times.push(performance.now() - start);
            await painted() }
        return [times, idle, touched] }"""
    )
    with capsys.disabled():  # recorded in every run, CI's too
        print(
            f"\n2,000 tokens, twice: click to the next painted frame, median {statistics.median(times):.0f} ms of 20 "
            f"(a frame with nothing to do: {statistics.median(idle):.0f} ms)"
        )
    assert touched <= 20 * 10, "a click must touch only what it changes"
    assert chosen(sheet) == [57]


def test_in_a_notebook(notebook: Lab) -> None:
    page = open_workbench(notebook)
    enter(page, "3:7")
    becomes(notebook, "w.state['positions']", [3, 4, 5, 6])
    page.get_by_role("button", name="all", exact=True).click()
    becomes(notebook, "w.state['positions']", list(range(9)))
    page.get_by_label("Find in the prompt").fill("tower")
    expect(axp(page).locator(".tok.now")).to_have_text(["3\u2423Tower"])
    source = axp(page).get_by_label("Source", exact=True)
    source.fill("The Colosseum is in")
    source.press("Enter")
    expect(axp(page).locator(".count.unequal")).to_have_count(2)
    settled(notebook)
    counts = notebook.evaluate("[len(w.tokens['prompt']['tokens']), len(w.tokens['source']['tokens'])]")
    assert axp(page).locator(".count").first.inner_text() == f"{counts[0]} \u2260 {counts[1]}"
