"""Taps: where each hook point is in vLLM's modules, and how its tensor is read and replaced.

A tap is attached for one step and only where that step has work, so an idle model runs without a single hook.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ...hooks import ModelShape

# Given a hook point's rows `(rows, width)`: None to leave them, or the rows that changed and their indices.
Edited = tuple[torch.Tensor, torch.Tensor]
Handler = Callable[[torch.Tensor], "Edited | None"]
Attach = Callable[[Handler], RemovableHandle]


@dataclass(frozen=True)
class Tap:
    """How to attach a handler to one hook point, and the shape of its rows."""

    attach: Attach
    shape: tuple[int, ...]


def find_taps(model: nn.Module, shape: ModelShape, eps: float) -> dict[str, Tap]:
    """The taps of a Llama-shaped model: layers that return (delta, residual), norms called as norm(x, residual)."""
    inner: Any = model.model
    width = (shape.d_model,)
    q, kv = shape.heads * shape.d_head, shape.kv_heads * shape.d_head
    heads, kv_heads = (shape.heads, shape.d_head), (shape.kv_heads, shape.d_head)
    taps = {
        "embed.hook_out": Tap(_output(inner.embed_tokens), width),
        "ln_final.hook_normalized": Tap(_normalized(inner.norm, eps), width),
    }
    for i, layer in enumerate(inner.layers):
        attention, mlp = layer.self_attn, layer.mlp
        taps |= {
            f"blocks.{i}.hook_in": Tap(_stream_in(layer, first=1), width),
            f"blocks.{i}.attn.q.hook_out": Tap(_output(attention.qkv_proj, slice(0, q)), heads),
            f"blocks.{i}.attn.k.hook_out": Tap(_output(attention.qkv_proj, slice(q, q + kv)), kv_heads),
            f"blocks.{i}.attn.v.hook_out": Tap(_output(attention.qkv_proj, slice(q + kv, q + 2 * kv)), kv_heads),
            f"blocks.{i}.attn.hook_rot_q": Tap(_input(attention.attn, 0), heads),
            f"blocks.{i}.attn.hook_rot_k": Tap(_input(attention.attn, 1), kv_heads),
            f"blocks.{i}.attn.o.hook_in": Tap(_input(attention.o_proj, 0), heads),
            f"blocks.{i}.attn.hook_out": Tap(_output(attention), width),
            f"blocks.{i}.ln2.hook_in": Tap(_stream_in(layer.post_attention_layernorm, first=0), width),
            f"blocks.{i}.mlp.out.hook_in": Tap(_input(mlp.down_proj, 0), (shape.d_mlp,)),
            f"blocks.{i}.mlp.hook_out": Tap(_output(mlp), width),
            f"blocks.{i}.hook_out": Tap(_stream_out(layer), width),
        }
    return taps


def _replace(x: torch.Tensor, edited: Edited) -> torch.Tensor:
    index, rows = edited
    return x.index_copy(0, index, rows)


def _output(module: nn.Module, columns: slice = slice(None)) -> Attach:
    """A module's output, or some of its columns. Tuples keep their other entries (a linear's bias)."""

    def attach(handler: Handler) -> RemovableHandle:
        def hook(_: nn.Module, __: Any, out: Any) -> Any:
            whole = out[0] if isinstance(out, tuple) else out
            edited = handler(whole[:, columns])
            if edited is None:
                return None
            index, rows = edited
            new = whole.clone()
            new[index, columns] = rows
            return (new, *out[1:]) if isinstance(out, tuple) else new

        return module.register_forward_hook(hook)

    return attach


def _input(module: nn.Module, position: int) -> Attach:
    """One positional input of a module, flattened to `(rows, width)`."""

    def attach(handler: Handler) -> RemovableHandle:
        def hook(_: nn.Module, args: tuple[Any, ...]) -> Any:
            x: torch.Tensor = args[position]
            edited = handler(x.reshape(x.shape[0], -1))
            if edited is None:
                return None
            index, rows = edited
            new = x.index_copy(0, index, rows.reshape(-1, *x.shape[1:]))
            return (*args[:position], new, *args[position + 1 :])

        return module.register_forward_pre_hook(hook)

    return attach


def _stream_in(module: nn.Module, first: int) -> Attach:
    """The residual stream that a module reads as two arguments (delta, residual), the first of them at `first`.

    A layer's very first residual is None: the delta is the whole stream then.
    """

    def attach(handler: Handler) -> RemovableHandle:
        def hook(_: nn.Module, args: tuple[Any, ...]) -> Any:
            delta, residual = args[first], args[first + 1]
            edited = handler(delta if residual is None else delta + residual)
            if edited is None:
                return None
            pair = (_replace(delta, edited), None) if residual is None else _split(delta, residual, edited)
            return (*args[:first], *pair, *args[first + 2 :])

        return module.register_forward_pre_hook(hook)

    return attach


def _stream_out(layer: nn.Module) -> Attach:
    """The residual stream after a layer that returns (delta, residual)."""

    def attach(handler: Handler) -> RemovableHandle:
        def hook(_: nn.Module, __: Any, out: tuple[torch.Tensor, torch.Tensor]) -> Any:
            edited = handler(out[0] + out[1])
            return None if edited is None else _split(*out, edited)

        return layer.register_forward_hook(hook)

    return attach


def _split(delta: torch.Tensor, residual: torch.Tensor, edited: Edited) -> tuple[torch.Tensor, torch.Tensor]:
    """Write edited rows whole into the residual and zero their delta: the next norm adds the two, exactly.

    Writing (edited - residual) into the delta instead would lose the edit in bf16 wherever the residual is large.
    """
    return delta.index_fill(0, edited[0], 0), _replace(residual, edited)


def _normalized(norm: nn.Module, eps: float) -> Attach:
    """The last stream divided by its root mean square: what the final norm computes before its weight."""

    def attach(handler: Handler) -> RemovableHandle:
        def hook(_: nn.Module, args: tuple[torch.Tensor, torch.Tensor]) -> None:
            stream = (args[0] + args[1]).float()
            scale = torch.rsqrt(stream.square().mean(-1, keepdim=True) + eps)
            handler((stream * scale).to(args[0].dtype))

        return norm.register_forward_pre_hook(hook)

    return attach
