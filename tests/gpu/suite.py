"""Run the GPU suite on some models, in one process; results as they come, then as one JSON file and one table.

    python -m tests.gpu.suite --model 1b --model smollm2-135m --out FOLDER [pytest's own arguments]

pytest's own are `-k`, `-x` and the like, and `--tensor-parallel N` and `--pipeline-parallel N` for several GPUs and
`--rehearse` for a machine without any. `FOLDER/suite.jsonl` has a line for each test as soon as it is over,
`suite.json` all of them with versions, GPU, date and command, `suite.md` the table, which is printed as well.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")  # else products in fp32 are rounded to TF32 in vLLM's attention
os.environ.setdefault("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # whatever that machine has

import pytest
import torch

from explorer import ModelNotFound

from .models import folder_of
from .report import about, table

HERE = Path(__file__).parent
STUCK = 200  # seconds after which a test's threads are shown; it goes on


class Records:
    """A pytest plugin that writes each test's outcome and numbers when it is over."""

    def __init__(self, model: str, file: Path) -> None:
        self.model, self.file = model, file
        self.rows: list[dict[str, Any]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.outcome == "passed":
            if report.when == "setup":
                self._setup = report.duration
            return
        row = {
            "model": self.model,
            "test": report.nodeid.rpartition("/")[2],
            "outcome": report.outcome,
            "seconds": round(report.duration, 2),
            "setup_seconds": round(getattr(self, "_setup", 0.0), 2),
            "numbers": dict(report.user_properties),
        }
        if report.outcome != "passed":
            row["message"] = str(report.longrepr)[-4000:]
        self.rows.append(row)
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, default=str) + "\n")


def main() -> int:
    """Run it; 1 when something failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--model", action="append", help="a name of tests.gpu.models, a bundled name or a folder")
    parser.add_argument("--out", type=Path, default=Path(".out/gpu-results"))
    parser.add_argument("--tests", nargs="+", default=[str(HERE)], help="files of tests, in order")
    asked, rest = parser.parse_known_args()
    models = asked.model or ["tiny"]
    if not (torch.cuda.is_available() or "--rehearse" in rest):
        parser.error("torch finds no NVIDIA GPU here, and every test would be skipped; --rehearse runs them on the CPU")
    try:
        for model in models:
            folder_of(model)
    except ModelNotFound as error:
        parser.error(str(error))
    asked.out.mkdir(parents=True, exist_ok=True)
    lines = asked.out / "suite.jsonl"
    lines.unlink(missing_ok=True)
    started, rows, codes = time.monotonic(), [], []
    for model in models:
        records = Records(model, lines)
        arguments = ["-p", "no:cacheprovider", "-q", "--tb=short", "--show-capture=no", "--model", model]
        arguments += ["-o", f"faulthandler_timeout={STUCK}"]
        codes.append(int(pytest.main([*arguments, *asked.tests, *rest], plugins=[records])))
        rows += records.rows
    result = {"about": about(), "seconds": round(time.monotonic() - started, 1), "tests": rows}
    (asked.out / "suite.json").write_text(json.dumps(result, indent=1, default=str) + "\n", encoding="utf-8")
    cells = [[r["model"], r["test"], r["outcome"], r["seconds"], said(r["numbers"])] for r in rows]
    text = table(["model", "test", "outcome", "s", "numbers"], cells)
    (asked.out / "suite.md").write_text(text, encoding="utf-8")
    print(text)
    return max(codes)


def said(numbers: dict[str, Any]) -> str:
    """What a test recorded, short: numbers that come in pairs are ours and transformers' own."""

    def short(value: Any) -> str:
        if isinstance(value, float):
            return f"{value:.2g}"
        return " / ".join(short(v) for v in value) if isinstance(value, list | tuple) else str(value)

    return "; ".join(f"{name} {short(value)}" for name, value in numbers.items())


if __name__ == "__main__":
    sys.exit(main())
