"""vLLM booting in this process: which version, what reaches it, what it says of the model, what a failure leaves."""

from __future__ import annotations

import contextlib
import os
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import pydantic
import pytest
import torch

from explorer import BootError
from explorer.catalogue import Catalogue
from explorer.engine.shapes import model_shape
from explorer.engine.vllm import boot, internals

from .fake import config


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


def test_without_vllm_the_install_line_survives_the_clean_up(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "vllm", None)
    failed = pytest.raises(ImportError, match=r"pip install 'activation-explorer\[vllm\]'")
    with failed, internals.Lifetime().booting():
        boot.construct("anything", {}, lambda stage: None)


def test_a_boot_says_that_it_compiles(tmp_path, monkeypatch, on_cpu):
    monkeypatch.setattr(boot, "read_config", lambda path, options: config())
    monkeypatch.setattr(internals, "construct", lambda path, options: options["enforce_eager"])
    monkeypatch.setattr(internals, "import_class", lambda name: None)
    for mode in ("eager", "compiled"):
        stages = []
        assert boot.construct(str(tmp_path), {"mode": mode}, stages.append) is (mode == "eager")
        assert ("compiling" in stages[-1]) is (mode == "compiled")


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


def test_what_this_torch_lacks_is_not_put_back(monkeypatch):
    monkeypatch.setattr(internals, "_PATCHED", ((torch, "set_num_threads"), (torch, "not_in_this_version")))
    with internals.Lifetime().booting():
        pass


class Sizes(pydantic.BaseModel):
    width: int = 0
    cache_dtype: Literal["auto"] = "auto"


@pytest.mark.parametrize(
    ("wrong", "given", "says"),
    [
        ({"width": "a"}, {"width": "a"}, "vLLM refuses width='a': Input should be a valid integer"),
        ({"cache_dtype": 5}, {"kv_cache_dtype": 5}, "vLLM refuses kv_cache_dtype=5: Input should be 'auto'"),
        ({"width": [1]}, {"seed": 1, "dtype": "x"}, "vLLM refuses the model with seed=1: Input should be"),
    ],
)
def test_what_vllm_refuses_in_one_sentence(wrong, given, says):
    with pytest.raises(pydantic.ValidationError) as error:
        Sizes(**wrong)
    sentence = boot.refusal(error.value, given)
    assert sentence.startswith(f"boot: {says}") and "\n" not in sentence


def test_what_vllm_refuses_without_saying_which():
    error = ValueError("no such thing:\n  this one\n  and more")
    assert boot.refusal(error, {"dtype": "x"}) == "boot: vLLM refuses the model: no such thing: this one"
    assert boot.refusal(ValueError(), {"a": "y" * 99}) == "boot: vLLM refuses the model with a=a str: ValueError"


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
