"""`make bench`: what a comparison costs against plain vLLM generating the same two prompts in one batch.

Interleaved, medians of 20, as a ratio; the table is printed and kept as JSON in `.out/bench.json`.
"""

from __future__ import annotations

import json
import platform
import random
import statistics
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

import psutil

import explorer

REPEATS = 20
PAUSE = 0.05  # seconds before each measurement: idle OpenMP threads spin for a while, and both sides share the cores
LENGTHS = (16, 64)
LIMIT = 1.15  # the bound on compare / plain
KV_BYTES = 600 * 2**20


class Plain:
    """The plain engine in its own process."""

    def __init__(self, folder: str) -> None:
        command = [sys.executable, "-m", "tests.benchmarks.plain", folder, str(KV_BYTES)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        if self._answer() != "ready":
            raise RuntimeError("the plain engine did not start")

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def seconds(self, prompts: list[list[int]]) -> float:
        """How long plain vLLM takes for these prompts in one batch."""
        assert self._process.stdin is not None
        time.sleep(PAUSE)
        self._process.stdin.write(json.dumps(prompts) + "\n")
        self._process.stdin.flush()
        return float(self._answer())

    def close(self) -> None:
        """End the process."""
        self._process.communicate(timeout=60)


def seconds(fn: Any) -> float:
    """How long a call takes, after the other process's compute threads have gone to sleep."""
    time.sleep(PAUSE)
    start = time.perf_counter()
    fn()
    return time.perf_counter() - start


def main() -> int:
    """Measure, print, keep; 1 when a ratio is past its limit."""
    rows: list[dict[str, Any]] = []
    start = time.perf_counter()
    with explorer.boot("smollm2-135m", kv_cache_memory_bytes=KV_BYTES) as session:
        booted = {"boot_s": time.perf_counter() - start, "memory_gib": psutil.Process().memory_info().rss / 2**30}
        runs = [seconds(lambda: session.run("The Eiffel Tower is in the city of")) * 1e3 for _ in range(10)]
        booted |= {"first_run_ms": runs[0], "tenth_run_ms": runs[9]}
        assert session.model_path is not None
        plain = Plain(session.model_path)
        edit = {"blocks.10.hook_out": {"op": "scale", "factor": 0.5, "pos": 3}}
        for length in LENGTHS:
            ids = random.Random(length).sample(range(100, 40000), length)
            asks = {
                "compare, one edit": lambda ids=ids: session.compare(ids, edit).top(20),
                "two clean runs (idle)": lambda ids=ids: session.run([ids, ids]),
                "two runs, all hooks": lambda ids=ids: session.run([ids, ids], capture="all"),
                "two runs, all logits": lambda ids=ids: session.run([ids, ids], logits=True),
            }
            times: dict[str, list[float]] = {name: [] for name in ("plain", *asks)}
            for repeat in range(REPEATS + 2):
                sample = {"plain": plain.seconds([ids, ids])} | {name: seconds(ask) for name, ask in asks.items()}
                if repeat >= 2:  # the first two warm both sides up
                    for name, value in sample.items():
                        times[name].append(value)
            base = statistics.median(times["plain"])
            for name in asks:
                median = statistics.median(times[name])
                row = {"what": name, "tokens": length, "plain_ms": base * 1e3, "ms": median * 1e3}
                rows.append(row | {"ratio": median / base})
        plain.close()
    print(
        f"boot {booted['boot_s']:.1f} s, {booted['memory_gib']:.2f} GiB in memory; "
        f"first run {booted['first_run_ms']:.0f} ms, tenth {booted['tenth_run_ms']:.0f} ms"
    )
    print(f"SmolLM2-135M, fp32, eager; medians of {REPEATS}, interleaved")
    print(f"{'':24} tokens  plain ms  ours ms  ratio")
    for row in rows:
        print(f"{row['what']:24} {row['tokens']:6} {row['plain_ms']:9.1f} {row['ms']:8.1f} {row['ratio']:6.3f}")
    about = {"date": date.today().isoformat(), "machine": platform.machine(), "session": session.info}
    out = Path(".out")
    out.mkdir(exist_ok=True)
    (out / "bench.json").write_text(
        json.dumps({"about": about, "boot": booted, "rows": rows}, indent=2) + "\n", encoding="utf-8"
    )
    over = [row for row in rows if row["what"].startswith("compare") and row["ratio"] > LIMIT]
    for row in over:
        print(f"past the limit of {LIMIT}: {row['what']} at {row['tokens']} tokens is {row['ratio']:.3f} x plain")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
