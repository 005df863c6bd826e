"""One forward pass with every hook point read: by which convention a model's stream adds up, and what it lacks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import BootError
from ...hooks import ModelShape
from ..parts import Parts, first_of
from ..study import SILENT, missing_hooks, same
from ..taps import Handler, Tap, output
from . import internals
from .taps import Convention, find_taps, passed

# Where both hold alike the first is taken: a stream that is one tensor is edited in place.
TRIED = (Convention(fused=False, by_group=False), Convention(fused=True, by_group=True))
PROJECTED = ("attn.q.hook_out", "attn.k.hook_out", "attn.v.hook_out")
LAYOUT = "where queries, keys and values are in their fused projection is not known"
PARTIAL = "each tensor-parallel worker has only its share of this sum; tensor_parallel_size=1 has it whole"

Rows = dict[str, torch.Tensor]  # hook point -> the rows `(rows, width)` that it held


@dataclass
class Reading:
    """What every hook point held in one pass."""

    seen: dict[Convention, Rows]
    values: Rows  # what attention read as values
    end: Rows  # what the final norm put out


def read(parts: Parts, shape: ModelShape, forward: Callable[[], Any]) -> tuple[Any, Reading]:
    """Run a forward pass and read every hook point by every convention; what `forward` returned comes first."""
    reading = Reading({convention: {} for convention in TRIED}, {}, {})
    with ExitStack() as attached:
        for convention, rows in reading.seen.items():
            for name, tap in find_taps(parts, shape, convention).items():
                attached.callback(tap.attach(_keep(rows, name)).remove)
        for i, layer in parts.layers.items():
            kernel = internals.attention_module(layer.attention)
            if kernel is not None and layer.qkv:
                attached.callback(passed(kernel, 2)(_keep(reading.values, f"blocks.{i}.attn.v.hook_out")).remove)
        if parts.norm is not None:
            attached.callback(output(parts.norm)(_keep(reading.end, "norm")).remove)
        return forward(), reading


def judge(parts: Parts, shape: ModelShape, reading: Reading, ranks: int = 1) -> tuple[dict[str, Tap], dict[str, str]]:
    """The taps by the convention under which fewest hook points are missing, and these with their reasons.

    `ranks` counts the tensor-parallel workers. `BootError` when the stream can be followed by no convention.
    """
    layouts = [c for c, rows in reading.seen.items() if all(same(rows.get(n), v) for n, v in reading.values.items())]
    layout = (layouts or TRIED)[0]
    projected = {name: rows for name, rows in reading.seen[layout].items() if name.endswith(PROJECTED)}
    found: list[tuple[dict[str, str], bool]] = []
    refused: list[BootError] = []
    for convention, rows in reading.seen.items():
        try:
            _check_end(parts, rows, reading.end.get("norm"))
            found.append((missing_hooks(parts, rows | projected), convention.fused))
        except BootError as error:
            refused.append(error)
    if not found:
        raise refused[0]
    missing, fused = min(found, key=lambda each: len(each[0]))
    if not layouts:
        missing |= dict.fromkeys(projected, LAYOUT)
    if ranks > 1:
        missing |= _partial(parts)
    taps = find_taps(parts, shape, Convention(fused, layout.by_group))
    return taps, missing | _unlike(taps, reading.seen[layout])


def _unlike(taps: Mapping[str, Tap], rows: Rows) -> dict[str, str]:
    """Hook points that did not fire, or fired with another width than all layers should have."""
    wrong = {name: SILENT for name in taps if name not in rows}
    for name, tap in taps.items():
        width = math.prod(tap.shape)
        if name in rows and rows[name].shape[1] != width:
            wrong[name] = f"it is {rows[name].shape[1]} wide here and not {width}, as in other layers"
    return wrong


def _partial(parts: Parts) -> dict[str, str]:
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


def _check_end(parts: Parts, seen: Rows, normed: torch.Tensor | None) -> None:
    """`BootError` unless the final norm reads the last layer's stream."""
    if parts.norm is None or normed is None:
        return
    want = first_of(parts.norm(seen[f"blocks.{max(parts.layers)}.hook_out"])).float()
    if (normed.float() - want).abs().max() > 16 * torch.finfo(normed.dtype).eps * want.abs().max():
        raise BootError(f"boot: {type(parts.inner).__name__} is not served: its final norm does not read the stream")


def _keep(rows: Rows, name: str) -> Handler:
    def keep(x: torch.Tensor) -> None:
        rows[name] = x.clone()

    return keep
