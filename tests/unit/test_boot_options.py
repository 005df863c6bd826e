"""Booting vLLM, up to vLLM: what is refused in one sentence, and what is chosen when nothing was said."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers

from explorer import BootError
from explorer.catalogue import Catalogue
from explorer.engine import process
from explorer.engine.shapes import architecture, model_dtype, model_shape, read_config
from explorer.engine.vllm import boot, internals, processes
from explorer.engine.vllm.boot import LOCKED, check_options, choose, code_hash

KNOWN = {"dtype", "max_model_len", "max_num_seqs", "gpu_memory_utilization", "quantization", "additional_config"}
GIVEN = {"gpu_memory_utilization": 0.5, "max_num_batched_tokens": 64, "max_model_len": None, "dtype": None}


def config(**changes):
    made = SimpleNamespace(
        architectures=["LlamaForCausalLM"],
        num_hidden_layers=2,
        hidden_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=80,
        vocab_size=160,
        max_position_embeddings=256,
        dtype=torch.float32,
    )
    vars(made).update(changes)
    made.get_text_config = lambda: made
    return made


def chosen(tmp_path, made=None, **options):
    made = made or config()
    return choose(GIVEN | options, str(tmp_path), made, model_shape(made))


@pytest.fixture(params=[True, False], ids=["cpu", "gpu"])
def on_cpu(request, monkeypatch):
    monkeypatch.setattr(internals, "on_cpu", lambda: request.param)
    return request.param


# --- refusals ---------------------------------------------------------------------------------------------------------


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


# --- sizes ------------------------------------------------------------------------------------------------------------


def test_the_sizes_of_a_model():
    shape = model_shape(config())
    assert vars(shape) == {
        "layers": 2,
        "d_model": 96,
        "heads": 4,
        "kv_heads": 2,
        "d_head": 32,
        "d_mlp": 80,
        "d_vocab": 160,
    }


def test_sizes_that_are_not_written_down():
    shape = model_shape(config(head_dim=None, num_key_value_heads=None))
    assert (shape.d_head, shape.kv_heads) == (24, 4)


RECURRENT = (
    "mamba",
    "mamba2",
    "falcon_mamba",
    "jamba",
    "falcon_h1",
    "granitemoehybrid",
    "bamba",
    "zamba2",
    "nemotron_h",
)


@pytest.mark.parametrize("model_type", [*RECURRENT, "qwen3_next", "recurrent_gemma", "rwkv", "lfm2", "minimax"])
def test_layers_without_attention_are_not_served(model_type):
    made = transformers.AutoConfig.for_model(model_type)
    with pytest.raises(
        BootError, match=f"boot: {architecture(made)} is not served: its state-space or linear-attention"
    ):
        model_shape(made)


@pytest.mark.parametrize("model_type", ["t5", "bart", "whisper"])
def test_encoder_decoders_are_not_served(model_type):
    with pytest.raises(BootError, match=r"boot: \w+ is not served: encoder-decoders have two streams"):
        model_shape(transformers.AutoConfig.for_model(model_type))


def test_norms_on_the_stream_itself_are_not_served():
    with pytest.raises(BootError, match="boot: OPTForCausalLM is not served: its norms come after each layer's sum"):
        model_shape(transformers.AutoConfig.for_model("opt", do_layer_norm_before=False))


@pytest.mark.parametrize(
    ("model_type", "sizes", "expected"),
    [
        ("gpt2", {"n_embd": 96, "n_head": 4, "n_layer": 3}, (3, 96, 4, 4, 24, 384)),
        ("gptj", {"n_embd": 96, "n_head": 4, "n_layer": 3, "n_inner": 80}, (3, 96, 4, 4, 24, 80)),
        ("opt", {"hidden_size": 96, "num_attention_heads": 4, "ffn_dim": 80}, (12, 96, 4, 4, 24, 80)),
        ("bloom", {"hidden_size": 96, "n_head": 4, "n_layer": 3}, (3, 96, 4, 4, 24, 384)),
        ("falcon", {"hidden_size": 96, "num_attention_heads": 4}, (32, 96, 4, 1, 24, 384)),
        (
            "falcon",
            {"hidden_size": 96, "num_attention_heads": 4, "num_kv_heads": 2, "new_decoder_architecture": True},
            (32, 96, 4, 2, 24, 384),
        ),
    ],
)
def test_sizes_under_other_names(model_type, sizes, expected):
    shape = model_shape(transformers.AutoConfig.for_model(model_type, **sizes))
    assert tuple(vars(shape).values())[:6] == expected


def test_a_model_without_layers():
    with pytest.raises(BootError, match="has no layers"):
        model_shape(config(num_hidden_layers=0))


def test_an_architecture_that_is_not_written_down(tmp_path, on_cpu):
    made = config(architectures=None, model_type="qwen3")
    assert architecture(made) == "Qwen3ForCausalLM"
    assert chosen(tmp_path, made)["hf_overrides"] == {"architectures": ["Qwen3ForCausalLM"]}
    overrides = {"rope_theta": 1e6}
    asked = chosen(tmp_path, made, hf_overrides=overrides)["hf_overrides"]
    assert asked == {"rope_theta": 1e6, "architectures": ["Qwen3ForCausalLM"]} and overrides == {"rope_theta": 1e6}
    assert "hf_overrides" not in chosen(tmp_path)


@pytest.mark.parametrize(
    ("written", "dtype"),
    [
        ({}, "float32"),
        ({"dtype": None}, "float32"),
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "float16"}, "float16"),
    ],
    ids=["no such key", "null", "the older key", "the newer key"],
)
def test_the_dtype_of_a_file(tmp_path, written, dtype):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **written}))
    assert model_dtype(None, read_config(str(tmp_path), {})) == dtype


def test_the_token_reaches_the_configuration(monkeypatch):
    seen = {}

    def load(path, **hub):
        seen[path] = hub
        return transformers.LlamaConfig()

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", load)
    read_config("some/model", {"hf_token": "t", "revision": "v2", "dtype": "float32"})
    assert seen == {"some/model": {"token": "t", "revision": "v2"}}


# --- what is chosen ---------------------------------------------------------------------------------------------------


def test_the_locked_are_always_passed_on(tmp_path, on_cpu):
    options = chosen(tmp_path, additional_config={"mine": 1})
    assert {name: options[name] for name in LOCKED} == {name: value for name, (value, _) in LOCKED.items()}
    assert options["additional_config"]["mine"] == 1
    ours = options["additional_config"]["explorer"]
    assert ours == {"shape": vars(model_shape(config())), "code": code_hash(), "compiled_for": internals.compiled_for()}
    assert options["max_model_len"] == 256
    assert len(code_hash()) == 16


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


def test_cores_are_dealt_out_to_workers(monkeypatch):
    monkeypatch.setattr(processes.os, "sched_getaffinity", lambda pid: {7, 2, 3, 5, 11})
    assert processes.share_out_cores(2) == "2,3|5,7"
    assert processes.share_out_cores(5) == "2|3|5|7|11"
    assert processes.share_out_cores(6) == "2|3|5|7|11|2"


def test_a_batch_of_none_is_the_usual_one(tmp_path, monkeypatch):
    monkeypatch.setattr(internals, "on_cpu", lambda: True)
    usual, none = (chosen(tmp_path, max_num_batched_tokens=n) for n in (2048, None))
    assert none == usual


def test_what_this_torch_lacks_is_not_put_back(monkeypatch):
    monkeypatch.setattr(internals, "_PATCHED", ((torch, "set_num_threads"), (torch, "not_in_this_version")))
    with internals.Lifetime().booting():
        pass


def test_on_a_gpu_vllm_takes_its_share(tmp_path, monkeypatch):
    monkeypatch.setattr(internals, "on_cpu", lambda: False)
    options = chosen(tmp_path)
    assert options["gpu_memory_utilization"] == 0.5
    assert "kv_cache_memory_bytes" not in options


def test_too_little_memory_is_one_sentence(tmp_path, monkeypatch):
    import psutil

    monkeypatch.setattr(internals, "on_cpu", lambda: True)
    (tmp_path / "model.safetensors").write_bytes(bytes(2**20))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=2**20))
    with pytest.raises(BootError, match=r"GiB are needed .* but 0\.0 GiB are free; lower max_model_len or kv_cache"):
        chosen(tmp_path)


def test_vllm_finds_a_descriptor_where_stdout_has_none(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.StringIO())  # as in a notebook
    with process.stdout_with_descriptor():
        assert sys.stdout.fileno() == 1
    with pytest.raises(OSError):
        sys.stdout.fileno()
    with process.stdout_with_descriptor():  # nothing else changes
        print("hello")
    assert sys.stdout.getvalue() == "hello\n"


@pytest.fixture
def vllm(monkeypatch):
    """As much of vLLM as `construct` touches; `vllm.LLM` is yet to be set."""
    fake = SimpleNamespace()
    monkeypatch.setitem(sys.modules, "vllm", fake)
    layers = SimpleNamespace(rotary_embedding=SimpleNamespace(_ROPE_DICT={}))
    monkeypatch.setitem(sys.modules, "vllm.model_executor.layers", layers)
    monkeypatch.setattr(torch.accelerator, "synchronize", None)
    monkeypatch.setattr(torch.accelerator, "empty_cache", None)
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    return fake


def test_the_token_reaches_the_download_of_weights(monkeypatch, vllm, on_cpu):
    """It is in the environment, where huggingface_hub looks, and not among the keywords, which an older vLLM logs."""
    from huggingface_hub import get_token

    monkeypatch.setenv("HF_TOKEN", "from outside")
    vllm.LLM = lambda **options: (get_token(), options.get("hf_token"))
    assert internals.construct("anything", {}) == ("from outside", None)
    assert internals.construct("anything", {"hf_token": True}) == ("from outside", True)
    assert internals.construct("anything", {"hf_token": "of the call"}) == ("of the call", None)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(
    ("cpu", "options", "kept"),
    [(False, {}, True), (True, {"tensor_parallel_size": 2}, True), (True, {}, False)],
)
def test_pytorch_keeps_its_threads_where_it_does_not_compute_the_model(monkeypatch, vllm, cpu, options, kept, fails):
    """vLLM leaves one to the process; a worker on a CPU in this process has set how many it wants."""

    def llm(**_):
        torch.set_num_threads(1)
        if fails:
            raise ValueError("no")

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    monkeypatch.setattr(internals, "on_cpu", lambda: cpu)
    vllm.LLM = llm
    try:
        with pytest.raises(ValueError) if fails else contextlib.nullcontext():
            internals.construct("anything", options)
        assert torch.get_num_threads() == (2 if kept else 1)
    finally:
        torch.set_num_threads(before)


def test_without_vllm_the_install_line_survives_the_clean_up(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "vllm", None)
    failed = pytest.raises(ImportError, match=r"pip install 'activation-explorer\[vllm\]'")
    with failed, internals.Lifetime().booting():
        boot.construct("anything", {}, lambda stage: None)


@pytest.mark.parametrize("found", ["0.20.2", "0.20.3", "0.26.0+cpu", "0.32.0", "0.33.0", "0.33.1rc2"])
def test_versions_of_vllm_in_the_range(monkeypatch, found):
    monkeypatch.setattr(internals, "version", lambda: found)
    internals.check_version()


@pytest.mark.parametrize("found", ["0.8.5", "0.20.1", "0.34.0", "0.34.0rc1.dev3+g1a2b3c4", "1.0", "dev"])
def test_another_version_of_vllm_is_refused_with_the_range(monkeypatch, found):
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__=found))  # nothing else of it is touched
    with pytest.raises(BootError) as refused:
        boot.construct("anything", {}, lambda stage: None)
    assert str(refused.value) == (
        f'boot: vLLM {found} is not supported; install one from 0.20.2 to 0.33, or boot with engine="transformers"'
    )


def test_the_extra_asks_for_the_range():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    oldest, newest = internals.SUPPORTED
    major, minor = newest.split(".")
    assert project["optional-dependencies"]["vllm"] == [f"vllm>={oldest},<{major}.{int(minor) + 1}"]


@pytest.mark.parametrize(("mode", "eager"), [(None, True), ("eager", True), ("compiled", False)])
def test_the_mode_is_vllms_enforce_eager(mode, eager):
    given = {} if mode is None else {"mode": mode}
    assert boot.with_mode(given) == {"enforce_eager": eager}
    assert boot.with_mode(given | {"enforce_eager": eager}) == {"enforce_eager": eager}
    with pytest.raises(BootError, match=f"enforce_eager={not eager} contradicts mode='{mode or 'eager'}'"):
        boot.with_mode(given | {"enforce_eager": not eager})


def test_a_boot_says_that_it_compiles(tmp_path, monkeypatch, on_cpu):
    monkeypatch.setattr(boot, "read_config", lambda path, options: config())
    monkeypatch.setattr(internals, "construct", lambda path, options: options["enforce_eager"])
    monkeypatch.setattr(internals, "import_class", lambda name: None)
    for mode in ("eager", "compiled"):
        stages = []
        assert boot.construct(str(tmp_path), {"mode": mode}, stages.append) is (mode == "eager")
        assert ("compiling" in stages[-1]) is (mode == "compiled")


def test_a_hook_that_no_worker_has_is_fatal_at_boot(tmp_path, monkeypatch, on_cpu):
    shape = model_shape(config())
    names = [p.name for p in Catalogue(shape) if not p.derived_from and p.component != "logits"]

    def worker(layer, held):
        attention = [[layer, {"scale": 0.5, "window": None, "softcap": None}]]
        seen = {"shape": vars(shape), "dtype": "float32", "device": "cpu", "attention": attention}
        seen |= {"cache_bytes": 7, "missing": {}, "apart": False, "refused": None}
        return seen | {"shards": {name: [0, 4, 4, 0] for name in held}}

    stages = [worker(0, names[:13]), worker(1, names[13:])]
    monkeypatch.setattr(internals, "rpc", lambda llm, method: stages)
    monkeypatch.setattr(internals, "checkpoint", lambda llm: (str(tmp_path), config()))
    for name in ("max_model_len", "version", "is_eager"):
        monkeypatch.setattr(internals, name, lambda *_: 1)
    model, shards = boot.describe(None)
    assert [*shards[0], *shards[1]] == names and len(model.attention) == 2
    assert model.info["cache_bytes"] == 14
    del stages[1]["shards"]["blocks.1.mlp.hook_out"]
    with pytest.raises(BootError, match=r"no worker has a place for blocks\.1\.mlp\.hook_out"):
        boot.describe(None)
    added = {f"blocks.{i}.hook_{x}_out": "not known" for i in (0, 1) for x in ("attn", "mlp")}
    stages[0]["missing"] = {"blocks.1.mlp.hook_out": "not here"} | added
    model, _ = boot.describe(None)
    assert model.apart and model.missing == stages[0]["missing"]
    stages[1]["refused"] = "boot: refused"
    with pytest.raises(BootError, match="boot: refused"):
        boot.describe(None)


# --- what goes wrong while it boots -----------------------------------------------------------------------------------


def test_the_reason_of_a_worker_is_the_reason(capfd):
    lines = "Traceback (most recent call last):\n  File 'x'\nKeyError: 'layers.1'\nRuntimeError: no luck: at all\nbye\n"
    failed = pytest.raises(BootError, match=r"^boot: a worker process failed to start: RuntimeError: no luck: at all$")
    with failed, internals.Lifetime().booting():
        os.write(2, lines.encode())
        raise Exception("WorkerProc initialization failed due to an exception in a background process.")
    with pytest.raises(BootError, match="it left no message"), internals.Lifetime().booting():
        raise Exception("WorkerProc initialization failed due to an exception in a background process.")
    assert capfd.readouterr().err == ""


def test_what_a_core_had_built_when_it_failed_is_freed():
    ended = []

    class Core:
        def __init__(self):
            self.model_executor = SimpleNamespace(shutdown=lambda: ended.append(True))
            raise ValueError("no memory for a cache")

    try:
        Core()
    except ValueError as error:
        internals.free_failed(error)
    assert ended == [True]


def test_a_script_without_a_main_guard_is_told(monkeypatch):
    processes.check_main()
    monkeypatch.setattr(processes.multiprocessing.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(BootError, match='put what it does under if __name__ == "__main__":'):
        processes.check_main()
