"""A plain vLLM engine in a process of its own, timed on request: the other side of every ratio.

Reads lines of JSON `[tokens, [ids, ids, ...]]` from stdin, generates so many tokens for each prompt in one batch, and
answers with the seconds it took.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

KV_BYTES = 600 * 2**20


def room() -> dict[str, Any]:
    """What each of the processes may take.

    On a GPU vLLM refuses to boot unless its share of all memory is free, by default almost all, though with the size of
    the cache given it takes no more than weights, that and a batch, and does not look at what others take meanwhile.
    """
    import torch

    return {"kv_cache_memory_bytes": KV_BYTES} | ({"gpu_memory_utilization": 0.2} if torch.cuda.is_available() else {})


def main(folder: str, dtype: str, mode: str) -> None:
    """Boot with the session's own choices (dtype, cache size, mode), serve until stdin ends."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints on stdout
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=folder,
        dtype=dtype,
        enforce_eager=mode == "eager",
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        max_model_len=2048,
        max_num_batched_tokens=2048,
        **room(),
    )
    print('"ready"', file=answers, flush=True)
    for line in sys.stdin:
        tokens, batch = json.loads(line)
        prompts = [{"prompt_token_ids": ids} for ids in batch]
        params = SamplingParams(max_tokens=tokens, temperature=0.0, detokenize=False, ignore_eos=True)
        start = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        print(time.perf_counter() - start, file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:4])
