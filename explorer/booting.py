"""Booting: from the name of a model to a session on it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from .engine.process import one_boot
from .engine.protocol import Engine
from .errors import BootError
from .given import short
from .jobs import Job, Jobs
from .models import hub_options, resolve
from .session import Session
from .status import StatusLine
from .tokens import load_tokenizer, token_table

# TransformerLens's boot_vllm has to be told at boot what will be used later; nothing has to be told here.
ALWAYS_ON = ("enable_batching", "enable_position_interventions")

# Keywords that go to more than one library, each of which would take something else for what is meant.
KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "hf_token": ((str, bool), "a token, or True for the one of this machine"),
    "revision": ((str,), "a string"),
    "tokenizer_revision": ((str,), "a string"),
    "trust_remote_code": ((bool,), "True or False"),
}


def boot(
    model: str | Path,
    *,
    engine: str = "auto",
    mode: str | None = None,
    tokenizer: Any = None,
    dtype: str | torch.dtype | None = None,
    gpu_memory_utilization: float = 0.5,
    max_model_len: int | None = None,
    max_num_batched_tokens: int = 2048,
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    **vllm_kwargs: Any,
) -> Session:
    """Load a model and make it ready: imports, weights and the first forward pass all happen here.

    Args:
        model: a bundled name (`smollm2-135m`), a hub id, or a folder.
        engine: `vllm`, `transformers`, or `auto`: vLLM where it is installed, else transformers, and a line says so.
        mode: `eager` (None is that too), or `compiled`: vLLM's compiled graphs stay on wherever nothing is captured or
            edited, and a step that does either runs the same layers uncompiled (on one GPU edits have a compiled graph
            too, made at the first of them). The first compiled boot takes longer.
        tokenizer: a folder, a hub id or a transformers tokenizer, when it is not the model's own.
        dtype: None is the checkpoint's own; else `float32`, `bfloat16` or `float16`.
        gpu_memory_utilization: the share of a GPU's memory that vLLM may take. On a CPU the key-value cache is sized
            for `max_model_len` and one batch instead (`kv_cache_memory_bytes` sets it).
        max_model_len: the longest prompt plus generation, in tokens, a prompt alone counting as one more; None is the
            model's own.
        max_num_batched_tokens: tokens in one forward pass; longer prompts run in chunks.
        tensor_parallel_size, pipeline_parallel_size: worker processes that share heads and neurons, and layers; see
            docs/parallel.md.
        vllm_kwargs: other keywords of `vllm.LLM`, `hf_token` among them; those that captures stand on are locked, see
            the README. The transformers engine takes a few of them.

    Raises `BootError` (a ValueError), one sentence: before weights load, or after the first forward pass for what only
    that shows of a model; ImportError with the install line where vLLM is missing.
    """
    if engine not in ("auto", "vllm", "transformers"):
        raise BootError(f"boot: engine must be 'vllm', 'transformers' or 'auto', not {engine!r}")
    if mode not in (None, "eager", "compiled"):
        raise BootError(f"boot: mode must be 'eager' or 'compiled', not {mode!r}")
    for name, (kinds, meant) in KINDS.items():
        given = vllm_kwargs.get(name)
        if given is not None and not isinstance(given, kinds):
            raise BootError(f"boot: {name} must be {meant}, not {short(given)}")
    if engine == "vllm" and not find_spec("vllm"):  # said before a tokenizer is looked for on the hub
        from .engine.vllm.boot import INSTALL

        raise ImportError(f"engine='vllm' needs vLLM: {INSTALL}")
    for name in ALWAYS_ON:
        if name in vllm_kwargs:
            del vllm_kwargs[name]
            warnings.warn(f"boot: {name} changes nothing here: batches and positions always work", stacklevel=2)
    options = vllm_kwargs | {
        "mode": mode or "eager",
        "dtype": None if dtype is None else str(dtype).removeprefix("torch."),
        "gpu_memory_utilization": gpu_memory_utilization,
        "max_model_len": max_model_len,
        "max_num_batched_tokens": max_num_batched_tokens,
        "tensor_parallel_size": tensor_parallel_size,
        "pipeline_parallel_size": pipeline_parallel_size,
    }
    hub = hub_options(vllm_kwargs)
    with one_boot(), StatusLine(str(model)) as line:
        if engine == "auto":
            engine = "vllm" if find_spec("vllm") else "transformers"
            if engine == "transformers":
                line.say("vLLM is not installed: the transformers engine runs the model, slower and just as exact")
        path = str(resolve(model, lambda fraction, stage: line.bar(fraction, stage) if fraction < 1 else None))
        words = _words(path if tokenizer is None else tokenizer, tokenizer is None, vllm_kwargs)
        token_table(words, [0])  # reads the tokenizer's definition, which is slow the first time
        jobs = Jobs(f"explorer-{Path(path).name}")
        built: list[Engine] = []

        def build(progress: Callable[[str], None]) -> Engine:
            return _build(engine, path, options, _stop_ids(words, path, hub), progress)

        def undo(job: Job) -> None:
            for one in built:  # an interrupt is raised after a build that could not hear it
                one.close()

        try:
            jobs.call(lambda job: built.append(build(line)))
            session = Session(str(model), path, built[0], words, jobs, build)
        except BaseException:
            jobs.close(undo)
            raise
        if session.model.no_head:
            line.say(
                f"predictions at the last position only: the head cannot be asked for more ({session.model.no_head})"
            )
        line.say(f"{session!r}; {_memory(session.info)}ready in {line.seconds:.1f} s")
    return session


def _memory(info: dict[str, Any]) -> str:
    """What weights and cache take, as far as the engine knows, and which keywords lower them."""
    sizes = [("weights", "weights_bytes", "dtype"), ("key-value cache", "cache_bytes", info.get("cache_keyword"))]
    known = [(what, info[key], keyword) for what, key, keyword in sizes if info.get(key)]
    return "".join(f"{what} {size / 2**30:.2f} GiB ({keyword} lowers it); " for what, size, keyword in known)


def _words(tokenizer: Any, own: bool, options: dict[str, Any]) -> Any:
    """A tokenizer from its folder or hub id; one that is loaded already as it is. `own`: it comes with the model."""
    if all(hasattr(tokenizer, name) for name in ("encode", "decode", "convert_ids_to_tokens", "all_special_ids")):
        return tokenizer
    if not isinstance(tokenizer, (str, Path)):
        raise BootError(f"boot: tokenizer is a folder, a hub id or a transformers tokenizer, not {short(tokenizer)}")
    revision = options.get("tokenizer_revision") or (options.get("revision") if own else None)
    return load_tokenizer(tokenizer, **hub_options(options | {"revision": revision}))


def _stop_ids(tokenizer: Any, path: str, hub: dict[str, Any]) -> list[int]:
    """The ids that end a generation: the tokenizer's end of sequence, and those of the model's generation config."""
    from transformers import GenerationConfig

    try:
        eos = GenerationConfig.from_pretrained(path, **hub).eos_token_id
    except OSError:  # a model without one
        eos = None
    ids = [tokenizer.eos_token_id, *(eos if isinstance(eos, list) else [eos])]
    return list(dict.fromkeys(i for i in ids if i is not None))


def _build(
    engine: str, path: str, options: dict[str, Any], stop_ids: list[int], progress: Callable[[str], None]
) -> Engine:
    options = {name: value for name, value in options.items() if value is not None}
    if engine == "transformers":
        from .engine.transformers.engine import TransformersEngine

        return TransformersEngine(path, options, stop_ids, progress)
    from .engine.vllm.engine import VllmEngine

    return VllmEngine(path, options, stop_ids, progress)
