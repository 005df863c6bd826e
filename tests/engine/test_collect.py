"""Collected rows are those of runs, from either engine."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

import explorer

PROMPTS = [[1, 17, 45, 80], [31], [9, 120, 64, 33, 52, 8] * 30, [7, 7]]
HOOKS = ("blocks.0.attn.hook_z", "blocks.1.hook_out")


def test_rows_prompts_positions_and_tokens(either: explorer.Session, tmp_path: Path) -> None:
    either.collect(PROMPTS, HOOKS, tmp_path)
    manifest = json.loads((tmp_path / "collection.json").read_text())
    assert (manifest["model"], manifest["dtype"]) == (either.name, "float32")
    shards = [load_file(tmp_path / shard["file"]) for shard in manifest["shards"]]
    got = {name: torch.cat([shard[name] for shard in shards]) for name in shards[0]}
    runs = either.run(PROMPTS, capture=HOOKS)
    assert got["token"].tolist() == [token for prompt in PROMPTS for token in prompt]
    assert got["prompt"].tolist() == [i for i, prompt in enumerate(PROMPTS) for _ in prompt]
    for hook in HOOKS:
        want = torch.cat([run[hook] for run in runs])
        torch.testing.assert_close(got[either.hooks[hook].name], want, atol=1e-5, rtol=1e-5)
        padded, mask = explorer.stack(runs, hook)
        assert torch.equal(padded[mask], want)
