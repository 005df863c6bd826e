"""Taps on a small stack: what they read, what they write, and that nothing stays attached."""

from __future__ import annotations

import pytest
import torch

from explorer.catalogue import Catalogue
from explorer.engine.parts import find_parts
from explorer.engine.points import Convention, find_taps
from explorer.engine.rows import ChangedRows
from explorer.engine.vllm import internals
from explorer.engine.vllm.reads import reads

from .stack import SHAPE, NormsOnly, OneTensor, PostNorms, Stack

IDS = torch.tensor([3, 1, 4, 1, 5])
TAPPED = [p for p in Catalogue(SHAPE) if not p.derived_from and p.component != "logits"]
EDITABLE = [p.name for p in TAPPED if p.editable]
ADDED = {f"blocks.{i}.{name}": (SHAPE.d_model,) for i in range(2) for name in ("hook_attn_out", "hook_mlp_out")}


@pytest.fixture(autouse=True)
def attention(monkeypatch):
    monkeypatch.setattr(internals, "attention_module", lambda attention: attention.attn)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def stack(request) -> Stack:
    return Stack(request.param)


def run(stack: Stack, edits=None, read=(), fused=True) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A forward pass with `edits`: hook -> (index, rows), and copies of what the hooks of `read` held."""
    taps, seen, handles = find_taps(find_parts(stack, reads), SHAPE, Convention(fused, by_group=False)), {}, []

    def handler(name):
        def handle(_, x):
            seen[name] = x.clone()
            return ChangedRows(*edits[name]) if name in (edits or {}) else None

        return handle

    for name in (*(edits or {}), *read):
        if name not in seen:
            handles.append(taps[name].attach(handler(name)))
            seen[name] = torch.empty(0)
    out = stack(IDS)
    for handle in reversed(handles):
        handle.remove()
    assert stack.hooks() == 0
    return out, seen


def test_there_is_a_tap_for_every_hook_with_its_shape(stack):
    taps = find_taps(find_parts(stack, reads), SHAPE)
    assert {name: tap.shape for name, tap in taps.items()} == {p.name: p.shape for p in TAPPED} | ADDED
    assert stack.hooks() == 0


def test_reading_changes_nothing(stack):
    out, seen = run(stack, read=[p.name for p in TAPPED])
    assert torch.equal(out, stack(IDS))
    for point in TAPPED:
        assert seen[point.name].shape == (len(IDS), point.width), point.name


def test_the_stream_is_the_sum_of_what_is_added(stack):
    _, seen = run(stack, read=[p.name for p in TAPPED])
    assert torch.equal(seen["embed.hook_out"], stack.model.embed_tokens(IDS))
    assert torch.equal(seen["blocks.0.hook_in"], seen["embed.hook_out"])
    assert torch.equal(seen["blocks.1.hook_in"], seen["blocks.0.hook_out"])
    for i in range(SHAPE.layers):
        at = f"blocks.{i}."
        assert torch.equal(seen[at + "ln2.hook_in"], seen[at + "hook_in"] + seen[at + "attn.hook_out"])
        assert torch.equal(seen[at + "hook_out"], seen[at + "ln2.hook_in"] + seen[at + "mlp.hook_out"])


def test_the_last_norm_is_read_before_its_weight(stack):
    out, seen = run(stack, read=["ln_final.hook_normalized"])
    atol = 1e-5 if out.dtype == torch.float32 else 0.05
    torch.testing.assert_close(seen["ln_final.hook_normalized"] * stack.model.norm.weight, out, atol=atol, rtol=atol)


@pytest.mark.parametrize("name", EDITABLE)
def test_writing_back_what_was_read_changes_nothing(name):
    stack = Stack()
    out, seen = run(stack, read=[name])
    index = torch.tensor([1, 3])
    again, _ = run(stack, {name: (index, seen[name][index])})
    assert torch.equal(again, out)


@pytest.mark.parametrize("name", EDITABLE)
def test_an_edit_reaches_the_output_from_its_position_on(stack, name):
    out, seen = run(stack, read=[name])
    again, _ = run(stack, {name: (torch.tensor([2]), seen[name][2:3] + 1)})
    if not name.endswith(("k.hook_out", "v.hook_out", "rot_k")):
        assert not torch.equal(again[2], out[2])
    assert not torch.equal(again[2:], out[2:])
    assert torch.equal(again[:2], out[:2])
    assert torch.equal(stack(IDS), out)  # the model itself is as before


@pytest.mark.parametrize(
    ("name", "reader"),
    [
        ("embed.hook_out", "blocks.0.hook_in"),
        ("blocks.0.hook_out", "blocks.1.hook_in"),
        ("blocks.0.attn.v.hook_out", None),
    ],
)
def test_written_rows_are_exact(stack, name, reader):
    """A large stream, a small value: the next layer reads that value, and every other row as it was."""
    stack.model.embed_tokens.weight.mul_(300)
    out, seen = run(stack, read=[name, *([reader] if reader else [])])
    rows = torch.full((2, seen[name].shape[1]), 0.5, dtype=out.dtype)
    index = torch.tensor([1, 4])
    _, after = run(stack, {name: (index, rows)}, read=[reader] if reader else [])
    if reader:
        assert after[reader][index].eq(0.5).all()
        others = torch.tensor([0])
        assert torch.equal(after[reader][others], seen[reader][others])


def test_the_middle_of_the_stream_is_written_exactly(stack):
    stack.model.embed_tokens.weight.mul_(300)
    rows = torch.full((1, 8), 0.5, dtype=stack.head.dtype)
    _, seen = run(
        stack, {"blocks.0.ln2.hook_in": (torch.tensor([2]), rows)}, ["blocks.0.mlp.hook_out", "blocks.0.hook_out"]
    )
    assert torch.equal(seen["blocks.0.hook_out"][2], seen["blocks.0.mlp.hook_out"][2] + 0.5)


def test_only_the_columns_of_the_projection_change():
    stack = Stack()
    before = run(stack, read=["blocks.0.attn.q.hook_out", "blocks.0.attn.k.hook_out", "blocks.0.attn.v.hook_out"])[1]
    projected = []
    handle = stack.model.layers[0].self_attn.attn.register_forward_pre_hook(lambda _, args: projected.append(args))
    taps = find_taps(find_parts(stack, reads), SHAPE)
    tap = taps["blocks.0.attn.k.hook_out"].attach(lambda _, x: ChangedRows(torch.tensor([1]), torch.zeros(1, 4)))
    stack(IDS)
    tap.remove()
    handle.remove()
    _, k, v = projected[0]
    others, turn = [0, 2, 3, 4], torch.arange(5)[:, None] * 0.1
    assert torch.equal(k[1], turn[1].expand(4))
    assert torch.equal(k[others], (before["blocks.0.attn.k.hook_out"] + turn)[others])
    assert torch.equal(v, before["blocks.0.attn.v.hook_out"])


def test_what_attention_reads_where_its_forward_was_wrapped_already():
    stack = Stack()
    attend = stack.model.layers[0].self_attn.attn
    calls = []
    wrapper = lambda *args, own=attend.forward: calls.append(len(args)) or own(*args)  # noqa: E731
    attend.forward = wrapper
    out = stack(IDS)
    q, k = (reads(stack.model.layers[0].self_attn)(i) for i in (0, 1))
    handles = [q(lambda _, x: None), k(lambda _, x: ChangedRows(torch.tensor([1]), torch.zeros(1, 4)))]
    assert not torch.equal(stack(IDS), out)
    for handle in reversed(handles):
        handle.remove()
    assert vars(attend)["forward"] is wrapper
    assert torch.equal(stack(IDS), out) and calls == [3, 3, 3]


def test_keys_that_another_layer_has_are_not_read():
    stack = Stack()
    layer, seen = stack.model.layers[0].self_attn, []
    layer.attn.forward = lambda q, k, v: q
    layer.forward = lambda positions, hidden_states: layer.o_proj(
        layer.attn.forward(layer.qkv_proj(hidden_states)[0][:, :8], None, None)
    )[0]
    handles = [reads(layer)(i)(lambda _, x, i=i: seen.append(i)) for i in range(3)]
    stack(IDS)
    for handle in reversed(handles):
        handle.remove()
    assert seen == [0]


@pytest.mark.parametrize("packed", [torch.int32, torch.float8_e4m3fn])
def test_the_last_norm_is_tried_in_its_own_dtype_not_in_that_of_packed_weights(packed):
    stack = Stack(torch.bfloat16)
    stack.model.embed_tokens.weight = torch.nn.Parameter(torch.zeros(2, 2, dtype=packed), requires_grad=False)
    dtypes = set()
    stack.model.norm.register_forward_pre_hook(lambda _, args: dtypes.add(args[0].dtype))
    find_taps(find_parts(stack, reads), SHAPE)
    assert dtypes == {torch.bfloat16}


@pytest.mark.parametrize("layer", [OneTensor, PostNorms, NormsOnly])
def test_the_middle_of_the_stream_is_what_is_added_back(layer):
    stack, fused = Stack(layer=layer), layer is PostNorms
    stack.model.embed_tokens.weight.mul_(300)
    rows, at = torch.full((1, 8), 0.5), ["blocks.0.hook_mlp_out", "blocks.0.hook_out"]
    _, seen = run(stack, {"blocks.0.ln2.hook_in": (torch.tensor([2]), rows)}, at, fused)
    assert torch.equal(seen[at[1]][2], seen[at[0]][2] + 0.5)
