"""A plain `vllm.LLM`, nothing of the explorer in it: what the tests hold idle sessions to, bit for bit.

python plain_vllm.py QUESTION ANSWER: reads `{"model", "dtype", "eager", "max_model_len", "batches"}`, a batch being a
list of token ids, and writes a safetensors file that holds, for each prompt of each batch, log-probabilities over the
vocabulary after the prompt (`B.P.next`) and of each prompt token (`B.P.prompt`).
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import torch
import vllm
from safetensors.torch import save_file

if __name__ == "__main__":
    question = json.loads(Path(sys.argv[1]).read_text())
    llm = vllm.LLM(
        question["model"],
        dtype=question["dtype"],
        max_model_len=min(1024, question["max_model_len"]),
        enforce_eager=question["eager"],
        kv_cache_memory_bytes=2**28,
        max_logprobs=-1,
        disable_log_stats=True,
    )
    params = vllm.SamplingParams(max_tokens=1, temperature=0, logprobs=-1, prompt_logprobs=1, detokenize=False)
    answer: dict[str, torch.Tensor] = {}
    for b, batch in enumerate(question["batches"]):
        for p, output in enumerate(llm.generate([{"prompt_token_ids": ids} for ids in batch], params, use_tqdm=False)):
            following = output.outputs[0].logprobs[0]
            own = output.prompt_logprobs[1:]
            answer[f"{b}.{p}.next"] = torch.tensor([following[i].logprob for i in range(len(following))])
            answer[f"{b}.{p}.prompt"] = torch.tensor(
                [seen[i].logprob for seen, i in zip(own, batch[p][1:], strict=True)]
            )
    save_file(answer, sys.argv[2])
