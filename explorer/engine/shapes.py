"""What a transformers configuration says about a model: its sizes, its dtype, the longest prompt."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..errors import BootError
from ..given import first_line, short
from ..hooks import ModelShape
from ..models import hub_options

# What configurations of state-space and linear-attention layers have, and no other.
RECURRENT = (
    *("state_size", "ssm_state_size", "mamba_d_state", "lru_width", "linear_num_key_heads", "conv_L_cache"),
    "attention_hidden_size",
)
ATTENTION_TYPES = ("full_attention", "sliding_attention", "chunked_attention", "attention")
NEURONS = ("ffn_hidden_size", "n_inner", "ffn_dim", "intermediate_size")  # the first that is set, else 4 x d_model

SIZES = (
    *("tensor_parallel_size", "pipeline_parallel_size", "max_num_batched_tokens", "max_model_len", "max_num_seqs"),
    *("kv_cache_memory_bytes", "block_size"),
)
BATCH_TOKENS = 2048  # tokens in one forward pass where nothing else was asked for
LEAST_LENGTH = 3  # a token of prompt and two generated ones: what boot tries first


def read_config(path: str, options: Mapping[str, Any]) -> Any:
    """The configuration of a folder or hub id, as the engine will see it: with `hf_overrides` applied.

    `BootError` when it cannot be read, and for overrides that do not fit it.
    """
    from transformers import AutoConfig

    overrides = options.get("hf_overrides") or {}
    if not callable(overrides) and not isinstance(overrides, dict):
        raise BootError(f"boot: hf_overrides must be a dict or a function of the configuration, not {short(overrides)}")
    try:
        config = AutoConfig.from_pretrained(path, **hub_options(options))
    except (OSError, ValueError, KeyError) as error:
        raise BootError(f"boot: the configuration of {path!r} cannot be read: {first_line(error)}") from error
    if callable(overrides):
        return overrides(config)
    try:
        config.update(overrides)
    except Exception as error:  # of many kinds: each class of configurations checks what it is given
        raise BootError(f"boot: hf_overrides={short(overrides)} does not fit the model: {first_line(error)}") from error
    return config


def architecture(config: Any) -> str:
    """The model class that a configuration names; where it names none, transformers' own for its model type."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if config.architectures:
        return str(config.architectures[0])
    return str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(getattr(config, "model_type", ""), type(config).__name__))


def model_shape(config: Any) -> ModelShape:
    """The sizes of a configuration; `BootError` for an architecture that is known not to be served."""
    whole, config = config, config.get_text_config()
    reason = _refused(whole, config)
    if reason is not None:
        raise BootError(f"boot: {architecture(whole)} is not served: {reason}")
    if config.num_hidden_layers < 1:
        raise BootError(
            "boot: the model's configuration has no layers (num_hidden_layers is 0); nothing could be hooked"
        )
    heads, d_model = config.num_attention_heads, config.hidden_size
    return ModelShape(
        layers=config.num_hidden_layers,
        d_model=d_model,
        heads=heads,
        kv_heads=_kv_heads(config, heads),
        d_head=getattr(config, "head_dim", None) or d_model // heads,
        d_mlp=next((n for n in (getattr(config, name, None) for name in NEURONS) if n), 4 * d_model),
        d_vocab=config.vocab_size,
    )


def _refused(whole: Any, config: Any) -> str | None:
    """Why no engine serves this model, or None. What is unknown is tried: the first forward pass shows what it has."""
    if getattr(whole, "is_encoder_decoder", False):
        return "encoder-decoders have two streams; the session runs decoders"
    others = sorted(set(getattr(config, "layer_types", None) or ()).difference(ATTENTION_TYPES))
    if others or any(getattr(config, name, None) is not None for name in RECURRENT):
        kind = f" ({', '.join(others)})" if others else ""
        return f"its state-space or linear-attention layers{kind} have no attention to look into"
    if getattr(config, "do_layer_norm_before", True) is False:
        return "its norms come after each layer's sum, so that nothing adds up to a residual stream"
    return None


def _kv_heads(config: Any, heads: int) -> int:
    if hasattr(config, "num_kv_heads"):  # Falcon
        return int(config.num_kv_heads) if config.new_decoder_architecture else 1 if config.multi_query else heads
    return getattr(config, "num_key_value_heads", None) or heads


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
