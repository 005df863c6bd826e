"""Pinned edits: what a generated run did, as an edit of the tokens it fed."""

from __future__ import annotations

import math

import pytest
import torch

from explorer import Edit
from explorer.positions import Extent
from explorer.resolve import pin
from explorer.specs import parse

from .resolving import GENERATING, STREAM, FakeRun, Z, no_source, one, rows_of


def pinned(edit: Edit, rows: int = 7, source=no_source) -> Edit | None:
    edit = parse(edit)[0]
    return pin(edit, rows_of(edit, extent=GENERATING, source=source)[0], rows)


def test_pinning_writes_the_positions_that_were_fed():
    assert pinned(Edit(STREAM, "suppress", pos="last")) == Edit(STREAM, "suppress", pos=[4])
    assert pinned(Edit(STREAM, "suppress", phase="decode")) == Edit(STREAM, "suppress", pos=[5, 6])
    assert pinned(Edit(STREAM, "suppress", phase="decode", pos=7)) is None
    assert pinned(Edit(STREAM, "set", value=2.0, phase="both"), 6) == Edit(STREAM, "set", value=2.0, pos=list(range(6)))


@pytest.mark.parametrize(
    ("hook", "head", "shape"),
    [
        (STREAM, None, (3, 8)),
        (Z, None, (3, 12)),
        (Z, None, (3, 4, 3)),
        (Z, [2, 0], (3, 3)),
        (Z, [2, 0], (3, 2, 3)),
        (Z, 1, (3, 3)),
    ],
)
def test_pinning_keeps_the_values_of_the_positions_that_were_fed(hook, head, shape):
    value = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)
    edit = pinned(Edit(hook, "set", value=value, head=head, phase="decode"))
    before = one(hook, "set", value=value, head=head, phase="decode", extent=GENERATING).value
    after = rows_of(edit, extent=Extent(7, 7))[0]
    assert tuple(after.rows) == (5, 6)
    assert torch.equal(after.value, before[:2].expand_as(after.value))


def test_pinning_a_patch_writes_where_it_read():
    edit = pinned(Edit(STREAM, "patch", source="w1", pos="last"), source=lambda *_: (Extent(3, 3), "key"))
    assert (edit.pos, edit.source_pos) == ([4], [2])
    edit = pinned(
        Edit(Z, "patch", source=FakeRun(3, 3), pos="last"), source=lambda *_: (Extent(3, 3), FakeRun(3, 3).rows_at(Z))
    )
    assert (edit.pos, edit.source_pos) == ([4], [2])
    edit = pinned(Edit(STREAM, "patch", source="w1", phase="decode"), source=lambda *_: (GENERATING, "key"))
    assert (edit.pos, edit.source_pos, edit.phase) == ([5, 6], [5, 6], "prompt")
