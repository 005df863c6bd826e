"""Tokens: encoding, the token table, one-token strings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from explorer import ModelNotFound
from explorer import tokens as subject
from explorer.tokens import encode, load_tokenizer, one_token, texts, token_table

from .tokenizer_zoo import byte_level, sentencepiece_like, word_pieces

HOSTILE = [
    "</script><img src=x onerror=alert(1)>",
    "{{7*7}} ${x} `y` \\u003cb\\u003e",
    "emoji 😀👩‍👩‍👧 flags 🇺🇳",
    "你好,世界",
    "שלום עולם \u202eabc",
    "line one\nline two\r\n\ttab",
    "zero\u200bwidth \x00 nul \x1b[31m",
    "  two spaces  ",
]


def one_line(error: pytest.ExceptionInfo[BaseException]) -> str:
    text = str(error.value)
    assert text and "\n" not in text
    return text


def test_the_tokenizer_of_the_checkpoint(smol: Any) -> None:
    assert encode(smol, "The Eiffel Tower is in the city of") == [504, 414, 46682, 18669, 314, 281, 260, 2240, 282]
    assert smol.model_max_length == 8192 and len(smol) == 49152
    assert encode(smol, "<|im_end|>") == [2] and smol.bos_token == "<|im_start|>"
    # It adds no BOS of its own.
    assert encode(smol, "The") == [504] and not token_table(smol, [504])[0].bos


def test_the_chat_template_of_the_checkpoint(smol: Any) -> None:
    ids = encode(smol, "Hi", chat=True)
    assert smol.decode(ids) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    table = token_table(smol, ids)
    assert [token.position for token in table if token.bos] == [0]
    assert [token.text for token in table if token.special] == ["<|im_start|>", "<|im_end|>"] * 2 + ["<|im_start|>"]


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_comes_back_whole(smol: Any, tiny: Any, text: str) -> None:
    for tokenizer in (smol, tiny):
        ids = encode(tokenizer, text)
        assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text
        table = token_table(tokenizer, ids)
        assert [token.id for token in table] == ids and [token.position for token in table] == list(range(len(ids)))
        assert not any("\ufffd" in token.text or token.special for token in table)
        assert [token.raw for token in table] == tokenizer.convert_ids_to_tokens(ids)
        assert texts(tokenizer, [*ids, 10**6]) == [*(token.text for token in table), "⟨id 1000000⟩"]
        if text.isascii():
            assert "".join(token.text for token in table) == text


def test_load_tokenizer_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="has no tokenizer that can be loaded") as error:
        load_tokenizer(tmp_path)
    assert "tokenizer.save_pretrained(folder)" in one_line(error)


def test_load_tokenizer_from_a_folder(tiny: Any, tmp_path: Path) -> None:
    tiny.save_pretrained(tmp_path)
    assert encode(load_tokenizer(tmp_path), "a Paris") == encode(tiny, "a Paris")


# --- encode -----------------------------------------------------------------------------------------------------------


def test_encode_uses_the_tokenizers_own_default(tiny: Any) -> None:
    with_bos = byte_level(bos=True)
    start = with_bos.bos_token_id
    assert encode(with_bos, "ab")[0] == start and encode(tiny, "ab")[0] != start
    assert token_table(with_bos, encode(with_bos, "ab"))[0].bos
    assert encode(with_bos, [65, 66]) == [65, 66]  # ids: nothing prepended
    twice = token_table(with_bos, [start, 65, start])
    assert [token.bos for token in twice] == [True, False, False] and twice[2].special


@pytest.mark.parametrize(
    "ids",
    [[65, 66], (65, 66), np.array([65, 66]), torch.tensor([65, 66]), [np.int64(65), torch.tensor(66)], range(65, 67)],
)
def test_encode_takes_ids_of_any_kind(tiny: Any, ids: Any) -> None:
    got = encode(tiny, ids)
    assert got == [65, 66] and all(type(i) is int for i in got)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("", "the prompt is empty"),
        ([], "the prompt is empty"),
        (np.array([], dtype=int), "the prompt is empty"),
        ([1, True], "True at position 1 is no token id"),
        (np.array([True]), "True at position 0"),
        ([torch.tensor(True)], "True at position 0"),
        ([1.0], "1.0 at position 0 is no token id"),
        (["a"], "'a' at position 0"),
        ([[1]], "[1] at position 0"),
        ([0, -1], "token id -1 at position 1 is not in the vocabulary: this model has ids 0 to 258"),
        ([259], "token id 259 at position 0"),
        (None, "a prompt is text or a list of token ids, not NoneType"),
        (b"ab", "not bytes"),
        ({1: 2}, "not dict"),
        (7, "not int"),
        (torch.tensor(7), "not Tensor"),
        ("half \ud800 here", "a lone surrogate, '\\ud800') at index 5"),
    ],
)
def test_encode_refuses_in_one_line(wrong: Any, says: str) -> None:
    with pytest.raises(ValueError) as error:
        encode(byte_level(), wrong)
    assert says in one_line(error)


def test_encode_minds_a_smaller_model(tiny: Any) -> None:
    assert encode(tiny, "!", vocab_size=1) == [0]
    with pytest.raises(ValueError, match=r"holds token id 1, but this model has 1 tokens \(0 to 0\)"):
        encode(tiny, '!"', vocab_size=1)
    with pytest.raises(ValueError, match="ids 0 to 0"):
        encode(tiny, [1], vocab_size=1)
    with pytest.raises(ValueError, match="ids 0 to 0"):
        one_token(tiny, '"', vocab_size=1)


def test_encode_refuses_text_without_tokens() -> None:
    backend = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(ValueError, match="the prompt '  ' has no tokens"):
        encode(PreTrainedTokenizerFast(tokenizer_object=backend), "  ")


def test_encode_chat(tiny: Any, smol: Any) -> None:
    with pytest.raises(ValueError, match="no chat template: use chat=False"):
        encode(tiny, "Hi", chat=True)
    with pytest.raises(ValueError, match="chat=True needs the prompt as text"):
        encode(smol, [1, 2], chat=True)
    with pytest.raises(ValueError, match="the prompt is empty"):
        encode(smol, "", chat=True)


# --- the token table --------------------------------------------------------------------------------------------------


def test_fragments_of_characters_are_legible(smol: Any) -> None:
    table = token_table(smol, encode(smol, "你 😀"))
    assert [token.text for token in table] == ["⟨E4 BD⟩", "⟨A0⟩", " ⟨F0 9F 98⟩", "⟨80⟩"]
    assert [token.raw for token in table] == ["ä½", "ł", "ĠðŁĺ", "Ģ"]


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", ""),
        (b" abc\n\t", " abc\n\t"),
        ("é你😀".encode(), "é你😀"),
        (b"\xe4\xbd", "⟨E4 BD⟩"),
        (b" \xe4\xbd", " ⟨E4 BD⟩"),
        (b"\xa0!", "⟨A0⟩!"),
        (b"\xa0\xbd\xe4\xbd\xa0\xf0\x9f", "⟨A0 BD⟩你⟨F0 9F⟩"),
        (b"a\xffb\xfec", "a⟨FF⟩b⟨FE⟩c"),
        ("\ufffd".encode(), "\ufffd"),  # a real one is text
    ],
)
def test_legible(data: bytes, text: str) -> None:
    assert subject._legible(data) == text


@given(st.binary(max_size=12))
def test_legible_loses_no_byte(data: bytes) -> None:
    shown = subject._legible(data)
    back = b""
    while shown:
        if shown[0] == "⟨":
            inside, _, shown = shown[1:].partition("⟩")
            back += bytes.fromhex(inside)
        else:
            back += shown[0].encode()
            shown = shown[1:]
    if "⟨".encode() not in data and "⟩".encode() not in data:
        assert back == data


def test_the_byte_alphabet_is_the_tokenizers_own() -> None:
    assert sorted(subject._byte_alphabet()) == sorted(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(subject._byte_alphabet().values()) == list(range(256))
    tiny = byte_level()
    for text in ("\x00\x7f\xa0\xad", "Ā~ÿ"):
        spelt = tiny.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
        assert bytes(subject._byte_alphabet()[c] for piece, _ in spelt for c in piece) == text.encode()


def test_added_tokens_are_shown_as_written(tiny: Any) -> None:
    special, plain = token_table(tiny, encode(tiny, "<eos>Ġraw"))
    assert (special.text, special.special) == ("<eos>", True)
    assert (plain.text, plain.raw, plain.special) == ("Ġraw", "Ġraw", False)  # not " raw": an added token is literal


def test_sentencepiece_tokens() -> None:
    tokenizer = sentencepiece_like()
    table = token_table(tokenizer, encode(tokenizer, " Paris é你\n"))
    assert [token.text for token in table] == [" Paris", " ", "é", "⟨E4⟩", "⟨BD⟩", "⟨A0⟩", "\n"]
    assert table[0].raw == "▁Paris" and table[3].raw == "<0xE4>"


def test_other_vocabularies() -> None:
    tokenizer = word_pieces()
    assert [token.text for token in token_table(tokenizer, [1, 2, 3])] == ["pa", "##ris", "\ufffd"]


def test_a_tokenizer_without_a_backend() -> None:
    class Plain:
        all_special_ids = ()
        bos_token_id = None

        def __init__(self) -> None:
            self.added_tokens_decoder: dict[int, AddedToken] = {}

        def convert_ids_to_tokens(self, number: int) -> str | None:
            return {0: "x", 1: "odd"}.get(number)

        def convert_tokens_to_string(self, pieces: list[str]) -> str:
            return "\ufffd" if pieces == ["odd"] else pieces[0].upper()

    assert [token.text for token in token_table(Plain(), [0, 1])] == ["X", "odd"]


def test_a_byte_level_token_outside_the_alphabet() -> None:
    assert subject._display(byte_level(), "byte-level", "a b") == "a b"


def test_a_decoder_that_is_not_there() -> None:
    assert subject._scheme(PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0})))) == "other"


def test_an_id_without_an_entry(tiny: Any) -> None:
    """Vocabularies are padded: a model can predict an id that its tokenizer has no word for."""
    token = token_table(tiny, [1, 5000])[1]
    assert (token.position, token.id, token.raw, token.text, token.special) == (1, 5000, "", "⟨id 5000⟩", True)


# --- one token --------------------------------------------------------------------------------------------------------


def test_one_token(smol: Any, tiny: Any) -> None:
    paris = one_token(smol, " Paris")
    assert token_table(smol, [paris])[0].text == " Paris"
    assert one_token(smol, paris) == one_token(smol, np.int64(paris)) == paris  # type: ignore[arg-type]
    assert one_token(byte_level(bos=True), "a") == one_token(tiny, "a")  # no BOS is counted


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("Paris", "'Paris' is 3 tokens ('P', 'ar', 'is'), but one is needed: ' Paris' is one token"),
        (" P!", "' P!' is 2 tokens (' P', '!'), but one is needed: give one of them, or an id"),
        (" a", "'a' is one token"),
        ("", "an empty text is no token"),
        (True, "True at this place is no token id"),
        (1.5, "1.5 at this place is no token id"),
        (999, "token id 999 at this place is not in the vocabulary"),
    ],
)
def test_one_token_refuses_in_one_line(tiny: Any, wrong: Any, says: str) -> None:
    with pytest.raises(ValueError) as error:
        one_token(tiny, wrong)
    assert says in one_line(error)


def test_a_long_prompt_is_tokenized_without_a_word(smol: Any, capfd: pytest.CaptureFixture[str]) -> None:
    for chat in (False, True):
        assert len(encode(smol, "a b " * 5000, chat)) > smol.model_max_length
    assert capfd.readouterr() == ("", "")
