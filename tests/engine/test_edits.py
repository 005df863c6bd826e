"""Edits: logits, and every hook after the edit, against transformers under the same edit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import explorer
from explorer import Edit

from .. import tiny
from ..reference import reference
from .compare import relative, same, token_ids
from .conftest import ENGINES

IDS = [1, 17, 45, 80, 31, 9, 120, 64, 33, 52]
OTHER = [1, 90, 14, 77, 31, 100, 6, 64, 150, 8]
EIFFEL = "The Eiffel Tower is in the city of"
ROME = "The Colosseum is in the city of"


def random(*shape: int) -> list[Any]:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3)).tolist()


# name -> spec on the tiny Llama: 4 heads, 2 key-value heads, d_model 96, d_head 32, d_mlp 80
SPECS: dict[str, dict[str, Any]] = {
    # every place that can be edited
    "embed": {"embed.hook_out": {"op": "scale", "factor": 0.3, "pos": [2, 5]}},
    "resid_pre, first layer": {"blocks.0.hook_in": {"op": "add", "value": 0.7, "pos": 4}},
    "resid_pre": {"blocks.1.hook_in": {"op": "set", "value": 0.25, "pos": [0, 8]}},
    "q": {"blocks.0.attn.q.hook_out": {"op": "scale", "factor": -2.0, "head": 3}},
    "k": {"blocks.0.attn.k.hook_out": {"op": "add", "value": 1.5, "head": 1, "pos": [1, 2, 3]}},
    "v": {"blocks.1.attn.v.hook_out": {"op": "scale", "factor": 3.0, "head": 0}},
    "rot_q": {"blocks.1.attn.hook_rot_q": {"op": "set", "value": 0.5, "head": [0, 2]}},
    "rot_k": {"blocks.0.attn.hook_rot_k": {"op": "suppress", "head": 1}},
    "z": {"blocks.0.attn.o.hook_in": {"op": "suppress", "head": 2}},
    "attn_out": {"blocks.1.attn.hook_out": {"op": "scale", "factor": 0.0, "pos": 9}},
    "resid_mid": {"blocks.0.ln2.hook_in": {"op": "add", "value": random(96), "pos": [3]}},
    "neurons": {"blocks.0.mlp.out.hook_in": {"op": "set", "value": random(80), "pos": [5, 6]}},
    "mlp_out": {"blocks.0.mlp.hook_out": {"op": "suppress"}},
    "resid_post": {"blocks.0.hook_out": {"op": "set", "value": 0.5, "pos": [7]}},
    "resid_post, last layer": {"blocks.1.hook_out": {"op": "add", "value": random(96), "pos": [9]}},
    "a stream so small that the norm's epsilon shows": {"blocks.1.hook_out": {"op": "set", "value": 0.001, "pos": [9]}},
    # every op at the stream
    "suppress the stream": {"blocks.0.hook_out": {"op": "suppress", "pos": 3}},
    "scale the stream": {"blocks.0.hook_out": {"op": "scale", "factor": 2.5}},
    "add to the stream": {"blocks.0.hook_out": {"op": "add", "value": random(96)}},
    "set the stream": {"blocks.0.hook_out": {"op": "set", "value": random(96), "pos": -1}},
    "patch the stream": {"blocks.0.hook_out": {"op": "patch", "source": {"ids": OTHER}, "pos": [2, 4]}},
    "patch from elsewhere": {
        "blocks.0.hook_out": {"op": "patch", "source": {"ids": OTHER}, "pos": [2, 4], "source_pos": [9, 1]}
    },
    "patch one head": {"blocks.1.attn.o.hook_in": {"op": "patch", "source": {"ids": OTHER}, "head": 1, "pos": 9}},
    "patch key-value heads": {"blocks.0.attn.v.hook_out": {"op": "patch", "source": {"ids": OTHER}, "head": [1, 0]}},
    "patch neurons": {"blocks.1.mlp.out.hook_in": {"op": "patch", "source": {"ids": OTHER}, "pos": -1}},
    "patch from a patched run": {
        "blocks.0.ln2.hook_in": {
            "op": "patch",
            "source": {"ids": OTHER, "edits": {"blocks.0.hook_in": {"op": "scale", "factor": 0.5}}},
        }
    },
    # every shape of a value
    "value: a head's": {"blocks.0.attn.o.hook_in": {"op": "set", "value": random(32), "head": 1}},
    "value: all heads": {"blocks.0.attn.o.hook_in": {"op": "set", "value": random(4, 32), "pos": [6]}},
    "value: all heads, flat": {"blocks.0.attn.o.hook_in": {"op": "add", "value": random(128), "pos": [6]}},
    "value: the chosen heads": {"blocks.0.attn.q.hook_out": {"op": "add", "value": random(2, 32), "head": [3, 1]}},
    "value: a stream a position": {"blocks.0.hook_out": {"op": "set", "value": random(3, 96), "pos": [8, 2, 5]}},
    "value: a head a position": {
        "blocks.0.attn.k.hook_out": {"op": "set", "value": random(2, 32), "head": 1, "pos": [4, 3]}
    },
    "value: heads a position": {
        "blocks.0.attn.o.hook_in": {"op": "add", "value": random(3, 2, 32), "head": [2, 0], "pos": [9, 1, 4]}
    },
    "value: all heads a position": {
        "blocks.1.attn.v.hook_out": {"op": "set", "value": random(2, 2, 32), "pos": [0, 9]}
    },
    # several edits
    "in order: add, then scale": {
        "blocks.0.hook_out": [{"op": "add", "value": 1.0}, {"op": "scale", "factor": -2.0, "pos": [1, 9]}]
    },
    "in order: scale, then add": {
        "blocks.0.hook_out": [{"op": "scale", "factor": -2.0, "pos": [1, 9]}, {"op": "add", "value": 1.0}]
    },
    "in order: set, patch a head, scale": {
        "blocks.0.attn.o.hook_in": [
            {"op": "set", "value": 0.2},
            {"op": "patch", "source": {"ids": OTHER}, "head": 2},
            {"op": "scale", "factor": 4.0, "head": [2, 3], "pos": -1},
        ]
    },
    "a layer's end and the next one's start": {
        "blocks.0.hook_out": {"op": "add", "value": 1.0, "pos": 9},
        "blocks.1.hook_in": {"op": "scale", "factor": 0.5, "pos": 9},
    },
    "embedding and first layer": {
        "embed.hook_out": {"op": "set", "value": 0.3, "pos": 9},
        "blocks.0.hook_in": {"op": "scale", "factor": -1.0, "pos": [8, 9]},
    },
    "q, k and v at once": {
        "blocks.0.attn.q.hook_out": {"op": "scale", "factor": 2.0, "head": 0},
        "blocks.0.attn.k.hook_out": {"op": "scale", "factor": -1.0, "head": 0},
        "blocks.0.attn.v.hook_out": {"op": "add", "value": 0.5, "pos": [3]},
    },
    "before and after rotary": {
        "blocks.1.attn.q.hook_out": {"op": "add", "value": 1.0},
        "blocks.1.attn.hook_rot_q": {"op": "scale", "factor": 0.5, "head": 1},
    },
}


@pytest.mark.parametrize("name", SPECS)
def test_every_edit_as_in_transformers(either: explorer.Session, name: str) -> None:
    ref = reference(either.model_path)
    run = either.run(IDS, SPECS[name], capture="all")
    want = ref.run(IDS, SPECS[name])
    assert relative(want.logits, ref.run(IDS).logits) > 1e-2, "the edit must show, or this test could not fail"
    assert relative(run.logits, want.logits) <= 1e-4
    for hook in run.captured:  # the edited one too: it holds what the model goes on with
        if either.hooks[hook].component not in ("pattern", "scores"):
            assert relative(run[hook], want[hook]) <= 1e-4, hook
        elif hook.endswith("pattern"):
            assert float((run[hook] - want[hook]).abs().max()) <= 1e-5, hook


@pytest.mark.parametrize("part", ["q.hook_out", "k.hook_out", "v.hook_out", "o.hook_in", "hook_rot_q", "hook_rot_k"])
@pytest.mark.parametrize(("engine", "family"), [(engine, family) for engine in ENGINES for family in tiny.FAMILIES])
def test_zeroing_what_attention_reads(
    booted: Callable[..., explorer.Session], engine: str, family: str, part: str
) -> None:
    # k and v reach attention through the key-value cache: zeroing them too late would change nothing
    session = booted(family, engine=engine)
    ref = reference(session.model_path, engine)
    hook = f"blocks.0.attn.{part}"
    if hook not in ref.names:
        pytest.skip(f"{family} has no {part}")
    for head in (None, ref.run(IDS)[hook].shape[1] - 1):
        spec = {hook: {"op": "suppress"} | ({} if head is None else {"head": head})}
        want = ref.run(IDS, spec).logits
        assert relative(want, ref.run(IDS).logits) > 1e-2
        assert relative(session.run(IDS, spec).logits, want) <= 1e-4


SMOL_SPECS: dict[str, dict[str, Any]] = {
    "one head's z": {"blocks.14.attn.o.hook_in": {"op": "suppress", "head": 4}},
    "no MLP": {"blocks.20.mlp.hook_out": {"op": "suppress"}},
    "set": {"blocks.10.hook_out": {"op": "set", "value": 0.5, "pos": [3, 4]}},
    "scale": {"blocks.15.hook_out": {"op": "scale", "factor": 1.5, "pos": [8]}},
    "add": {"blocks.20.hook_out": {"op": "add", "value": random(576)}},
    "keys": {"blocks.5.attn.k.hook_out": {"op": "suppress", "head": 2}},
    "values": {"blocks.5.attn.v.hook_out": {"op": "suppress", "head": 0}},
    "neurons": {"blocks.29.mlp.out.hook_in": {"op": "suppress", "pos": -1}},
}


@pytest.mark.parametrize("name", [*SMOL_SPECS, "patch"])
def test_smollm2_edits_as_in_transformers(either_smol: explorer.Session, name: str) -> None:
    ref = reference(either_smol.model_path)
    ids = token_ids(either_smol, EIFFEL)
    rome = {"ids": token_ids(either_smol, ROME)}
    spec = SMOL_SPECS.get(name) or {
        "blocks.18.hook_out": {"op": "patch", "source": rome, "pos": [-1], "source_pos": [-1]}
    }
    want = ref.run(ids, spec).logits
    assert relative(want, ref.run(ids).logits) > 1e-2
    assert relative(either_smol.run(EIFFEL, spec).logits, want) <= 1e-4


def test_aliases_are_the_same_hook(either: explorer.Session) -> None:
    canonical = either.run(
        IDS, {"blocks.1.attn.hook_out": [{"op": "add", "value": 1.0}, {"op": "scale", "factor": 3.0}]}, capture="all"
    )
    aliased = either.run(
        IDS,
        [Edit("blocks.1.hook_attn_out", "add", value=1.0), Edit("blocks.1.attn.hook_out", "scale", factor=3.0)],
        capture="all",
    )
    assert torch.equal(canonical.logits, aliased.logits)
    assert torch.equal(canonical["blocks.1.hook_attn_out"], aliased["blocks.1.attn.hook_out"])


@pytest.mark.parametrize(
    ("pos", "same"),
    [
        (None, list(range(10))),
        ("all", list(range(10))),
        ("last", [9]),
        (-1, [9]),
        ([-1, 0, -10 + 1], [9, 0, 1]),
        ((3, 4), [3, 4]),
        ("3:7", [3, 4, 5, 6]),
        ("-2:", [8, 9]),
        ("::4", [0, 4, 8]),
        (np.int64(5), [5]),
        (torch.tensor([5, 2]), [5, 2]),
        (range(2, 4), [2, 3]),
    ],
)
def test_positions(either: explorer.Session, pos: Any, same: list[int]) -> None:
    run = either.run(IDS, Edit("blocks.0.hook_out", "set", value=2.0, pos=pos), capture="blocks.0.hook_out")
    clean = either.run(IDS, capture="blocks.0.hook_out")
    untouched = [p for p in range(10) if p not in same]
    assert bool((run["blocks.0.hook_out"][same] == 2.0).all())
    assert torch.equal(run["blocks.0.hook_out"][untouched], clean["blocks.0.hook_out"][untouched])


@pytest.mark.parametrize(
    "value",
    [
        np.linspace(-1, 1, 96, dtype=np.float16),
        np.linspace(-1, 1, 96),
        torch.linspace(-1, 1, 96, dtype=torch.bfloat16),
        torch.linspace(-1, 1, 96, dtype=torch.float64, requires_grad=True),
        list(np.linspace(-1, 1, 96)),
        torch.arange(96),
    ],
    ids=["numpy float16", "numpy float64", "torch bfloat16", "torch with gradient", "list", "torch int64"],
)
def test_values_of_any_type(either: explorer.Session, value: Any) -> None:
    run = either.run(IDS, Edit("blocks.0.hook_out", "set", value=value, pos=1), capture="blocks.0.hook_out")
    want = torch.as_tensor(value).detach().to(torch.float32)
    assert torch.equal(run["blocks.0.hook_out"][1], want)


def test_heads_of_the_right_kind(either: explorer.Session) -> None:
    # four query heads share two key-value heads: head 1 of k serves query heads 2 and 3
    spec = {"blocks.0.attn.hook_rot_k": {"op": "suppress", "head": 1}}
    pattern = either.run(IDS, spec, capture="blocks.0.attn.hook_pattern").pattern(0)
    clean = either.run(IDS, capture="blocks.0.attn.hook_pattern").pattern(0)
    even = torch.ones(10, 10).tril() / torch.arange(1, 11)[:, None]
    assert torch.equal(pattern[:2], clean[:2])
    torch.testing.assert_close(pattern[2:], even.expand(2, -1, -1))


def test_suppress_zeroes_infinity_and_nan(either: explorer.Session) -> None:
    hooks = ("blocks.0.mlp.hook_out", "blocks.0.hook_out", "blocks.1.attn.o.hook_in", "blocks.1.hook_out")
    broken = either.run(IDS, {hooks[0]: {"op": "scale", "factor": 3e38}}, capture=hooks)
    assert bool(broken[hooks[0]].isinf().any()) and bool(broken[hooks[1]].isinf().any())
    assert bool(broken[hooks[2]].isnan().any()) and bool(broken[hooks[3]].isnan().any())

    infinite = {"op": "scale", "factor": 3e38}
    healed = either.run(IDS, {hooks[0]: [infinite, {"op": "suppress"}]}, capture=hooks)
    assert same(healed, either.run(IDS, {hooks[0]: {"op": "suppress"}}, capture=hooks))
    healed = either.run(
        IDS, {hooks[0]: infinite, **{h: {"op": "suppress"} for h in (hooks[2], hooks[3])}}, capture=hooks
    )
    assert bool((healed[hooks[2]] == 0).all()) and bool((healed[hooks[3]] == 0).all())
    assert bool((healed.logits == 0).all())  # the head of a stream of zeros


@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_two_hooks_of_one_module_in_either_order(booted: Callable[..., explorer.Session], engine: str) -> None:
    """Granite multiplies what the MLP puts out before it is added: both are hook points of one module."""
    session = booted("granite", engine=engine)
    added, output = "blocks.1.hook_mlp_out", "blocks.1.mlp.hook_out"
    specs = [{added: {"op": "suppress"}}, {output: {"op": "set", "value": 1.0}}]
    alone, *both, clean = session.run(
        [IDS] * 4, [specs[0], specs[0] | specs[1], specs[1] | specs[0], None], capture=[output, added]
    )
    assert torch.equal(alone[output], clean[output]) and not alone[added].any()
    for run in both:
        assert bool((run[output] == 1).all()) and not run[added].any()
        assert torch.equal(run.logits, alone.logits)
