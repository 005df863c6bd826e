"""Tiny random models with a word-level tokenizer, for tests that need a model but no knowledge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
)

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


def make(folder: Path, model_type: str = "llama", **overrides: Any) -> Path:
    """Write a random fp32 model and its tokenizer (words `w0` to `w156`) to `folder`; the same weights every time."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **(SIZES | overrides))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            # large enough that attention and the MLP matter, norms off one so that a forgotten weight shows
            weight.copy_(torch.randn_like(weight) * 0.15 + (1.0 if "norm" in name else 0.0))
    model.save_pretrained(folder)
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i + 3 for i in range(VOCABULARY - 3)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = Whitespace()
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    return folder
