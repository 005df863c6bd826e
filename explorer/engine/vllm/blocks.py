"""Blocks of the key-value cache that an edit may have left NaN in: zeroed before another request gets them.

vLLM never clears its cache. Attention on a CPU multiplies the unused end of a request's last block by zero, and zero
times NaN is NaN: without this, one extreme edit would spoil runs long after it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from ..rows import Span, to_host, wait_for
from . import internals

KEYS_AND_VALUES = ("attn.k.hook_out", "attn.v.hook_out", "attn.hook_rot_k")


def hides(span: Span) -> bool:
    """Whether keys or values of these rows may be NaN or infinite though what the pipeline stage puts out is finite.

    A second edit, on whatever stage, may hide what the first did.
    """
    edits = {*span.held.edits, *span.held.elsewhere}
    return len(edits) > 1 or any(name.endswith(KEYS_AND_VALUES) for name in edits)


class Blocks:
    """The blocks of one model runner: whose they are, and which are spoilt."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._spoilt: set[int] = set()
        self._given: dict[str, list[int]] = {}  # request -> its blocks; vLLM may have taken some of them back already
        self._unsure: dict[str, slice] = {}  # the rows of the last pass; its spans would keep what they captured
        self._finite = torch.empty(0)  # which rows of it are finite, on their way from `_device`
        self._device = self._finite.device

    def give(self, over: Collection[str], given: Sequence[internals.Given]) -> None:
        """Before a step: who is over, and who gets blocks. Spoilt ones are zeroed: nobody else has them any more."""
        self._settle()
        for request in over:
            self._given.pop(request, None)
        for request, starts, blocks in given:
            self._given[request] = blocks if starts else self._given[request] + blocks
        stale = self._spoilt.intersection(block for _, _, blocks in given for block in blocks)
        if stale:
            internals.zero_blocks(self._runner, sorted(stale))
            self._spoilt -= stale

    def watch(self, spans: Mapping[str, Span], outputs: Sequence[torch.Tensor] | None) -> None:
        """After a pass: which requests may have spoilt the blocks they have.

        An edit of anything but keys or values shows in what the pipeline stage puts out, tensors `(rows, d_model)`: the
        last hidden state, or what the next stage goes on with; None after a pass that failed midway. On a GPU that is
        not known yet: it is looked at before blocks are given again.
        """
        self._settle()  # a pass that fails may follow another without a schedule between
        for request, span in spans.items():
            if span.held.edits or span.held.elsewhere:
                if outputs is None or hides(span):
                    self._spoilt.update(self._given[request])
                else:
                    self._unsure[request] = slice(span.row, span.row + span.count)
        if self._unsure and outputs:
            self._device = outputs[0].device
            self._finite = to_host(torch.stack([x.isfinite().all(-1) for x in outputs]).all(0))
            if self._device.type == "cpu":  # known already
                self._settle()

    def _settle(self) -> None:
        if self._unsure:
            wait_for(self._device)
            for request, rows in self._unsure.items():
                if not self._finite[rows].all():
                    self._spoilt.update(self._given[request])
            self._unsure, self._finite = {}, torch.empty(0)
