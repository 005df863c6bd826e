"""Where each hook point is in vLLM's modules, and vLLM's own shape of the residual stream."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ...hooks import ModelShape
from ..rows import Edited
from ..taps import Attach, Handle, Handler, Tap, argument, normalized, output, replace


def find_taps(model: nn.Module, shape: ModelShape, eps: float) -> dict[str, Tap]:
    """The taps of a Llama-shaped model: layers that return (delta, residual), norms called as norm(x, residual).

    `shape` holds the heads and neurons of this worker. Modules of other pipeline stages have no taps here.
    """
    inner: Any = model.model
    width = (shape.d_model,)
    q, kv = shape.heads * shape.d_head, shape.kv_heads * shape.d_head
    heads, kv_heads = (shape.heads, shape.d_head), (shape.kv_heads, shape.d_head)
    taps: dict[str, Tap] = {}
    if is_here(inner.embed_tokens):
        taps["embed.hook_out"] = Tap(output(inner.embed_tokens), width)
    if is_here(inner.norm):
        taps["ln_final.hook_normalized"] = Tap(normalized(inner.norm, eps, lambda args: args[0] + args[1]), width)
    for i, layer in enumerate(inner.layers):
        if not is_here(layer):
            continue
        attention, mlp = layer.self_attn, layer.mlp
        taps |= {
            f"blocks.{i}.hook_in": Tap(_stream_in(layer, first=1), width),
            f"blocks.{i}.attn.q.hook_out": Tap(output(attention.qkv_proj, slice(0, q)), heads),
            f"blocks.{i}.attn.k.hook_out": Tap(output(attention.qkv_proj, slice(q, q + kv)), kv_heads),
            f"blocks.{i}.attn.v.hook_out": Tap(output(attention.qkv_proj, slice(q + kv, q + 2 * kv)), kv_heads),
            f"blocks.{i}.attn.hook_rot_q": Tap(argument(attention.attn, 0), heads),
            f"blocks.{i}.attn.hook_rot_k": Tap(argument(attention.attn, 1), kv_heads),
            f"blocks.{i}.attn.o.hook_in": Tap(argument(attention.o_proj, 0), heads),
            f"blocks.{i}.attn.hook_out": Tap(output(attention), width),
            f"blocks.{i}.ln2.hook_in": Tap(_stream_in(layer.post_attention_layernorm, first=0), width),
            f"blocks.{i}.mlp.out.hook_in": Tap(argument(mlp.down_proj, 0), (shape.d_mlp,)),
            f"blocks.{i}.mlp.hook_out": Tap(output(mlp), width),
            f"blocks.{i}.hook_out": Tap(_stream_out(layer), width),
        }
    return taps


def is_here(module: nn.Module) -> bool:
    """Whether this worker has the module: vLLM puts an Identity where another pipeline stage has it."""
    return not isinstance(module, nn.Identity)


def _stream_in(module: nn.Module, first: int) -> Attach:
    """The residual stream that a module reads as two arguments (delta, residual), the first of them at `first`.

    A layer's very first residual is None: the delta is the whole stream then.
    """

    def attach(handler: Handler) -> Handle:
        def hook(_: nn.Module, args: tuple[Any, ...]) -> Any:
            delta, residual = args[first], args[first + 1]
            edited = handler(delta if residual is None else delta + residual)
            if edited is None:
                return None
            pair = (replace(delta, edited), None) if residual is None else _split(delta, residual, edited)
            return (*args[:first], *pair, *args[first + 2 :])

        return module.register_forward_pre_hook(hook)

    return attach


def _stream_out(layer: nn.Module) -> Attach:
    """The residual stream after a layer that returns (delta, residual)."""

    def attach(handler: Handler) -> Handle:
        def hook(_: nn.Module, __: Any, out: tuple[torch.Tensor, torch.Tensor]) -> Any:
            edited = handler(out[0] + out[1])
            return None if edited is None else _split(*out, edited)

        return layer.register_forward_hook(hook)

    return attach


def _split(delta: torch.Tensor, residual: torch.Tensor, edited: Edited) -> tuple[torch.Tensor, torch.Tensor]:
    """Write edited rows whole into the residual and zero their delta: the next norm adds the two, exactly.

    Writing (edited - residual) into the delta instead would lose the edit in bf16 wherever the residual is large.
    """
    return delta.index_fill(0, edited[0], 0), replace(residual, edited)
