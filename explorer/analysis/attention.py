"""Attention replayed from the queries and keys that attention read."""

from __future__ import annotations

import torch

from ..engine.protocol import Attention


def scores(q: torch.Tensor, k: torch.Tensor, attention: Attention) -> torch.Tensor:
    """Scores before the softmax, float32 `(heads, query, key)`, -inf where masked.

    q: `(positions, heads, d_head)`, k: `(positions, kv_heads, d_head)`, both after norm and rotary. A key-value head
    serves `heads / kv_heads` neighbouring query heads (grouped-query attention, https://arxiv.org/abs/2305.13245).
    The mask is causal and, with a `window`, hides keys `window` or more positions back. With `slopes` a key's score has
    its position times the head's slope added (ALiBi, https://arxiv.org/abs/2108.12409; as transformers counts them).
    """
    heads, kv_heads = q.shape[1], k.shape[1]
    queries = q.float().transpose(0, 1)
    keys = k.float().transpose(0, 1).repeat_interleave(heads // kv_heads, dim=0)
    out = queries @ keys.transpose(1, 2) * attention.scale
    if attention.softcap is not None:
        out = attention.softcap * torch.tanh(out / attention.softcap)
    position = torch.arange(q.shape[0], device=q.device)
    if attention.slopes is not None:
        out = out + torch.tensor(attention.slopes, device=q.device)[:, None, None] * position
    back = position[:, None] - position[None, :]
    masked = back < 0
    if attention.window is not None:
        masked |= back >= attention.window
    return out.masked_fill(masked, float("-inf"))


def pattern(q: torch.Tensor, k: torch.Tensor, attention: Attention) -> torch.Tensor:
    """Attention weights, float32 `(heads, query, key)`. Arguments as for `scores`.

    Each query's row sums to 1; with `sinks` to less, by what the sink takes.
    """
    seen = scores(q, k, attention)
    if attention.sinks is None:
        return torch.softmax(seen, dim=-1)
    sinks = torch.tensor(attention.sinks, device=q.device)[:, None, None].expand(-1, seen.shape[1], 1)
    return torch.softmax(torch.cat([seen, sinks], dim=-1), dim=-1)[..., :-1]
