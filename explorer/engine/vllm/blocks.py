"""Blocks of the key-value cache that an edit may have left NaN in: zeroed before another request gets them.

vLLM never clears its cache. Attention on a CPU multiplies the unused end of a request's last block by zero, and zero
times NaN is NaN: without this, one extreme edit would spoil runs long after it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from ..host import to_host, wait_for
from ..rows import Span
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
        # of each pass the largest number of each row, on its way from the device, and whose blocks depend on which rows
        self._unsure: list[tuple[list[torch.Tensor], list[tuple[list[int], Span]]]] = []

    def give(self, over: Collection[str], given: Sequence[internals.Given]) -> None:
        """Before a step: who is over, and who gets blocks. Spoilt ones are zeroed: nobody else has them any more."""
        if given:
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
        unsure: list[tuple[list[int], Span]] = []
        for request, span in spans.items():
            if not span.held.edits and not span.held.elsewhere:
                continue
            if outputs is None or hides(span):
                self._spoilt.update(self._given[request])
            else:
                unsure.append((self._given[request], span))
        if unsure and outputs is not None:
            largest = [to_host(torch.linalg.vector_norm(x, torch.inf, dim=-1)) for x in outputs]
            self._unsure.append((largest, unsure))
        if self._runner.device.type == "cpu":  # known already
            self._settle()

    def _settle(self) -> None:
        if self._unsure:
            wait_for(self._runner.device)
            for largest, unsure in self._unsure:
                for of_rows in largest:
                    if not math.isfinite(of_rows.max()):  # which is seldom so, and NaN is the largest of all
                        spoilt = (blocks for blocks, span in unsure if not span.of(of_rows).isfinite().all())
                        self._spoilt.update(*spoilt)
            self._unsure = []
