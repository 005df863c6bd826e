"""How far numbers are off, and the edits that the GPU suite makes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from explorer.catalogue import HookPoint

MORE_THAN_THEIRS = 1.5  # our error in bf16, of transformers' own in bf16
CLOSE = 1e-3  # of a row's length: what fp32 may be off when sums are made in another order, TF32 off


def off(got: torch.Tensor, want: torch.Tensor) -> float:
    """How far the worst row is off, of its own length; what is -inf in one must be so in the other."""
    return float(_of_rows(got, want).max())


def on_average(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """How far a row is off, of its own length: the mean over all rows.

    Not all rows together, of their length: a few rows can be nearly all of it, each by a single number, and how these
    five or so happen to be rounded decides. SmolLM2's `blocks.2.mlp.hook_out` is such a hook: there transformers in
    bf16 is no nearer to itself, its channels and neurons only put in another order.
    """
    return float(torch.cat([_of_rows(got, want) for got, want in pairs]).mean())


def _of_rows(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    got, want = _finite(got, want)
    error = (got - want).flatten(1).norm(dim=1) / want.flatten(1).norm(dim=1).clamp_min(1e-30)
    return error.nan_to_num(nan=float("inf"), posinf=float("inf"))


def _finite(got: torch.Tensor, want: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    assert got.shape == want.shape, f"{tuple(got.shape)} against {tuple(want.shape)}"
    got, want = got.double(), want.double()
    masked = want == float("-inf")
    assert torch.equal(got == float("-inf"), masked), "other places are masked"
    return got.masked_fill(masked, 0), want.masked_fill(masked, 0)


def drawn(*shape: int, seed: int = 3) -> list[Any]:
    """Random numbers, the same every time."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).tolist()  # type: ignore[no-any-return]


def edits_at(point: HookPoint, length: int, source: tuple[int, ...]) -> dict[str, dict[str, Any]]:
    """One edit of each op at a hook point, in the JSON form; `length` tokens of prompt, as many of `source`."""
    heads = point.heads is not None
    chosen: dict[str, Any] = {"head": [0, point.heads - 1] if point.heads > 1 else 0} if heads else {}
    count = len(chosen["head"]) if isinstance(chosen.get("head"), list) else 1
    width = point.shape[-1]
    value = drawn(count, width) if count > 1 else drawn(width)
    return {
        "suppress": {"op": "suppress", "pos": [1, length - 1], **chosen},
        "scale": {"op": "scale", "factor": -1.5, **chosen},
        "add": {"op": "add", "value": value, "pos": [0, 2, length - 1], **chosen},
        "set": {"op": "set", "value": value, "pos": [length - 1, 3], **chosen},
        "patch": {"op": "patch", "source": {"ids": list(source)}, "pos": [2, length - 1], **chosen},
    }
