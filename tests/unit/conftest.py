"""Fixtures of the unit tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from explorer.models import resolve
from explorer.tokens import load_tokenizer

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
