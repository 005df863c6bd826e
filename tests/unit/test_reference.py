"""The tests' own yardstick: what must hold of transformers' activations in every family, clean and edited."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers.models.llama import modeling_llama

from ..reference import Pass, Reference, reference
from ..tiny import FAMILIES

IDS = [1, *range(5, 150, 9), 7, 7, 3]  # 20 tokens: longer than every window
READ_ONLY = ("hook_attn_scores", "hook_pattern", "ln_final.hook_normalized", "unembed.hook_out")
PARALLEL = {"gpt_neox", "gptj", "falcon", "falcon_new", "phi", "cohere"}
WITHOUT_ROTARY = {"gpt2", "opt", "bloom"}
COMPRESSED = {"deepseek_v2", "deepseek_v3"}
# family -> its layers that have experts
EXPERTS = {
    **dict.fromkeys(("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", "deepseek_v2"), (0, 1)),
    "deepseek_v3": (1,),
}
APART = {"gemma2", "gemma3", "olmo2", "olmo3", "granite"}  # a norm or multiplier between the sublayers and the stream
WINDOWS = {
    **dict.fromkeys(("mistral", "starcoder2"), (4, 4)),
    **dict.fromkeys(("gemma2", "gemma3", "gpt_oss", "olmo3"), (4, len(IDS))),
}
with_heads = pytest.mark.parametrize(
    "family", [name for name in FAMILIES if name not in COMPRESSED], indirect=True, scope="module"
)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def ref(family: str, tiny_folder: Callable[[str], Path]) -> Reference:
    return Reference(tiny_folder(family))


def editable(ref: Reference) -> list[str]:
    return [name for name in ref.names if not name.endswith(READ_ONLY)]


def close(got: torch.Tensor, want: torch.Tensor) -> bool:
    return float((got - want).norm()) <= 1e-5 * float(want.norm())


def test_the_hooks_that_each_family_has(family: str, ref: Reference) -> None:
    heads = {
        *("attn.q.hook_out", "attn.k.hook_out", "attn.v.hook_out", "attn.o.hook_in"),
        *("attn.hook_attn_scores", "attn.hook_pattern"),
    }
    rotary = {"attn.hook_rot_q", "attn.hook_rot_k"}
    names = {"embed.hook_out", "ln_final.hook_normalized", "unembed.hook_out"}
    for i in (0, 1):
        layer = {"hook_in", "attn.hook_out", "mlp.hook_out", "hook_out"}
        layer |= heads if family not in COMPRESSED else set()
        layer |= rotary if family not in WITHOUT_ROTARY | COMPRESSED else set()
        layer |= {"ln2.hook_in"} if family not in PARALLEL else set()
        layer |= {"mlp.out.hook_in"} if i not in EXPERTS.get(family, ()) else set()
        layer |= {"hook_attn_out", "hook_mlp_out"} if family in APART else set()
        names |= {f"blocks.{i}.{name}" for name in layer}
    assert set(ref.names) == names


def test_unedited_is_untouched(ref: Reference) -> None:
    got = ref.run(IDS)
    with torch.no_grad():
        want = ref.model(input_ids=torch.tensor([IDS]), use_cache=False, output_hidden_states=True)
        norm = ref.model.get_submodule(f"{ref.family.inner}.{ref.family.norm}")
        final = norm(got["ln_final.hook_normalized"])  # normalizing twice is normalizing once, but for epsilon
    assert torch.equal(got.logits, want.logits[0])
    for i in (0, 1):
        assert torch.equal(got[f"blocks.{i}.hook_in"], want.hidden_states[i][0])
    torch.testing.assert_close(final, want.hidden_states[-1][0], atol=1e-4, rtol=1e-4)
    same = {name: {"op": "scale", "factor": 1.0} for name in editable(ref)}
    assert torch.equal(ref.run(IDS, same).logits, got.logits)


def test_what_each_hook_means(ref: Reference) -> None:
    run = ref.run(IDS)
    assert list(run.rows) == ref.names
    consistent(ref, run)


@with_heads
def test_attention(ref: Reference) -> None:
    run = ref.run(IDS)
    for i in (0, 1):
        attention = f"blocks.{i}.attn"
        for x, heads in (("q", ref.heads), ("k", ref.kv_heads), ("v", ref.kv_heads)):
            assert run[f"{attention}.{x}.hook_out"].shape == (len(IDS), heads, ref.d_head)
        scores, pattern = run[f"{attention}.hook_attn_scores"], run[f"{attention}.hook_pattern"]
        masked = scores == float("-inf")
        assert bool(masked[:, *torch.triu_indices(len(IDS), len(IDS), 1)].all()) and not bool(pattern[masked].any())
        layer = ref.model.get_submodule(f"{ref.family.inner}.{ref.family.layers}.{i}.{ref.family.attention}")
        if hasattr(layer, "sinks"):  # a column that takes its share of attention and carries nothing
            sinks = layer.sinks.detach().view(-1, 1, 1).expand(-1, len(IDS), 1)
            scores = torch.cat([scores, sinks], dim=-1)
            assert bool((pattern.sum(-1).mean(-1) < 0.99).all())
        assert close(scores.softmax(-1)[..., : len(IDS)], pattern)


@with_heads
def test_windows(family: str, ref: Reference) -> None:
    run = ref.run(IDS)
    seen = tuple(int(run[f"blocks.{i}.attn.hook_attn_scores"][0, -1].isfinite().sum()) for i in (0, 1))
    assert seen == WINDOWS.get(family, (len(IDS), len(IDS)))


def test_an_edit_at_every_hook_is_felt_where_it_should_be(ref: Reference) -> None:
    clean = ref.run(IDS)
    for name in editable(ref):
        value = torch.randn(clean[name].shape[1:], generator=torch.Generator().manual_seed(3)).tolist()
        run = ref.run(IDS, {name: {"op": "add", "value": value, "pos": [3, -1]}})
        assert name == "embed.hook_out" or torch.equal(run["embed.hook_out"], clean["embed.hook_out"])
        if name.startswith("blocks.1."):
            assert torch.equal(run["blocks.0.hook_out"], clean["blocks.0.hook_out"]), name
        assert not close(run.logits, clean.logits), name
        torch.testing.assert_close(run[name][[3, -1]], clean[name][[3, -1]] + torch.tensor(value))
        consistent(ref, run, name)
    assert torch.equal(ref.run(IDS).logits, clean.logits)


@with_heads
def test_heads_are_whole(ref: Reference) -> None:
    """A projection of zero is zero after any norm and rotary: so this is that head, and no other."""
    for x, heads in (("q", ref.heads), ("k", ref.kv_heads)):
        for head in range(heads):
            run = ref.run(IDS, {f"blocks.1.attn.{x}.hook_out": {"op": "suppress", "head": head}})
            read = run[f"blocks.1.attn.hook_rot_{x}" if ref.rotary else f"blocks.1.attn.{x}.hook_out"]
            assert [bool((read[:, h] == 0).all()) for h in range(heads)] == [h == head for h in range(heads)]


def consistent(ref: Reference, run: Pass, edited: str = "") -> None:
    """What follows from what, in one pass: each holds unless its left side is the hook that was edited."""
    follows: dict[str, torch.Tensor] = {}
    for i in (0, 1):
        block = f"blocks.{i}"
        attn, mlp = (
            run[f"{block}.hook_{x}_out" if f"{block}.hook_{x}_out" in ref.names else f"{block}.{x}.hook_out"]
            for x in ("attn", "mlp")
        )
        if f"{block}.ln2.hook_in" in ref.names:
            follows[f"{block}.ln2.hook_in"] = run[f"{block}.hook_in"] + attn
            follows[f"{block}.hook_out"] = run[f"{block}.ln2.hook_in"] + mlp
        else:
            follows[f"{block}.hook_out"] = run[f"{block}.hook_in"] + attn + mlp
        if f"{block}.attn.hook_pattern" in ref.names:
            values = run[f"{block}.attn.v.hook_out"].repeat_interleave(ref.heads // ref.kv_heads, dim=1)
            follows[f"{block}.attn.o.hook_in"] = torch.einsum("hqk,khd->qhd", run[f"{block}.attn.hook_pattern"], values)
    follows["blocks.1.hook_in"] = run["blocks.0.hook_out"]
    for name, want in follows.items():
        assert name == edited or close(run[name], want), name


def test_apart_from_what_others_do_to_transformers(
    tiny_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise AssertionError("vLLM alters classes like this")

    want = Reference(tiny_folder("llama")).run(IDS).logits
    monkeypatch.setattr(modeling_llama.LlamaModel, "__init__", broken)
    monkeypatch.setattr(modeling_llama, "eager_attention_forward", broken)
    assert torch.equal(Reference(tiny_folder("llama")).run(IDS).logits, want)


def test_one_for_both_engines_but_for_bloom(tiny_folder: Callable[[str], Path]) -> None:
    assert reference(tiny_folder("llama"), "vllm") is reference(str(tiny_folder("llama")))
    approximate, exact = (reference(tiny_folder("bloom"), engine) for engine in ("transformers", "vllm"))
    error = (approximate.run(IDS).logits - exact.run(IDS).logits).abs().max()
    assert 1e-5 < float(error) < 1e-2
