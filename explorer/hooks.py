"""The table of hook points: their names, aliases and shapes, and what each one is."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    """The sizes that decide which hook points a model has and how wide they are."""

    layers: int
    d_model: int
    heads: int
    kv_heads: int
    d_head: int
    d_mlp: int
    d_vocab: int


@dataclass(frozen=True)
class Kind:
    """One row of the hook table: a family of hook points, one per layer when the name holds `{i}`."""

    name: str
    component: str
    group: str
    about: str
    aliases: tuple[str, ...] = ()
    heads: str | None = None  # the ModelShape field that counts its heads
    width: str = "d_model"  # the ModelShape field of its last axis
    edit: bool = True
    derived_from: tuple[str, ...] = ()  # computed from these hook points instead of being tapped
    else_from: tuple[str, ...] = ()  # or, in layers that lack those, from these
    one_with: str | None = None  # an alias of this hook in models where nothing comes between the two


# Canonical names are TransformerLens's bridge names, aliases its classic ones.
KINDS: tuple[Kind, ...] = (
    Kind(
        "embed.hook_out",
        "embed",
        "residual",
        "The token embeddings, before positions are added to them.",
        ("hook_embed",),
    ),
    Kind(
        "blocks.{i}.hook_in",
        "resid_pre",
        "residual",
        "The residual stream as the layer reads it.",
        ("blocks.{i}.hook_resid_pre",),
    ),
    Kind(
        "blocks.{i}.attn.q.hook_out",
        "q",
        "attention",
        "Queries of each head, before any norm and rotary.",
        ("blocks.{i}.attn.hook_q",),
        "heads",
        "d_head",
    ),
    Kind(
        "blocks.{i}.attn.k.hook_out",
        "k",
        "attention",
        "Keys of each key-value head, before any norm and rotary.",
        ("blocks.{i}.attn.hook_k",),
        "kv_heads",
        "d_head",
    ),
    Kind(
        "blocks.{i}.attn.v.hook_out",
        "v",
        "attention",
        "Values of each key-value head.",
        ("blocks.{i}.attn.hook_v",),
        "kv_heads",
        "d_head",
    ),
    Kind(
        "blocks.{i}.attn.hook_rot_q",
        "rot_q",
        "attention",
        "Queries as attention reads them, after norm and rotary.",
        (),
        "heads",
        "d_head",
    ),
    Kind(
        "blocks.{i}.attn.hook_rot_k",
        "rot_k",
        "attention",
        "Keys as attention reads them, after norm and rotary.",
        (),
        "kv_heads",
        "d_head",
    ),
    Kind(
        "blocks.{i}.attn.hook_attn_scores",
        "scores",
        "attention",
        "Query-key scores of each head before the softmax; -inf where masked.",
        (),
        "heads",
        "",
        False,
        ("blocks.{i}.attn.hook_rot_q", "blocks.{i}.attn.hook_rot_k"),
        ("blocks.{i}.attn.q.hook_out", "blocks.{i}.attn.k.hook_out"),
    ),
    Kind(
        "blocks.{i}.attn.hook_pattern",
        "pattern",
        "attention",
        "Attention of each head: which earlier token each token looks at.",
        (),
        "heads",
        "",
        False,
        ("blocks.{i}.attn.hook_rot_q", "blocks.{i}.attn.hook_rot_k"),
        ("blocks.{i}.attn.q.hook_out", "blocks.{i}.attn.k.hook_out"),
    ),
    Kind(
        "blocks.{i}.attn.o.hook_in",
        "z",
        "attention",
        "What each head carries to the token: the attention-weighted values.",
        ("blocks.{i}.attn.hook_z",),
        "heads",
        "d_head",
    ),
    Kind(
        "blocks.{i}.attn.hook_out",
        "attn_out",
        "attention",
        "The attention layer's output.",
    ),
    Kind(
        "blocks.{i}.hook_attn_out",
        "attn_added",
        "attention",
        "What attention adds to the stream: its output after a norm or multiplier of its own.",
        one_with="blocks.{i}.attn.hook_out",
    ),
    Kind(
        "blocks.{i}.ln2.hook_in",
        "resid_mid",
        "residual",
        "The residual stream between attention and MLP.",
        ("blocks.{i}.hook_resid_mid",),
    ),
    Kind(
        "blocks.{i}.mlp.out.hook_in",
        "post",
        "mlp",
        "The MLP's neurons, after the activation function.",
        ("blocks.{i}.mlp.hook_post",),
        None,
        "d_mlp",
    ),
    Kind(
        "blocks.{i}.mlp.hook_out",
        "mlp_out",
        "mlp",
        "The MLP's output.",
    ),
    Kind(
        "blocks.{i}.hook_mlp_out",
        "mlp_added",
        "mlp",
        "What the MLP adds to the stream: its output after a norm or multiplier of its own.",
        one_with="blocks.{i}.mlp.hook_out",
    ),
    Kind(
        "blocks.{i}.hook_out",
        "resid_post",
        "residual",
        "The residual stream after the layer.",
        ("blocks.{i}.hook_resid_post",),
    ),
    Kind(
        "ln_final.hook_normalized",
        "ln_final",
        "residual",
        "The last stream, normalized, before the final norm's weight.",
        (),
        None,
        "d_model",
        False,
    ),
    Kind(
        "unembed.hook_out",
        "logits",
        "logits",
        "The logits: one score for each token of the vocabulary.",
        ("logits",),
        None,
        "d_vocab",
        False,
    ),
)

# TransformerLens names that are not served, and the nearest one that is.
NOT_SERVED = {
    "hook_result": "blocks.{i}.attn.o.hook_in",
    "ln1.hook_scale": "blocks.{i}.hook_in",
    "ln2.hook_scale": "blocks.{i}.ln2.hook_in",
    "ln1.hook_normalized": "blocks.{i}.hook_in",
    "ln2.hook_normalized": "blocks.{i}.ln2.hook_in",
    "ln1.hook_in": "blocks.{i}.hook_in",
    "ln1.hook_out": "blocks.{i}.hook_in",
    "ln2.hook_out": "blocks.{i}.ln2.hook_in",
    "attn.hook_in": "blocks.{i}.hook_in",
    "attn.hook_result": "blocks.{i}.attn.o.hook_in",
    "hook_attn_in": "blocks.{i}.hook_in",
    "hook_q_input": "blocks.{i}.hook_in",
    "hook_k_input": "blocks.{i}.hook_in",
    "hook_v_input": "blocks.{i}.hook_in",
    "mlp.hook_in": "blocks.{i}.ln2.hook_in",
    "hook_mlp_in": "blocks.{i}.ln2.hook_in",
    "mlp.hook_pre": "blocks.{i}.mlp.out.hook_in",
    "mlp.in.hook_out": "blocks.{i}.mlp.out.hook_in",
    "ln_final.hook_scale": "ln_final.hook_normalized",
    "ln_final.hook_out": "ln_final.hook_normalized",
    "ln_final.hook_in": "blocks.{last}.hook_out",
    "unembed.hook_in": "ln_final.hook_normalized",
    "hook_pos_embed": "embed.hook_out",
    "embed.hook_in": "embed.hook_out",
}


def canonical(name: str) -> str:
    """The canonical name of an alias that holds in every model; any other name unchanged."""
    return _same_as(name, lambda kind: ((alias, kind.name) for alias in kind.aliases))


def one_in_some_models(name: str) -> str:
    """The hook that a canonical name is one with where nothing comes between the two; any other name unchanged."""
    return _same_as(name, lambda kind: [(kind.name, kind.one_with)] if kind.one_with else [])


def _same_as(name: str, pairs: Callable[[Kind], Iterable[tuple[str, str]]]) -> str:
    layer = re.match(r"blocks\.([0-9]+)\.", name)
    number = layer[1] if layer else ""
    for kind in KINDS:
        for theirs, ours in pairs(kind):
            if name == theirs.replace("{i}", number):
                return ours.replace("{i}", number)
    return name
