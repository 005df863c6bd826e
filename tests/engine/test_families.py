"""Every place of every family that can be edited: logits as transformers' under the same edit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import AutoModelForCausalLM

import explorer

from .. import tiny
from ..reference import reference
from .compare import relative
from .conftest import ENGINES

IDS = [1, 17, 45, 80, 31, 9, 120, 64, 33, 52]
POSITION = 4


@pytest.mark.parametrize(("engine", "family"), [(engine, family) for engine in ENGINES for family in tiny.FAMILIES])
def test_an_edit_at_every_hook(booted: Callable[..., explorer.Session], engine: str, family: str) -> None:
    session = booted(family, engine=engine)
    ref = reference(session.model_path, engine)
    random = torch.Generator().manual_seed(5)
    specs = {
        point.name: {
            point.name: [
                {"op": "scale", "factor": -1.5, "pos": POSITION},
                {"op": "add", "value": torch.randn(point.shape, generator=random).tolist(), "pos": POSITION},
            ]
        }
        for point in session.hooks
        if point.editable
    }
    clean = ref.run(IDS).logits
    for (name, spec), run in zip(specs.items(), session.run([IDS] * len(specs), list(specs.values())), strict=True):
        want = ref.run(IDS, spec).logits
        assert relative(want[POSITION:], clean[POSITION:]) > 1e-3, f"{name}: the edit must show"
        assert relative(run.logits, want) <= 1e-4, name


def test_transformers_still_builds_what_vllm_ran(booted: Callable[..., explorer.Session]) -> None:
    # vLLM runs this family through transformers' classes, and alters them
    session = booted("gpt_neox")
    built = AutoModelForCausalLM.from_pretrained(session.model_path, dtype=torch.float32).eval()
    with torch.no_grad():
        want = built(torch.tensor([IDS])).logits[0]
    assert relative(session.run(IDS).logits, want) <= 1e-4
