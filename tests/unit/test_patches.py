"""What a patch reads: every form of a source, and which of its positions."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from explorer import Edit, SpecError
from explorer.positions import Extent
from explorer.resolve import RowEdit
from explorer.specs import Source, as_source, parse

from .resolving import GENERATING, PROMPT, STREAM, FakeRun, Z, rows_of


def patched(extent: Extent = PROMPT, of: Extent = PROMPT, **fields) -> RowEdit:
    return rows_of(Edit(STREAM, "patch", source="w1", **fields), extent=extent, source=lambda *_: (of, "key"))[0]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("w1 w2", Source(prompt="w1 w2")),
        ([3, 4], Source(ids=(3, 4))),
        ((3, 4), Source(ids=(3, 4))),
        (range(3, 5), Source(ids=(3, 4))),
        (np.array([3, 4]), Source(ids=(3, 4))),
        (torch.tensor([3, 4]), Source(ids=(3, 4))),
        ({"prompt": "w1"}, Source(prompt="w1")),
        ({"ids": [3]}, Source(ids=(3,))),
        ({"prompt": "w1", "edits": None}, Source(prompt="w1")),
        ({"prompt": "w1", "edits": {Z: {"op": "suppress"}}}, Source(prompt="w1", edits=(Edit(Z, "suppress"),))),
        (FakeRun(rows=2), Source(ids=(0, 1), edits=(Edit(STREAM, "suppress", pos=[0]),))),
    ],
)
def test_source_forms(source, expected):
    made = as_source(source)
    assert made == expected
    assert as_source(made) is made
    assert as_source(made.to_json()) == expected
    assert Edit(STREAM, "patch", source=source).to_json()["source"] == expected.to_json()


def test_a_run_stays_with_its_recipe():
    run = FakeRun()
    assert as_source(run).run is run
    assert "run" not in as_source(run).to_json()


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (5, "source is 5; it must be a Run, a prompt or a list of token ids"),
        (b"w1", "source is b'w1'; it must be"),
        ({1, 2}, "it must be a Run"),
        (len, "it must be a Run"),
        (torch.zeros(5, 8), "source is an array of numbers; write them with op 'set' and value="),
        (np.zeros(8), "op 'set' and value="),
        ([], "source: ids is empty"),
        ([1.5], "source: ids takes whole numbers, not 1.5"),
        ([True], "not True"),
        (["w1"], "ids takes whole numbers, not 'w1'"),
        ({}, "source: it needs exactly one of 'prompt' and 'ids'"),
        ({"prompt": "w1", "ids": [1]}, "exactly one of"),
        ({"prompt": "w1", "spec": {}}, "unknown key 'spec'"),
        ({"prompt": 5}, "'prompt' is 5, not a string"),
        ({"ids": "w1"}, "ids takes whole numbers"),
        ({"prompt": "w1", "edits": {Z: {"op": "zap"}}}, "source: edit 1 .*unknown op 'zap'"),
        ({"prompt": "w1", "edits": len}, "source: a spec is data"),
    ],
)
def test_what_is_no_source(source, says):
    with pytest.raises(SpecError, match=rf"^edit 1 \(blocks.1.hook_out, patch\): .*{says}") as refused:
        parse(Edit(STREAM, "patch", source=source))
    assert refused.value.edit_index == 0


def test_source_positions_default_to_pos():
    edit = patched(pos=[0, -1], of=Extent(7, 7))
    assert edit.op == "patch"
    assert (tuple(edit.rows), edit.source) == ((0, 4), ("key", (0, 6)))
    assert patched(pos="last", of=Extent(2, 2)).source == ("key", (1,))
    assert patched().source == ("key", (0, 1, 2, 3, 4))


def test_source_positions_of_their_own():
    assert patched(pos=[0, 1], source_pos=[3, 2]).source == ("key", (3, 2))
    assert patched(pos=[0, 1, 3], source_pos=[2, -1, 2]).source == ("key", (2, 4, 2))  # a row may be read twice
    assert patched(pos="2:4", source_pos="-2:", of=Extent(9, 9)).source == ("key", (7, 8))
    assert patched(pos=0, source_pos=6, of=GENERATING).source == ("key", (6,))  # a generated token of the source


@pytest.mark.parametrize(
    ("fields", "of", "says"),
    [
        ({}, Extent(4, 4), "5 positions to write, but 4 positions of the source to read"),
        ({}, Extent(6, 6), "5 positions to write, but 6 positions of the source to read"),
        (
            {"pos": [0, 1], "source_pos": 3},
            PROMPT,
            "2 positions to write, but 1 position of the source to read",
        ),
        (
            {"pos": 4},
            Extent(3, 3),
            "pos 4 is outside the source's prompt, which has positions 0 to 2; source_pos= says where to read",
        ),
        (
            {"pos": 0, "source_pos": 5},
            PROMPT,
            "source_pos 5 is outside the source's prompt, which has positions 0 to 4",
        ),
        ({"pos": 0, "source_pos": "5:9"}, PROMPT, "source_pos '5:9' is outside the source's prompt"),
        ({"pos": 0, "source_pos": True}, PROMPT, "source_pos takes whole numbers"),
    ],
)
def test_source_positions_that_do_not_match(fields, of, says):
    with pytest.raises(SpecError, match=r"^edit 1 \(blocks.1.hook_out, patch\): ") as refused:
        patched(of=of, **fields)
    assert says in str(refused.value)


def test_the_phase_of_a_patch():
    assert patched(GENERATING, GENERATING, phase="decode").source == ("key", (5, 6, 7))
    assert patched(GENERATING, GENERATING, phase="both").source == ("key", tuple(range(8)))
    assert patched(GENERATING, GENERATING).source == ("key", tuple(range(5)))
    assert patched(GENERATING, Extent(9, 9), phase="decode", pos=6).source == ("key", (6,))
    assert patched(GENERATING, Extent(3, 3), phase="decode", source_pos="all").source == ("key", (0, 1, 2))
    assert patched(GENERATING, Extent(4, 7), phase="decode", pos="::2").source == ("key", (4, 6))
    assert patched(GENERATING, Extent(2, 8), phase="decode", pos="6:").source == ("key", (6, 7))


@pytest.mark.parametrize("pos", [None, "all", ":", "::1"])
def test_generated_tokens_are_not_patched_from_a_prompt(pos):
    """Not even where it has as many."""
    with pytest.raises(SpecError, match=r"^edit 1 \(blocks.1.hook_out, patch\): ") as refused:
        patched(GENERATING, Extent(3, 3), phase="decode", pos=pos)
    assert "3 positions to write, but 0 positions of the source to read; give pos and source_pos of " in str(
        refused.value
    )
    assert "or a source run that generated as many tokens" in str(refused.value)


def test_where_a_patch_reads_unless_told_is_in_the_sources_prompt():
    """The source generated: its prompt has 3 tokens, its rows go on."""
    with pytest.raises(
        SpecError, match="pos 4 is outside the source's prompt, which has positions 0 to 2; source_pos="
    ):
        patched(PROMPT, Extent(3, 6), pos=[1, 4])
    assert patched(PROMPT, Extent(3, 6), pos=-1).source == ("key", (2,))
    assert patched(PROMPT, Extent(3, 6), pos=4, source_pos=5).source == ("key", (5,))


def test_values_that_a_run_holds_are_set():
    values = FakeRun().rows_at(Z)
    edit = rows_of(
        Edit(Z, "patch", source="w1", pos=[0, 1], source_pos=[4, 2], head=[1, 3]), source=lambda *_: (PROMPT, values)
    )[0]
    assert (edit.op, edit.heads, edit.source) == ("set", (1, 3), None)
    assert edit.value.shape == (2, 2, 3)
    assert edit.value[:, 0, 0].tolist() == [4.0, 2.0]


def test_a_refused_source_names_the_edit():
    def source(origin, point):
        raise SpecError("no")

    with pytest.raises(SpecError, match=r"^edit 2 \(blocks.1.hook_out, patch\): no$") as refused:
        rows_of(Edit(STREAM, "suppress"), Edit(STREAM, "patch", source="w1"), source=source)
    assert refused.value.edit_index == 1
