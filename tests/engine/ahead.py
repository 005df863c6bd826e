"""vLLM runs ahead on a CPU, as on GPUs (asynchronous scheduling): a step begins before the last one is read.

python -m tests.engine.ahead ANSWER MODEL: for each generation, how it differs from the transformers engine's, as JSON
in the file ANSWER. vLLM turns it off on CPUs for want of streams alone: here they are there, and do nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import torch
import vllm.v1.worker.gpu_model_runner  # noqa: F401  # imports what reads the names below as types
from transformers.generation import utils  # noqa: F401
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.worker import cpu_model_runner

import explorer

PROMPT = [1, *range(10, 19)]
OTHER = [1, 40, 41, 42]
STEERED = {"blocks.1.hook_out": {"op": "add", "value": 0.5, "phase": "both"}}


class Nothing:
    """A stream or an event where everything has happened already."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


def run_ahead() -> None:
    """Have vLLM's CPU engines schedule asynchronously."""
    settle = CpuPlatform.check_and_update_config.__func__  # type: ignore[attr-defined]

    def check_and_update_config(cls: type, config: Any) -> None:
        settle(cls, config)
        config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)  # type: ignore[assignment,method-assign]
    cpu_model_runner._torch_cuda_wrapper = contextlib.nullcontext  # has others, which in 0.20 do not wait
    torch.Event = torch.cuda.Stream = Nothing  # type: ignore[assignment,misc]
    torch.cuda.current_stream = Nothing  # type: ignore[assignment]
    torch.cuda.stream = lambda _: contextlib.nullcontext()  # type: ignore[assignment]


def failing(runner: Any, steps: int) -> None:
    """Have the sampler fail in some steps, from the third on."""
    sample, seen = runner._sample, itertools.count()

    def sample_or_fail(*args: Any, **kwargs: Any) -> Any:
        if 2 <= next(seen) < 2 + steps:
            raise torch.OutOfMemoryError("no memory left")
        return sample(*args, **kwargs)

    runner._sample = sample_or_fail


def main(answer: str, model: str) -> None:
    """Texts that end by their length, by an end-of-text token and by a string; edited and not, one and several."""
    run_ahead()
    capture = ["blocks.0.hook_out", "blocks.1.attn.hook_pattern"]
    with explorer.boot(model, engine="transformers") as reference:
        whole = reference.run([PROMPT, OTHER], [None, STEERED], capture, max_new_tokens=12, logits=True)
    end = whole[0].generated[5]
    ends = [1 + run.generated.index(end) if end in run.generated else 12 for run in whole]
    with explorer.boot(model, override_generation_config={"eos_token_id": end}) as session:
        core = session._engines[0]._llm.llm_engine.engine_core.engine_core
        seen: dict[str, Any] = {"ahead": core.batch_queue is not None, "ends": ends, "runs": []}
        for _ in range(2):  # what is under way when the first ends is nobody's in the second
            runs = session.run([PROMPT, OTHER], [None, STEERED], capture, max_new_tokens=12, logits=True)
            for run, want in zip(runs, whole, strict=True):
                seen["runs"].append(
                    {
                        "generated": len(run.generated),
                        "rows": [run.rows, *(len(run[hook]) for hook in capture[:1]), run[capture[1]].shape[-1]],
                        "same": run.generated == want.generated[: len(run.generated)],
                        "off": max(
                            float((run.logits - want.logits[: run.rows]).abs().max()),
                            float((run[capture[0]] - want[capture[0]][: run.rows]).abs().max()),
                        ),
                    }
                )
            early = session.run(PROMPT, max_new_tokens=ends[0] + 1)  # by then its last row was fed
            seen["early"] = [
                len(early.generated),
                float((early.logits_at() - whole[0].logits[early.rows - 1]).abs().max()),
            ]
            seen["begun at a time"] = [core.batch_queue_size]
            at_rest = session.run([PROMPT, OTHER], [None, STEERED])  # without a step to come
            seen["off at rest"] = max(
                float((run.logits_at() - want.logits[run.rows - 1]).abs().max())
                for run, want in zip(at_rest, whole, strict=True)
            )
            seen["begun at a time"].append(core.batch_queue_size)
            seen["under way"] = len(core.batch_queue)
        for steps in (1, 2):  # a step that fails, and one that began before that was seen
            failing(core.model_executor.driver_worker.worker.model_runner, steps)
            try:
                session.run([PROMPT, OTHER], max_new_tokens=12)
            except torch.OutOfMemoryError:
                seen["failed"] = seen.get("failed", 0) + 1
            seen["under way"] += len(core.batch_queue)
        stopped = session.run(OTHER, STEERED, max_new_tokens=12, stop=whole[1].text[:2])
        seen["stopped"] = [len(stopped.generated), stopped.rows]
        seen["off"] = float((stopped.logits - whole[1].logits[: stopped.rows]).abs().max())
    Path(answer).write_text(json.dumps(seen))


if __name__ == "__main__":
    main(*sys.argv[1:3])
