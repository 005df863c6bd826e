"""What a session does to the process it lives in, looked at from a fresh one.

python -m tests.engine.fresh ANSWER MODEL TINY: boots, runs and closes, and writes what it saw to the file ANSWER as
JSON. Whatever is on stdout and stderr is the explorer's own.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import random
import signal
import sys
import threading
import warnings
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

import explorer

from .compare import worker

EIFFEL = "The Eiffel Tower is in the city of"


def surroundings() -> dict[str, Any]:
    """What belongs to the whole process and must be as it was."""
    return {
        "environment": dict(os.environ),
        "affinity": sorted(os.sched_getaffinity(0)),
        "threads of torch": torch.get_num_threads(),
        "default dtype": str(torch.get_default_dtype()),
        "functions": [
            id(f) for f in (torch.set_num_threads, torch.accelerator.synchronize, torch.accelerator.empty_cache)
        ],
        "random": [repr(random.getstate()), repr(np.random.get_state()), torch.get_rng_state().tolist()],
        "stderr": os.fstat(2).st_ino,
        "folder": os.getcwd(),
        "signals": repr([signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]),
        # filters of everything; modules add narrow ones when they are first imported
        "warnings": [repr(f) for f in warnings.filters if f[1:4] == (None, Warning, None)],
        "handlers": [repr(h) for h in logging.getLogger().handlers],
        "level": logging.getLogger().level,
        "hook": repr(sys.excepthook),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "gradients": torch.is_grad_enabled(),
    }


def changed(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """What is not as it was: both values."""
    return {key: [before[key], after[key]] for key in before if before[key] != after[key]}


def workers() -> list[str]:
    """Names of live worker threads."""
    return [t.name for t in threading.enumerate() if t.name.startswith("explorer-")]


def refusal(call: Any) -> str:
    """The SessionClosed message of a call."""
    try:
        call()
    except explorer.SessionClosed as error:
        return str(error)
    return "it was not refused"


def main(answer: str, model: str, tiny: str) -> None:
    seen: dict[str, Any] = {}
    memory = psutil.Process().memory_info
    before = surroundings()
    session = explorer.boot(model)
    booted = surroundings()
    seen["memory after boot"] = memory().rss
    seen["changed by boot"] = changed(before, booted)

    run = session.run(EIFFEL, {"blocks.3.hook_out": {"op": "scale", "factor": 2.0}}, capture="all")
    unread, read = session.run(EIFFEL), session.run(EIFFEL)
    loss = read.loss.sum().item()
    said = session.generate(EIFFEL, max_new_tokens=3, stop="x")
    seen["changed by runs"] = changed(booted, surroundings())

    second = explorer.boot(tiny)
    alive = second.run([1, 5, 9]).logits
    weights = {name: weakref.ref(w) for name, w in worker(session).model_runner.model.named_parameters()}
    session.close()
    seen["weights of a closed session"] = [name for name, weight in weights.items() if weight() is not None]
    session.close()
    seen["second session after the first closed"] = bool(torch.equal(second.run([1, 5, 9]).logits, alive))
    with explorer.boot(tiny, max_model_len=64) as third:
        seen["third session"] = bool(torch.equal(third.run([1, 5, 9]).logits, alive))
    seen["second session after the third closed"] = bool(torch.equal(second.run([1, 5, 9]).logits, alive))
    seen["workers with one open"] = workers()

    held = weakref.ref(second)
    del second, third
    gc.collect()
    seen["forgotten session is collected"] = held() is None
    seen["workers with none open"] = workers()
    seen["memory after close"] = memory().rss
    seen["changed by all of it"] = changed(before, surroundings())

    seen["refusals"] = [
        refusal(call) for call in (lambda: unread.logits, lambda: session.run(EIFFEL), lambda: unread.loss)
    ]
    seen["readable"] = [
        run["blocks.3.hook_out"].shape[0] == run.rows,
        run.pattern(0).shape[0] == 9,
        unread.top(1)[0].text == " Paris",
        read.loss.sum().item() == loss,
        len(said.text) > 0,
        "closed" in repr(session),
        len(session.tokens(EIFFEL)) == run.rows,
    ]

    again = explorer.boot(tiny)
    seen["boots again"] = bool(torch.equal(again.run([1, 5, 9]).logits, alive))
    Path(answer).write_text(json.dumps(seen))  # `again` is left open: the process must end all the same


if __name__ == "__main__":
    main(*sys.argv[1:])
