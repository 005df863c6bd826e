"""What a configuration says: sizes, architecture and dtype, and the models that are not served."""

from __future__ import annotations

import json

import pytest
import transformers

from explorer import BootError
from explorer.engine.shapes import architecture, model_dtype, model_shape, read_config

from .fake import config


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
