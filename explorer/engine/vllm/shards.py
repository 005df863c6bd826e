"""Shards: the heads or neurons of a hook point that a worker holds; edits cut down to them, captures gathered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ...errors import EngineError
from ...resolve import RowEdit
from ..parts import Parts

PARTIAL = "each tensor-parallel worker has only its share of this sum; tensor_parallel_size=1 has it whole"


@dataclass(frozen=True)
class Shard:
    """`[start, stop)` of the first axis of a hook point's shape a token, which is `whole` long.

    `copy` counts the workers of the same pipeline stage that come before this one and hold the same.
    """

    start: int
    stop: int
    whole: int
    copy: int = 0

    @property
    def complete(self) -> bool:
        """Whether it is all there is."""
        return self.stop - self.start == self.whole


def shard_of(whole: int, held: int, rank: int, ranks: int) -> Shard:
    """The shard of tensor-parallel worker `rank` of `ranks`, when each holds `held`, in order.

    Where all of them together hold more than there is, neighbours hold copies: key-value heads fewer than workers, or
    a stream that every worker has in full. ValueError for sizes that do not add up to that.
    """
    copies, rest = divmod(held * ranks, whole)
    if rest or not copies:
        raise ValueError(f"{ranks} workers that hold {held} each do not share out {whole}")
    start = rank // copies * held
    return Shard(start, start + held, whole, rank % copies)


def cut(edit: RowEdit, shard: Shard, heads: bool) -> RowEdit:
    """The edit as the worker that holds `shard` applies it. `heads`: the hook point's first axis counts heads.

    An edit of other workers' heads stays, with no head: that it came to its rows is counted on every worker.
    """
    if shard.complete:
        return edit
    value = edit.value
    if edit.heads is None:
        axis = 1 if heads else 2
        if value is not None and value.shape[axis] > 1:
            value = value.narrow(axis, shard.start, shard.stop - shard.start)
        return replace(edit, value=value)
    mine = [i for i, head in enumerate(edit.heads) if shard.start <= head < shard.stop]
    if value is not None and value.shape[1] > 1:
        value = value[:, mine]
    return replace(edit, heads=tuple(edit.heads[i] - shard.start for i in mine), value=value)


def gather(pieces: Sequence[tuple[Shard, torch.Tensor]]) -> torch.Tensor:
    """The whole of a hook point from its shards `(rows, part, ...)`, whatever their order; of copies the first counts.

    EngineError when something is missing.
    """
    if len(pieces) == 1 and pieces[0][1].shape[1] == pieces[0][0].whole:  # one worker has it all
        return pieces[0][1]
    by_start = {shard.start: tensor for shard, tensor in reversed(pieces)}
    ordered = [by_start[start] for start in sorted(by_start)]
    got, whole = sum(tensor.shape[1] for tensor in ordered), pieces[0][0].whole
    if got != whole:
        raise EngineError(f"the workers hold {got} of {whole} heads or neurons; please report this")
    return ordered[0] if len(ordered) == 1 else torch.cat(ordered, dim=1)


def assemble(shards: Sequence[torch.Tensor], axis: int, sections: Sequence[tuple[int, int]]) -> torch.Tensor:
    """A parameter from its shards in order of rank. `sections` are those of the axis in one shard: length, and copies.

    What one process keeps as [q, k, v] each of two keeps as half of q, half of k, half of v. ValueError when the
    sections are not the axis: quantized weights may be packed.
    """
    if sum(length for length, _ in sections) != shards[0].shape[axis]:
        raise ValueError(f"sections {sections} are no axis of {shards[0].shape[axis]}: it is stored packed")
    split = [shard.split([length for length, _ in sections], dim=axis) for shard in shards]
    return torch.cat(
        [rank[i] for i, (_, copies) in enumerate(sections) for rank in split[::copies]],
        dim=axis,
    )


def agree(pieces: Sequence[tuple[Shard, torch.Tensor]]) -> bool:
    """Whether copies of the same shard are the same, but for rounding in their dtype."""
    first: dict[int, torch.Tensor] = {}
    return all(_alike(tensor, first.setdefault(shard.start, tensor)) for shard, tensor in pieces)


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two captures differ by rounding at most: that of the largest number of a row, the others' company.

    Workers may add up each other's parts in different orders, once or twice a layer: 30 layers on three workers came
    to 5 such roundings. Rows of something else differ by all of it.
    """
    if a.shape != b.shape or not torch.equal(a.isnan(), b.isnan()):
        return False
    rounding = 32 * torch.finfo(a.dtype).eps
    a, b = a.double().nan_to_num(), b.double().nan_to_num()
    return bool(((a - b).abs() <= rounding * a.abs().amax(-1, keepdim=True)).all())


def partial_sums(parts: Parts) -> dict[str, str]:
    """Outputs that vLLM sums over the workers only after the module, together with others."""
    return {
        f"blocks.{i}.{name}": PARTIAL
        for i, layer in parts.layers.items()
        for module, names in (
            (layer.out, ("attn.hook_out", "hook_attn_out")),
            (layer.mlp, ("mlp.hook_out", "hook_mlp_out")),
        )
        if not getattr(module, "reduce_results", True)
        for name in names
    }
