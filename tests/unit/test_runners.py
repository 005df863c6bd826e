"""Which rows of a step are whose, in either model runner of vLLM: on runners with the attributes of vLLM's."""

from __future__ import annotations

from enum import Enum
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from explorer.engine.vllm import internals


class Graphs(Enum):
    """vLLM's `CUDAGraphMode`."""

    NONE = 0
    PIECEWISE = 1
    FULL = 2
    FULL_DECODE_ONLY = (FULL, NONE)
    FULL_AND_PIECEWISE = (FULL, PIECEWISE)

    def mixed_mode(self) -> Graphs:
        return Graphs(self.value[1]) if isinstance(self.value, tuple) else self


class Model:
    """Says what it was fed."""

    vocab = 160

    def __call__(self, rows: int) -> torch.Tensor:
        return torch.arange(rows)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states * 2


class V1(SimpleNamespace):
    """The parts of the V1 runner that say whose rows are whose; requests keep their place from step to step."""

    def __init__(self) -> None:
        super().__init__(model=Model(), requests={}, query_start_loc=SimpleNamespace(np=np.zeros(9, dtype=np.int32)))
        self.computed: dict[str, int] = {}

    def _model_forward(self, rows: int) -> torch.Tensor:
        return self.model(rows)

    def step(self, fed: dict[str, int], done: tuple[str, ...] = ()) -> torch.Tensor:
        for name in done:
            del self.requests[name]
        for name in fed:
            params = SimpleNamespace(extra_args=None if name == "nobody" else {"explorer": name})
            self.requests.setdefault(name, SimpleNamespace(sampling_params=params))
        computed = [self.computed.get(name, 0) for name in fed]
        for row, (name, count) in enumerate(fed.items()):
            self.query_start_loc.np[row + 1] = self.query_start_loc.np[row] + count
            self.computed[name] = self.computed.get(name, 0) + count
        self.input_batch = SimpleNamespace(
            req_ids=list(fed), num_computed_tokens_cpu=np.array(computed, dtype=np.int32)
        )
        return self._model_forward(rows=sum(fed.values()))


class V2(SimpleNamespace):
    """The parts of the V2 runner: requests have a slot, and a batch, fewest rows first, names the slots."""

    def __init__(self, graphs: Graphs = Graphs.NONE) -> None:
        super().__init__(model=Model(), compilation_config=SimpleNamespace(cudagraph_mode=graphs))
        self.req_states = SimpleNamespace(num_computed_tokens_np=np.zeros(8, dtype=np.int32))
        self.slots: dict[str, int] = {}
        self.free = list(range(8))

    def add_requests(self, scheduled: Any) -> None:
        for new in scheduled.scheduled_new_reqs:
            self.slots[new.req_id] = self.free.pop()
            self.req_states.num_computed_tokens_np[self.slots[new.req_id]] = 0

    def prepare_inputs(self, scheduled: Any, batch_desc: Any) -> Any:
        names = sorted(scheduled.num_scheduled_tokens, key=scheduled.num_scheduled_tokens.get)
        starts = np.cumsum([0, *(scheduled.num_scheduled_tokens[name] for name in names)])
        slots = np.array([self.slots[name] for name in names])
        return SimpleNamespace(req_ids=names, idx_mapping_np=slots, query_start_loc_np=starts)

    def step(self, fed: dict[str, int], done: tuple[str, ...] = ()) -> torch.Tensor:
        for name in done:
            self.free.append(self.slots.pop(name))
        new = [
            SimpleNamespace(
                req_id=name,
                sampling_params=SimpleNamespace(extra_args=None if name == "nobody" else {"explorer": name}),
            )
            for name in fed
            if name not in self.slots
        ]
        output = SimpleNamespace(finished_req_ids=set(done), scheduled_new_reqs=new, num_scheduled_tokens=fed)
        self.add_requests(output)
        self.prepare_inputs(output, batch_desc=None)
        hidden = self.model(rows=sum(fed.values()))
        for name, count in fed.items():
            self.req_states.num_computed_tokens_np[self.slots[name]] += count
        return hidden


class Seen:
    """What is seen around each forward pass of a runner."""

    def __init__(self, runner: V1 | V2) -> None:
        self.runner = runner
        internals.wrap_forward(runner, self.around)

    def around(self, forward: Any) -> Any:
        self.ids, self.rows = [], {}
        for name, extra, *rest in internals.scheduled(self.runner):
            self.ids.append(name)
            self.rows[extra.get("explorer")] = rest
        return forward() + 100


@pytest.fixture(params=[V1, V2])
def runner(request: pytest.FixtureRequest) -> V1 | V2:
    return request.param()


def test_rows_and_positions_of_each_request_over_steps(runner: V1 | V2) -> None:
    seen = Seen(runner)
    hidden = runner.step({"long": 4, "short": 2, "nobody": 5})
    assert torch.equal(hidden, torch.arange(11) + 100)
    first = {name: (row, count) for name, (row, count, _) in seen.rows.items()}
    order = ["long", "short", None] if isinstance(runner, V1) else ["short", "long", None]
    assert seen.ids == [name or "nobody" for name in order]
    ends = np.cumsum([0, *(first[name][1] for name in order)])
    assert [first[name][0] for name in order] == ends[:-1].tolist()
    assert {name: count for name, (_, count) in first.items()} == {"long": 4, "short": 2, None: 5}
    assert all(position == 0 for _, _, position in seen.rows.values())

    runner.step({"long": 3, "new": 1}, done=("short", "nobody"))
    assert {name: rest[1:] for name, rest in seen.rows.items()} == {"long": [3, 4], "new": [1, 0]}


def test_a_request_of_a_name_that_was_there_before(runner: V1 | V2) -> None:
    seen = Seen(runner)
    runner.step({"a": 2})
    runner.computed = {}
    runner.step({"a": 3}, done=("a",))
    assert seen.rows == {"a": [0, 3, 0]}


def test_a_pass_of_nobody_has_no_rows() -> None:
    """The V2 runner warms up and measures its memory by calling the model; what it prepared last is over."""
    runner = V2()
    seen = Seen(runner)
    assert runner.model(rows=2).tolist() == [100, 101] and seen.rows == {}
    runner.step({"a": 2})
    assert seen.rows == {"a": [0, 2, 0]}
    runner.model(rows=7)
    assert seen.rows == {}


def test_who_is_over_and_who_gets_which_blocks_is_told_before_each_step() -> None:
    """Models with layers of several kinds have a list of blocks for each."""
    told: list[Any] = []
    runner = SimpleNamespace(execute_model=lambda scheduled, *args, **kwargs: told.append((args, kwargs)) or "out")
    internals.wrap_schedule(runner, lambda over, given: told.append((over, given)))
    new = [SimpleNamespace(req_id="new", block_ids=([1, 2], [3]))]
    known = SimpleNamespace(
        req_ids=["goes on", "needs none", "starts over"],
        resumed_req_ids={"starts over"},
        new_block_ids=[([], [4]), None, ([5], [6])],
    )
    step = SimpleNamespace(finished_req_ids={"old"}, scheduled_new_reqs=new, scheduled_cached_reqs=known)
    assert runner.execute_model(step, 1, dummy_run=True) == "out"
    given = [("new", True, [1, 2, 3]), ("goes on", False, [4]), ("starts over", True, [5, 6])]
    assert told == [({"old"}, given), ((1,), {"dummy_run": True})]


def test_a_step_that_fails_is_over() -> None:
    runner, fail = V2(), True

    def around(forward: Any) -> Any:
        if fail:
            raise ValueError("no")
        return len(list(internals.scheduled(runner)))

    internals.wrap_forward(runner, around)
    with pytest.raises(ValueError):
        runner.step({"a": 2})
    fail = False
    assert runner.model(rows=2) == 0


def test_the_model_stays_itself_and_its_head_is_shown(runner: V1 | V2) -> None:
    shown: list[torch.Tensor] = []
    internals.wrap_forward(runner, lambda forward: forward())
    head = internals.wrap_head(runner, shown.append)
    logits = runner.model.compute_logits(torch.ones(3))
    assert torch.equal(logits, torch.full((3,), 2.0)) and shown == [logits]
    assert torch.equal(head(torch.ones(3)), logits) and len(shown) == 1
    assert runner.model.vocab == 160
    with pytest.raises(AttributeError):
        _ = runner.model.not_there


@pytest.mark.parametrize(
    ("asked", "kept"),
    [
        (Graphs.NONE, Graphs.NONE),
        (Graphs.PIECEWISE, Graphs.PIECEWISE),
        (Graphs.FULL, Graphs.NONE),
        (Graphs.FULL_DECODE_ONLY, Graphs.NONE),
        (Graphs.FULL_AND_PIECEWISE, Graphs.PIECEWISE),
    ],
)
def test_no_graph_of_the_v2_runner_goes_round_the_model(asked: Graphs, kept: Graphs) -> None:
    runner = V2(asked)
    internals.wrap_forward(runner, lambda forward: forward())
    assert runner.compilation_config.cudagraph_mode == kept
