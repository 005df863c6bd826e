"""What one forward pass shows of a model: whether its stream adds up as the hooks say, and which hooks it lacks."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..errors import BootError
from .parts import Layer, Parts

# Why a hook point is not there.
LATENT = "multi-head latent attention compresses queries, keys and values; they are not there head by head"
NO_ROTARY = "this layer has no rotary embedding: attention reads the queries and keys as they are projected"
NOT_ADDED = "what these modules put out is not what this layer adds to the stream, and what comes between is not known"
PARALLEL = "attention and MLP read the same stream (a parallel block): there is none between them"
SILENT = "its module did not run in a forward pass"
SPARSE = "the MLP is a mixture of experts: a token has no one row of neurons"

LATENT_HOOKS = (
    *("attn.q.hook_out", "attn.k.hook_out", "attn.v.hook_out", "attn.hook_rot_q", "attn.hook_rot_k"),
    *("attn.hook_attn_scores", "attn.hook_pattern", "attn.o.hook_in"),
)


def missing_hooks(parts: Parts, seen: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """The hook points that a model lacks, and why, from one pass of several tokens.

    `seen` holds the rows `(rows, width)` of every hook point that could be read, `hook_attn_out` and `hook_mlp_out`
    included. What is not shown to be what its name says is missing. `BootError` when the stream cannot be followed.
    """
    missing: dict[str, str] = {}
    for i, layer in parts.layers.items():
        block = f"blocks.{i}."
        here = {name.removeprefix(block): rows for name, rows in seen.items() if name.startswith(block)}
        if "hook_in" not in here or "hook_out" not in here:
            raise BootError(f"boot: {_name(layer)} is not served: it was not called as a decoder layer is")
        reader = seen.get(f"blocks.{i + 1}.hook_in")
        if reader is not None and not torch.equal(here["hook_out"], reader):
            raise BootError(f"boot: {_name(layer)} is not served: the next layer does not read what it puts out")
        missing |= {block + name: reason for name, reason in _missing_here(layer, here).items()}
    return missing


def _missing_here(layer: Layer, seen: Mapping[str, torch.Tensor]) -> dict[str, str]:
    missing: dict[str, str] = {}
    before, middle = seen["hook_in"], seen.get("ln2.hook_in")
    added = [seen[name] for name in ("hook_attn_out", "hook_mlp_out") if name in seen]
    if len(added) < 2 or not adds_up(seen["hook_out"], before, *added):
        missing |= dict.fromkeys(("hook_attn_out", "hook_mlp_out", "ln2.hook_in"), NOT_ADDED)
    elif middle is None or torch.equal(middle, before):
        missing["ln2.hook_in"] = PARALLEL
    elif not adds_up(middle, before, added[0]):
        missing["ln2.hook_in"] = NOT_ADDED
    if layer.down is None:
        missing["mlp.out.hook_in"] = SPARSE
    if not layer.qkv or "attn.hook_rot_q" not in seen:
        missing |= dict.fromkeys(LATENT_HOOKS, LATENT)
    elif same(seen.get("attn.k.hook_out"), seen.get("attn.hook_rot_k")):  # transformers' OPT scales queries before
        missing |= dict.fromkeys(("attn.hook_rot_q", "attn.hook_rot_k"), NO_ROTARY)
    return missing


def adds_up(total: torch.Tensor, *terms: torch.Tensor) -> bool:
    """Whether `total` is the sum of the terms, entry by entry, to the rounding of a few additions in its dtype."""
    exact = torch.stack([term.double() for term in terms])
    allowed = 8 * torch.finfo(total.dtype).eps * (exact.abs().sum(0) + total.double().abs())
    return bool(((total.double() - exact.sum(0)).abs() <= allowed).all())


def same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Whether both are there, and equal bit for bit."""
    return one is not None and other is not None and torch.equal(one, other)


def _name(layer: Layer) -> str:
    return type(layer.block).__name__
