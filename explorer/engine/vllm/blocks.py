"""Blocks of the key-value cache that an edit may have left NaN in: zeroed before another request gets them.

vLLM never clears its cache. Attention on a CPU multiplies the unused end of a request's last block by zero, and zero
times NaN is NaN: without this, one extreme edit would spoil runs long after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..rows import Span
from . import internals

KEYS_AND_VALUES = ("attn.k.hook_out", "attn.v.hook_out", "attn.hook_rot_k")


def may_spoil(span: Span, outputs: Sequence[torch.Tensor]) -> bool:
    """Whether keys or values of these rows may be NaN or infinite.

    An edit of anything but keys or values shows in what the pipeline stage puts out, tensors `(rows, d_model)`: the
    last hidden state, or what the next stage goes on with. A second edit, on whatever stage, may hide it.
    """
    edits = {*span.held.edits, *span.held.elsewhere}
    if not edits:
        return False
    if len(edits) > 1 or any(name.endswith(KEYS_AND_VALUES) for name in edits):
        return True
    return not all(bool(torch.isfinite(x[span.row : span.row + span.count]).all()) for x in outputs)


class Blocks:
    """The spoilt blocks of one model runner, and the requests that spoilt them."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._spoilt: dict[int, str] = {}

    def spoil(self, index: int) -> None:
        """The request at this index of the step may have spoilt the blocks it has."""
        request, _, blocks = internals.blocks(self._runner, index)
        self._spoilt |= dict.fromkeys(blocks, request)

    def clean(self) -> None:
        """Before a step: zero every spoilt block that another request, or the same one starting over, has got."""
        if not self._spoilt:
            return
        stale: list[int] = []
        for index in range(internals.request_count(self._runner)):
            request, starts, blocks = internals.blocks(self._runner, index)
            stale += [b for b in blocks if b in self._spoilt and (starts or self._spoilt[b] != request)]
        for block in stale:
            del self._spoilt[block]
        internals.zero_blocks(self._runner, stale)
