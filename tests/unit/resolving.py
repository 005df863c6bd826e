"""Edits resolved on the small model: what they come to, and what is said about one that is refused."""

from __future__ import annotations

import pytest
import torch

from explorer import Edit, SpecError
from explorer.given import Once
from explorer.positions import Extent
from explorer.resolve import RowEdit, resolve
from explorer.specs import parse, to_json

from .fake import CATALOGUE

STREAM = "blocks.1.hook_out"
Z = "blocks.1.attn.o.hook_in"  # 4 heads of 3
K = "blocks.1.attn.k.hook_out"  # 2 key-value heads of 3
PROMPT = Extent(5, 5)
GENERATING = Extent(5, 8)


def no_source(origin, point, where):
    raise AssertionError("nothing here patches")


def rows_of(*edits: Edit, extent: Extent = PROMPT, dtype: torch.dtype = torch.float32, source=no_source):
    return resolve(parse(list(edits)), CATALOGUE, extent, dtype, source, Once())


def one(hook: str = STREAM, op: str = "suppress", *, extent: Extent = PROMPT, dtype=torch.float32, **fields) -> RowEdit:
    return rows_of(Edit(hook, op, **fields), extent=extent, dtype=dtype)[0]


def refusal(hook: str = STREAM, op: str = "suppress", *, extent: Extent = PROMPT, dtype=torch.float32, **fields) -> str:
    """What is said about an edit, which is always named."""
    with pytest.raises(SpecError) as refused:
        one(hook, op, extent=extent, dtype=dtype, **fields)
    message = str(refused.value)
    assert message.startswith(f"edit 1 ({hook}, {op}): "), message
    assert refused.value.edit_index == 0
    assert isinstance(refused.value, ValueError)
    return message.removeprefix(f"edit 1 ({hook}, {op}): ")


class FakeRun:
    """A Run of `prompt` tokens that generated, and captured z with the position as every value."""

    def __init__(self, prompt: int = 5, rows: int = 5) -> None:
        self.prompt_length, self.rows = prompt, rows
        self.fed, self.fed_edits = tuple(range(rows)), (Edit(STREAM, "suppress", pos=[0]),)

    def recipe(self):
        return {"ids": list(self.fed), "edits": to_json(self.fed_edits)}

    def rows_at(self, hook):
        return torch.arange(self.rows, dtype=torch.float32)[:, None, None].expand(-1, 4, 3) if hook == Z else None

    def made_in(self, catalogue):
        return True
