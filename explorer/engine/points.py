"""Where each hook point is in a model's modules, and the shapes that a residual stream has there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn

from ..hooks import ModelShape
from .parts import Layer, Parts, columns, epsilon, subtracts_mean
from .taps import Attach, Handle, Handler, Tap, argument, flat, in_place, multiplied, normalized, output, replace


class Convention(NamedTuple):
    """What models differ in and neither names nor signatures tell.

    fused: layers return (delta, residual), as many of vLLM's do, and the stream is their sum; else it is the first.
    by_group: a fused projection keeps each key-value head's queries, key and value together; see `columns`.
    """

    fused: bool
    by_group: bool


LLAMA = Convention(fused=True, by_group=False)


def find_taps(parts: Parts, shape: ModelShape, convention: Convention = LLAMA) -> dict[str, Tap]:
    """The taps of the modules that are here. `shape` counts the heads and neurons that are.

    `hook_attn_out` and `hook_mlp_out` are among them also where they are one with the modules' own outputs.
    """
    width = (shape.d_model,)
    taps: dict[str, Tap] = {}
    if parts.embedding is not None:
        taps["embed.hook_out"] = Tap(_embedded(parts, parts.embedding), width)
    for i, layer in parts.layers.items():
        taps |= {f"blocks.{i}.{name}": tap for name, tap in _in_layer(layer, shape, convention).items()}
    if parts.norm is not None:
        like = _like(parts.norm, parts.inner).new_empty(width)
        eps, centred = epsilon(parts.norm, like), subtracts_mean(parts.norm, like)
        last = normalized(parts.norm, eps, lambda args: stream(args, convention.fused), centred)
        taps["ln_final.hook_normalized"] = Tap(last, width)
    return taps


def _in_layer(layer: Layer, shape: ModelShape, convention: Convention) -> dict[str, Tap]:
    width, heads, kv_heads = (shape.d_model,), (shape.heads, shape.d_head), (shape.kv_heads, shape.d_head)
    attention, mlp, fused = output(layer.out), output(layer.mlp), convention.fused
    taps = {
        "hook_in": Tap(stream_in(layer.block, fused), width),
        "attn.hook_out": Tap(attention, width),
        "hook_attn_out": Tap(_added(attention, layer.attention_norm, layer.multiplier), width),
        "mlp.hook_out": Tap(mlp, width),
        "hook_mlp_out": Tap(_added(mlp, layer.mlp_norm, layer.multiplier), width),
        "hook_out": Tap(stream_out(layer.block, fused), width),
    }
    if layer.reads is not None and layer.qkv:
        q, k, v = _projections(layer.qkv, shape, convention.by_group)
        taps |= {
            "attn.q.hook_out": Tap(q, heads),
            "attn.k.hook_out": Tap(k, kv_heads),
            "attn.v.hook_out": Tap(v, kv_heads),
            "attn.hook_rot_q": Tap(layer.reads(0), heads),
            "attn.hook_rot_k": Tap(layer.reads(1), kv_heads),
            "attn.o.hook_in": Tap(argument(layer.out, 0), heads),
        }
    if layer.middle is not None:
        taps["ln2.hook_in"] = Tap(stream_in(layer.middle, fused) if fused else in_place(layer.middle), width)
    if layer.down is not None:
        taps["mlp.out.hook_in"] = Tap(argument(layer.down, 0), (shape.d_mlp,))
    return taps


def _like(norm: nn.Module, model: nn.Module) -> torch.Tensor:
    """A tensor of a dtype and device that the norm takes: its own weight, or where it has none (OLMo) of the model.

    The model's first one may be packed: integers, or numbers of 8 bits.
    """
    tensors = chain(norm.parameters(), model.parameters())
    return next(x for x in tensors if x.is_floating_point() and x.itemsize > 1)


def _embedded(parts: Parts, embedding: nn.Module) -> Attach:
    """The embedding as transformers' module returns it: Gemma's is scaled, by vLLM only after the module."""
    if hasattr(parts.inner, "normalizer") and 0 in parts.layers:
        return stream_in(parts.layers[0].block, fused=False, first=True)
    return output(embedding)


def _projections(qkv: Sequence[nn.Module], shape: ModelShape, by_group: bool) -> tuple[Attach, Attach, Attach]:
    if len(qkv) == 3:
        q, k, v = map(output, qkv)
    else:
        q, k, v = (output(qkv[0], part) for part in columns(shape.heads, shape.kv_heads, shape.d_head, by_group))
    return q, k, v


def _added(out: Attach, norm: nn.Module | None, multiplier: float) -> Attach:
    """What a module's output is when it is added to the stream."""
    added = out if norm is None else output(norm)
    return added if multiplier == 1 else multiplied(added, multiplier)


# the stream: one tensor, or two that are yet to be added


def stream(values: Sequence[Any], fused: bool) -> torch.Tensor:
    """The stream among the arguments or results of a module."""
    terms = [values[place] for place in _places(dict(enumerate(values)), fused)]
    return terms[0] if len(terms) == 1 else terms[0] + terms[1]


def stream_in(module: nn.Module, fused: bool, first: bool = False) -> Attach:
    """The stream that a module reads. With `first` this comes before what else reads it there."""

    def attach(handler: Handler) -> Handle:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            new = _rewritten(module, {**dict(enumerate(args)), **kwargs}, fused, handler)
            return (
                None if new is None else (tuple(new[i] for i in range(len(args))), {name: new[name] for name in kwargs})
            )

        return module.register_forward_pre_hook(hook, with_kwargs=True, prepend=first)

    return attach


def stream_out(module: nn.Module, fused: bool) -> Attach:
    """The stream that a module puts out."""

    def attach(handler: Handler) -> Handle:
        def hook(module: nn.Module, _: Any, out: Any) -> Any:
            new = _rewritten(module, dict(enumerate(out if isinstance(out, tuple) else (out,))), fused, handler)
            return new if new is None else tuple(new.values()) if isinstance(out, tuple) else new[0]

        return module.register_forward_hook(hook)

    return attach


def _places(values: Mapping[Any, Any], fused: bool) -> list[Any]:
    """Where the stream is: the first tensor of numbers, and the next one like it if the two are yet to be added.

    A model's very first layer has no second one: there the first is the whole stream.
    """
    found: list[Any] = []
    for place, x in values.items():
        if isinstance(x, torch.Tensor) and x.is_floating_point() and (not found or x.shape == values[found[0]].shape):
            found.append(place)
            if len(found) == 1 + fused:
                break
    return found


def _rewritten(module: nn.Module, values: dict[Any, Any], fused: bool, handler: Handler) -> dict[Any, Any] | None:
    """`values` with the stream as the handler left it; None when it left all as it was.

    Of two tensors the changed rows are written whole into the second and zeroed in the first: what adds the two gets
    them exactly. Writing (edited - second) into the first would lose the edit in bf16 wherever the stream is large.
    """
    *deltas, whole = _places(values, fused)
    changed = handler(module, flat(values[whole] if not deltas else values[deltas[0]] + values[whole]))
    if changed is None:
        return None
    zeroed = {place: changed.cleared(flat(values[place])).reshape(values[place].shape) for place in deltas}
    return values | zeroed | {whole: replace(values[whole], changed)}
