"""Which cache blocks an edit may have spoilt, and when they are zeroed."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from explorer import EngineError
from explorer.engine.rows import Held, Span
from explorer.engine.vllm import internals
from explorer.engine.vllm.blocks import Blocks, may_spoil
from explorer.resolve import RowEdit


def span(*hooks: str) -> Span:
    return Span(Held({hook: [RowEdit(hook, "suppress", (0,))] for hook in hooks}, ()), row=1, count=2, start=0)


@pytest.mark.parametrize(
    ("hooks", "spoils"),
    [
        ((), False),
        (("blocks.3.hook_out",), False),
        (("blocks.3.attn.o.hook_in",), False),
        (("blocks.3.attn.k.hook_out",), True),
        (("blocks.3.attn.v.hook_out",), True),
        (("blocks.3.attn.hook_rot_k",), True),
        (("blocks.3.hook_out", "blocks.4.hook_out"), True),
    ],
)
def test_what_may_spoil_though_the_last_hidden_state_is_finite(hooks: tuple[str, ...], spoils: bool) -> None:
    assert may_spoil(span(*hooks), [torch.ones(4, 3)]) is spoils


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_an_edit_that_leaves_no_finite_hidden_state_spoils(bad: float) -> None:
    hidden = torch.ones(4, 3)
    hidden[2, 1] = bad
    assert may_spoil(span("blocks.3.hook_out"), [hidden])
    assert may_spoil(span("blocks.3.hook_out"), [torch.ones(4, 3), hidden])  # what the next stage goes on with
    assert not may_spoil(span(), [hidden])  # the model's own doing
    hidden[2, 1], hidden[3, 1] = 1.0, bad
    assert not may_spoil(span("blocks.3.hook_out"), [hidden])  # another request's rows


def test_edits_of_other_stages_count() -> None:
    finite, bad = [torch.ones(4, 3)], [torch.full((4, 3), float("nan"))]
    one, two = span(), span("blocks.3.hook_out")
    one.held.elsewhere = two.held.elsewhere = ("blocks.0.hook_out",)
    assert not may_spoil(one, finite)
    assert may_spoil(one, bad)
    assert may_spoil(two, finite)  # the second may hide what the first did
    one.held.elsewhere = ("blocks.0.attn.k.hook_out",)
    assert may_spoil(one, finite)


class Runner(SimpleNamespace):
    """The parts of vLLM's runner that say who has which block: `who` maps request ids to (computed tokens, blocks)."""

    def __init__(self, axis: int) -> None:
        cache = torch.full((6, 2) if axis == 0 else (2, 6), float("nan"))
        starts = SimpleNamespace(np=None)  # rows do not matter here
        super().__init__(
            query_start_loc=starts, kv_cache_config=SimpleNamespace(num_blocks=6), kv_caches=[cache, cache.clone()]
        )

    def step(self, **who: tuple[int, list[int]]) -> None:
        table = np.zeros((len(who), 3), dtype=np.int32)
        for row, (_, blocks) in enumerate(who.values()):
            table[row, : len(blocks)] = blocks
        counts = np.array([len(blocks) for _, blocks in who.values()])
        tables = [SimpleNamespace(block_table=SimpleNamespace(np=table), num_blocks_per_row=counts)]
        self.input_batch = SimpleNamespace(
            req_ids=list(who),
            num_computed_tokens_cpu=np.array([computed for computed, _ in who.values()]),
            block_table=SimpleNamespace(block_tables=tables),
        )

    def clean(self) -> set[int]:
        """The blocks without NaN, the same in every layer."""
        per_layer = []
        for cache in self.kv_caches:
            blocks = cache if cache.shape[0] == 6 else cache.T
            per_layer.append({i for i in range(6) if not blocks[i].isnan().any()})
        assert per_layer[0] == per_layer[1]
        return per_layer[0]


@pytest.mark.parametrize("axis", [0, 1])
def test_a_spoilt_block_is_zeroed_when_another_request_gets_it(axis: int) -> None:
    runner = Runner(axis)
    blocks = Blocks(runner)
    runner.step(a=(0, [1, 2]), b=(0, [3]))
    blocks.spoil(0)
    runner.step(a=(5, [1, 2]), b=(5, [3]))
    blocks.clean()
    assert runner.clean() == set()  # a still reads its own
    runner.step(b=(6, [3, 2]))
    blocks.clean()
    assert runner.clean() == {2}
    runner.step(c=(0, [1, 4]))
    blocks.clean()
    assert runner.clean() == {1, 2}
    assert internals.request_count(runner) == 1


def test_a_spoilt_block_is_zeroed_when_its_request_starts_over() -> None:
    runner = Runner(0)
    blocks = Blocks(runner)
    runner.step(a=(0, [1]))
    blocks.spoil(0)
    runner.step(a=(0, [1]))
    blocks.clean()
    assert runner.clean() == {1}


def test_a_cache_of_another_layout_is_an_error() -> None:
    runner = Runner(0)
    runner.kv_caches = [torch.zeros(5, 7)]
    with pytest.raises(EngineError, match=r"cache of shape \(5, 7\) has no axis of 6 blocks"):
        internals.zero_blocks(runner, [1])
