"""What is the transformers engine's own: batches, odd models, manners. All else is tested with vLLM's."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import explorer
from explorer import BootError
from explorer.engine.transformers import attention
from explorer.engine.transformers import engine as subject

from .. import tiny
from .compare import idle, relative

IDS = [1, 17, 45, 80, 31, 9, 120, 64, 33, 52]


@pytest.fixture(scope="module")
def session(booted: Callable[..., explorer.Session]) -> explorer.Session:
    return booted("llama", engine="transformers")


def test_parameters_and_fires(session: explorer.Session) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    own = session.worker.parameter(name)
    assert torch.equal(own, session._engine._lm.get_parameter(name))
    own.zero_()  # a copy
    assert session.worker.parameter(name).abs().sum() > 0
    with pytest.raises(ValueError, match=r"no parameter 'model\.norm\.wait'; did you mean model\.norm\.weight"):
        session.worker.parameter("model.norm.wait")
    session.worker.reset_fires()
    session.run(IDS, capture=["blocks.0.hook_out", "blocks.1.attn.hook_pattern"])
    assert session.worker.fires() == dict.fromkeys(
        ("blocks.0.hook_out", "blocks.1.attn.hook_rot_q", "blocks.1.attn.hook_rot_k"), 1
    )
    session.worker.detach()
    assert idle(session)


# positions that are learned, added to scores, or end at a window: padding must not move them
@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "bloom", "gemma3"])
def test_a_batch_of_many_lengths_is_each_alone(booted: Callable[..., explorer.Session], family: str) -> None:
    session = booted(family, engine="transformers")
    prompts = [IDS[:n] * 3 for n in (4, 1, 9, 2, 7)]
    for prompt, run in zip(prompts, session.run(prompts, capture="blocks.*.hook_out"), strict=True):
        alone = session.run(prompt, capture="blocks.*.hook_out")
        assert run.ids == tuple(prompt)
        assert relative(run["blocks.1.hook_out"], alone["blocks.1.hook_out"]) <= 1e-5


def test_batches_by_tokens() -> None:
    states = [subject._Running(None, [0] * n, [], None) for n in (3, 5, 2, 9, 1)]  # type: ignore[arg-type]
    assert [[len(s.ids) for s in b] for b in subject._batches(states, 10)] == [[3, 5], [2], [9], [1]]
    assert [[len(s.ids) for s in b] for b in subject._batches(states, 1)] == [[3], [5], [2], [9], [1]]


def from_heads(run: explorer.Run, layer: int) -> torch.Tensor:
    """What attention carries, from its replayed pattern and its values."""
    value = run[f"blocks.{layer}.attn.v.hook_out"].transpose(0, 1)
    pattern = run.pattern(layer)
    return (pattern @ value.repeat_interleave(len(pattern) // len(value), dim=0)).transpose(0, 1)


def test_falcon_with_alibi(tmp_path: Path) -> None:
    # Its eager attention adds ALiBi twice (transformers 5.19): held to what transformers runs when it is not asked.
    sizes = tiny.FAMILIES["falcon"][1] | {"alibi": True, "multi_query": False, "parallel_attn": False}
    folder = tiny.make(tmp_path / "model", "falcon", **sizes)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad(), explorer.boot(folder, engine="transformers") as own:
        run = own.run(IDS, capture=["*attn.v.hook_out", "*attn.o.hook_in", "*pattern"])
        assert relative(run.logits, plain(torch.tensor([IDS])).logits[0]) <= 1e-4
        for layer in range(2):
            assert relative(from_heads(run, layer), run[f"blocks.{layer}.attn.o.hook_in"]) <= 1e-5
            assert not own.hooks[f"blocks.{layer}.attn.hook_rot_q"].available
        edit = {"blocks.0.ln2.hook_in": {"op": "suppress", "pos": 3}}
        assert float(own.run(IDS, edit, capture="*ln2*")["blocks.0.ln2.hook_in"][3].abs().max()) == 0


def test_gpt2_that_scales_by_layer_and_upcasts(tmp_path: Path) -> None:
    flags = {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True}
    folder = tiny.make(tmp_path / "model", "gpt2", **tiny.FAMILIES["gpt2"][1] | flags)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad(), explorer.boot(folder, engine="transformers") as own:
        run = own.run(IDS, capture="*pattern")
        want = plain(torch.tensor([IDS]), output_attentions=True)
        assert relative(run.logits, want.logits[0]) <= 1e-4
        for layer in range(2):
            torch.testing.assert_close(run.pattern(layer), want.attentions[layer][0], atol=1e-5, rtol=0)


def test_a_pattern_in_bf16_is_what_the_model_used(booted: Callable[..., explorer.Session]) -> None:
    own = booted("gpt_oss", engine="transformers", dtype="bfloat16")
    run = own.run(IDS, capture="*attn*")
    for layer in range(2):
        assert relative(from_heads(run, layer).float(), run[f"blocks.{layer}.attn.o.hook_in"].float()) <= 2**-7


def test_a_pattern_that_is_not_the_one_used_is_missing(
    tiny_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = attention.describe
    monkeypatch.setattr(attention, "describe", lambda *args: dataclasses.replace(told(*args), softcap=1.0))
    with explorer.boot(tiny_folder("llama"), engine="transformers") as own:
        for name in ("hook_pattern", "hook_attn_scores"):
            assert "not the one that its attention used" in str(own.hooks[f"blocks.1.attn.{name}"].reason)
        assert own.hooks["blocks.1.attn.hook_rot_q"].available


def test_a_stream_that_does_not_add_up_is_refused_or_missing(tmp_path: Path) -> None:
    sizes = tiny.FAMILIES["bloom"][1] | {"apply_residual_connection_post_layernorm": True}
    with explorer.boot(tiny.make(tmp_path / "model", "bloom", **sizes), engine="transformers") as own:
        for name in ("hook_attn_out", "ln2.hook_in"):
            assert "not known" in str(own.hooks[f"blocks.0.{name}"].reason)


def test_a_last_norm_without_weights(tmp_path: Path) -> None:
    folder = tiny.make(tmp_path / "model", "olmo", **tiny.DIVIDED)
    with explorer.boot(folder, engine="transformers") as own:
        run = own.run(IDS, capture="ln_final.hook_normalized")
        head = own._engine._lm.lm_head.weight.detach()  # type: ignore[union-attr]
        assert relative(run["ln_final.hook_normalized"] @ head.T, run.logits) <= 1e-4
        assert all(point.available for point in own.hooks)


def test_closing_frees_the_model(tiny_folder: Callable[[str], Path]) -> None:
    own = explorer.boot(tiny_folder("llama"), engine="transformers")
    run = own.run(IDS, capture="all")
    weights = weakref.ref(own._engine._lm)  # type: ignore[union-attr]
    own.close()
    gc.collect()
    assert weights() is None and len(run.captured) > 20


def test_keywords_that_are_vllms(tiny_folder: Callable[[str], Path]) -> None:
    for options in ({"max_num_seqs": 4}, {"tensor_parallel_size": 2}):
        with pytest.raises(BootError, match=r"the transformers engine does not take .*; engine='vllm' may"):
            explorer.boot(tiny_folder("llama"), engine="transformers", **options)
    with pytest.raises(BootError, match="did you mean 'max_model_len'"):
        explorer.boot(tiny_folder("llama"), engine="transformers", max_modle_len=64)


def test_what_holds_anyway_may_be_restated(tiny_folder: Callable[[str], Path]) -> None:
    restated = {"skip_tokenizer_init": True, "disable_log_stats": True, "enable_prefix_caching": False}
    with explorer.boot(tiny_folder("llama"), engine="transformers", enforce_eager=True, **restated) as session:
        assert len(session.run([1, 5, 9]).top(3)) == 3
    for name, value in restated.items():
        with pytest.raises(BootError, match=f"does not take {name}={not value}"):
            explorer.boot(tiny_folder("llama"), engine="transformers", **{name: not value})


def test_sizes_that_are_none(tiny_folder: Callable[[str], Path]) -> None:
    for name, value in (("max_num_batched_tokens", 0), ("max_model_len", "long"), ("max_model_len", 64.0)):
        with pytest.raises(BootError, match=f"{name} must be a whole number of at least 1, not {value!r}"):
            explorer.boot(tiny_folder("llama"), engine="transformers", **{name: value})


def test_quiet_and_in_the_dtype_asked_for(
    tiny_folder: Callable[[str], Path], capfd: pytest.CaptureFixture[str]
) -> None:
    with explorer.boot(tiny_folder("llama"), engine="transformers", dtype="bfloat16", max_model_len=64) as own:
        run = own.run(IDS, capture=["blocks.0.hook_out", "blocks.0.attn.hook_pattern"])
        assert run["blocks.0.hook_out"].dtype == run.pattern(0).dtype == torch.bfloat16
        assert run.logits.dtype == torch.float32
        with pytest.raises(ValueError, match="64 in all"):
            own.run([5] * 64)
    out, err = capfd.readouterr()
    assert err == "" and out.count("\n") == 1


def test_models_that_ask_the_registry_by_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers 5.24 has no classes of GPT-J's attention to choose from; Falcon's may go the same way."""
    from transformers.models.falcon import modeling_falcon as falcon
    from transformers.models.gptj import modeling_gptj as gptj

    monkeypatch.delattr(falcon, "FALCON_ATTENTION_CLASSES", raising=False)
    monkeypatch.delattr(gptj, "GPTJ_ATTENTION_CLASSES", raising=False)
    attention.register.__wrapped__()
