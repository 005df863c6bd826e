"""`make bench`: what captures and edits cost, as ratios against plain vLLM given the same prompts in the same run.

Four processes are timed in turns: plain vLLM, ours, ours, and plain vLLM, booted in this order; with `--rounds 2`
eight, and so on. Two processes of the very same engine differ by up to a tenth, for as long as they live. So each side
is the mean of its processes' medians; what plain's differ by is shown: no ratio means more than that. The table is
printed and kept as JSON in `.out/bench.json`.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil

from ..gpu.models import folder_of

MODES = ("eager", "compiled")
BOOT_TOGETHER = 2 if (psutil.cpu_count() or 1) >= 8 else 1  # processes
PAUSE = 0.05  # seconds before each measurement: idle OpenMP threads spin for a while, and all sides share the cores


class Side:
    """One process that measures on request."""

    def __init__(self, module: str, *arguments: str) -> None:
        command = [sys.executable, "-m", f"tests.benchmarks.{module}", *arguments]
        noise = subprocess.DEVNULL if module == "plain" else None  # our own errors are to be read
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=noise, text=True
        )

    @cached_property
    def about(self) -> Any:
        """What it says of itself once it has booted."""
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("one of the processes ended")
        return json.loads(line)

    def seconds(self, question: Any) -> float:
        """What it answers to one line of JSON, after the other sides' compute threads have gone to sleep."""
        assert self._process.stdin is not None
        time.sleep(PAUSE)
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return float(self._answer())

    def close(self) -> None:
        """End the process."""
        try:
            self._process.communicate(timeout=60)
        finally:
            self._process.kill()


def measure(number: int, case: dict[str, Any], plain: Sequence[Side], ours: Sequence[Side]) -> dict[str, Any]:
    """All of them in turns; the first two turns warm them up."""
    questions = {side: [case["generated"], case["prompts"]] for side in plain} | dict.fromkeys(ours, number)
    seconds: dict[Side, list[float]] = {side: [] for side in questions}
    for _ in range(case["repeats"] + 2):
        for side, question in questions.items():
            seconds[side].append(side.seconds(question))
    medians = {side: statistics.median(taken[2:]) for side, taken in seconds.items()}
    theirs, mine = [medians[side] for side in plain], [medians[side] for side in ours]
    return {
        "what": case["what"],
        "prompts": sizes(case["prompts"]),
        "plain_ms": statistics.mean(theirs) * 1e3,
        "ms": statistics.mean(mine) * 1e3,
        "ratio": statistics.mean(mine) / statistics.mean(theirs),
        "plain_ratio": max(theirs) / min(theirs),
        "limit": case["limit"],
    }


def sizes(prompts: Sequence[Sequence[int]]) -> str:
    """How many prompts and how long, for people to read."""
    lengths = {len(ids) for ids in prompts}
    return f"{len(prompts)} x {lengths.pop() if len(lengths) == 1 else f'{min(lengths)}-{max(lengths)}'}"


def bench(model: str, dtype: str, mode: str, rounds: int = 1, only: str = "") -> dict[str, Any]:
    """Boot them in one mode, measure every case that has `only` in its name, print the table."""
    folder = str(folder_of(model))
    boots = Side("boots", folder, dtype, mode)
    booted = boots.about
    boots.close()
    modules = ("plain", "ours", "ours", "plain") * rounds
    sides: list[Side] = []
    for module in modules:
        sides.append(Side(module, folder, dtype, mode))
        if len(sides) % BOOT_TOGETHER == 0:
            for side in sides:
                _ = side.about  # never two of a kind at once: what one compiles the next one loads
    plain, ours = ([side for side, of in zip(sides, modules, strict=True) if of == kind] for kind in ("plain", "ours"))
    about = ours[0].about
    print(
        f"\n{mode}: first boot {booted['first_boot_s']:.1f} s, second {booted['boot_s']:.1f} s; "
        f"{booted['memory_gib']:.2f} GiB in memory; first run {booted['first_run_ms']:.0f} ms, tenth "
        f"{booted['tenth_run_ms']:.0f} ms"
    )
    print(f"{'':22} {'prompts':>11}  plain ms   ours ms  ratio  at most  (plain to plain)", flush=True)
    rows = []
    for number, case in enumerate(about["cases"]):
        if only not in case["what"]:
            continue
        row = measure(number, case, plain, ours)
        rows.append(row)
        limit = "" if row["limit"] is None else f"{row['limit']:.2f}"
        print(
            f"{row['what']:22} {row['prompts']:>11} {row['plain_ms']:9.1f} {row['ms']:9.1f} {row['ratio']:6.3f}"
            f"  {limit:>7}  ({row['plain_ratio']:.3f}){'  PAST IT' if past(row) else ''}",
            flush=True,
        )
    for side in sides:
        side.close()
    return {"mode": mode, "session": about["session"], "boot": booted, "rows": rows}


def past(row: dict[str, Any]) -> bool:
    """Whether a ratio is past its bound."""
    return row["limit"] is not None and row["ratio"] > row["limit"]


def main() -> int:
    """Measure, print, keep; 1 when a ratio is past its limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("modes", nargs="*", metavar="MODE", help="eager, compiled; both unless said")
    parser.add_argument(
        "--model", default="smollm2-135m", help="a Llama-shaped one: bundled, a folder, or of tests.gpu.models"
    )
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=1, help="of four processes each, all of them at once")
    parser.add_argument("--only", default="", help="the cases with this in their name")
    asked = parser.parse_args()
    print(f"{asked.model}, {asked.dtype}; medians, in turns with plain vLLM in the same mode")
    results = [bench(asked.model, asked.dtype, mode, asked.rounds, asked.only) for mode in asked.modes or MODES]
    about = {"date": date.today().isoformat(), "machine": platform.machine(), "cores": psutil.cpu_count()}
    out = Path(".out")
    out.mkdir(exist_ok=True)
    text = json.dumps({"about": about, "results": results}, indent=2, default=str) + "\n"
    (out / "bench.json").write_text(text, encoding="utf-8")
    return int(any(past(row) for result in results for row in result["rows"]))


if __name__ == "__main__":
    sys.exit(main())
