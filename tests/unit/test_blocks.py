"""Which cache blocks an edit may have spoilt, and when they are zeroed."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from explorer import EngineError
from explorer.engine.rows import Held, Span
from explorer.engine.vllm import internals
from explorer.engine.vllm.blocks import Blocks
from explorer.resolve import RowEdit


def span(*hooks: str) -> Span:
    return Span(Held({hook: [RowEdit(hook, "suppress", (0,))] for hook in hooks}, ()), row=1, count=2, start=0)


def spoils(one: Span, outputs: list[torch.Tensor] | None) -> bool:
    """Whether the blocks of a request are zeroed before another gets them."""
    runner = Runner()
    blocks = Blocks(runner)
    blocks.give((), [gets("a", 1, starts=True)])
    blocks.watch({"a": one}, outputs)
    blocks.give({"a"}, [gets("b", 1, starts=True)])
    return runner.clean() == {1}


@pytest.mark.parametrize(
    ("hooks", "spoilt"),
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
def test_what_may_spoil_though_the_last_hidden_state_is_finite(hooks: tuple[str, ...], spoilt: bool) -> None:
    assert spoils(span(*hooks), [torch.ones(4, 3)]) is spoilt


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_an_edit_that_leaves_no_finite_hidden_state_spoils(bad: float) -> None:
    hidden = torch.ones(4, 3)
    hidden[2, 1] = bad
    assert spoils(span("blocks.3.hook_out"), [hidden])
    assert spoils(span("blocks.3.hook_out"), [torch.ones(4, 3), hidden])  # what the next stage goes on with
    assert not spoils(span(), [hidden])  # the model's own doing
    hidden[2, 1], hidden[3, 1] = 1.0, bad
    assert not spoils(span("blocks.3.hook_out"), [hidden])  # another request's rows


def test_edits_of_other_stages_count() -> None:
    finite, bad = [torch.ones(4, 3)], [torch.full((4, 3), float("nan"))]
    one, two = span(), span("blocks.3.hook_out")
    one.held.elsewhere = two.held.elsewhere = ("blocks.0.hook_out",)
    assert not spoils(one, finite)
    assert spoils(one, bad)
    assert spoils(two, finite)  # the second may hide what the first did
    one.held.elsewhere = ("blocks.0.attn.k.hook_out",)
    assert spoils(one, finite)


def test_after_a_pass_that_failed_whoever_edits_may_have_spoilt() -> None:
    assert spoils(span("blocks.3.hook_out"), None)
    assert not spoils(span(), None)


class Runner(SimpleNamespace):
    """The parts of vLLM's runner that hold the cache: two layers, each 6 blocks of NaN.

    `parts`: how many blocks an attention kernel counts where the scheduler counts one. `axis`: where they are counted.
    """

    def __init__(self, axis: int = 0, parts: int = 1, blocks: int = 6) -> None:
        shape = (blocks * parts, 2, 3, 4) if axis == 0 else (2, blocks * parts, 3, 4)
        caches = [torch.full(shape, float("nan")) for _ in range(2)]
        self.axis, self.parts, self.blocks = axis, parts, blocks
        config = SimpleNamespace(num_blocks=blocks)
        super().__init__(kv_cache_config=config, kv_caches=caches, device=torch.device("cpu"))

    def clean(self) -> set[int]:
        """The blocks without a NaN, as the scheduler counts them; the others are untouched."""
        per_layer = []
        for cache in self.kv_caches:
            nan = cache.movedim(self.axis, 0).reshape(self.blocks, -1).isnan()
            assert all(block.all() or not block.any() for block in nan)
            per_layer.append({i for i, block in enumerate(nan) if not block.any()})
        assert per_layer[0] == per_layer[1]
        return per_layer[0]


def test_every_pass_since_blocks_were_given_counts() -> None:
    runner, bad = Runner(), torch.ones(4, 3)
    bad[1] = float("nan")
    blocks, both = Blocks(runner), {name: span("blocks.3.hook_out") for name in "ab"}
    both["b"] = replace(both["b"], row=3, count=1)
    blocks.give((), [gets("a", 1, starts=True), gets("b", 2, starts=True)])
    blocks.watch(both, [bad])
    blocks.watch(both, [torch.ones(4, 3)])
    blocks.give((), [gets("c", 1, 2, starts=True)])  # taken from requests that are not over
    assert runner.clean() == {1}


def gets(request: str, *blocks: int, starts: bool = False) -> internals.Given:
    return internals.Given(request, starts, list(blocks))


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("axis", [0, 1])
def test_a_spoilt_block_is_zeroed_when_another_request_gets_it(axis: int, parts: int) -> None:
    runner = Runner(axis, parts)
    blocks = Blocks(runner)
    blocks.give((), [gets("a", 1, 2, starts=True), gets("b", 3, starts=True)])
    blocks.watch({"a": span("blocks.3.hook_out")}, None)
    blocks.give((), [gets("b", 4)])
    assert runner.clean() == set()  # a still reads its own
    blocks.give({"a"}, [gets("b", 2)])
    assert runner.clean() == {2}
    blocks.give((), [gets("c", 1, 5, starts=True)])
    assert runner.clean() == {1, 2}


def test_blocks_that_come_later_are_spoilt_as_well() -> None:
    runner = Runner()
    blocks = Blocks(runner)
    blocks.give((), [gets("a", 1, starts=True)])
    blocks.give((), [gets("a", 2)])
    blocks.watch({"a": span("blocks.3.hook_out")}, None)
    blocks.give({"a"}, [gets("b", 1, 2, starts=True)])
    assert runner.clean() == {1, 2}


def test_a_block_that_was_taken_back_is_its_new_owners() -> None:
    """Layers with a window give blocks back while the request goes on; their new owner reads what it spoilt there."""
    runner = Runner()
    blocks = Blocks(runner)
    blocks.give((), [gets("long", 1, 2, starts=True)])
    blocks.give((), [gets("edited", 1, starts=True), gets("long", 3)])
    blocks.watch({"edited": span("blocks.3.hook_out")}, None)
    blocks.give((), [gets("long", 4)])
    assert runner.clean() == set()
    blocks.watch({"long": span("blocks.3.hook_out")}, None)  # of what it had
    blocks.give({"edited"}, [gets("next", 1, 2, starts=True)])
    assert runner.clean() == {1, 2}


def test_a_spoilt_block_is_zeroed_when_its_request_starts_over() -> None:
    runner = Runner()
    blocks = Blocks(runner)
    blocks.give((), [gets("a", 1, 2, starts=True)])
    blocks.watch({"a": span("blocks.3.hook_out")}, None)
    blocks.give((), [gets("a", 1, 3, starts=True)])
    assert runner.clean() == {1}
    blocks.watch({"a": span("blocks.3.hook_out")}, None)
    blocks.give({"a"}, [gets("b", 3, starts=True)])
    assert runner.clean() == {1, 3}


@pytest.mark.parametrize("axis", [0, 1])
def test_the_only_block_that_there_is(axis: int) -> None:
    """Of two blocks vLLM keeps one; an axis of two may be keys and values."""
    runner = Runner(axis, blocks=2)
    internals.zero_blocks(runner, [1])
    assert 1 in runner.clean()


def test_a_cache_of_another_layout_is_an_error() -> None:
    runner = Runner()
    runner.kv_caches = [torch.zeros(5, 7)]
    with pytest.raises(EngineError, match=r"cache of shape \(5, 7\) has no axis of 6 blocks"):
        internals.zero_blocks(runner, [1])
