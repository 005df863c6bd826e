"""Where each model family of transformers deviates from Llama's shape."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from transformers.models.gptj.modeling_gptj import GPTJAttention


@dataclass(frozen=True)
class Family:
    """Where the hook points of a family are: attribute paths, inside a layer unless another place is named.

    The defaults are Llama's.
    """

    # in the model
    inner: str = "model"
    embed: str = "embed_tokens"  # in `inner`, as the next two
    layers: str = "layers"
    norm: str = "norm"
    centred: bool = False  # whether the final norm subtracts the mean: LayerNorm, not RMS
    # attention
    attention: str = "self_attn"
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")  # in `attention`; one name where one module projects all
    by_group: bool = False  # such a module holds, one key-value head after the other, its queries, key and value
    o: str | None = "o_proj"  # in `attention`; None where queries, keys and values are compressed (MLA)
    attn_out: str = "self_attn"
    reads: str | None = "eager_attention_forward"  # the function, in the model's file, that reads rotated q and k
    rotates: str | None = None  # or else the function, there, that returns them; neither: no rotary
    # MLP
    mid: str | None = "post_attention_layernorm"  # reads the stream between attention and MLP; None: parallel blocks
    neurons: str = "mlp.down_proj"  # reads the neurons; layers without this module have experts
    mlp_out: str = "mlp"
    post_norms: tuple[str, ...] = ()  # between attention and the stream, and between MLP and the stream


LLAMA = Family()
LAYER_NORM = replace(LLAMA, centred=True)
POST_NORMS = replace(LLAMA, post_norms=("post_attention_layernorm", "post_feedforward_layernorm"))
OLMO2 = replace(POST_NORMS, mid="mlp")
MLA = replace(LLAMA, o=None, reads=None)
GPT2 = Family(
    inner="transformer",
    embed="wte",
    layers="h",
    norm="ln_f",
    centred=True,
    attention="attn",
    qkv=("c_attn",),
    o="c_proj",
    attn_out="attn",
    reads=None,
    mid="ln_2",
    neurons="mlp.c_proj",
)
GPTJ = replace(
    GPT2,
    qkv=LLAMA.qkv,
    o="out_proj",
    # transformers 5.24 has it as in the other models' files
    reads="GPTJAttention._attn" if hasattr(GPTJAttention, "_attn") else LLAMA.reads,
    mid=None,
    neurons="mlp.fc_out",
)
GPT_NEOX = Family(
    inner="gpt_neox",
    embed="embed_in",
    norm="final_layer_norm",
    centred=True,
    attention="attention",
    qkv=("query_key_value",),
    by_group=True,
    o="dense",
    attn_out="attention",
    neurons="mlp.dense_4h_to_h",
)
FALCON = replace(
    GPT_NEOX,
    inner="transformer",
    embed="word_embeddings",
    layers="h",
    norm="ln_f",
    attention="self_attention",
    attn_out="self_attention",
    reads=None,
    rotates="apply_rotary_pos_emb",
)
# Bloom's attention and MLP add the stream themselves: their outputs are what their last projections return.
BLOOM = replace(FALCON, attn_out="self_attention.dense", rotates=None, mlp_out="mlp.dense_4h_to_h")
OPT = Family(
    inner="model.decoder",
    norm="final_layer_norm",
    centred=True,
    o="out_proj",
    reads=None,
    mid="final_layer_norm",
    neurons="fc2",
    mlp_out="fc2",
)
PHI = replace(LAYER_NORM, norm="final_layernorm", o="dense", mid=None, neurons="mlp.fc2")

FAMILIES = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma", "granite"), LLAMA),
    **dict.fromkeys(("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss"), LLAMA),
    "phi3": replace(LLAMA, qkv=("qkv_proj",)),
    **dict.fromkeys(("gemma2", "gemma3_text"), replace(POST_NORMS, mid="pre_feedforward_layernorm")),
    **dict.fromkeys(("olmo2", "olmo3"), OLMO2),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), MLA),
    "cohere": replace(LAYER_NORM, mid=None),
    "stablelm": LAYER_NORM,
    "starcoder2": replace(LAYER_NORM, neurons="mlp.c_proj"),
    "gpt2": GPT2,
    "gptj": GPTJ,
    "gpt_neox": GPT_NEOX,
    "falcon": FALCON,
    "bloom": BLOOM,
    "opt": OPT,
    "phi": PHI,
}


def family_of(config: Any) -> Family:
    """The family of a transformers configuration."""
    family = FAMILIES[config.model_type]
    parallel = any(getattr(config, name, False) for name in ("use_parallel_residual", "parallel_attn"))
    return replace(family, mid=None) if parallel else family


def kv_heads_of(config: Any) -> int:
    """Key-value heads of a transformers configuration."""
    if config.model_type == "falcon" and not config.new_decoder_architecture:
        return 1 if config.multi_query else int(config.num_attention_heads)
    named = ("num_key_value_heads", "num_kv_heads", "num_attention_heads")
    return next(int(count) for count in (getattr(config, name, None) for name in named) if count)
