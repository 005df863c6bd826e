"""Our attention in transformers' own registries: between rotary and softmax there is no module to hook."""

from __future__ import annotations

import sys
import weakref
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import nn

from ..parts import Reads, columns
from ..protocol import Attention
from ..taps import Attach, Handle, Handler, flat, output, replace

NAME = "activation-explorer"  # under this name, which only our models use

# attention module -> what handles the queries (0), keys (1) and values (2) that it reads in this pass
_readers: weakref.WeakKeyDictionary[nn.Module, list[tuple[int, Handler]]] = weakref.WeakKeyDictionary()


@cache
def register() -> None:
    """Tell transformers. Models that do not know its registry of functions yet choose a class by the same name."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask
    from transformers.models.falcon import modeling_falcon as falcon
    from transformers.models.gptj import modeling_gptj as gptj

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, eager_mask)
    if hasattr(falcon, "FALCON_ATTENTION_CLASSES"):
        falcon.FALCON_ATTENTION_CLASSES[NAME] = _falcon(falcon)
    if hasattr(gptj, "GPTJ_ATTENTION_CLASSES"):  # transformers 5.24 has none any more
        gptj.GPTJ_ATTENTION_CLASSES[NAME] = _gptj(gptj)


def reads(module: nn.Module) -> Reads:
    """How to attach to what a layer's attention reads: after norm and rotary, and for each key-value head once."""
    if type(module).__name__ == "BloomAttention":  # it is one function, of which nothing comes here: it has no rotary
        fused: Any = module
        parts = columns(fused.num_heads, fused.num_heads, fused.head_dim, by_group=True)
        return lambda which: output(fused.query_key_value, parts[which])
    return partial(_argument, module)


def _argument(module: nn.Module, which: int) -> Attach:
    def attach(handler: Handler) -> Handle:
        reader = (which, handler)
        _readers.setdefault(module, []).append(reader)
        return _Detach(module, reader)

    return attach


class _Detach(NamedTuple):
    """Takes a reader away again."""

    module: nn.Module
    reader: tuple[int, Handler]

    def remove(self) -> None:
        _readers[self.module].remove(self.reader)


def describe(module: Any, layer: int, inner: Any) -> Attention:
    """How a layer treats its scores; `inner` holds the layers. Boot checks it."""
    config = inner.config
    kinds, window = getattr(config, "layer_types", None), getattr(config, "sliding_window", None)
    slides = kinds is None or kinds[layer] == "sliding_attention"
    sinks = getattr(module, "sinks", None)
    return Attention(
        scale=_scale(module),
        window=window if window and slides else None,
        softcap=getattr(module, "attn_logit_softcapping", None),
        slopes=_slopes(module, inner),
        sinks=None if sinks is None else tuple(sinks.float().tolist()),
    )


def _scale(module: Any) -> float:
    if hasattr(module, "scale_attn"):  # GPT-J divides
        return 1 / float(module.scale_attn)
    named = (getattr(module, name, None) for name in ("scaling", "inv_norm_factor"))
    return next((float(scale) for scale in named if scale is not None), 1.0)


def _slopes(module: Any, inner: Any) -> tuple[float, ...] | None:
    """What a key gains a position (ALiBi). Bloom adds it after its scale, Falcon before."""
    build = getattr(sys.modules[type(inner).__module__], "build_alibi_tensor", None)
    if build is None or not getattr(inner, "use_alibi", True):
        return None
    slopes = build(torch.ones(1, 2), module.num_heads, torch.float32)[:, 0, 1]
    return tuple((slopes * (module.inv_norm_factor if hasattr(inner, "use_alibi") else 1)).tolist())


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention with taps: `(batch, heads, position, d_head)` in, `(batch, position, heads, d_head)` out.

    Scores and their softmax are float32 in every dtype, as they are replayed. `attention_mask` is added to them: what a
    token may not see, and ALiBi. `s_aux` are sinks `(heads,)`: one more score that takes its share and carries nothing.
    """
    read = [query, key, value]
    for which, handler in _readers.get(module, ()):
        read[which] = _visited(module, read[which], handler)
    query, key, value = read
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    scores = torch.matmul(query.float(), key.float().transpose(2, 3)) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores + attention_mask
    if s_aux is not None:
        sinks = s_aux.float().reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    pattern = torch.softmax(scores, dim=-1)[..., : key.shape[2]].to(value.dtype)
    return torch.matmul(pattern, value).transpose(1, 2).contiguous(), None


def _visited(module: nn.Module, x: torch.Tensor, handler: Handler) -> torch.Tensor:
    by_row = x.transpose(1, 2)
    changed = handler(module, flat(by_row, 2))
    return x if changed is None else replace(by_row, changed, 2).transpose(1, 2)


def _gptj(modeling: Any) -> type[nn.Module]:
    class Attention(modeling.GPTJAttention):  # type: ignore[misc]
        def _attn(self, query: Any, key: Any, value: Any, attention_mask: Any = None) -> Any:
            out = attend(self, query, key, value, attention_mask, 1 / self.scale_attn)[0]
            return out.transpose(1, 2), None

    return Attention


def _falcon(modeling: Any) -> type[nn.Module]:
    class Attention(modeling.FalconAttention):  # type: ignore[misc]
        def forward(
            self, hidden_states: Any, alibi: Any, attention_mask: Any, position_embeddings: Any = None, **_: Any
        ) -> Any:
            fused = self.query_key_value(hidden_states)
            grouped = fused.unflatten(-1, (self.num_kv_heads, -1, self.head_dim))  # each: its queries, key, value
            query, key, value = grouped[..., :-2, :].flatten(2, 3), grouped[..., -2, :], grouped[..., -1, :]
            query, key, value = (x.transpose(1, 2) for x in (query, key, value))
            if alibi is None:
                query, key = modeling.apply_rotary_pos_emb(query, key, *position_embeddings)
            # the mask holds ALiBi already
            out = attend(self, query, key, value, attention_mask, self.inv_norm_factor)[0]
            return self.dense(out.flatten(2)), None

    return Attention
