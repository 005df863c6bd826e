"""The parts of a decoder, found in its module tree by the names that the field uses; the same in either engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ..errors import BootError
from .taps import Attach, Columns

# Each tuple is tried in order; the first name that a module has is taken.
INNER = ("model", "transformer", "gpt_neox", "language_model", "decoder")
LAYERS = ("layers", "h")
EMBEDDING = ("embed_tokens", "wte", "word_embeddings", "embed_in", "embedding")
FINAL_NORM = ("norm", "ln_f", "final_layernorm", "final_layer_norm")
ATTENTION = ("self_attn", "self_attention", "attn", "attention")
FUSED = ("qkv_proj", "query_key_value", "c_attn")
SEPARATE = ("q_proj", "k_proj", "v_proj")
OUT = ("o_proj", "out_proj", "c_proj", "dense")
MLP = ("mlp", "block_sparse_moe")
DOWN = ("down_proj", "c_proj", "dense_4h_to_h", "fc_out", "fc2")
MLP_NORM = ("post_feedforward_layernorm",)
MIDDLE = ("post_attention_layernorm", "ln_2", "final_layer_norm")

# How to attach to the queries (0), keys (1) and values (2) that an attention module reads.
Reads = Callable[[int], Attach]


@dataclass(frozen=True)
class Layer:
    """One decoder layer.

    out: attention's output projection: it reads z, and its output is attention's.
    reads: how to attach to what attention reads; None where that is not queries and keys head by head.
    qkv: one fused projection, or three; none where keys and values are latent.
    mlp: the module whose output is the MLP's: its down projection, or the whole sparse block.
    down: the projection that reads the neurons; None in a mixture of experts.
    middle: what reads the stream between attention and MLP; None where nothing does. It may turn out to read the
        stream before the layer (a parallel block): only a forward pass shows.
    attention_norm, mlp_norm: norms on the way from attention's or the MLP's output to the stream.
    multiplier: what these outputs are multiplied by on their way to the stream.
    """

    block: nn.Module
    attention: nn.Module
    reads: Reads | None
    qkv: tuple[nn.Module, ...]
    out: nn.Module
    mlp: nn.Module
    down: nn.Module | None
    middle: nn.Module | None
    attention_norm: nn.Module | None
    mlp_norm: nn.Module | None
    multiplier: float

    @property
    def apart(self) -> bool:
        """Whether something comes between the outputs of attention and MLP and the stream."""
        return self.attention_norm is not None or self.mlp_norm is not None or self.multiplier != 1


@dataclass(frozen=True)
class Parts:
    """A decoder: what holds the layers, and the layers that live here by number.

    Under pipeline parallelism the embedding, the norm and some layers live in another process.
    """

    inner: nn.Module
    embedding: nn.Module | None
    layers: dict[int, Layer]
    norm: nn.Module | None

    @property
    def apart(self) -> bool:
        """Whether `hook_attn_out` and `hook_mlp_out` are hook points of their own."""
        return any(layer.apart for layer in self.layers.values())


def find_parts(model: nn.Module, reads: Callable[[nn.Module], Reads | None]) -> Parts:
    """The parts of a causal language model; `BootError` names what was not found."""
    inner = model
    while not isinstance(_first(inner, LAYERS), nn.ModuleList):
        inner = _need(inner, INNER, "decoder layers")
    layers = _need(inner, LAYERS, "decoder layers")
    return Parts(
        inner,
        _here(_need(inner, EMBEDDING, "token embedding")),
        {i: _layer(block, reads) for i, block in enumerate(layers.children()) if _here(block) is not None},
        _here(_need(inner, FINAL_NORM, "final norm")),
    )


def _layer(block: nn.Module, reads: Callable[[nn.Module], Reads | None]) -> Layer:
    attention = _need(block, ATTENTION, "attention")
    fused = _first(attention, FUSED)
    separate = [getattr(attention, name, None) for name in SEPARATE]
    whole = _first(block, MLP)
    down = _first(block if whole is None else whole, DOWN)  # OPT's projections are the layer's own
    mlp = down if down is not None else whole
    if mlp is None:
        raise BootError(f"boot: {type(block).__name__} is not served: no MLP found among {_names(block)}")
    middle, attention_norm, mlp_norm = _first(block, MIDDLE), None, _first(block, MLP_NORM)
    if mlp_norm is not None:
        # norms after attention and after the MLP: the stream is read by one more norm (Gemma), or by the MLP (OLMo)
        attention_norm, middle = middle, _first(block, ("pre_feedforward_layernorm", *MLP))
    return Layer(
        block=block,
        attention=attention,
        reads=reads(attention),
        qkv=(fused,) if fused is not None else tuple(m for m in separate if m is not None) if all(separate) else (),
        out=_need(attention, OUT, "output projection"),
        mlp=mlp,
        down=down,
        middle=middle,
        attention_norm=attention_norm,
        mlp_norm=mlp_norm,
        multiplier=float(getattr(block, "residual_multiplier", 1.0)),
    )


def columns(heads: int, kv_heads: int, d_head: int, by_group: bool) -> tuple[Columns, Columns, Columns]:
    """Where q, k and v are in the output of a fused projection.

    All of q, then all of k, then all of v; or `by_group`: a key-value head's queries, its key and its value side by
    side, as GPT-NeoX, Bloom and Falcon keep them.
    """
    if not by_group:
        q, kv = heads * d_head, kv_heads * d_head
        return slice(0, q), slice(q, q + kv), slice(q + kv, q + 2 * kv)
    group = heads // kv_heads
    index = torch.arange((heads + 2 * kv_heads) * d_head).view(kv_heads, group + 2, d_head)
    return index[:, :group].flatten(), index[:, group].flatten(), index[:, group + 1].flatten()


@torch.inference_mode()
def subtracts_mean(norm: nn.Module, like: torch.Tensor) -> bool:
    """Whether a norm is a LayerNorm rather than an RMSNorm: adding a number to every entry changes nothing.

    `like` is any tensor of the stream's dtype, device and last axis.
    """
    x = torch.linspace(-2, 3, like.shape[-1], dtype=torch.float32)
    plain, moved = (first_of(norm((x + c)[None].to(like))).float() for c in (0, 4))
    return bool((plain - moved).abs().max() < 0.1 * plain.abs().max())


@torch.inference_mode()
def epsilon(norm: nn.Module, like: torch.Tensor) -> float:
    """The epsilon of a norm; where it has no name (OLMo), from how far it shrinks a row of small variance.

    `like` as for `subtracts_mean`.
    """
    for name in ("variance_epsilon", "eps"):
        value = getattr(norm, name, None)
        if isinstance(value, (int, float)):
            return float(value)
    variance, signs = 1e-5, 1.0 - 2 * (torch.arange(like.shape[-1]) % 2)
    plain, small = (first_of(norm((signs * scale)[None].to(like))).float().norm() for scale in (1, variance**0.5))
    left = float((small / plain) ** 2)  # variance * (1 + epsilon) / (variance + epsilon)
    return variance * (1 - left) / (left - variance)


def first_of(out: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor:
    """A module's output; of a tuple the first."""
    return out[0] if isinstance(out, tuple) else out


def _first(module: nn.Module, names: Sequence[str]) -> nn.Module | None:
    found = (getattr(module, name, None) for name in names)
    return next((m for m in found if isinstance(m, nn.Module)), None)


def _need(module: nn.Module, names: Sequence[str], what: str) -> nn.Module:
    found = _first(module, names)
    if found is None:
        raise BootError(f"boot: {type(module).__name__} is not served: no {what} found among {_names(module)}")
    return found


def _here(module: nn.Module) -> nn.Module | None:
    """None for what lives in another process: an Identity stands in its place."""
    return None if isinstance(module, nn.Identity) else module


def _names(module: nn.Module) -> str:
    return ", ".join(name for name, _ in module.named_children()) or "no modules"
