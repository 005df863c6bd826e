"""Sessions of the engine suite, booted once: several live side by side in one process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import explorer

SMOL = "smollm2-135m"
SMOL_LENGTH = 2048
ENGINES = ("vllm", "transformers")
# On a GPU many sessions share one device, and the first would take half of it.
ROOM = {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 2**28} if torch.cuda.is_available() else {}


@pytest.fixture(scope="session")
def booted(tiny_folder: Callable[[str], Path]) -> Iterator[Callable[..., explorer.Session]]:
    """`booted(name, **keywords)`: the session of a tiny family or of SmolLM2; the same call gives the same session."""
    with contextlib.ExitStack() as stack:
        sessions: dict[tuple[object, ...], explorer.Session] = {}

        def boot(name: str, **keywords: object) -> explorer.Session:
            if keywords.get("engine") == "vllm":  # the default
                del keywords["engine"]
            key = (name, *sorted(keywords.items()))
            if key not in sessions:
                model = name if name == SMOL else tiny_folder(name)
                room = ROOM if "engine" not in keywords else {}
                sessions[key] = stack.enter_context(explorer.boot(model, **(room | keywords)))
            return sessions[key]

        yield boot


@pytest.fixture(scope="session")
def smol(booted: Callable[..., explorer.Session]) -> explorer.Session:
    """SmolLM2 in fp32."""
    return booted(SMOL, dtype="float32", max_model_len=SMOL_LENGTH)


@pytest.fixture(scope="session")
def smol_bf16(booted: Callable[..., explorer.Session]) -> explorer.Session:
    """SmolLM2 in bf16."""
    return booted(SMOL, dtype="bfloat16", max_model_len=SMOL_LENGTH)


@pytest.fixture(scope="session")
def llama(booted: Callable[..., explorer.Session]) -> explorer.Session:
    """Two random layers, fp32: 4 heads, 2 key-value heads, d_model 96, d_head 32."""
    return booted("llama")


@pytest.fixture(params=ENGINES)
def either(request: pytest.FixtureRequest, booted: Callable[..., explorer.Session]) -> explorer.Session:
    """The tiny Llama in each of the engines."""
    return booted("llama", engine=request.param)


@pytest.fixture(params=ENGINES)
def either_smol(request: pytest.FixtureRequest, booted: Callable[..., explorer.Session]) -> explorer.Session:
    """SmolLM2 in fp32 in each of the engines."""
    return booted(SMOL, engine=request.param, dtype="float32", max_model_len=SMOL_LENGTH)


@pytest.fixture(params=ENGINES)
def either_smol_bf16(request: pytest.FixtureRequest, booted: Callable[..., explorer.Session]) -> explorer.Session:
    """SmolLM2 in bf16 in each of the engines."""
    return booted(SMOL, engine=request.param, dtype="bfloat16", max_model_len=SMOL_LENGTH)
