"""Small tokenizers of every kind, made on the spot."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast


def byte_level(bos: bool = False, merges: tuple[tuple[str, str], ...] = ()) -> Any:
    """A byte-level BPE tokenizer: the 256 bytes, the merges given, <s> and <eos>; <s> is prepended where `bos`."""
    vocab = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for left, right in merges:
        vocab[left + right] = len(vocab)
    backend = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("<eos>", special=True)])
    backend.add_tokens([AddedToken("Ġraw", special=False)])
    if bos:
        start = backend.token_to_id("<s>")
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", start)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="<eos>")


def sentencepiece_like() -> Any:
    """▁ for spaces and <0x..> for bytes outside the vocabulary, as Llama 2 spells them."""
    vocab = [("<unk>", 0.0), ("▁Paris", -1.0), ("▁", -2.0), ("Paris", -1.5), ("é", -3.0)]
    vocab += [(f"<0x{byte:02X}>", -9.0) for byte in range(256)]
    backend = Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


def word_pieces() -> Any:
    """A vocabulary that spells no bytes."""
    backend = Tokenizer(models.WordPiece({"[UNK]": 0, "pa": 1, "##ris": 2, "\ufffd": 3}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")
