"""`make bench`: what captures and edits cost, as ratios against plain vLLM given the same prompts in the same run.

Each case is measured in turns with a plain engine of the same mode in a process of its own; medians, their ratio, and
the bound it is held to. The table is printed and kept as JSON in `.out/bench.json`.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import psutil

import explorer

MODES = ("eager", "compiled")
PAUSE = 0.05  # seconds before each measurement: idle OpenMP threads spin for a while, and both sides share the cores
KV_BYTES = 600 * 2**20
CLEAN = "When Mary and John went to the store, John gave a drink to"
CORRUPT = "When Mary and John went to the store, Mary gave a drink to"


@dataclass(frozen=True)
class Case:
    """What we are asked, what plain vLLM generates meanwhile, and the most that ours may cost."""

    what: str
    prompts: list[list[int]]
    ask: Callable[[], Any]
    limit: float | None = None
    repeats: int = 20
    generated: int = 1

    @property
    def tokens(self) -> str:
        """Prompts and their length, for people to read."""
        lengths = {len(ids) for ids in self.prompts}
        return f"{len(self.prompts)} x {lengths.pop() if len(lengths) == 1 else f'{min(lengths)}-{max(lengths)}'}"


def cases(session: explorer.Session, folder: Path) -> Iterator[Case]:
    """Everything that has a price."""
    idle = {"eager": 1.02, "compiled": 1.05}[session.info["mode"]]
    stream = f"blocks.{session.model.shape.layers // 3}.hook_out"
    edit = {stream: {"op": "scale", "factor": 0.5, "pos": 3}}
    for length in (16, 64):
        ids = drawn(length)
        two = [ids, ids]
        yield Case("idle", two, lambda two=two: session.run(two), idle, repeats=60)
        yield Case("compare, one edit", two, lambda ids=ids: session.compare(ids, edit).top(20), 1.15)
        yield Case("all logits", two, lambda two=two: session.run(two, logits=True))
    long = drawn(256)
    yield Case("idle", [long], lambda: session.run(long), idle, repeats=60)
    yield Case("every hook captured", [long], lambda: session.run(long, capture="all"), 1.5)
    steered = {stream: {"op": "add", "value": 0.01, "phase": "both"}}
    yield Case("32 tokens, idle", [drawn(16)], lambda: generate(session, None), idle, 5, 32)
    yield Case("32 tokens, steered", [drawn(16)], lambda: generate(session, steered), None, 5, 32)
    clean, corrupt = (list(session.encode(text)) for text in (CLEAN, CORRUPT))
    specs = [
        {f"blocks.{layer}.hook_out": {"op": "patch", "source": CLEAN, "pos": pos}}
        for layer in range(session.model.shape.layers)
        for pos in range(len(clean))
    ]
    many = [corrupt] * len(specs)
    yield Case("patched, one batch", many, lambda: session.run(many, specs), 1.15, repeats=5)
    prompts = [drawn(length) for length in range(64, 128)]
    numbers = iter(range(10**6))
    yield Case(
        "collect, every stream",
        prompts,
        lambda: session.collect(prompts, "blocks.*.hook_out", folder / str(next(numbers))),
        1.5,
        repeats=5,
    )


def generate(session: explorer.Session, edits: Any) -> None:
    """32 tokens; an end of text before that would make it cheaper than plain vLLM, which goes on."""
    if len(session.run(drawn(16), edits, max_new_tokens=32).generated) < 32:
        raise RuntimeError("the model ended the text early: take another prompt")


def drawn(length: int) -> list[int]:
    """Random token ids, the same every time."""
    return random.Random(length).sample(range(100, 1000), length)


class Plain:
    """The plain engine in its own process."""

    def __init__(self, folder: str, dtype: str, mode: str) -> None:
        command = [sys.executable, "-m", "tests.benchmarks.plain", folder, dtype, mode, str(KV_BYTES)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        if self._answer() != "ready":
            raise RuntimeError("the plain engine did not start")

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def seconds(self, prompts: list[list[int]], generated: int) -> float:
        """How long plain vLLM takes to generate so many tokens for each of these prompts in one batch."""
        assert self._process.stdin is not None
        time.sleep(PAUSE)
        self._process.stdin.write(json.dumps([generated, prompts]) + "\n")
        self._process.stdin.flush()
        return float(self._answer())

    def close(self) -> None:
        """End the process."""
        self._process.communicate(timeout=60)


def seconds(fn: Callable[[], Any]) -> float:
    """How long a call takes, after the other process's compute threads have gone to sleep."""
    time.sleep(PAUSE)
    start = time.perf_counter()
    fn()
    return time.perf_counter() - start


def measure(case: Case, plain: Plain, warm_ups: int = 2) -> dict[str, Any]:
    """Ours and plain's in turns; the first ones warm both sides up."""
    theirs, ours = [], []
    for repeat in range(case.repeats + warm_ups):
        sample = plain.seconds(case.prompts, case.generated), seconds(case.ask)
        if repeat >= warm_ups:
            theirs.append(sample[0])
            ours.append(sample[1])
    base, median = statistics.median(theirs), statistics.median(ours)
    return {
        "what": case.what,
        "prompts": case.tokens,
        "plain_ms": base * 1e3,
        "ms": median * 1e3,
        "ratio": median / base,
        "limit": case.limit,
    }


def bench(model: str, dtype: str, mode: str) -> dict[str, Any]:
    """Boot both engines in one mode, measure every case, print the table."""

    def boot() -> explorer.Session:
        return explorer.boot(model, dtype=dtype, mode=mode, max_model_len=2048, kv_cache_memory_bytes=KV_BYTES)

    start = time.perf_counter()
    boot().close()
    booted = {"first_boot_s": time.perf_counter() - start}
    start = time.perf_counter()
    with boot() as session, tempfile.TemporaryDirectory() as folder:
        booted |= {"boot_s": time.perf_counter() - start, "memory_gib": psutil.Process().memory_info().rss / 2**30}
        runs = [seconds(lambda: session.run("The Eiffel Tower is in the city of")) * 1e3 for _ in range(10)]
        booted |= {"first_run_ms": runs[0], "tenth_run_ms": runs[9]}
        print(
            f"\n{mode}: first boot {booted['first_boot_s']:.1f} s, second {booted['boot_s']:.1f} s; "
            f"{booted['memory_gib']:.2f} GiB in memory; first run {runs[0]:.0f} ms, tenth {runs[9]:.0f} ms"
        )
        print(f"{'':22} {'prompts':>11}  plain ms   ours ms  ratio  at most", flush=True)
        assert session.model_path is not None
        plain = Plain(session.model_path, dtype, mode)
        rows = []
        for case in cases(session, Path(folder)):
            row = measure(case, plain)
            rows.append(row)
            limit = "" if case.limit is None else f"{case.limit:.2f}"
            print(
                f"{row['what']:22} {row['prompts']:>11} {row['plain_ms']:9.1f} {row['ms']:9.1f} {row['ratio']:6.3f}"
                f"  {limit:>7}{'  PAST IT' if case.limit and row['ratio'] > case.limit else ''}",
                flush=True,
            )
        plain.close()
        return {"mode": mode, "session": session.info, "boot": booted, "rows": rows}


def main() -> int:
    """Measure, print, keep; 1 when a ratio is past its limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("modes", nargs="*", metavar="MODE", help="eager, compiled; both unless said")
    parser.add_argument("--model", default="smollm2-135m", help="bundled name or folder of a Llama-shaped model")
    parser.add_argument("--dtype", default="float32")
    asked = parser.parse_args()
    print(f"{asked.model}, {asked.dtype}; medians, in turns with plain vLLM in the same mode")
    results = [bench(asked.model, asked.dtype, mode) for mode in asked.modes or MODES]
    about = {"date": date.today().isoformat(), "machine": platform.machine(), "cores": psutil.cpu_count()}
    out = Path(".out")
    out.mkdir(exist_ok=True)
    text = json.dumps({"about": about, "results": results}, indent=2, default=str) + "\n"
    (out / "bench.json").write_text(text, encoding="utf-8")
    past = [row for result in results for row in result["rows"] if row["limit"] and row["ratio"] > row["limit"]]
    return 1 if past else 0


if __name__ == "__main__":
    sys.exit(main())
