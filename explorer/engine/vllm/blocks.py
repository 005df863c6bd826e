"""Blocks of the key-value cache that an edit may have left NaN in: zeroed before another request gets them.

vLLM never clears its cache. Attention on a CPU multiplies the unused end of a request's last block by zero, and zero
times NaN is NaN: without this, one extreme edit would spoil runs long after it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from ..rows import Span
from . import internals

KEYS_AND_VALUES = ("attn.k.hook_out", "attn.v.hook_out", "attn.hook_rot_k")


def may_spoil(span: Span, outputs: Sequence[torch.Tensor] | None) -> bool:
    """Whether keys or values of these rows may be NaN or infinite.

    An edit of anything but keys or values shows in what the pipeline stage puts out, tensors `(rows, d_model)`: the
    last hidden state, or what the next stage goes on with; None after a pass that failed midway. A second edit, on
    whatever stage, may hide it.
    """
    edits = {*span.held.edits, *span.held.elsewhere}
    if not edits:
        return False
    if outputs is None or len(edits) > 1 or any(name.endswith(KEYS_AND_VALUES) for name in edits):
        return True
    return not all(bool(torch.isfinite(x[span.row : span.row + span.count]).all()) for x in outputs)


class Blocks:
    """The blocks of one model runner: whose they are, and which are spoilt."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._spoilt: set[int] = set()
        self._given: dict[str, list[int]] = {}  # request -> its blocks; vLLM may have taken some of them back already

    def give(self, over: Collection[str], given: Sequence[internals.Given]) -> None:
        """Before a step: who is over, and who gets blocks. Spoilt ones are zeroed: nobody else has them any more."""
        for request in over:
            self._given.pop(request, None)
        for request, starts, blocks in given:
            self._given[request] = blocks if starts else self._given[request] + blocks
        stale = self._spoilt.intersection(block for _, _, blocks in given for block in blocks)
        if stale:
            internals.zero_blocks(self._runner, sorted(stale))
            self._spoilt -= stale

    def spoil(self, request: str) -> None:
        """This request may have spoilt the blocks it has."""
        self._spoilt.update(self._given[request])
