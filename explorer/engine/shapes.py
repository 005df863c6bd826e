"""What a transformers configuration says about a model: its sizes, its dtype, the longest prompt."""

from __future__ import annotations

from typing import Any

from ..errors import BootError
from ..hooks import ModelShape

# Architectures whose layers are Llama-shaped: two norms, attention and MLP each read from the stream and added to it.
ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Phi3ForCausalLM")

LEAST_LENGTH = 3  # a token of prompt and two generated ones: what boot tries first


def model_shape(config: Any) -> ModelShape:
    """The sizes of a configuration; `BootError` for an architecture that is not served."""
    config = config.get_text_config()
    architecture = (config.architectures or [type(config).__name__])[0]
    if architecture not in ARCHITECTURES:
        raise BootError(
            f"boot: {architecture} is not served yet; the architectures that are: {', '.join(ARCHITECTURES)}"
        )
    heads = config.num_attention_heads
    return ModelShape(
        layers=config.num_hidden_layers,
        d_model=config.hidden_size,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        d_head=getattr(config, "head_dim", None) or config.hidden_size // heads,
        d_mlp=config.intermediate_size,
        d_vocab=config.vocab_size,
    )


def model_length(asked: int | None, config: Any, extended: bool = False) -> int:
    """Tokens of prompt and generation together: what was asked for, else the model's own.

    `BootError` for more than the model has positions, unless the caller `extended` them.
    """
    own = int(getattr(config.get_text_config(), "max_position_embeddings", 2048))
    length = own if asked is None else asked
    if length < LEAST_LENGTH:
        raise BootError(f"boot: max_model_len={length} leaves no room to generate; use at least {LEAST_LENGTH}")
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    if length > own and rope.get("rope_type", "default") == "default" and not extended:
        raise BootError(f"boot: max_model_len={length} is more than the {own} positions that the model has")
    return length


def model_dtype(asked: Any, config: Any) -> str:
    """The name of a dtype: what was asked for, else the checkpoint's own."""
    own = str(config.dtype or "float32").removeprefix("torch.")
    dtype = str(asked or "auto").removeprefix("torch.")
    dtype = {"auto": own, "half": "float16", "float": "float32"}.get(dtype, dtype)
    if dtype not in ("float32", "bfloat16", "float16"):
        raise BootError(f"boot: dtype {dtype!r} is not served; use 'float32', 'bfloat16' or 'float16'")
    return dtype
