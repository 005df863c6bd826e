"""Fixtures of the unit tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from explorer import Session
from explorer.engine.vllm import internals
from explorer.models import resolve
from explorer.tokens import load_tokenizer

from . import fake
from .tokenizer_zoo import byte_level


@pytest.fixture(scope="session")
def tiny() -> Any:
    return byte_level(merges=(("Ġ", "P"), ("a", "r"), ("ĠP", "ar"), ("i", "s"), ("ĠPar", "is")))


@pytest.fixture(scope="session")
def smol_folder() -> Path:
    return Path(resolve("smollm2-135m"))


@pytest.fixture(scope="session")
def smol(smol_folder: Path) -> Any:
    return load_tokenizer(smol_folder)


@pytest.fixture
def engine() -> fake.FakeEngine:
    return fake.FakeEngine()


@pytest.fixture
def session(engine: fake.FakeEngine) -> Iterator[Session]:
    """An open session on the fake engine."""
    with fake.session(engine) as session:
        yield session


@pytest.fixture(params=[True, False], ids=["cpu", "gpu"])
def on_cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether vLLM runs on the CPU here: a test that asks runs twice."""
    monkeypatch.setattr(internals, "on_cpu", lambda: request.param)
    return request.param
