"""Tokens: from text to ids and back to something a person can read."""

from __future__ import annotations

import json
import operator
import os
import re
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

from .errors import ModelNotFound
from .given import first_line

Tokenizer: TypeAlias = Any
"""A transformers tokenizer (of any kind; transformers is imported only when one is loaded)."""


@dataclass(frozen=True)
class Token:
    """One token of a prompt."""

    position: int  # 0-based
    id: int
    raw: str  # as the vocabulary spells it, such as "ĠParis"
    text: str  # what it stands for, such as " Paris"; bytes that are no whole character as "⟨E4 BD⟩"
    special: bool  # a control token such as "<|im_end|>"
    bos: bool  # the beginning-of-sequence token at position 0


def load_tokenizer(path_or_id: str | os.PathLike[str], **hub: Any) -> Tokenizer:
    """The transformers tokenizer of a folder (never asking the network) or a hub id. `hub`: see `models.hub_options`.

    Raises ModelNotFound, one line, when there is none.
    """
    from transformers import AutoTokenizer

    name = os.fspath(path_or_id)
    try:
        return AutoTokenizer.from_pretrained(name, local_files_only=Path(name).is_dir(), **hub)
    except (OSError, ValueError, KeyError) as error:
        reason = first_line(error)
        if Path(name).is_dir():
            advice = "save one there with tokenizer.save_pretrained(folder), or name another with tokenizer="
        else:
            advice = "it is no folder here; for a hub model look at the name, the network, and hf_token if it is gated"
        raise ModelNotFound(f"{name!r} has no tokenizer that can be loaded ({reason}): {advice}") from error


def encode(
    tokenizer: Tokenizer, prompt: str | Sequence[int], chat: bool = False, *, vocab_size: int | None = None
) -> list[int]:
    """The token ids of a prompt.

    Text gets the special tokens that are the tokenizer's own default and nothing else; with `chat=True` it becomes the
    user's turn in the tokenizer's chat template, followed by the template's generation prompt. Ids are checked and
    returned unchanged. `vocab_size` is the model's, where it may be smaller than the tokenizer's. Raises ValueError for
    an empty prompt, ids that are no whole numbers in the vocabulary, and `chat=True` with ids or without a template.
    """
    size = len(tokenizer) if vocab_size is None else vocab_size
    if isinstance(prompt, str):
        if not prompt:
            raise ValueError("the prompt is empty: give at least one token")
        try:
            prompt.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(
                f"the prompt holds half a character (a lone surrogate, {prompt[error.start]!r}) at index "
                f"{error.start}: remove it"
            ) from error
        ids = _chat_ids(tokenizer, prompt) if chat else list(tokenizer.encode(prompt, verbose=False))
        if not ids:
            raise ValueError(f"the prompt {prompt!r} has no tokens: give at least one")
        outside = [i for i in ids if i >= size]
        if outside:
            raise ValueError(
                f"the prompt holds token id {outside[0]}, but this model has {size} tokens (0 to {size - 1})"
            )
        return ids
    if chat:
        raise ValueError("chat=True needs the prompt as text: token ids go to the model as they are")
    return _check_ids(prompt, size)


def _chat_ids(tokenizer: Tokenizer, prompt: str) -> list[int]:
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("this model's tokenizer has no chat template: use chat=False")
    turn = [{"role": "user", "content": prompt}]
    written = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
    return list(tokenizer.encode(written, add_special_tokens=False, verbose=False))


def _check_ids(prompt: Sequence[int], size: int) -> list[int]:
    values = prompt.tolist() if hasattr(prompt, "tolist") else prompt  # numpy and torch
    if isinstance(values, bytes | dict) or not hasattr(values, "__iter__"):
        raise ValueError(f"a prompt is text or a list of token ids, not {type(prompt).__name__}")
    ids = [
        value if type(value) is int and 0 <= value < size else _check_id(value, size, f"position {position}")
        for position, value in enumerate(values)
    ]
    if not ids:
        raise ValueError("the prompt is empty: give at least one token")
    return ids


def _check_id(value: Any, size: int, where: str) -> int:
    value = value.item() if hasattr(value, "item") and getattr(value, "ndim", 0) == 0 else value
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ValueError(f"{value!r} at {where} is no token id: ids are whole numbers")
    number = operator.index(value)
    if not 0 <= number < size:
        raise ValueError(f"token id {number} at {where} is not in the vocabulary: this model has ids 0 to {size - 1}")
    return number


def token_table(tokenizer: Tokenizer, ids: Sequence[int]) -> list[Token]:
    """One Token a position, in order; `len(ids)` of them.

    `text` holds real characters (a leading space is a space, a newline a newline); a token that is only part of a
    character's bytes shows them in hexadecimal, and an id without a word (vocabularies are padded) as `⟨id 151900⟩`.
    """
    decoder = tokenizer.added_tokens_decoder
    special = {*tokenizer.all_special_ids, *(i for i, token in decoder.items() if token.special)}
    table = []
    for position, (number, (raw, text)) in enumerate(zip(ids, _spelt(tokenizer, ids, decoder), strict=True)):
        first = position == 0 and number == tokenizer.bos_token_id and bool(raw)
        table.append(Token(position, int(number), raw, text, special=number in special or not raw, bos=first))
    return table


def texts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """What tokens stand for: the `text` of `token_table`."""
    return [text for _, text in _spelt(tokenizer, ids, tokenizer.added_tokens_decoder)]


def _spelt(tokenizer: Tokenizer, ids: Sequence[int], added: Mapping[int, Any]) -> Iterator[tuple[str, str]]:
    """How the vocabulary spells each token ("" for an id without a word), and what it stands for."""
    scheme = _scheme(tokenizer)
    for number in map(int, ids):
        raw = tokenizer.convert_ids_to_tokens(number)
        if raw is None:
            yield "", f"⟨id {number}⟩"
        else:
            yield raw, raw if number in added else _display(tokenizer, scheme, raw)


def one_token(tokenizer: Tokenizer, text_or_id: str | int, *, vocab_size: int | None = None) -> int:
    """The id of a one-token text, or a valid id itself.

    Raises ValueError for a text of several tokens, naming the pieces, and the variant with (or without) a leading space
    where that one is a single token.
    """
    size = len(tokenizer) if vocab_size is None else vocab_size
    if not isinstance(text_or_id, str):
        return _check_id(text_or_id, size, "this place")
    if not text_or_id:
        raise ValueError("an empty text is no token: give a one-token text such as ' Paris', or an id")
    ids = _plain_ids(tokenizer, text_or_id)
    if len(ids) == 1:
        return _check_id(ids[0], size, repr(text_or_id))
    pieces = ", ".join(repr(token.text) for token in token_table(tokenizer, ids))
    variant = text_or_id[1:] if text_or_id.startswith(" ") else f" {text_or_id}"
    hint = f"{variant!r} is one token" if len(_plain_ids(tokenizer, variant)) == 1 else "give one of them, or an id"
    raise ValueError(f"{text_or_id!r} is {len(ids)} tokens ({pieces}), but one is needed: {hint}")


def _plain_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


_schemes: weakref.WeakKeyDictionary[Tokenizer, str] = weakref.WeakKeyDictionary()


def _scheme(tokenizer: Tokenizer) -> str:
    """How the vocabulary spells bytes: "byte-level" (GPT-2's alphabet), "sentencepiece" (▁ and <0x0A>) or "other".

    Found once a tokenizer: its definition is megabytes of JSON.
    """
    if tokenizer not in _schemes:
        _schemes[tokenizer] = _find_scheme(tokenizer)
    return _schemes[tokenizer]


def _find_scheme(tokenizer: Tokenizer) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return "other"
    spelt = _decoder_names(json.loads(backend.to_str()).get("decoder"))
    if "ByteLevel" in spelt:
        return "byte-level"
    return "sentencepiece" if spelt & {"ByteFallback", "Metaspace"} else "other"


def _decoder_names(decoder: dict[str, Any] | None) -> set[str]:
    if decoder is None:
        return set()
    return {decoder["type"]}.union(*(_decoder_names(part) for part in decoder.get("decoders", [])))


def _display(tokenizer: Tokenizer, scheme: str, raw: str) -> str:
    if scheme == "byte-level":
        table = _byte_alphabet()
        if all(character in table for character in raw):
            return _legible(bytes(table[character] for character in raw))
        return raw
    if scheme == "sentencepiece":
        if byte := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", raw):
            return _legible(bytes.fromhex(byte[1]))
        return raw.replace("▁", " ")
    text = str(tokenizer.convert_tokens_to_string([raw]))
    return raw if "\ufffd" in text else text


def _legible(data: bytes) -> str:
    """UTF-8 text, with bytes that are no whole character in hexadecimal: b" \\xe4\\xbd" is " ⟨E4 BD⟩"."""
    shown = ""
    while data:
        try:
            return shown + data.decode("utf-8")
        except UnicodeDecodeError as error:
            start = error.start
            end = next((i for i in range(start + 1, len(data)) if _starts_character(data[i:])), len(data))
            shown += data[:start].decode("utf-8") + f"⟨{data[start:end].hex(' ').upper()}⟩"
            data = data[end:]
    return shown


def _starts_character(data: bytes) -> bool:
    """Whether the bytes begin with one whole character."""
    for length in range(1, 5):
        try:
            return len(data[:length].decode("utf-8")) == 1
        except UnicodeDecodeError:
            continue
    return False


@cache
def _byte_alphabet() -> dict[str, int]:
    """GPT-2's byte-level alphabet, character to byte: printable Latin-1 stands for itself, the rest follow U+0100."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
