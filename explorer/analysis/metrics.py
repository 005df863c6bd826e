"""Metrics of logits. Logarithms are natural: everything is in nats."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def log_probs(logits: torch.Tensor) -> torch.Tensor:
    """Log-probabilities over the last axis, float32."""
    return torch.log_softmax(logits.float(), dim=-1)


def kl(clean: torch.Tensor, patched: torch.Tensor) -> torch.Tensor:
    """KL(clean || patched) over the last axis of two logit tensors, in nats."""
    p, q = log_probs(clean), log_probs(patched)
    return (p.exp() * (p - q)).sum(-1).clamp_min(0.0)


def next_token_loss(logits: torch.Tensor, ids: Sequence[int]) -> torch.Tensor:
    """Cross-entropy of each next token, `(positions, d_vocab)` -> `(positions - 1,)`; entry t scores token t + 1."""
    targets = torch.tensor(ids[1 : logits.shape[0]], dtype=torch.long)
    return -log_probs(logits[: len(targets)]).gather(1, targets[:, None])[:, 0]
