"""A session comes and goes without a trace: environment, output, threads, memory."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import explorer

from .compare import plain_twin, tensor_bytes
from .conftest import SMOL

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def fresh(tiny_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `fresh.py` saw in a process of its own, and what that process printed."""
    answer = tmp_path_factory.mktemp("fresh") / "answer.json"
    command = [sys.executable, "-m", "tests.engine.fresh", str(answer), SMOL, str(tiny_folder("llama"))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    return json.loads(answer.read_text()) | {"stdout": done.stdout.decode(), "stderr": done.stderr.decode()}


def test_boot_changes_nothing_of_the_process(fresh: dict[str, Any]) -> None:
    # while an engine lives, vLLM keeps its own versions of three functions of torch
    assert set(fresh["changed by boot"]) <= {"functions"}, fresh["changed by boot"]


def test_runs_change_nothing_of_the_process(fresh: dict[str, Any]) -> None:
    assert fresh["changed by runs"] == {}


def test_nothing_is_left_after_the_last_session(fresh: dict[str, Any]) -> None:
    assert fresh["changed by all of it"] == {}
    assert fresh["workers with none open"] == []
    assert fresh["forgotten session is collected"] is True


def test_sessions_side_by_side(fresh: dict[str, Any]) -> None:
    assert fresh["second session after the first closed"] is True
    assert fresh["third session"] is True
    assert fresh["weights of a closed session"] == []
    assert fresh["second session after the third closed"] is True
    assert len(fresh["workers with one open"]) == 1
    assert fresh["boots again"] is True


def test_memory(fresh: dict[str, Any]) -> None:
    gib = 2**30
    print({key: round(fresh[key] / gib, 2) for key in ("memory after boot", "memory after close")})
    assert fresh["memory after boot"] <= 3 * gib
    assert fresh["memory after close"] <= fresh["memory after boot"] - 0.8 * gib  # weights 0.5 and cache 0.5 are gone


def test_boot_prints_one_line_and_nothing_else(fresh: dict[str, Any]) -> None:
    assert fresh["stderr"] == ""
    shown = fresh["stdout"].splitlines()
    assert len(shown) == 4 and all("; ready in " in line for line in shown), fresh["stdout"]
    assert SMOL in shown[0]
    assert "\r" not in fresh["stdout"], "what rewrites a line belongs into no file"


def test_boot_says_what_it_takes_and_what_lowers_it(fresh: dict[str, Any]) -> None:
    first = fresh["stdout"].split("\n")[0]
    assert "weights 0.50 GiB (dtype lowers it)" in first  # 134.5 million numbers of 4 bytes
    assert re.search(r"key-value cache 0\.\d\d GiB \(max_model_len lowers it\)", first)


def test_five_boots_leave_no_more_than_one() -> None:
    command = [sys.executable, "-m", "tests.engine.five_boots", SMOL]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    after = json.loads(done.stdout.splitlines()[-1])
    print([round(size / 2**30, 2) for size in after])
    assert after[-1] <= after[0] * 1.05


def test_hooks_take_no_memory_until_something_is_captured(tiny_folder: Callable[[str], Path]) -> None:
    nothing = tensor_bytes()
    with plain_twin(str(tiny_folder("llama"))):
        plain = tensor_bytes()
        with explorer.boot(tiny_folder("llama")) as session:
            idle = tensor_bytes()
            assert idle - plain <= plain - nothing
            run = session.run([1, 5, 9], capture="all")
            assert tensor_bytes() >= idle + sum(run[f"blocks.{i}.hook_out"].nbytes for i in (0, 1))
            del run
            session.compare([1, 5, 9], {"blocks.0.hook_out": {"op": "add", "value": [0.5] * 96}}, capture="all")
            assert tensor_bytes() == idle


def test_what_a_closed_session_says_and_keeps(fresh: dict[str, Any]) -> None:
    assert all("session is closed" in message for message in fresh["refusals"]), fresh["refusals"]
    assert all(fresh["readable"]), fresh["readable"]


def test_the_explorers_log_is_about_hooks(tiny_folder: Callable[[str], Path], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="explorer"), explorer.boot(tiny_folder("gpt_neox"), max_model_len=96):
        pass
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("explorer")]
    assert 1 <= len(lines) <= 4 and all(" can fire" in line or "cannot fire" in line for line in lines), lines


def test_the_log_goes_to_a_logger(
    tiny_folder: Callable[[str], Path], capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    environment = dict(os.environ)
    with caplog.at_level(logging.INFO, logger="vllm"), explorer.boot(tiny_folder("llama"), max_model_len=96) as session:
        session.run([1, 5, 9])
        assert dict(os.environ) == environment
    assert any(record.name.startswith("vllm") for record in caplog.records)
    out, err = capfd.readouterr()
    assert err == ""
    assert len([line for line in out.split("\n") if line]) == 1


def test_closing_twice_and_as_a_context(tiny_folder: Callable[[str], Path]) -> None:
    with explorer.boot(tiny_folder("llama"), max_model_len=96) as session:
        run = session.run([1, 5, 9], logits=True)
        session.close()
    session.close()
    assert run.logits.shape == (3, 160)
    with pytest.raises(explorer.SessionClosed, match="session is closed"):
        session.run([1, 5, 9])
    with pytest.raises(explorer.SessionClosed), explorer.boot(tiny_folder("llama"), max_model_len=96) as other:
        other.close()
        other.run([1])
