"""A token of the source carried to one of the prompt, in Chromium without Jupyter; and edits at many hooks at once."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import Page, expect

from .test_views import about as about  # fixtures
from .test_views import mount, traits
from .test_views import page as page
from .test_workbench_axe import violations

PROMPT = ["When", " Mary", " and", " John", " went", " to", " the", " store"]
SOURCE = ["When", " Mary", " and", " Tom", " went", " to", " a", " big", " shop"]
HERE = {"hook": "blocks.6.hook_out", "op": "patch", "enabled": True, "source": {"prompt": "".join(SOURCE)}}
LINE = "patch blocks.6.hook_out: pos 4 from pos 6 of the second prompt"


def opened(page: Page, about: dict[str, Any], dark: bool = False, **state: Any) -> None:
    given = traits(about, PROMPT, **{"source": "".join(SOURCE)} | state)
    rows = [[PROMPT.index(t) if t in PROMPT else 90 + i, t, ""] for i, t in enumerate(SOURCE)]
    given["tokens"]["source"] = {"text": "".join(SOURCE), "tokens": rows if state.get("source", True) else []}
    mount(page, given)
    page.evaluate("window.seen = []; model.on('change:state', () => seen.push(model.get('state')))")
    dark_theme(page, dark)


def dark_theme(page: Page, dark: bool) -> None:
    if dark:
        page.evaluate(
            """() => { document.body.dataset.jpThemeLight = 'false'; document.body.style.background = '#111';
            for (const [k, v] of [['ui-font-color1', '#e6edf3'], ['layout-color1', '#111'],
                ['border-color2', '#3d434a']]) document.body.style.setProperty(`--jp-${k}`, v) }"""
        )


def edits(page: Page) -> Any:
    return page.evaluate("model.get('state').edits")


def token(page: Page, role: str, p: int) -> Any:
    return page.get_by_label(f"Tokens of the {role}").locator(f'[data-p="{p}"]')


def middle(page: Page, role: str, p: int) -> tuple[float, float]:
    box = token(page, role, p).bounding_box()
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


def drag(page: Page, p: int, *to: tuple[str, int]) -> None:
    """Presses on a token of the source and moves over others; the button stays down."""
    x, y = middle(page, "source", p)
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x + 4, y + 1)  # within the token, where a browser begins to mark its text
    for role, q in to:
        page.mouse.move(*middle(page, role, q), steps=4)


def said(page: Page) -> str:
    return str(page.locator(".line").nth(1).locator("[aria-live=polite]").text_content())


def test_a_token_dragged_onto_another_patches_it(page: Page, about: dict[str, Any]) -> None:
    opened(page, about, positions=[2])
    page.add_style_tag(content=".axp, .axp button { user-select: text }")  # as in JupyterLab
    line = page.locator(".carry")
    drag(page, 6, ("prompt", 5), ("prompt", 4))
    expect(line).to_have_text(LINE)
    expect(page.locator(".tok.target")).to_have_attribute("data-p", "4")
    expect(page.locator(".tok.carried")).to_have_attribute("data-p", "6")
    assert edits(page) == [] and page.evaluate("seen") == [], "nothing is done before it is dropped"
    page.mouse.up()
    assert edits(page) == [HERE | {"pos": 4, "source_pos": 6}]
    assert page.evaluate("seen.length") == 1, "one gesture, one change"
    assert page.evaluate("getSelection().toString()") == "", "no text is left marked"
    assert said(page) == f"added: {LINE}"
    expect(line).to_have_text("")
    expect(page.locator(".tok.target, .tok.carried, .carrying")).to_have_count(0)
    assert page.evaluate("model.get('state').positions") == [2], "the choice stays"
    drag(page, 3, ("prompt", 3))
    page.mouse.up()
    assert edits(page)[1] == HERE | {"pos": 3, "source_pos": 3}


def test_a_drag_that_is_given_up_does_nothing(page: Page, about: dict[str, Any]) -> None:
    opened(page, about)
    drag(page, 6, ("prompt", 4))
    page.keyboard.press("Escape")
    expect(page.locator(".tok.target, .tok.carried")).to_have_count(0)
    page.mouse.move(*middle(page, "prompt", 5))
    page.mouse.up()
    drag(page, 6, ("prompt", 4), ("source", 2))  # let go over no token of the prompt
    expect(page.locator(".carry")).to_contain_text("drop it on the token of the prompt")
    page.mouse.up()
    assert edits(page) == [] and page.evaluate("seen") == []
    expect(page.locator(".carry")).to_have_text("")
    token(page, "source", 5).click()  # a plain click still chooses
    token(page, "prompt", 2).click()
    state = page.evaluate("model.get('state')")
    assert [state["source_positions"], state["positions"], state["edits"]] == [[5], [2], []]
    page.mouse.move(*middle(page, "prompt", 1))  # the prompt's own tokens are carried nowhere
    page.mouse.down()
    page.mouse.move(*middle(page, "prompt", 5), steps=3)
    expect(page.locator(".carry")).to_have_text("")
    page.mouse.up()
    assert edits(page) == []


def test_a_chosen_token_is_dragged_by_touch(page: Page, about: dict[str, Any]) -> None:
    opened(page, about, source_positions=[6])
    touch = "(e) => getComputedStyle(e).touchAction"
    assert token(page, "source", 6).evaluate(touch) == "none" and token(page, "source", 5).evaluate(touch) != "none"
    start, end = middle(page, "source", 6), middle(page, "prompt", 4)
    chrome = page.context.new_cdp_session(page)

    def send(kind: str, *points: tuple[float, float]) -> None:
        found = [{"x": x, "y": y} for x, y in points]
        chrome.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": found})

    chrome.send("Emulation.setTouchEmulationEnabled", {"enabled": True})
    send("touchStart", start)
    for share in (0.3, 0.7, 1):
        send("touchMove", (start[0] + (end[0] - start[0]) * share, start[1] + (end[1] - start[1]) * share))
    expect(page.locator(".carry")).to_have_text(LINE)
    send("touchEnd")
    assert edits(page) == [HERE | {"pos": 4, "source_pos": 6}]


def test_a_token_is_picked_up_with_a_button_and_dropped_with_a_tap(page: Page, about: dict[str, Any]) -> None:
    opened(page, about)
    button = page.get_by_role("button", name="patch to")
    token(page, "source", 6).click()
    button.click()
    assert button.get_attribute("aria-pressed") == "true"
    button.click()  # and put down again
    expect(page.locator(".tok.target, .tok.carried")).to_have_count(0)
    button.click()
    token(page, "prompt", 4).hover()
    expect(page.locator(".carry")).to_contain_text(LINE)
    token(page, "prompt", 4).click()
    assert edits(page) == [HERE | {"pos": 4, "source_pos": 6}]
    assert button.get_attribute("aria-pressed") == "false"
    token(page, "prompt", 5).click()
    assert page.evaluate("model.get('state').positions") == [5] and len(edits(page)) == 1
    button.click()
    page.evaluate("model.set('state', { ...model.get('state'), hook: 'blocks.2.attn.hook_pattern' })")
    expect(page.locator(".carry")).to_contain_text(
        "Nothing can be patched here: blocks.2.attn.hook_pattern: can be read"
    )
    token(page, "prompt", 4).click()
    assert len(edits(page)) == 1
    page.evaluate("model.set('tokens', { ...model.get('tokens'), source: { text: '', tokens: [] } })")
    expect(page.locator(".carry")).to_have_text("")
    expect(button).to_be_hidden()


def test_a_token_is_carried_by_keys(page: Page, about: dict[str, Any]) -> None:
    opened(page, about)
    at = "[document.activeElement.closest('.strip').ariaLabel, document.activeElement.dataset.p]"
    token(page, "source", 5).click()
    page.keyboard.press("ArrowRight")
    page.evaluate("seen.length = 0")
    page.keyboard.press("p")
    assert page.evaluate(at) == ["Tokens of the prompt", "6"]
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    expect(page.locator(".carry")).to_contain_text(LINE)
    assert page.locator(".carry").get_attribute("role") == "status"
    page.keyboard.press("Escape")
    assert page.evaluate(at) == ["Tokens of the source", "6"] and page.evaluate("seen") == []
    assert said(page) == "nothing patched"
    page.keyboard.press("p")
    page.keyboard.press("Home")
    page.keyboard.press("Enter")
    assert edits(page) == [HERE | {"pos": 0, "source_pos": 6}] and page.evaluate("seen.length") == 1
    assert page.evaluate(at) == ["Tokens of the source", "6"], "on with the next one"
    page.keyboard.press("ArrowLeft")  # arrows choose again
    assert page.evaluate("model.get('state').source_positions") == [5]


def test_what_is_carried_is_put_down_when_a_text_changes(page: Page, about: dict[str, Any]) -> None:
    opened(page, about)
    carry = page.locator(".carry")
    for change in ("prompt: 'When'", "source: 'Then'", "source: ''"):
        token(page, "source", 5).click()
        page.get_by_role("button", name="patch to").click()
        expect(carry).to_contain_text("Choose its token")
        page.evaluate(f"model.set('state', {{ ...model.get('state'), {change} }})")
        expect(carry).to_have_text("")
    drag(page, 6, ("prompt", 4))  # the tokens of the text that was cleared are still there
    page.mouse.up()
    alert = page.locator(".line").nth(1).get_by_role("alert")
    expect(alert).to_have_text("There is nothing to patch from yet: type a second prompt as Source, above.")
    expect(carry).to_have_text("")
    expect(page.locator(".tok.target, .tok.carried, .carrying")).to_have_count(0)
    assert edits(page) == []
    page.evaluate("model.set('tokens', { ...model.get('tokens'), source: { text: '', tokens: [] } })")
    expect(alert).to_be_hidden()


def test_escape_is_the_notebooks_outside(page: Page, about: dict[str, Any]) -> None:
    opened(page, about)
    page.evaluate(
        """window.heard = 0; document.body.append(Object.assign(document.createElement('input'), { id: 'cell' }));
        document.addEventListener('keydown', (e) => (heard += e.key === 'Escape' && !e.defaultPrevented))"""
    )
    token(page, "source", 6).click()
    page.get_by_role("button", name="patch to").click()
    page.keyboard.press("Escape")
    assert page.evaluate("heard") == 0, "it put down what was carried"
    page.get_by_role("button", name="patch to").click()
    page.get_by_label("Operation").focus()
    expect(page.locator(".carry")).to_contain_text("Choose its token")
    page.locator("#cell").focus()
    expect(page.locator(".carry")).to_have_text("")
    page.keyboard.press("Escape")
    assert page.evaluate("heard") == 1
    drag(page, 6, ("prompt", 4))
    page.evaluate(
        "document.querySelector('#cell').dispatchEvent(new KeyboardEvent('keydown', { key: 'Escape', bubbles: true }))"
    )
    assert page.evaluate("heard") == 2
    expect(page.locator(".carry")).to_have_text("")
    page.mouse.up()
    assert edits(page) == []


def test_a_layer_or_component_is_edited_at_all_of_its_hooks(page: Page, about: dict[str, Any]) -> None:
    opened(page, about, positions=[1])
    page.get_by_role("columnheader", name="resid_post of every layer").click()
    page.evaluate("seen.length = 0")
    drag(page, 6, ("prompt", 4))
    expect(page.locator(".carry")).to_have_text("patch 12 hooks: pos 4 from pos 6 of the second prompt")
    page.mouse.up()
    names = [f"blocks.{layer}.hook_out" for layer in range(12)]
    assert edits(page) == [HERE | {"hook": name, "pos": 4, "source_pos": 6} for name in names]
    assert page.evaluate("seen.length") == 1
    add = page.get_by_role("button", name="Add to 12 hooks")
    add.click()
    assert [edit["op"] for edit in edits(page)[12:]] == ["suppress"] * 12 and page.evaluate("seen.length") == 2
    assert page.locator(".edits > .sr").text_content() == "edits 13 to 24 added: suppress at 12 hooks"
    expect(page.locator(".edit").last).to_be_in_viewport()

    page.get_by_role("rowheader", name="layer 5", exact=True).click()
    form = page.locator(".edits form")
    expect(form).to_contain_text("2 skipped: blocks.5.attn.hook_attn_scores, blocks.5.attn.hook_pattern (can be read")
    count = len(edits(page))
    form.get_by_role("button", name="Add to").click()
    added = [edit["hook"] for edit in edits(page)[count:]]
    assert len(added) == int(str(page.evaluate("document.querySelector('form .go').textContent")).split()[2])
    assert "blocks.5.mlp.hook_out" in added and not any("pattern" in name or "scores" in name for name in added)
    page.get_by_role("button", name="Presets").click()
    expect(page.get_by_role("menuitem", name="Zero this")).to_contain_text(f"suppress {len(added)} hooks at token 1")
    page.get_by_role("menuitem", name="Zero this").click()
    assert [edit["hook"] for edit in edits(page)[count + len(added) :]] == added

    page.get_by_role("columnheader", name="pattern of every layer").click()
    expect(page.get_by_role("button", name="Add edit")).to_be_disabled()
    expect(form).to_contain_text("none of the chosen hooks can be edited; choose another hook above")
    page.evaluate("model.set('state', { ...model.get('state'), source: '', hook: 'blocks.1.hook_out', hooks: [] })")
    page.get_by_label("Operation").select_option("patch")
    expect(form).to_contain_text("There is nothing to patch from yet: type a second prompt as Source, above.")


def test_chosen_heads_go_to_the_hooks_that_have_them(page: Page, about: dict[str, Any]) -> None:
    opened(page, about, positions=[1])
    page.get_by_role("rowheader", name="layer 5", exact=True).click()
    state = "model.set('state', { ...model.get('state'), hook: 'blocks.5.attn.o.hook_in', heads: [1, 3] })"
    page.evaluate(state)
    page.locator(".edits form .go").click()
    assert [(edit["hook"], edit["head"]) for edit in edits(page)] == [
        (f"blocks.5.attn.{name}", [1, 3]) for name in ("q.hook_out", "hook_rot_q", "o.hook_in")
    ]
    expect(page.locator(".edits form")).to_contain_text("has no head 1, 3 of these")


@pytest.mark.parametrize("dark", [False, True])
def test_axe_finds_nothing_while_a_token_is_carried(page: Page, about: dict[str, Any], dark: bool) -> None:
    opened(page, about, dark)
    token(page, "source", 6).click()
    page.get_by_role("button", name="patch to").click()
    assert violations(page) == []
    page.keyboard.press("Escape")
    page.get_by_role("rowheader", name="layer 5", exact=True).click()
    assert violations(page) == []
