"""Generations while vLLM runs a step ahead: a text is seen to have ended when the next row was fed already."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_row_that_was_fed_ahead_is_nobodys(tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    answer = tmp_path / "answer.json"
    command = [sys.executable, "-m", "tests.engine.ahead", str(answer), str(tiny_folder("llama"))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads(answer.read_text())
    assert seen["ahead"] and seen["begun at a time"] == [2, 1]
    assert seen["ends"][0] <= 6 < 12  # one ends early
    lengths = [10, 4]  # of the prompts
    for i, run in enumerate(seen["runs"]):
        assert run["generated"] == seen["ends"][i % 2]
        assert set(run["rows"]) == {lengths[i % 2] + run["generated"] - 1}
        assert run["same"] and run["off"] < 1e-4
    assert seen["off at rest"] < 1e-4 and seen["under way"] == 0 and seen["failed"] == 2
    assert seen["early"][0] == seen["ends"][0] and seen["early"][1] < 1e-4
    assert 0 < seen["stopped"][0] < 12 and seen["stopped"][1] == lengths[1] + seen["stopped"][0] - 1
    assert seen["off"] < 1e-4
