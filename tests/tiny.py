"""Tiny random models with a word-level tokenizer, for tests that need a model but no knowledge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoConfig, PreTrainedTokenizerFast

from .untouched import model_class

VOCABULARY = 160
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 96,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

LEFT_OUT = object()  # for a size that the family's configuration does not have
ALTERNATING = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
# Where the sizes leave no choice: d_head is hidden_size / heads, and there are as many key-value heads as heads.
DIVIDED = {"hidden_size": 128, "head_dim": LEFT_OUT}
MULTI_HEAD = DIVIDED | {"num_key_value_heads": LEFT_OUT}
FALCON = MULTI_HEAD | {"intermediate_size": LEFT_OUT, "bias": True}  # neurons: four times hidden_size, in vLLM
MLA = {
    "head_dim": LEFT_OUT,
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 512,  # this and the next as in the real ones: vLLM has kernels for no others
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}

# name -> (transformers model type, what differs from SIZES)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "mistral": ("mistral", {"sliding_window": 4}),
    "qwen2": ("qwen2", DIVIDED),
    "qwen3": ("qwen3", {}),
    "phi3": ("phi3", {}),
    "gemma": ("gemma", {}),
    # caps so low that they bend what random weights give
    "gemma2": (
        "gemma2",
        ALTERNATING | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 20},
    ),
    "gemma3": ("gemma3_text", ALTERNATING | {"query_pre_attn_scalar": 20}),
    "mixtral": ("mixtral", EXPERTS),
    "qwen2_moe": (
        "qwen2_moe",
        DIVIDED | EXPERTS | {"moe_intermediate_size": 48, "shared_expert_intermediate_size": 64},
    ),
    "qwen3_moe": ("qwen3_moe", EXPERTS | {"moe_intermediate_size": 48, "norm_topk_prob": True}),
    "olmoe": ("olmoe", DIVIDED | EXPERTS),
    "gpt_oss": ("gpt_oss", ALTERNATING | EXPERTS | {"intermediate_size": 96}),  # vLLM on CPU: a multiple of 32
    "gpt2": ("gpt2", MULTI_HEAD | {"intermediate_size": LEFT_OUT, "n_inner": 80}),
    "gpt_neox": ("gpt_neox", MULTI_HEAD),
    "gpt_neox_sequential": ("gpt_neox", MULTI_HEAD | {"use_parallel_residual": False}),
    "gptj": ("gptj", MULTI_HEAD | {"intermediate_size": LEFT_OUT, "n_inner": 80, "rotary_dim": 16}),
    "opt": ("opt", MULTI_HEAD | {"intermediate_size": LEFT_OUT, "ffn_dim": 80}),
    "bloom": ("bloom", MULTI_HEAD | {"intermediate_size": LEFT_OUT}),  # four times hidden_size
    "falcon": ("falcon", FALCON),
    "falcon_new": ("falcon", FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "phi": ("phi", DIVIDED),
    "stablelm": ("stablelm", DIVIDED | {"use_qkv_bias": True}),
    "starcoder2": ("starcoder2", DIVIDED | {"sliding_window": 4}),
    "cohere": ("cohere", {"logit_scale": 0.25, "use_qk_norm": True}),
    "granite": (
        "granite",
        {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.1, "logits_scaling": 2.0},
    ),
    "olmo2": ("olmo2", DIVIDED),
    "olmo3": ("olmo3", DIVIDED | ALTERNATING),
    "deepseek_v2": ("deepseek_v2", MLA | {"topk_method": "greedy", "n_group": 1, "topk_group": 1}),
    # the first layer is dense, as in the real ones
    "deepseek_v3": (
        "deepseek_v3",
        MLA
        | {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "n_group": 2, "topk_group": 1}
        | {"first_k_dense_replace": 1},
    ),
}


def make(folder: Path, model_type: str = "llama", **overrides: Any) -> Path:
    """Write a random fp32 model and its tokenizer (words `w0` to `w156`) to `folder`; the same weights every time."""
    torch.manual_seed(0)
    sizes = {name: size for name, size in (SIZES | overrides).items() if size is not LEFT_OUT}
    config = AutoConfig.for_model(model_type, **sizes)
    model = model_class(config)._from_config(config, dtype=torch.float32)
    norms = {id(p) for m in model.modules() if "Norm" in type(m).__name__ for p in m.parameters(recurse=False)}
    with torch.no_grad():
        for weight in model.parameters():
            # Large enough that attention and the MLP matter. Norms around where they start (one, for Gemma zero, for
            # biases zero), but off it, so that a forgotten weight shows.
            weight.copy_(torch.randn_like(weight) * 0.15 + (weight.mean() if id(weight) in norms else 0.0))
    model.save_pretrained(folder)
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i + 3 for i in range(VOCABULARY - 3)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = Whitespace()
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    return folder
