"""What boot refuses, in one sentence and before weights load, and what it accepts and chooses."""

from __future__ import annotations

import gc
import json
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import explorer
from explorer import BootError, ModelNotFound
from explorer.engine.vllm import internals

from .compare import core, same

IDS = [1, 17, 45, 80]


def workers() -> set[threading.Thread]:
    """The worker threads of sessions."""
    return {t for t in threading.enumerate() if t.name.startswith("explorer-")}


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails the test when vLLM is asked to load anything, or when a worker thread stays."""
    import vllm

    monkeypatch.setattr(vllm, "LLM", lambda *a, **k: pytest.fail("weights would have loaded"))
    threads = workers()
    yield
    assert workers() == threads


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown keyword": (
        {"max_model_length": 64},
        r"unknown keyword 'max_model_length'; did you mean 'max_model_len'\?",
    ),
    "tokenizer left out": ({"skip_tokenizer_init": False}, "skip_tokenizer_init=False is refused.*locked to True"),
    "log statistics": ({"disable_log_stats": False}, "disable_log_stats=False is refused.*locked to True"),
    "prefix caching": ({"enable_prefix_caching": True}, "enable_prefix_caching=True is refused.*cached prefix"),
    "another worker": ({"worker_cls": "mine.Worker"}, "worker_cls='mine.Worker' is refused"),
    "our configuration": ({"additional_config": {"explorer": {}}}, r"additional_config\['explorer'\] is refused"),
    "configuration of a wrong type": ({"additional_config": 3}, "additional_config"),
    "a token that is none": ({"hf_token": 5}, "hf_token must be a token, .* not 5"),
    "a revision that is none": ({"revision": 5}, "revision must be a string, not 5"),
    "trust in words": ({"trust_remote_code": "no"}, "trust_remote_code must be True or False, not 'no'"),
    "a tokenizer that is none": (
        {"tokenizer": 5},
        "tokenizer is a folder, a hub id or a transformers tokenizer, not 5",
    ),
    "eagerness in words": ({"enforce_eager": "yes"}, "enforce_eager must be True or False, not 'yes'"),
    "overrides that are none": ({"hf_overrides": 5}, "hf_overrides must be a dict or a function .*, not 5"),
    "overrides of a wrong type": (
        {"hf_overrides": {"num_hidden_layers": "two"}},
        "hf_overrides={'num_hidden_layers': 'two'} does not fit the model: .*num_hidden_layers",
    ),
    "no batch": ({"max_num_batched_tokens": 0}, "max_num_batched_tokens .* not 0"),
    "negative length": ({"max_model_len": -5}, "max_model_len .* not -5"),
    "a length in words": ({"max_model_len": "8k"}, "max_model_len .* not '8k'"),
    "a length of True": ({"max_model_len": True}, "max_model_len .* not True"),
    "longer than the model": ({"max_model_len": 257}, "257.*256"),
    "no room to generate": ({"max_model_len": 2}, "max_model_len=2 .* at least 3"),
    "blocks of nothing": ({"block_size": 0}, "block_size .* not 0"),
    "drafts": ({"speculative_config": {"method": "ngram"}}, "speculative_config=.* is refused.*locked to None"),
    "several engines": ({"data_parallel_size": 2}, "data_parallel_size=2 is refused"),
    "another executor": ({"distributed_executor_backend": "uni"}, "distributed_executor_backend='uni' is refused"),
    "a mode that contradicts itself": ({"mode": "eager", "enforce_eager": False}, "enforce_eager=False contradicts"),
    "pooling": ({"runner": "pooling"}, "runner='pooling' is refused, it is locked to 'generate'"),
    "no memory": ({"gpu_memory_utilization": 0}, "gpu_memory_utilization .* not 0"),
    "all memory and more": ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization .* not 1.5"),
    "three workers for four heads": ({"tensor_parallel_size": 3}, "tensor_parallel_size=3 does not divide .*heads=4"),
    "three stages for two layers": ({"pipeline_parallel_size": 3}, "pipeline_parallel_size=3 is more than"),
    "more cache than there is memory": ({"kv_cache_memory_bytes": 10**15}, "GiB are needed .* are free"),
    "less cache than a prompt takes": ({"kv_cache_memory_bytes": 2 * 128 * 1024}, "kv_cache_memory_bytes=.*too small"),
    "unknown dtype": ({"dtype": "float31"}, "dtype 'float31'"),
    "integers": ({"dtype": torch.int8}, "dtype 'int8'"),
    "unknown engine": ({"engine": "jax"}, "engine must be .* not 'jax'"),
    "unknown mode": ({"mode": "fast"}, "mode must be .* not 'fast'"),
}


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_weights_load(tiny_folder: Callable[[str], Path], name: str) -> None:
    keywords, words = REFUSED[name]
    with pytest.raises(BootError, match=words) as error:
        explorer.boot(tiny_folder("llama"), **keywords)
    assert isinstance(error.value, ValueError)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"quantization": "awq"}, "refuses the model with quantization='awq': .*awq"),
        ({"load_format": "zzz"}, "refuses the model with load_format='zzz': "),
        ({"load_format": 5}, "refuses load_format=5: Input should be a valid string$"),
        ({"kv_cache_dtype": "zzz"}, "refuses kv_cache_dtype='zzz': Input should be 'auto', "),
    ],
)
def test_what_vllm_refuses_is_one_sentence_too(
    tiny_folder: Callable[[str], Path], keywords: dict[str, Any], words: str
) -> None:
    engines, threads = internals.lifetime._engines, workers()
    with pytest.raises(BootError, match=f"^boot: vLLM {words}") as error:
        explorer.boot(tiny_folder("llama"), max_model_len=64, hf_token="hf_secret", **keywords)
    assert "\n" not in str(error.value) and "hf_secret" not in str(error.value)
    assert error.value.__cause__ is not None
    assert internals.lifetime._engines == engines and workers() == threads


@pytest.mark.parametrize("device", ["zzz", 5.5, "cuda:99"])
def test_a_device_that_is_not_there(tiny_folder: Callable[[str], Path], device: Any) -> None:
    with pytest.raises(BootError, match=f"^boot: device={device!r} is not there: "):
        explorer.boot(tiny_folder("llama"), engine="transformers", device=device)


@pytest.mark.usefixtures("no_weights")
def test_a_model_runner_that_cannot_run_here(
    tiny_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    monkeypatch.setattr("vllm.triton_utils.HAS_TRITON", False)  # as it is on a CPU
    with pytest.raises(BootError, match=r"boot: VLLM_USE_V2_MODEL_RUNNER=1 needs a Triton .* unset it"):
        explorer.boot(tiny_folder("llama"))
    assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "1"


@pytest.mark.usefixtures("no_weights")
def test_what_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="smollm2-135m"):
        explorer.boot("smollm2-135")
    with pytest.raises(ModelNotFound):
        explorer.boot(tmp_path / "nowhere")
    with pytest.raises(ModelNotFound, match=str(tmp_path)):
        explorer.boot(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(BootError):
        explorer.boot(tmp_path)


@pytest.mark.usefixtures("no_weights")
def test_architectures_that_are_not_served(tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    folder = tiny_folder("llama")
    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "config.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mamba", "architectures": ["MambaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(BootError, match="MambaForCausalLM is not served: its state-space"):
        explorer.boot(tmp_path)


@pytest.mark.parametrize("when", ["with weights", "late"])
def test_a_boot_that_fails_leaves_its_neighbours_alone(
    llama: explorer.Session, tiny_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    # vLLM's own clean-up of a failed engine, whenever it is collected, takes down what all engines share
    import vllm

    class Late(vllm.LLM):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            raise ValueError("layers.1: too late")

    before = llama.run(IDS, capture="all")
    engines = internals.lifetime._engines
    threads = workers()
    if when == "late":
        monkeypatch.setattr(vllm, "LLM", Late)
    with pytest.raises((ValueError, KeyError), match=r"layers\.1"):  # versions of vLLM differ in it
        explorer.boot(tiny_folder("llama"), hf_overrides={"num_hidden_layers": 1} if when == "with weights" else None)
    gc.collect()
    assert internals.lifetime._engines == engines and workers() == threads
    assert same(llama.run(IDS, capture="all"), before)


def test_the_shortest_session(booted: Callable[..., explorer.Session]) -> None:
    session = booted("llama", max_model_len=3)
    assert len(session.generate([1], max_new_tokens=2).ids) == 3
    with pytest.raises(ValueError, match="3 in all"):
        session.run([1, 2, 3])


def test_restating_a_locked_value_is_fine(llama: explorer.Session, booted: Callable[..., explorer.Session]) -> None:
    session = booted(
        "llama",
        skip_tokenizer_init=True,
        disable_log_stats=True,
        enable_prefix_caching=False,
        enforce_eager=True,
        mode="eager",
        engine="vllm",
        dtype="torch.float32",
        max_model_len=64,
        tensor_parallel_size=1,
    )
    assert session.info["max_model_len"] == 64
    assert same(session.run(IDS, capture="all"), llama.run(IDS, capture="all"))


def test_keywords_of_other_tools_say_that_they_change_nothing(
    tiny_folder: Callable[[str], Path], llama: explorer.Session
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        session = explorer.boot(
            tiny_folder("llama"), enable_batching=True, enable_position_interventions=False, max_model_len=64
        )
    with session:
        ours = [str(w.message) for w in caught if "changes nothing" in str(w.message)]
        assert len(ours) == 2 and "enable_batching" in ours[0] and "enable_position_interventions" in ours[1]
        edits = {"blocks.0.hook_out": {"op": "set", "value": 0.5, "pos": [1, 3]}}
        got = session.run([IDS, IDS[:2]], [edits, None], capture="all")
        want = llama.run([IDS, IDS[:2]], [edits, None], capture="all")
        assert same(got[0], want[0]) and same(got[1], want[1])


def test_dtype_is_the_checkpoints_own(llama: explorer.Session, booted: Callable[..., explorer.Session]) -> None:
    # vLLM's own "auto" would make float16 of it
    assert (
        llama.info["dtype"] == "float32"
        and llama.run(IDS, capture="embed.hook_out")["embed.hook_out"].dtype == torch.float32
    )
    bf16 = booted("llama", dtype=torch.bfloat16)
    assert bf16.info["dtype"] == "bfloat16"
    assert bf16.run(IDS, capture="embed.hook_out")["embed.hook_out"].dtype == torch.bfloat16
    assert bf16.run(IDS).logits.dtype == torch.float32
    half = booted("llama", dtype="half")
    assert half.info["dtype"] == "float16"
    assert half.run(IDS, capture="embed.hook_out")["embed.hook_out"].dtype == torch.float16


def test_the_cache_holds_the_longest_prompt_and_a_full_batch(smol: explorer.Session) -> None:
    config = core(smol).vllm_config.cache_config
    tokens = config.num_gpu_blocks * config.block_size
    assert 2048 + 2048 <= tokens <= 1.3 * (2048 + 2048)


def test_overrides_of_the_configuration_reach_the_catalogue(tiny_folder: Callable[[str], Path]) -> None:
    with explorer.boot(tiny_folder("llama"), hf_overrides={"num_hidden_layers": 1}, load_format="dummy") as session:
        assert session.info["layers"] == 1
        assert len(session.run([1, 2], capture="all").captured) == len(session.hooks)


def test_info_and_repr(llama: explorer.Session, smol: explorer.Session, tiny_folder: Callable[[str], Path]) -> None:
    assert (
        llama.info | {"layers": 2, "heads": 4, "kv_heads": 2, "d_model": 96, "d_head": 32, "d_vocab": 160} == llama.info
    )
    assert llama.info["device"] == "cpu" and llama.info["engine"].startswith("vllm ") and llama.info["mode"] == "eager"
    assert "smollm2-135m" in repr(smol) and "30 layers" in repr(smol)
    assert llama.model_path == str(tiny_folder("llama")) and smol.name == "smollm2-135m"
    assert Path(str(smol.model_path)).is_dir()


def test_another_tokenizer(llama: explorer.Session, booted: Callable[..., explorer.Session], tiny_folder: Any) -> None:
    session = booted("qwen3", tokenizer=str(tiny_folder("llama")))
    assert [t.id for t in session.tokens("w1 w2")] == [t.id for t in llama.tokens("w1 w2")]
