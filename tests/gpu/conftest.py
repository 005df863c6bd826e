"""One model's sessions and references: eager and compiled, bf16 and fp32, booted when a test first asks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import explorer
from explorer.engine.vllm import internals

from ..reference import Reference
from .models import folder_of

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
# Several engines share one device; vLLM would take half of it for the first.
ROOM = {"max_model_len": 1024, "kv_cache_memory_bytes": 2**30, "gpu_memory_utilization": 0.2}
if not ON_GPU:
    ROOM = {"max_model_len": 1024}
PARALLEL = ("tensor", "pipeline")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--model", default="tiny", help="what tests.gpu.models knows, a bundled name or a folder")
    for kind in PARALLEL:
        parser.addoption(f"--{kind}-parallel", type=int, default=1, help="worker processes, one a GPU")
    parser.addoption("--rehearse", action="store_true", help="run without a GPU: everything but speed is as there")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    ours = [item for item in items if Path(__file__).parent in item.path.parents]
    items.sort(key=lambda item: item in ours and "compiled" in item.nodeid)  # what takes minutes to boot comes last
    if not (ON_GPU or config.getoption("--rehearse", default=False)):
        for item in ours:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU (--rehearse runs it without)"))


@pytest.fixture(scope="session", autouse=True)
def edits_in_graphs() -> Iterator[None]:
    """In a rehearsal too: without a GPU edits stay out of the compiled graph unless told otherwise."""
    with pytest.MonkeyPatch.context() as patch:
        if not ON_GPU:
            patch.setattr(internals, "compiles_edits", lambda inner: not getattr(inner, "do_not_compile", True))
        yield


@pytest.fixture(scope="session")
def folder(request: pytest.FixtureRequest) -> Path:
    """The checkpoint folder of the model under test."""
    return folder_of(request.config.getoption("--model", default="tiny"))


Booted = Callable[..., explorer.Session]


@pytest.fixture(scope="session")
def parallel(request: pytest.FixtureRequest) -> dict[str, int]:
    """How many workers share the model, as keywords; empty with one."""
    asked = {f"{kind}_parallel_size": request.config.getoption(f"--{kind}-parallel", default=1) for kind in PARALLEL}
    return {name: size for name, size in asked.items() if size > 1}


@pytest.fixture(scope="session")
def booted(folder: Path, parallel: dict[str, int]) -> Iterator[Booted]:
    """`booted(**keywords)`: the same call gives the same session."""
    with contextlib.ExitStack() as stack:

        @cache
        def boot(**keywords: Any) -> explorer.Session:
            return stack.enter_context(explorer.boot(folder, **(ROOM | parallel | keywords)))

        yield boot


@pytest.fixture(scope="session")
def eager(booted: Booted) -> explorer.Session:
    """In bf16, as people boot it."""
    return booted(dtype="bfloat16")


@pytest.fixture(scope="session")
def exact(booted: Booted) -> explorer.Session:
    """In fp32; on a GPU with Triton's attention, the only one that takes it."""
    return booted(dtype="float32")


@pytest.fixture(scope="session")
def compiled(booted: Booted) -> explorer.Session:
    """In bf16, compiled: on a GPU with CUDA graphs."""
    return booted(dtype="bfloat16", mode="compiled")


@pytest.fixture(scope="session")
def want(folder: Path) -> Iterator[Reference]:
    """transformers in fp32 on the same device, products in full precision."""
    with full_precision():
        yield Reference(folder, device=DEVICE)


@pytest.fixture(scope="session")
def want_bf16(folder: Path) -> Reference:
    """transformers in bf16: what bf16 itself costs."""
    return Reference(folder, dtype=torch.bfloat16, device=DEVICE)


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """Without TF32, which rounds what is multiplied to 10 bits."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.fixture(scope="session")
def prompts(eager: explorer.Session) -> list[tuple[int, ...]]:
    """Of several lengths; words where the model knows any."""
    return prompts_of(eager)


def prompts_of(session: explorer.Session) -> list[tuple[int, ...]]:
    texts = [
        "The Eiffel Tower is in the city of",
        "When Mary and John went to the store, John gave a drink to",
        "Two households, both alike in dignity, In fair Verona, where we lay our scene, From ancient grudge break to "
        "new mutiny, Where civil blood makes civil hands unclean.",
    ]
    return [session.encode(text) for text in texts]
