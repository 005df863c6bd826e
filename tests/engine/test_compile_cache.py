"""vLLM's compile cache under our boots: warm the second time, and nobody meets another's artefact."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def boots(folder: Path, model: Path, *kinds: str) -> list[dict[str, Any]]:
    """What `compiled_boots.py` saw in a process of its own, with this folder as vLLM's cache."""
    answer = folder / "answer.json"
    command = [sys.executable, "-m", "tests.engine.compiled_boots", str(answer), str(model), *kinds]
    environment = os.environ | {"VLLM_CACHE_ROOT": str(folder / "cache")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(answer.read_text())  # type: ignore[no-any-return]


def entries(seen: dict[str, Any]) -> set[str]:
    """The hashes under which the cache holds compiled models."""
    return {file.rsplit("/rank_", 1)[0] for file in seen["cached"] if "/rank_" in file}


def test_the_second_boot_is_warm_and_nobody_meets_anothers(tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    model = tiny_folder("llama")
    ours, plain = boots(tmp_path, model, "ours", "plain")
    again, other_code = boots(tmp_path, model, "ours", "other code")
    assert ours["counts"]["fxgraph_cache_miss"] > 0
    assert ours["counts"]["num_aot_compiles"] == 1 and ours["counts"]["num_aot_artifacts_loaded"] == 0
    assert again["counts"]["num_aot_compiles"] == 0 and again["counts"]["num_aot_artifacts_loaded"] == 1
    assert again["cached"] == plain["cached"] and "fxgraph_cache_miss" not in again["counts"]
    assert [len(entries(seen)) for seen in (ours, plain, again, other_code)] == [1, 2, 2, 3]
    assert ours["numbers"] == plain["numbers"] == again["numbers"] == other_code["numbers"]  # bit for bit
