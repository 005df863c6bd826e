"""Attention replayed and metrics of logits, against torch's own functions and plain loops."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from explorer.analysis import attention, metrics
from explorer.engine.protocol import Attention

POSITIONS, D_HEAD = 7, 6


@pytest.fixture(params=[(4, 4), (4, 2), (6, 1)], ids=str)
def qk(request) -> tuple[torch.Tensor, torch.Tensor]:
    heads, kv_heads = request.param
    draw = torch.Generator().manual_seed(heads * 10 + kv_heads)
    q = torch.randn(POSITIONS, heads, D_HEAD, generator=draw)
    return q, torch.randn(POSITIONS, kv_heads, D_HEAD, generator=draw)


def by_loops(q: torch.Tensor, k: torch.Tensor, how: Attention) -> torch.Tensor:
    """Scores one number at a time, in float64."""
    heads, kv_heads = q.shape[1], k.shape[1]
    out = torch.full((heads, len(q), len(k)), -math.inf, dtype=torch.float64)
    for h in range(heads):
        for i in range(len(q)):
            for j in range(len(k)):
                if j > i or (how.window is not None and i - j >= how.window):
                    continue
                score = float(q[i, h].double() @ k[j, h * kv_heads // heads].double()) * how.scale
                out[h, i, j] = score if how.softcap is None else how.softcap * math.tanh(score / how.softcap)
    return out


@pytest.mark.parametrize(
    "how",
    [
        Attention(0.4),
        Attention(0.4, window=3),
        Attention(0.4, window=1),
        Attention(2.0, softcap=1.5),
        Attention(0.4, 2, 1.0),
    ],
    ids=str,
)
def test_scores_and_patterns_equal_plain_loops(qk, how):
    expected = by_loops(*qk, how)
    torch.testing.assert_close(attention.scores(*qk, how).double(), expected, atol=1e-5, rtol=1e-5)
    pattern = attention.pattern(*qk, how)
    torch.testing.assert_close(pattern.double(), expected.softmax(-1), atol=1e-6, rtol=0)
    torch.testing.assert_close(pattern.sum(-1), torch.ones(pattern.shape[:2]))
    assert pattern.shape == (qk[0].shape[1], POSITIONS, POSITIONS)


def test_patterns_equal_torchs_attention(qk):
    q, k = (x.transpose(0, 1)[None] for x in qk)
    values = torch.eye(POSITIONS).expand(1, k.shape[1], -1, -1)  # the identity shows the weights themselves
    expected = functional.scaled_dot_product_attention(q, k, values, is_causal=True, scale=0.3, enable_gqa=True)[0]
    torch.testing.assert_close(attention.pattern(*qk, Attention(0.3)), expected, atol=1e-6, rtol=0)


def test_a_window_equals_torchs_masked_attention(qk):
    q, k = (x.transpose(0, 1)[None] for x in qk)
    back = torch.arange(POSITIONS)[:, None] - torch.arange(POSITIONS)
    values = torch.eye(POSITIONS).expand(1, k.shape[1], -1, -1)
    expected = functional.scaled_dot_product_attention(
        q, k, values, attn_mask=(back >= 0) & (back < 3), scale=0.3, enable_gqa=True
    )[0]
    torch.testing.assert_close(attention.pattern(*qk, Attention(0.3, window=3)), expected, atol=1e-6, rtol=0)


def test_masked_scores_are_minus_infinity(qk):
    scores = attention.scores(*qk, Attention(1.0, window=2))
    assert torch.isneginf(scores[:, 0, 1:]).all()
    assert torch.isneginf(scores[:, 5, :4]).all()
    assert torch.isfinite(scores[:, 5, 4:6]).all()


def test_half_precision_is_replayed_in_float32(qk):
    q, k = (x.bfloat16() for x in qk)
    scores = attention.scores(q, k, Attention(0.5))
    assert scores.dtype == torch.float32
    assert torch.equal(scores, attention.scores(q.float(), k.float(), Attention(0.5)))


def test_one_position():
    q = torch.ones(1, 2, 3)
    assert attention.pattern(q, q, Attention(1.0)).tolist() == [[[1.0]], [[1.0]]]


# --- metrics ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(5, 9, generator=torch.Generator().manual_seed(1)) * 4


def test_log_probs(logits):
    expected = logits.double() - logits.double().exp().sum(-1, keepdim=True).log()
    torch.testing.assert_close(metrics.log_probs(logits).double(), expected, atol=1e-5, rtol=0)
    assert metrics.log_probs(logits.bfloat16()).dtype == torch.float32
    assert torch.isfinite(metrics.log_probs(logits * 1e4)).all()


def test_kl(logits):
    other = logits.flip(0) + 1.0
    p, q = logits.double().softmax(-1), other.double().softmax(-1)
    expected = (p * (p / q).log()).sum(-1)
    torch.testing.assert_close(metrics.kl(logits, other).double(), expected, atol=1e-5, rtol=1e-4)
    assert metrics.kl(logits, logits).tolist() == [0.0] * 5
    assert (metrics.kl(logits, logits + 1e-6) >= 0).all()
    assert metrics.kl(logits[0], other[0]).shape == ()


def test_loss(logits):
    ids = [3, 1, 4, 1, 5]
    expected = functional.cross_entropy(logits[:-1], torch.tensor(ids[1:]), reduction="none")
    torch.testing.assert_close(metrics.next_token_loss(logits, ids), expected)
    by_hand = [-math.log(float(logits[t].double().softmax(-1)[ids[t + 1]])) for t in range(4)]
    torch.testing.assert_close(
        metrics.next_token_loss(logits, ids).double(), torch.tensor(by_hand).double(), atol=1e-5, rtol=0
    )


def test_loss_of_one_token_is_empty(logits):
    assert metrics.next_token_loss(logits[:1], [3]).shape == (0,)


def test_slopes_are_a_bias_of_torchs_attention(qk):
    q, k = (x.transpose(0, 1)[None] for x in qk)
    slopes = torch.arange(1, q.shape[1] + 1) * 0.3
    back = torch.arange(POSITIONS)[:, None] - torch.arange(POSITIONS)
    bias = (-slopes[:, None, None] * back).masked_fill(back < 0, float("-inf"))
    values = torch.eye(POSITIONS).expand(1, k.shape[1], -1, -1)
    expected = functional.scaled_dot_product_attention(q, k, values, attn_mask=bias, scale=0.3, enable_gqa=True)[0]
    how = Attention(0.3, slopes=tuple(slopes.tolist()))
    torch.testing.assert_close(attention.pattern(*qk, how), expected, atol=1e-6, rtol=0)


def test_a_sink_takes_its_share(qk):
    sinks = torch.arange(qk[0].shape[1]) * 0.5 - 1
    plain = attention.scores(*qk, Attention(0.3)).double().exp()
    expected = plain / (plain.sum(-1, keepdim=True) + sinks.double().exp()[:, None, None])
    how = Attention(0.3, sinks=tuple(sinks.tolist()))
    torch.testing.assert_close(attention.pattern(*qk, how).double(), expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(attention.scores(*qk, how), attention.scores(*qk, Attention(0.3)))


@pytest.mark.parametrize("size", [5, 64, 1000, 4097])
@pytest.mark.parametrize("k", [1, 3, 40])
def test_the_largest_logits_are_in_order_and_the_lower_id_first(size: int, k: int) -> None:
    generator = torch.Generator().manual_seed(size + k)
    logits = torch.randint(-9, 9, (size,), generator=generator).float()  # many are equal
    logits[size // 2] = -torch.inf
    assert metrics.largest(logits, k) == logits.sort(descending=True, stable=True).indices[:k].tolist()


def test_a_logit_that_is_no_number_is_among_the_largest() -> None:
    logits = torch.zeros(4097)
    for place in (0, 4096):
        logits[place] = torch.nan
        assert logits[metrics.largest(logits, 3)].isnan().any()
