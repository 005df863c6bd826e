"""Patch sources in every form, and specs that make a run again, in both engines."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import explorer
from explorer import Edit

from ..reference import reference
from .compare import relative, same

IDS = [1, 17, 45, 80, 31, 9, 120, 64]
OTHER = [1, 90, 14, 77, 31, 100]
HOOK = "blocks.0.hook_out"
HALVED = {"blocks.0.mlp.hook_out": {"op": "scale", "factor": 0.5}}


@pytest.fixture
def want(either: explorer.Session) -> torch.Tensor:
    """Logits of the patch that every form of the source must give, from transformers."""
    spec = {HOOK: {"op": "patch", "source": {"ids": OTHER, "edits": HALVED}, "pos": [7, 2], "source_pos": [5, 3]}}
    return reference(either.model_path).run(IDS, spec).logits


def words(ids: list[int]) -> str:
    """The prompt that the tiny tokenizer turns into these ids."""
    return " ".join("<s>" if i == 1 else f"w{i - 3}" for i in ids)


@pytest.mark.parametrize(
    "form", ["recipe", "recipe of a prompt", "run that captured it", "run that did not", "its recipe"]
)
def test_forms_of_a_source(either: explorer.Session, want: torch.Tensor, form: str) -> None:
    source: Any = {
        "recipe": lambda: {"ids": OTHER, "edits": HALVED},
        "recipe of a prompt": lambda: {"prompt": words(OTHER), "edits": HALVED},
        "run that captured it": lambda: either.run(OTHER, HALVED, capture=HOOK),
        "run that did not": lambda: either.run(words(OTHER), HALVED, capture="blocks.1.hook_out"),
        "its recipe": lambda: json.loads(json.dumps(either.run(OTHER, HALVED).recipe())),
    }[form]()
    run = either.run(IDS, Edit(HOOK, "patch", source=source, pos=[7, 2], source_pos=[5, 3]))
    assert relative(run.logits, want) <= 1e-4


@pytest.mark.parametrize("source", [OTHER, tuple(OTHER), words(OTHER)], ids=["ids", "tuple of ids", "prompt"])
def test_plain_prompts_are_sources(either: explorer.Session, source: Any) -> None:
    spec = {HOOK: {"op": "patch", "source": {"ids": OTHER}, "pos": [4]}}
    got = either.run(IDS, {HOOK: {"op": "patch", "source": source, "pos": 4}}).logits
    assert relative(got, reference(either.model_path).run(IDS, spec).logits) <= 1e-4


def test_source_of_a_source(either: explorer.Session) -> None:
    # what was patched into OTHER from the reversed prompt is patched on into IDS
    deepest = {"ids": OTHER[::-1], "edits": HALVED}
    middle = {"ids": OTHER, "edits": {"blocks.0.attn.o.hook_in": {"op": "patch", "source": deepest, "head": 1}}}
    spec = {"blocks.1.hook_in": {"op": "patch", "source": middle, "pos": list(range(6))}}
    got = either.run(IDS, spec)
    want = reference(either.model_path).run(IDS, spec)
    without = {"blocks.1.hook_in": {"op": "patch", "source": {"ids": OTHER}, "pos": list(range(6))}}
    assert relative(want.logits, reference(either.model_path).run(IDS, without).logits) > 1e-2
    assert relative(got.logits, want.logits) <= 1e-4


def test_one_source_for_many_edits_and_prompts(either: explorer.Session) -> None:
    source = {"ids": OTHER, "edits": HALVED}
    specs = [{f"blocks.{n % 2}.hook_out": {"op": "patch", "source": source, "pos": [n % 6, 5]}} for n in range(5)]
    for spec, run in zip(specs, either.run([IDS] * 5, specs), strict=True):
        assert relative(run.logits, reference(either.model_path).run(IDS, spec).logits) <= 1e-4


def test_a_row_of_the_source_may_be_read_more_than_once(either: explorer.Session) -> None:
    want = either.run(OTHER, capture=HOOK)[HOOK]
    for source in (OTHER, either.run(OTHER, capture=HOOK), either.run(OTHER)):
        got = either.run(IDS, Edit(HOOK, "patch", source=source, pos=[1, 3, 4], source_pos=[2, 5, 2]), capture=HOOK)
        torch.testing.assert_close(got[HOOK][[1, 3, 4]], want[[2, 5, 2]], atol=0, rtol=0)


def test_source_positions_from_the_end(either: explorer.Session) -> None:
    # "last" is each prompt's own last token; the two differ in length
    got = either.run(IDS, Edit(HOOK, "patch", source=OTHER, pos="last"), capture=HOOK)[HOOK][-1]
    assert torch.equal(got, either.run(OTHER, capture=HOOK)[HOOK][-1])


def test_a_source_keeps_what_it_captured(either: explorer.Session) -> None:
    # a run in hand is patched from as it is, not run again: another seed, another sampled text
    run = either.generate(IDS, max_new_tokens=6, temperature=2.0, seed=5, capture=HOOK)
    patched = either.run([*run.ids][:-1], Edit(HOOK, "patch", source=run, source_pos=list(range(13)), pos="all"), HOOK)
    assert torch.equal(patched[HOOK], run[HOOK])


@pytest.mark.parametrize(
    "spec",
    [
        {"blocks.0.attn.hook_z": {"op": "suppress", "head": 2}},
        {HOOK: [{"op": "add", "value": 0.5, "pos": "2:5"}, {"op": "scale", "factor": 2.0, "pos": "last"}]},
        {HOOK: {"op": "patch", "source": {"prompt": words(OTHER), "edits": HALVED}, "pos": 3, "source_pos": -1}},
        {"blocks.1.attn.q.hook_out": {"op": "set", "value": [[0.1] * 32] * 2, "head": [0, 3]}},
    ],
    ids=["alias", "two edits", "patch", "value"],
)
def test_the_spec_makes_the_run_again(either: explorer.Session, spec: dict[str, Any]) -> None:
    run = either.run(IDS, spec, capture="all")
    assert json.loads(json.dumps(run.spec)) == run.spec
    assert same(either.run(IDS, run.spec, capture="all"), run)
    recipe = json.loads(json.dumps(run.recipe()))
    assert same(either.run(recipe["ids"], recipe["edits"], capture="all"), run)


def test_spec_of_a_patch_from_a_run(either: explorer.Session) -> None:
    source = either.run(OTHER, HALVED, capture=HOOK)
    run = either.run(IDS, Edit(HOOK, "patch", source=source, pos=[1, 2]), capture="all")
    assert same(either.run(IDS, json.loads(json.dumps(run.spec)), capture="all"), run)


def test_recipe_of_a_generated_run(either: explorer.Session) -> None:
    edits = [
        Edit("blocks.0.hook_out", "add", value=torch.linspace(-1, 1, 96), phase="both"),
        Edit("blocks.1.attn.o.hook_in", "suppress", head=1, phase="decode"),
        Edit("blocks.1.hook_in", "scale", factor=0.5, pos=-1),
    ]
    run = either.generate(IDS, edits, max_new_tokens=6, capture="all")
    assert run.rows == len(IDS) + 5
    recipe = json.loads(json.dumps(run.recipe()))
    again = either.run(recipe["ids"], recipe["edits"], capture="all")
    assert again.ids == run.ids[:-1]
    for name in ("blocks.0.hook_out", "blocks.1.attn.o.hook_in", "blocks.1.hook_out"):
        assert relative(again[name], run[name]) <= 1e-4  # one pass instead of one a token: rounding differs
