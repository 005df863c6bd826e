"""Ours booted twice in a process of its own: how long that takes, and the first runs; one line of JSON."""

from __future__ import annotations

import json
import os
import sys
import time

import psutil

from .ours import boot, seconds


def main(model: str, dtype: str, mode: str) -> None:
    """Seconds, GiB of memory with one session, and milliseconds of the first and the tenth run."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # progress is printed on stdout
    first_boot = seconds(lambda: boot(model, dtype, mode).close())
    start = time.perf_counter()
    with boot(model, dtype, mode) as session:
        booted = {
            "first_boot_s": first_boot,
            "boot_s": time.perf_counter() - start,
            "memory_gib": psutil.Process().memory_info().rss / 2**30,
        }
        runs = [seconds(lambda: session.run("The Eiffel Tower is in the city of")) * 1e3 for _ in range(10)]
    print(json.dumps(booted | {"first_run_ms": runs[0], "tenth_run_ms": runs[9]}), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:4])
