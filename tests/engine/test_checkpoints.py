"""Checkpoints that leave something out or hold something odd: no architecture, no dtype, a final norm of zeros."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import explorer

from ..reference import reference
from .compare import relative, same
from .conftest import ENGINES

IDS = [1, 17, 45, 80, 31, 9]


@pytest.fixture
def changed(tiny_folder: Callable[[str], Path], tmp_path: Path) -> Callable[..., Path]:
    """The tiny Llama's folder with other weights, and keys of config.json replaced; `...` removes one."""

    def change(weights: dict[str, torch.Tensor] | None = None, **keys: Any) -> Path:
        folder = shutil.copytree(tiny_folder("llama"), tmp_path / "changed")
        config = json.loads((folder / "config.json").read_text()) | keys
        (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))
        stored = load_file(folder / "model.safetensors")
        assert set(weights or {}) <= set(stored)
        save_file(stored | (weights or {}), folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    return change


@pytest.mark.parametrize("engine", ENGINES)
def test_the_last_norm_is_read_though_its_weight_is_zero(changed: Callable[..., Path], engine: str) -> None:
    # dividing the normed stream by the weight would be 0 / 0 here
    weight = torch.ones(96)
    weight[::2] = 0.0
    with explorer.boot(changed({"model.norm.weight": weight}), engine=engine) as session:
        run = session.run(IDS, capture="ln_final.hook_normalized")
        want = reference(session.model_path).run(IDS)
        assert relative(run["ln_final.hook_normalized"], want["ln_final.hook_normalized"]) <= 1e-4
        assert bool((run["ln_final.hook_normalized"] != 0).all())
        assert relative(run.logits, want.logits) <= 1e-4


@pytest.mark.parametrize("engine", ENGINES)
def test_neither_architecture_nor_dtype_is_written_down(
    changed: Callable[..., Path], booted: Callable[..., explorer.Session], engine: str
) -> None:
    # vLLM alone would take the model without its head, and float16
    with explorer.boot(changed(architectures=None, dtype=..., torch_dtype=...), engine=engine) as session:
        assert session.info["dtype"] == "float32"
        assert same(session.run(IDS, capture="all"), booted("llama", engine=engine).run(IDS, capture="all"))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_model_without_layers(changed: Callable[..., Path], engine: str) -> None:
    with pytest.raises(explorer.BootError, match="has no layers"):
        explorer.boot(changed(num_hidden_layers=0), engine=engine)
