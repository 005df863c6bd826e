"""Ours in a process of its own, timed on request: every case that has a price.

Writes one line of JSON about the cases, then answers each line of stdin, a case's number, with the seconds
that the case took.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import explorer

from .plain import room

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
    yield Case("collect, every stream", prompts, lambda: collect(session, prompts, folder), 1.5, repeats=5)


def collect(session: explorer.Session, prompts: list[list[int]], folder: Path) -> None:
    """Into a folder of its own, with what it takes to remove it."""
    with tempfile.TemporaryDirectory(dir=folder) as own:
        session.collect(prompts, "blocks.*.hook_out", own, progress=lambda done, total: None)


def generate(session: explorer.Session, edits: Any) -> None:
    """32 tokens; an end of text before that would make it cheaper than plain vLLM, which goes on."""
    if len(session.run(drawn(16), edits, max_new_tokens=32).generated) < 32:
        raise RuntimeError("the model ended the text early: take another prompt")


def drawn(length: int) -> list[int]:
    """Random token ids, the same every time."""
    return random.Random(length).sample(range(100, 1000), length)


def boot(model: str, dtype: str, mode: str) -> explorer.Session:
    """The session that is measured."""
    return explorer.boot(model, dtype=dtype, mode=mode, max_model_len=2048, **room())


def main(model: str, dtype: str, mode: str) -> None:
    """Boot once, as plain vLLM does (what a second boot finds in memory is slower for good), serve until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # progress is printed on stdout

    def answer(value: Any) -> None:
        print(json.dumps(value, default=str), file=answers, flush=True)

    with boot(model, dtype, mode) as session, tempfile.TemporaryDirectory() as folder:
        served = list(cases(session, Path(folder)))
        about = [
            {name: getattr(case, name) for name in ("what", "prompts", "limit", "repeats", "generated")}
            for case in served
        ]
        answer({"session": session.info, "cases": about})
        for line in sys.stdin:
            answer(seconds(served[int(line)].ask))


def seconds(fn: Callable[[], Any]) -> float:
    """How long a call takes."""
    start = time.perf_counter()
    fn()
    return time.perf_counter() - start


if __name__ == "__main__":
    main(*sys.argv[1:4])
