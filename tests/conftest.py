"""What every suite shares: tiny random checkpoints, made once a test session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from . import tiny


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The checkpoint folder of a tiny random model of one family."""
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            model_type, sizes = tiny.FAMILIES[family]
            made[family] = tiny.make(tmp_path_factory.mktemp("models") / f"tiny-{family}", model_type, **sizes)
        return made[family]

    return folder
