"""What a transformers configuration says about a model: its sizes, its dtype, the longest prompt."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..errors import BootError
from ..hooks import ModelShape
from ..models import hub_options

# Architectures whose layers are Llama-shaped: two norms, attention and MLP each read from the stream and added to it.
ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Phi3ForCausalLM")

SIZES = (
    *("tensor_parallel_size", "pipeline_parallel_size", "max_num_batched_tokens", "max_model_len", "max_num_seqs"),
    *("kv_cache_memory_bytes", "block_size"),
)
BATCH_TOKENS = 2048  # tokens in one forward pass where nothing else was asked for
LEAST_LENGTH = 3  # a token of prompt and two generated ones: what boot tries first


def read_config(path: str, options: Mapping[str, Any]) -> Any:
    """The configuration of a folder or hub id, as the engine will see it: with `hf_overrides` applied."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path, **hub_options(options))
    overrides = options.get("hf_overrides") or {}
    if callable(overrides):
        return overrides(config)
    config.update(overrides)
    return config


def architecture(config: Any) -> str:
    """The model class that a configuration names; where it names none, transformers' own for its model type."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if config.architectures:
        return str(config.architectures[0])
    return str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(getattr(config, "model_type", ""), type(config).__name__))


def model_shape(config: Any) -> ModelShape:
    """The sizes of a configuration; `BootError` for an architecture that is not served."""
    config = config.get_text_config()
    name = architecture(config)
    if name not in ARCHITECTURES:
        raise BootError(f"boot: {name} is not served yet; the architectures that are: {', '.join(ARCHITECTURES)}")
    if config.num_hidden_layers < 1:
        raise BootError(
            "boot: the model's configuration has no layers (num_hidden_layers is 0); nothing could be hooked"
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


def check_sizes(options: Mapping[str, Any]) -> None:
    """`BootError` for a size that is none. None is whatever the engine chooses."""
    for name in SIZES:
        value = options.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise BootError(f"boot: {name} must be a whole number of at least 1, not {value!r}")
    fraction = options.get("gpu_memory_utilization")
    if fraction is not None and (
        isinstance(fraction, bool) or not isinstance(fraction, (int, float)) or not 0 < fraction <= 1
    ):
        raise BootError(f"boot: gpu_memory_utilization must be between 0 and 1, not {fraction!r}")


def weights_bytes(path: str, config: Any, dtype: str) -> int | None:
    """What a checkpoint's weights take in memory as `dtype`; None where no safetensors file of it is at hand."""
    folder = Path(path)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError

        try:
            folder = Path(snapshot_download(path, local_files_only=True, allow_patterns="*.safetensors"))
        except LocalEntryNotFoundError:
            return None
    stored = (config.dtype or torch.float32).itemsize
    files = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return files * getattr(torch, dtype).itemsize // stored or None  # type: ignore[no-any-return]


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
