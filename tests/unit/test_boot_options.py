"""What vLLM is asked for: options that are refused or locked, and what is chosen where nothing was said."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from explorer import BootError
from explorer.engine.shapes import architecture, model_shape
from explorer.engine.vllm import boot, internals
from explorer.engine.vllm.boot import LOCKED, check_options, choose, code_hash

from .fake import config

KNOWN = {"dtype", "max_model_len", "max_num_seqs", "gpu_memory_utilization", "quantization", "additional_config"}
GIVEN = {"gpu_memory_utilization": 0.5, "max_num_batched_tokens": 64, "max_model_len": None, "dtype": None}


def chosen(tmp_path, made=None, **options):
    made = made or config()
    return choose(GIVEN | options, str(tmp_path), made, model_shape(made))


def test_good_options_pass():
    check_options({"dtype": "float32", "max_model_len": 64, "gpu_memory_utilization": 1, "max_num_seqs": None}, KNOWN)
    check_options({name: value for name, (value, _) in LOCKED.items()}, KNOWN)
    check_options({"additional_config": {"mine": 1}}, KNOWN)


def test_the_readme_names_the_locked_with_their_reasons():
    rows = [f"| `{name}` | `{value!r}` | {reason} |" for name, (value, reason) in LOCKED.items()]
    assert "\n".join(rows) + "\n\n" in (Path(__file__).parents[2] / "README.md").read_text()


@pytest.mark.parametrize("name", sorted(LOCKED))
def test_what_captures_stand_on_is_locked(name):
    locked, reason = LOCKED[name]
    other = not locked if isinstance(locked, bool) else "other"
    with pytest.raises(BootError, match="is refused, it is locked to") as refused:
        check_options({name: other}, KNOWN)
    assert str(refused.value).startswith(f"boot: {name}={other!r}")
    assert str(refused.value).endswith(reason)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"quantisation": "awq"}, "boot: unknown keyword 'quantisation'; did you mean 'quantization'?"),
        ({"zzz": 1}, "boot: unknown keyword 'zzz'; see vllm.LLM for the keywords it takes"),
        ({"max_model_len": 0}, "boot: max_model_len must be a whole number of at least 1, not 0"),
        ({"max_num_seqs": 2.0}, "boot: max_num_seqs must be a whole number of at least 1, not 2.0"),
        ({"max_num_seqs": True}, "not True"),
        ({"gpu_memory_utilization": 0}, "boot: gpu_memory_utilization must be between 0 and 1, not 0"),
        ({"gpu_memory_utilization": 1.5}, "not 1.5"),
        ({"gpu_memory_utilization": "half"}, "not 'half'"),
        ({"gpu_memory_utilization": True}, "not True"),
        ({"gpu_memory_utilization": float("nan")}, "not nan"),
        ({"additional_config": {"explorer": {}}}, "additional_config['explorer'] is refused"),
        ({"additional_config": "explorer"}, "additional_config must be a dict"),
    ],
)
def test_wrong_options(options, says):
    with pytest.raises(BootError) as refused:
        check_options(options, KNOWN)
    assert says in str(refused.value)
    assert isinstance(refused.value, ValueError)


@pytest.mark.parametrize("backend", ["uni", "external_launcher", "mine.Executor", object])
def test_executors(backend):
    known = KNOWN | {"distributed_executor_backend"}
    for served in (None, "mp", "ray"):
        check_options({"distributed_executor_backend": served}, known)
    with pytest.raises(BootError, match="is refused; leave it out, or use 'mp' for processes"):
        check_options({"distributed_executor_backend": backend}, known)


@pytest.mark.parametrize("name", boot.SPREAD)
def test_rows_stay_together(name):
    check_options({name: 1}, KNOWN | {name})
    with pytest.raises(BootError, match=f"{name}=2 is refused: it spreads a batch's rows over the workers"):
        check_options({name: 2}, KNOWN | {name})


@pytest.mark.parametrize(("mode", "eager"), [(None, True), ("eager", True), ("compiled", False)])
def test_the_mode_is_vllms_enforce_eager(mode, eager):
    given = {} if mode is None else {"mode": mode}
    assert boot.with_mode(given) == {"enforce_eager": eager}
    assert boot.with_mode(given | {"enforce_eager": eager}) == {"enforce_eager": eager}
    with pytest.raises(BootError, match=f"enforce_eager={not eager} contradicts mode='{mode or 'eager'}'"):
        boot.with_mode(given | {"enforce_eager": not eager})


def test_an_architecture_that_is_not_written_down(tmp_path, on_cpu):
    made = config(architectures=None, model_type="qwen3")
    assert architecture(made) == "Qwen3ForCausalLM"
    assert chosen(tmp_path, made)["hf_overrides"] == {"architectures": ["Qwen3ForCausalLM"]}
    overrides = {"rope_theta": 1e6}
    asked = chosen(tmp_path, made, hf_overrides=overrides)["hf_overrides"]
    assert asked == {"rope_theta": 1e6, "architectures": ["Qwen3ForCausalLM"]} and overrides == {"rope_theta": 1e6}
    assert "hf_overrides" not in chosen(tmp_path)


def test_the_locked_are_always_passed_on(tmp_path, on_cpu):
    options = chosen(tmp_path, additional_config={"mine": 1})
    assert {name: options[name] for name in LOCKED} == {name: value for name, (value, _) in LOCKED.items()}
    assert options["additional_config"]["mine"] == 1
    ours = options["additional_config"]["explorer"]
    assert ours == {"shape": vars(model_shape(config())), "code": code_hash(), "compiled_for": internals.compiled_for()}
    assert options["max_model_len"] == 256
    assert len(code_hash()) == 16


@pytest.mark.parametrize("kind", ["tensor", "pipeline", "V2"])
def test_vllm_runs_ahead_with_one_worker_and_its_first_runner_alone(tmp_path, monkeypatch, on_cpu, kind):
    assert "async_scheduling" not in chosen(tmp_path)  # vLLM's own choice
    assert chosen(tmp_path, async_scheduling=True)["async_scheduling"] is True
    monkeypatch.setattr(internals, "uses_v2", lambda: kind == "V2")
    several = {} if kind == "V2" else {f"{kind}_parallel_size": 2}
    assert chosen(tmp_path, **several)["async_scheduling"] is False
    with pytest.raises(BootError, match=r"async_scheduling=True is refused with several workers and with the V2"):
        chosen(tmp_path, async_scheduling=True, **several)


def test_a_compiled_model_is_for_this_cpu_and_these_settings(tmp_path, monkeypatch, on_cpu):
    before = chosen(tmp_path)["additional_config"]
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "another")
    another = chosen(tmp_path)["additional_config"]
    monkeypatch.setenv("VLLM_ZENTORCH_WEIGHT_PREPACK", "0")
    prepacked = chosen(tmp_path)["additional_config"]
    assert (before != another != prepacked) == internals.on_cpu()


@pytest.mark.parametrize(
    ("given", "own", "expected"),
    [
        (None, torch.bfloat16, "bfloat16"),
        (None, None, "float32"),
        (None, "float16", "float16"),
        ("auto", torch.float32, "float32"),
        ("half", torch.float32, "float16"),
        ("float", torch.bfloat16, "float32"),
        ("bfloat16", torch.float32, "bfloat16"),
        (torch.float16, torch.float32, "float16"),
    ],
)
def test_dtype(tmp_path, monkeypatch, given, own, expected):
    monkeypatch.setattr(internals, "on_cpu", lambda: False)
    assert chosen(tmp_path, config(dtype=own), dtype=given)["dtype"] == expected


@pytest.mark.parametrize("dtype", ["int8", "float64", "fp8", "nn"])
def test_dtypes_that_are_not_served(tmp_path, on_cpu, dtype):
    with pytest.raises(BootError, match=f"dtype '{dtype}' is not served; use 'float32', 'bfloat16' or 'float16'"):
        chosen(tmp_path, dtype=dtype)


def test_latent_attention_on_a_cpu_has_plain_rotary(tmp_path, monkeypatch):
    monkeypatch.setattr(internals, "on_cpu", lambda: True)
    asked = {"compilation_config": {"level": 0, "custom_ops": ["none"]}}
    latent = config(kv_lora_rank=32)
    assert "compilation_config" not in chosen(tmp_path)
    assert chosen(tmp_path, latent)["compilation_config"] == {"custom_ops": ["-rotary_embedding"]}
    assert chosen(tmp_path, latent, **asked)["compilation_config"] == {
        "level": 0,
        "custom_ops": ["none", "-rotary_embedding"],
    }
    with pytest.raises(BootError, match="compilation_config must be a dict"):
        chosen(tmp_path, latent, compilation_config=3)
    monkeypatch.setattr(internals, "on_cpu", lambda: False)
    assert "compilation_config" not in chosen(tmp_path, latent)


def test_a_length_past_the_model(tmp_path, on_cpu):
    with pytest.raises(BootError, match="max_model_len=257 is more than the 256 positions"):
        chosen(tmp_path, max_model_len=257)
    assert chosen(tmp_path, max_model_len=256)["max_model_len"] == 256
    stretched = config(rope_parameters={"rope_type": "yarn", "factor": 4.0})
    assert chosen(tmp_path, stretched, max_model_len=512)["max_model_len"] == 512


def test_a_length_without_room(tmp_path, on_cpu):
    with pytest.raises(BootError, match="max_model_len=2 leaves no room"):
        chosen(tmp_path, max_model_len=2)


def test_memory_on_a_cpu_is_what_the_longest_prompt_and_a_batch_need(tmp_path, monkeypatch):
    monkeypatch.setattr(internals, "on_cpu", lambda: True)
    a_token = 2 * 2 * 2 * 32 * 4  # layers, key and value, heads, d_head, bytes
    small, large = (chosen(tmp_path, max_num_batched_tokens=n)["kv_cache_memory_bytes"] for n in (64, 2048))
    assert a_token * (256 + 64) <= small < large <= 2 * a_token * (256 + 2048)
    half = chosen(tmp_path, max_num_batched_tokens=64, dtype="bfloat16")["kv_cache_memory_bytes"]
    assert half == pytest.approx(small / 2, rel=0.01)
    assert chosen(tmp_path, kv_cache_memory_bytes=large)["kv_cache_memory_bytes"] == large


def test_each_worker_has_cache_for_its_own_heads_and_layers(tmp_path, monkeypatch):
    monkeypatch.setattr(internals, "on_cpu", lambda: True)
    alone = chosen(tmp_path)["kv_cache_memory_bytes"]
    for kind in ("tensor", "pipeline"):
        assert chosen(tmp_path, **{f"{kind}_parallel_size": 2})["kv_cache_memory_bytes"] == alone // 2
    assert chosen(tmp_path, tensor_parallel_size=4)["kv_cache_memory_bytes"] == alone // 2  # two have a copy each


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tensor_parallel_size": 3}, "tensor_parallel_size=3 does not divide the model's heads=4"),
        ({"pipeline_parallel_size": 3}, "pipeline_parallel_size=3 is more than the model's 2 layers"),
    ],
)
def test_a_model_that_cannot_be_shared_out(tmp_path, on_cpu, options, says):
    with pytest.raises(BootError, match=says):
        chosen(tmp_path, **options)


def test_ray_needs_gpus(tmp_path, on_cpu):
    options = {"tensor_parallel_size": 2, "distributed_executor_backend": "ray"}
    if on_cpu:
        with pytest.raises(BootError, match="'ray' needs GPUs"):
            chosen(tmp_path, **options)
    else:
        assert chosen(tmp_path, **options)["distributed_executor_backend"] == "ray"


def test_too_little_memory_is_one_sentence(tmp_path, monkeypatch):
    import psutil

    monkeypatch.setattr(internals, "on_cpu", lambda: True)
    (tmp_path / "model.safetensors").write_bytes(bytes(2**20))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=2**20))
    with pytest.raises(BootError, match=r"GiB are needed .* but 0\.0 GiB are free; lower max_model_len or kv_cache"):
        chosen(tmp_path)


def test_a_batch_of_none_is_the_usual_one(tmp_path, monkeypatch):
    monkeypatch.setattr(internals, "on_cpu", lambda: True)
    usual, none = (chosen(tmp_path, max_num_batched_tokens=n) for n in (2048, None))
    assert none == usual


def test_on_a_gpu_vllm_takes_its_share(tmp_path, monkeypatch):
    monkeypatch.setattr(internals, "on_cpu", lambda: False)
    options = chosen(tmp_path)
    assert options["gpu_memory_utilization"] == 0.5
    assert "kv_cache_memory_bytes" not in options
