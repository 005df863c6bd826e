"""The models of the GPU suite: a bundled name, a folder, or random weights in a real model's shape, made once."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, PreTrainedTokenizerFast

from explorer.models import BUNDLED, BundledModel, cache_folder, resolve

from ..untouched import model_class

OUT = Path(__file__).resolve().parents[2] / ".out"
FOLDER = OUT / "gpu-models"
PIECES = OUT / "gpu"  # where `make gpu-bundle` leaves a bundled model's file, cut

LLAMA = {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": True}
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": LLAMA
    | {"num_hidden_layers": 3, "hidden_size": 256, "intermediate_size": 512, "vocab_size": 1024}
    | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64},
    # the width of the next with few layers, so that it is compiled quickly
    "small": LLAMA
    | {"num_hidden_layers": 4, "hidden_size": 2048, "intermediate_size": 8192, "head_dim": 64, "vocab_size": 32000},
    "1b": LLAMA | {"num_hidden_layers": 16, "hidden_size": 2048, "intermediate_size": 8192, "head_dim": 64},
    "8b": LLAMA
    | {"num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336, "head_dim": 128}
    | {"tie_word_embeddings": False},
}


def folder_of(name: str) -> Path:
    """The checkpoint folder of a model: made now if it is one of `SHAPES` and not there."""
    if name in BUNDLED:
        join_pieces(BUNDLED[name])
    if name not in SHAPES:
        return Path(resolve(name))
    folder = FOLDER / name
    if not (folder / "tokenizer.json").exists():  # written last
        shutil.rmtree(folder, ignore_errors=True)
        make(folder, SHAPES[name])
    return folder


def join_pieces(model: BundledModel) -> None:
    """Put a bundled model's file where it would be fetched to, from pieces that were carried here.

    Those that are there: when some are missing the model's checksum is not right, and `resolve` says so.
    """
    pieces = sorted(PIECES.glob("model.[0-9][0-9]"))
    target = cache_folder() / "downloads" / Path(model.gguf).name
    size = target.stat().st_size if target.is_file() else 0
    if size < sum(piece.stat().st_size for piece in pieces):
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("wb") as file:
            for piece in pieces:
                file.write(piece.read_bytes())


def make(folder: Path, sizes: dict[str, Any]) -> None:
    """Write a random bf16 Llama and a small tokenizer of bytes; the same weights every time on the same device.

    Weights are as large as keeps a row's length through a layer, so that attention and edits matter.
    """
    config = AutoConfig.for_model(
        "llama", max_position_embeddings=8192, rms_norm_eps=1e-5, bos_token_id=0, eos_token_id=1, **sizes
    )
    config.dtype = torch.bfloat16
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device("meta"):
        model = model_class(config)._from_config(config, dtype=torch.bfloat16)
    model.to_empty(device=device)
    draw = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            around, spread = (1.0, 0.1) if weight.dim() == 1 else (0.0, 1.2 * weight.shape[-1] ** -0.5)
            if "embed" in name:
                spread = 2 * weight.shape[-1] ** -0.5
            weight.copy_(torch.randn(weight.shape, generator=draw, device=device).mul_(spread).add_(around))
    model.tie_weights()
    model.save_pretrained(folder)
    words = Tokenizer(models.BPE(unk_token=None))
    words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    words.train_from_iterator(["the quick brown fox jumps over the lazy dog"] * 50, trainer)
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="+", help=f"{', '.join(SHAPES)}, a bundled name or a folder")
    for name in parser.parse_args().names:
        print(folder_of(name))
