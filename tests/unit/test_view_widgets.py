"""The views as widgets of their own: what they take, what they refuse, how they are linked, and what closing leaves."""

from __future__ import annotations

import gc
import itertools
import json
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import ipywidgets
import numpy as np
import pytest
import torch

from tests.browser import fake
from tests.browser.fake import one_session as one_session  # a fixture
from widgets import AttentionView, Heatmap, HookPicker, LogitCompare, SpecEditor, TokenPicker, data, views
from widgets.views import INLINE, Refusal

PROMPT = "When Mary"
EDIT = {"blocks.1.hook_out": {"op": "suppress", "pos": 1}}


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    for view in list(views.opened):
        view.close()


def living() -> int:
    return len(ipywidgets.widgets.widget._instances)


def causal(heads: int, length: int) -> torch.Tensor:
    return torch.tril(torch.rand(heads, length, length)) + torch.eye(length)


MAKE: dict[str, Callable[[Any], Any]] = {
    "Heatmap": lambda session: Heatmap([[1, 2], [3, 4]], rows=["a", "b"], title="t", unit="u"),
    "TokenPicker": lambda session: TokenPicker(session.tokens(PROMPT), positions=[1]),
    "HookPicker": lambda session: HookPicker(session),
    "SpecEditor": lambda session: SpecEditor(session, EDIT, session.tokens(PROMPT)),
    "LogitCompare": lambda session: LogitCompare(session.compare(PROMPT, EDIT)),
    "AttentionView": lambda session: AttentionView(causal(3, 4), ["a", "b", "c", "d"]),
}


@pytest.mark.parametrize("name", MAKE)
def test_closing_leaves_nothing_behind(session: Any, name: str) -> None:
    session.compare(PROMPT, EDIT)  # the worker thread is there before
    gc.collect()
    before, threads = living(), threading.active_count()
    for _ in range(5):
        view = MAKE[name](session)
        assert living() > before
        view.close()
        view.close()
    assert living() == before
    assert threading.active_count() == threads
    assert not views.opened


@pytest.mark.parametrize("name", MAKE)
def test_what_a_page_is_sent_is_plain(session: Any, name: str) -> None:
    state = MAKE[name](session).get_state()
    for key in ("_esm", "_css", "layout"):
        state.pop(key)
    arrays = state.pop("arrays")
    json.dumps(state, allow_nan=False)
    assert all(isinstance(array["bytes"], memoryview) for array in arrays.values())


GRID = [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]
REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "one axis": (lambda s: Heatmap([1, 2]), r"takes 2 axes, but this has the shape \(2,\)"),
    "three axes": (lambda s: Heatmap(torch.zeros(2, 2, 2)), "takes 2 axes"),
    "texts": (lambda s: Heatmap([["a"]]), "takes numbers"),
    "ragged": (lambda s: Heatmap([[1], [2, 3]]), "takes numbers"),
    "complex": (lambda s: Heatmap(np.zeros((2, 2), complex)), "real numbers, not complex128"),
    "empty": (lambda s: Heatmap(np.zeros((0, 3))), "nothing to show"),
    "row labels": (lambda s: Heatmap(GRID, rows=["a"]), "rows has 1 for 2 rows: give one each"),
    "column labels": (lambda s: Heatmap(GRID, columns=["a"] * 4), "columns has 4 for 3 columns"),
    "labels as one text": (lambda s: Heatmap(GRID, columns="abc"), "columns takes a list of labels"),
    "row outside": (lambda s: Heatmap(GRID, selected_rows=[2]), "selected_rows cannot hold 2: the rows are 0 to 1"),
    "no tokens": (lambda s: TokenPicker([]), "give at least one token"),
    "text for tokens": (lambda s: TokenPicker("When Mary"), "session.tokens"),
    "numbers for tokens": (lambda s: TokenPicker([1, 2]), "1 is neither"),
    "position outside": (lambda s: TokenPicker(["a"], [1]), "positions cannot hold 1: the tokens are 0 to 0"),
    "negative position": (lambda s: TokenPicker(["a"], [-1]), "cannot hold -1"),
    "bool position": (lambda s: TokenPicker(["a", "b"], [True]), "whole numbers"),
    "hook": (lambda s: HookPicker(s, "blocks.0.nope"), "there is no hook 'blocks.0.nope'"),
    "hook of no layer": (lambda s: HookPicker(s, "blocks.99.hook_out"), "layers 0 to 11"),
    "hook not served": (lambda s: HookPicker(s, "blocks.3.ln2.hook_in"), "this layer has none"),
    "heads of a hook without": (lambda s: HookPicker(s, heads=[0]), "there are no heads"),
    "key-value head": (lambda s: HookPicker(s, "blocks.0.attn.k.hook_out", heads=[2]), "are 0 to 1"),
    "spec with an unknown op": (lambda s: SpecEditor(s, {"blocks.1.hook_out": {"op": "nope"}}), "unknown op"),
    "spec at no hook": (lambda s: SpecEditor(s, {"x": {"op": "suppress"}}), "there is no hook 'x'"),
    "spec outside": (lambda s: SpecEditor(s, {"blocks.1.hook_out": {"op": "suppress", "pos": 9}}, ["a"]), "outside"),
    "spec that cannot edit": (
        lambda s: SpecEditor(s, {"blocks.1.attn.hook_pattern": {"op": "suppress"}}),
        "can be captured but not edited",
    ),
    "spec of no kind": (lambda s: SpecEditor(s, 3), "a spec is a dict"),
    "no run": (lambda s: LogitCompare(3), "session.compare"),
    "two tokens for one": (lambda s: LogitCompare(s.run(PROMPT), ["ab", None]), "'ab' is 2 tokens"),
    "three tokens": (lambda s: LogitCompare(s.run(PROMPT), ["a", "b", "c"]), "compare takes two tokens"),
    "pattern of one head": (lambda s: AttentionView(torch.zeros(3, 3)), r"\(heads, query, key\) takes 3 axes"),
    "no square": (lambda s: AttentionView(torch.zeros(2, 3, 4)), "as many queries as keys, not 3 and 4"),
    "tokens of a pattern": (lambda s: AttentionView(causal(2, 3), ["a"]), "tokens has 1 for 3 positions"),
    "head": (lambda s: AttentionView(causal(2, 3), head=2), "head cannot hold 2: the heads are 0 to 1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_the_constructor_refuses_in_one_sentence(session: Any, case: str) -> None:
    make, says = REFUSED[case]
    before = living()
    with pytest.raises(Refusal, match=says) as refused:
        make(session)
    assert "\n" not in str(refused.value)
    assert living() == before


@pytest.mark.parametrize(
    ("name", "trait", "value", "says"),
    [
        ("Heatmap", "values", [1, 2], "takes 2 axes"),
        ("Heatmap", "values", [[1, 2]], "rows has 2 for 1 row"),
        ("Heatmap", "rows", ["a"], "rows has 1 for 2 rows"),
        ("Heatmap", "columns", ["a"], "columns has 1 for 2 columns"),
        ("Heatmap", "selected_columns", [2], "the columns are 0 to 1"),
        ("TokenPicker", "positions", [9], "the tokens are 0 to 8"),
        ("TokenPicker", "tokens", [], "at least one"),
        ("HookPicker", "hook", "nope", "there is no hook 'nope'"),
        ("HookPicker", "hooks", ["nope"], "there is no hook 'nope'"),
        ("HookPicker", "heads", [1], "there are no heads of"),
        ("SpecEditor", "spec", {"nope": {"op": "suppress"}}, "there is no hook 'nope'"),
        ("SpecEditor", "spec", {"blocks.1.hook_out": {"op": "suppress", "pos": 99}}, "pos 99 is outside"),
        ("SpecEditor", "hook", "nope", "there is no hook 'nope'"),
        ("SpecEditor", "positions", [99], "the tokens are 0 to 8"),
        ("LogitCompare", "compare", ["abc", None], "'abc' is 3 tokens"),
        ("AttentionView", "pattern", np.zeros((2, 2)), "takes 3 axes"),
        ("AttentionView", "pattern", np.zeros((1, 2, 2)), "tokens has 4 for 2 positions"),
        ("AttentionView", "tokens", ["a"], "tokens has 1 for 4 positions"),
        ("AttentionView", "head", 3, "the heads are 0 to 2"),
        ("AttentionView", "positions", [4], "the tokens are 0 to 3"),
    ],
)
def test_a_trait_refuses_and_stays(session: Any, name: str, trait: str, value: Any, says: str) -> None:
    view = MAKE[name](session)
    before = getattr(view, trait)
    with pytest.raises(Refusal, match=says):
        setattr(view, trait, value)
    assert getattr(view, trait) is before


def test_numbers_come_from_any_library() -> None:
    for given in (GRID, np.array(GRID, np.float16), torch.tensor(GRID, dtype=torch.bfloat16, requires_grad=True)):
        view = Heatmap(given)
        assert view.values.dtype == np.float32 and view.values.tolist() == GRID
    assert Heatmap(np.array([[True, False]])).values.tolist() == [[1, 0]]
    assert np.isnan(Heatmap(np.ma.masked_equal([[1.0, 2.0]], 2)).values[0, 1])
    mine = np.zeros((1, 1))
    view = Heatmap(mine)
    mine[0, 0] = 1
    assert view.values[0, 0] == 0, "the map has numbers of its own"


def test_the_spec_catches_up_when_tokens_make_an_edit_valid(session: Any) -> None:
    editor = SpecEditor(session, tokens=["a", "b"])
    far = {"hook": "blocks.1.hook_out", "op": "suppress", "pos": 2, "enabled": True}
    editor.set_state({"edits": [far]})
    assert editor.result["error"] and editor.spec == {}
    editor.tokens = ["a", "b", "c"]
    assert editor.result["error"] is None
    assert editor.spec == {"blocks.1.hook_out": [{"op": "suppress", "pos": 2}]}


def test_links_pass_a_choice_on(session: Any) -> None:
    tokens = session.tokens(PROMPT)
    picker = TokenPicker(tokens)
    heatmap = Heatmap(np.zeros((2, len(tokens))), columns=tokens)
    attention = AttentionView(causal(2, len(tokens)), tokens)
    editor = SpecEditor(session, tokens=tokens)
    hooks = HookPicker(session)
    links = [
        ipywidgets.link((picker, "positions"), (heatmap, "selected_columns")),
        ipywidgets.link((picker, "positions"), (attention, "positions")),
        ipywidgets.link((picker, "positions"), (editor, "positions")),
        ipywidgets.link((hooks, "hook"), (editor, "hook")),
        ipywidgets.link((hooks, "heads"), (editor, "heads")),
    ]
    picker.positions = [3, 1, 3]
    assert heatmap.selected_columns == attention.positions == editor.positions == [1, 3]
    heatmap.set_state({"selected_columns": [4]})  # as the page does
    assert picker.positions == attention.positions == editor.positions == [4]
    hooks.set_state({"hook": "blocks.2.attn.o.hook_in", "heads": [1], "hooks": []})
    assert (editor.hook, editor.heads) == ("blocks.2.attn.o.hook_in", [1])
    editor.hook = "blocks.2.hook_attn_out"
    assert (hooks.hook, hooks.heads) == (session.hooks["blocks.2.hook_attn_out"].name, [])
    for link in links:
        link.unlink()
    picker.positions = []
    assert heatmap.selected_columns == [4]


def test_linked_pickers_follow_each_other_through_any_choices(session: Any) -> None:
    traits = ("hook", "hooks", "heads")
    pickers = [HookPicker(session) for _ in range(3)]
    for left, right in itertools.pairwise(pickers):
        for trait in traits:
            ipywidgets.link((left, trait), (right, trait))
    editor = SpecEditor(session)
    ipywidgets.link((pickers[2], "heads"), (editor, "heads"))
    ipywidgets.link((pickers[2], "hook"), (editor, "hook"))
    rng = random.Random(5)
    names = [point.name for point in session.hooks if point.available]
    for _ in range(200):
        among = rng.sample(names, rng.randint(1, 4))
        count = session.hooks[among[0]].heads or 0
        heads = sorted(rng.sample(range(count), rng.randint(0, count)))
        choice = {"hook": among[0], "hooks": among if len(among) > 1 else [], "heads": heads}
        sent = rng.sample(list(choice.items()), 3)  # a busy kernel gets the traits of several gestures in any order
        rng.choice(pickers).set_state(dict(sent))
        for picker in pickers:
            assert {trait: getattr(picker, trait) for trait in traits} == choice
        assert (editor.hook, editor.heads) == (choice["hook"], choice["heads"])
    pickers[1].set_state({"hook": names[0], "hooks": names[:3], "heads": []})
    pickers[0].hook = names[-1]
    assert [(picker.hook, picker.hooks) for picker in pickers] == [(names[-1], [])] * 3


def test_linked_views_follow_when_what_is_chosen_from_changes_too() -> None:
    pickers = [TokenPicker(["a", "b", "c"], [2]) for _ in range(2)]
    maps = [Heatmap(GRID, selected_columns=[2]) for _ in range(2)]
    heads = [AttentionView(causal(3, 2), head=2) for _ in range(2)]
    for (first, second), traits in (
        (pickers, ("tokens", "positions")),
        (maps, ("values", "selected_columns")),
        (heads, ("pattern", "head")),
    ):
        for trait in traits:
            if trait in ("tokens", "values", "pattern"):  # of arrays `link` cannot tell whether they are equal
                first.observe(lambda change, to=second, name=trait: setattr(to, name, change["new"]), trait)
            else:
                ipywidgets.link((first, trait), (second, trait))
    with pickers[0].hold_trait_notifications():
        pickers[0].tokens, pickers[0].positions = ["d", "e"], [1]
    with maps[0].hold_trait_notifications():
        maps[0].values, maps[0].selected_columns = [[1.0, 2.0]], [1]
    with heads[0].hold_trait_notifications():
        heads[0].pattern, heads[0].head = causal(2, 2), 1
    assert [picker.positions for picker in pickers] == [[1], [1]]
    assert [heatmap.selected_columns for heatmap in maps] == [[1], [1]]
    assert [view.head for view in heads] == [1, 1]


def test_what_no_longer_fits_is_no_longer_chosen(session: Any) -> None:
    heatmap = Heatmap(GRID, selected_rows=[1], selected_columns=[0, 2])
    heatmap.values = [[1.0, 2.0]]
    assert (heatmap.selected_rows, heatmap.selected_columns) == ([], [0])
    picker = TokenPicker(["a", "b"], [0, 1])
    picker.tokens = ["c"]
    assert picker.positions == [0] and picker.tokens == [["c", "c", ""]]
    hooks = HookPicker(session, "blocks.2.attn.q.hook_out", heads=[0, 3])
    hooks.hooks = ["blocks.2.attn.q.hook_out", "blocks.3.attn.q.hook_out"]
    hooks.hook = "blocks.2.attn.v.hook_out"
    assert (hooks.heads, hooks.hooks) == ([0], [])


def test_values_and_labels_change_together() -> None:
    heatmap = Heatmap(GRID, rows=["a", "b"])
    with heatmap.hold_trait_notifications():
        heatmap.values = [[1], [2], [3]]
        heatmap.rows = ["x", "y", "z"]
    assert heatmap.rows == ["x", "y", "z"] and heatmap.arrays["0"]["shape"] == [3, 1]
    view = AttentionView(causal(2, 3))
    view.pattern = causal(1, 2)
    assert [text for _, text, _ in view.tokens] == ["0", "1"]
    with view.hold_trait_notifications():
        view.pattern = causal(1, 3)
        view.tokens = ["a", "b", "c"]
    assert len(view.tokens) == 3


def test_the_spec_follows_the_page_while_the_model_can_take_it(session: Any) -> None:
    editor = SpecEditor(session, EDIT, session.tokens(PROMPT))
    assert editor.spec == {"blocks.1.hook_out": [{"op": "suppress", "pos": 1}]}
    scale = {"hook": "blocks.2.hook_out", "op": "scale", "factor": 2, "enabled": True}
    editor.set_state({"edits": [*editor.edits, scale]})
    assert editor.spec["blocks.2.hook_out"] == [{"op": "scale", "factor": 2}]
    before = editor.spec
    editor.set_state({"edits": [*editor.edits, {**scale, "op": "add", "factor": None, "value": [1, 2]}]})
    assert editor.spec is before
    assert editor.result["error"]["index"] == 2 and "value has shape (2,)" in editor.result["error"]["message"]
    editor.set_state({"edits": [{**edit, "enabled": False} for edit in editor.edits]})
    assert editor.spec == {} and editor.result["error"] is None and len(editor.edits) == 3
    editor.spec = {"blocks.4.hook_resid_post": {"op": "set", "value": np.zeros(48)}}
    assert editor.edits == [{"hook": "blocks.4.hook_out", "op": "set", "value": [0.0] * 48, "enabled": True}]
    session.run(PROMPT, editor.spec)
    other = SpecEditor(session)
    ipywidgets.link((editor, "spec"), (other, "spec"))
    assert other.edits == editor.edits


def test_predictions_stay_when_the_session_is_closed() -> None:
    session, _ = fake.session()
    both = session.compare(PROMPT, EDIT)
    expected = both.logit_diff("a", "b")
    view = LogitCompare(both)
    session.close()
    assert view.compare == [None, None] and len(view.result["difference"]["tokens"]) == 2
    view.compare = ["a", "b"]
    assert view.difference == pytest.approx(tuple(expected))
    view.set_state({"compare": ["abc", "b"]})
    assert view.difference is None and view.result["error"]["where"] == "difference"
    assert LogitCompare(both.clean).result["edited"] is False


def test_a_mistyped_token_is_answered_on_every_linked_page(session: Any) -> None:
    found = session.run(PROMPT)
    one, two = LogitCompare(found), LogitCompare(found)
    ipywidgets.link((one, "compare"), (two, "compare"))
    one.set_state({"compare": ["abc", "b"]})  # as the page does
    for view in (one, two):
        assert view.compare == ["abc", "b"] and view.difference is None
        assert "'abc' is 3 tokens" in view.result["error"]["message"]
    two.compare = ["a", "b"]
    assert one.difference == two.difference and one.result["error"] is None
    with pytest.raises(Refusal, match="'abc' is 3 tokens"):
        two.compare = ["abc", "b"]


def test_what_looks_ahead_is_shown(session: Any) -> None:
    assert AttentionView(causal(2, 4)).about["causal"]
    assert not AttentionView(torch.rand(2, 4, 4)).about["causal"]
    scores = causal(2, 4) - 3
    scores[:, ~torch.ones(4, 4).tril().bool()] = -torch.inf
    view = AttentionView(scores)
    assert view.about["causal"] and view.state["hook"] == "scores"


def test_large_arrays_are_asked_for_and_small_ones_come_along(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    side = int((INLINE / 4) ** 0.5)
    small, large = Heatmap(np.zeros((side, side))), Heatmap(np.ones((side + 1, side + 1)))
    assert list(small.arrays) == ["0"] and large.arrays == {}
    monkeypatch.setattr(views.View, "send", lambda self, message, buffers=None: sent.append((message, buffers)))
    large._on_message(large, {"type": "data", "key": "k", "head": 0}, [])
    [(message, [buffer])] = sent
    assert message["key"] == "k" and message["shape"] == [side + 1, side + 1]
    assert np.frombuffer(buffer, "<f4").sum() == (side + 1) ** 2
    large._on_message(large, {"type": "data", "key": "k", "head": 5}, [])
    assert sent[1][0]["dropped"]
    heads = AttentionView(causal(40, 120))
    heads._on_message(heads, {"type": "data", "key": "k", "head": -1}, [])
    assert sent[2][0]["shape"] == list(data.thumbnails(heads.pattern).shape)


def test_a_saved_file_reaches_open_pages(session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    view = TokenPicker(["a"])
    monkeypatch.setattr(views.esm, "css", lambda name: "/* new */")
    views.reload()
    assert view._css == "/* new */"
