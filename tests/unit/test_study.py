"""What the first forward pass shows of a model: its convention, the hooks it lacks and why."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from explorer.engine import study
from explorer.engine.parts import columns, epsilon, find_parts, subtracts_mean
from explorer.engine.study import judge, read
from explorer.engine.vllm import internals
from explorer.engine.vllm.reads import TRIED, reads
from explorer.engine.vllm.shards import partial_sums
from explorer.errors import BootError

from .stack import (
    SHAPE,
    Layer,
    Linear,
    Multiplied,
    Norm,
    NormsOnly,
    OneTensor,
    Parallel,
    PostNorms,
    Stack,
    Unknown,
    Whole,
)

IDS = torch.tensor([3, 1, 4, 1, 5])
MIDDLE, ATTENTION, MLP = "ln2.hook_in", "hook_attn_out", "hook_mlp_out"


@pytest.fixture(autouse=True)
def attention(monkeypatch):
    monkeypatch.setattr(internals, "attention_module", lambda attention: attention.attn)


def studied(stack):
    before, parts = stack.hooks(), find_parts(stack, reads)
    out, reading = read(parts, SHAPE, TRIED, lambda: stack(IDS))
    assert stack.hooks() == before
    return out, *judge(parts, SHAPE, reading, {})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("layer", "missing", "apart"),
    [
        (Layer, {}, False),
        (OneTensor, {}, False),
        (Whole, {}, False),
        (Multiplied, {}, True),
        (PostNorms, {}, True),
        (NormsOnly, {}, True),
        (Parallel, {MIDDLE: study.PARALLEL}, False),
        (Unknown, dict.fromkeys((MIDDLE, ATTENTION, MLP), study.NOT_ADDED), False),
    ],
)
def test_each_shape_of_layer(dtype, layer, missing, apart):
    stack = Stack(dtype, layer)
    plain = stack(IDS)
    out, taps, found = studied(stack)
    assert torch.equal(out, plain)
    assert found == {f"blocks.{i}.{name}": reason for i in range(2) for name, reason in missing.items()}
    assert find_parts(stack, reads).apart is apart
    seen = {}
    for name, tap in taps.items():
        tap.attach(lambda _, x, name=name: seen.update({name: x.clone()}))
    stack(IDS)
    stream = stack.model.embed_tokens(IDS)
    for i in range(2):
        at = f"blocks.{i}."
        torch.testing.assert_close(seen[at + "hook_in"], stream)
        if ATTENTION not in missing:
            stream = stream + seen[at + ATTENTION] + seen[at + MLP]
        else:
            stream = seen[at + "hook_out"]
    torch.testing.assert_close(seen["blocks.1.hook_out"], stream)


def test_no_rotary():
    stack = Stack()
    for layer in stack.model.layers:
        layer.self_attn.forward = lambda positions, hidden_states, own=layer.self_attn.forward: own(
            positions * 0, hidden_states
        )
    _, _, missing = studied(stack)
    assert missing == {f"blocks.{i}.attn.hook_rot_{x}": study.NO_ROTARY for i in range(2) for x in "qk"}


def test_sums_that_are_not_whole_yet():
    stack = Stack(layer=Parallel)
    stack.model.layers[1].self_attn.o_proj.reduce_results = False
    assert set(partial_sums(find_parts(stack, reads))) == {"blocks.1.attn.hook_out", "blocks.1.hook_attn_out"}


def test_a_stream_that_cannot_be_followed():
    stack = Stack(layer=OneTensor)
    stack.model.layers[1].register_forward_pre_hook(lambda _, args: (args[0], args[1] * 2))
    with pytest.raises(BootError, match="OneTensor is not served: the next layer does not read what it puts out"):
        studied(stack)


def test_a_last_norm_that_reads_something_else():
    stack = Stack(layer=OneTensor)
    parts = find_parts(stack, reads)
    _, reading = read(parts, SHAPE, TRIED, lambda: stack(IDS))
    judge(parts, SHAPE, reading, {})
    reading.end["norm"][2, 3] += 0.01
    with pytest.raises(BootError, match="Inner is not served: its final norm does not read the stream"):
        judge(parts, SHAPE, reading, {})


def test_a_module_that_does_not_run():
    stack = Stack(layer=OneTensor)
    stack.model.layers[0].self_attn.forward = lambda positions, hidden_states: torch.zeros_like(hidden_states)
    _, _, missing = studied(stack)
    assert missing["blocks.0.attn.hook_out"] == missing["blocks.0.attn.q.hook_out"] == study.SILENT
    assert missing["blocks.0.hook_attn_out"] == study.SILENT


def test_a_layer_that_reads_the_keys_and_values_of_another():
    stack = Stack(layer=OneTensor)
    first, second = (layer.self_attn for layer in stack.model.layers)
    kept = []
    own, first.attn.forward = first.attn.forward, lambda q, k, v: kept.append((k, v)) or own(q, k, v)
    second.attn.forward = lambda q, k, v: own(q, *kept[-1])
    second.forward = lambda positions, x: second.o_proj(second.attn(second.qkv_proj(x)[0][:, :8], None, None))[0]
    _, _, missing = studied(stack)
    wanted = dict.fromkeys((f"blocks.1.{name}" for name in study.SHARED_HOOKS), study.SHARED)
    assert missing == wanted | {"blocks.1.attn.hook_rot_k": study.SILENT}


def test_a_layer_with_fewer_neurons():
    stack = Stack()
    mlp = stack.model.layers[1].mlp
    mlp.up, mlp.down_proj = Linear(8, 6), Linear(6, 8)
    _, _, missing = studied(stack)
    assert missing == {"blocks.1.mlp.out.hook_in": "it is 6 wide here and not 10, as in other layers"}


@pytest.mark.parametrize("name", ["layers", "embed_tokens", "norm"])
def test_parts_that_are_not_found(name):
    stack = Stack()
    delattr(stack.model, name)
    with pytest.raises(BootError, match=r"boot: (Inner|Stack) is not served: no .* found among"):
        find_parts(stack, reads)


def test_columns_by_group():
    q, k, v = columns(4, 2, 3, by_group=True)
    assert q.tolist() == [*range(6), *range(12, 18)]
    assert (k.tolist(), v.tolist()) == ([6, 7, 8, 18, 19, 20], [9, 10, 11, 21, 22, 23])
    whole = torch.arange(24)
    assert [whole[c].tolist() for c in columns(4, 2, 3, by_group=False)] == [
        [*range(12)], [*range(12, 18)], [*range(18, 24)]
    ]  # fmt: skip


def test_which_norm():
    x = torch.randn(8)
    assert subtracts_mean(nn.LayerNorm(8), x) and not subtracts_mean(Norm(8), x)
    assert subtracts_mean(nn.LayerNorm(8).bfloat16(), x.bfloat16())
    assert not subtracts_mean(Norm(8).bfloat16(), x.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("eps", [1e-6, 1e-5, 1e-3])
def test_the_epsilon_of_a_norm_that_does_not_name_it(eps, dtype):
    class Nameless(nn.Module):
        def forward(self, x):
            return nn.functional.layer_norm(x.float(), (8,), torch.arange(1.0, 9), None, eps).to(x.dtype)

    assert epsilon(nn.LayerNorm(8, eps=eps), torch.empty(8)) == eps
    assert epsilon(Nameless(), torch.empty(8, dtype=dtype)) == pytest.approx(
        eps, rel=0.1 if dtype.itemsize == 2 else 1e-3
    )
