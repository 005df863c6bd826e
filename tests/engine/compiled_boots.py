"""Compiled boots, one after the other in one process: what the compiler counted, and what the cache has after each.

python -m tests.engine.compiled_boots ANSWER MODEL KIND...: a kind is `ours`, `plain` (vLLM with nothing of the explorer
in it) or `other code` (ours, after a change to the hook code). Writes a list as JSON to the file ANSWER.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import explorer
from explorer.engine.vllm import boot

from .compare import plain_twin

IDS = [1, 17, 45, 80, 31]


def predicted(model: str, kind: str) -> dict[int, float]:
    """The 20 most probable tokens after a prompt, as many as vLLM gives, and their log-probabilities."""
    if kind == "plain":
        from vllm import SamplingParams

        with plain_twin(model, "compiled") as llm:
            params = SamplingParams(max_tokens=1, temperature=0, logprobs=20, detokenize=False)
            (output,) = llm.generate([{"prompt_token_ids": IDS}], params, use_tqdm=False)
            following = output.outputs[0].logprobs[0]
            return {i: seen.logprob for i, seen in sorted(following.items(), key=lambda item: item[1].rank)[:20]}
    code = boot.code_hash() if kind == "ours" else "0" * 16
    with mock.patch.object(boot, "code_hash", lambda: code), explorer.boot(model, mode="compiled") as session:
        return {token.id: token.logprob for token in session.run(IDS).top(20)}


def cached() -> list[str]:
    """The files in vLLM's cache of compiled models."""
    folder = Path(os.environ["VLLM_CACHE_ROOT"]) / "torch_compile_cache"
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())


def main(answer: str, model: str, *kinds: str) -> None:
    from torch._dynamo.utils import counters
    from vllm.compilation.counter import compilation_counter

    told: list[dict[str, Any]] = []
    for kind in kinds:
        counters.clear()
        before = vars(compilation_counter).copy()
        numbers = predicted(model, kind)
        counts = {name: count - before[name] for name, count in vars(compilation_counter).items()}
        told.append({"numbers": numbers, "counts": counters["inductor"] | counts, "cached": cached()})
    Path(answer).write_text(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
