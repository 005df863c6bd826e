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
        table = SimpleNamespace(np=np.zeros((8, 4), dtype=np.int32))
        self.table = SimpleNamespace(block_table=table, num_blocks_per_row=np.zeros(8, dtype=np.int32))
        self.computed: dict[str, int] = {}

    def _model_forward(self, rows: int) -> torch.Tensor:
        return self.model(rows)

    def step(self, fed: dict[str, tuple[int, list[int]]], done: tuple[str, ...] = ()) -> torch.Tensor:
        for name in done:
            del self.requests[name]
        for name in fed:
            params = SimpleNamespace(extra_args=None if name == "nobody" else {"explorer": name})
            self.requests.setdefault(name, SimpleNamespace(sampling_params=params))
        computed = [self.computed.get(name, 0) for name in fed]
        for row, (name, (count, blocks)) in enumerate(fed.items()):
            self.query_start_loc.np[row + 1] = self.query_start_loc.np[row] + count
            self.table.block_table.np[row, : len(blocks)] = blocks
            self.table.num_blocks_per_row[row] = len(blocks)
            self.computed[name] = self.computed.get(name, 0) + count
        self.input_batch = SimpleNamespace(
            req_ids=list(fed),
            num_computed_tokens_cpu=np.array(computed, dtype=np.int32),
            block_table=SimpleNamespace(block_tables=[self.table]),
        )
        return self._model_forward(rows=sum(count for count, _ in fed.values()))


class V2(SimpleNamespace):
    """The parts of the V2 runner: requests have a slot, and a batch, fewest rows first, names the slots."""

    def __init__(self, graphs: Graphs = Graphs.NONE) -> None:
        super().__init__(model=Model(), compilation_config=SimpleNamespace(cudagraph_mode=graphs))
        self.req_states = SimpleNamespace(num_computed_tokens_np=np.zeros(8, dtype=np.int32))
        table = SimpleNamespace(gpu=torch.zeros(8, 4, dtype=torch.int32))
        counts = SimpleNamespace(np=np.zeros((1, 8), dtype=np.int32))
        self.block_tables = SimpleNamespace(block_tables=[table], num_blocks=counts)
        self.slots: dict[str, int] = {}
        self.free = list(range(8))
        self.seeds: list[int] = []

    def add_requests(self, scheduled: Any) -> None:
        for new in scheduled.scheduled_new_reqs:
            self.slots[new.req_id] = self.free.pop()
            self.req_states.num_computed_tokens_np[self.slots[new.req_id]] = 0
            self.seeds.append(np.random.randint(2**31))

    def prepare_inputs(self, scheduled: Any, batch_desc: Any) -> Any:
        names = sorted(scheduled.num_scheduled_tokens, key=scheduled.num_scheduled_tokens.get)
        starts = np.cumsum([0, *(scheduled.num_scheduled_tokens[name] for name in names)])
        slots = np.array([self.slots[name] for name in names])
        return SimpleNamespace(req_ids=names, idx_mapping_np=slots, query_start_loc_np=starts)

    def step(self, fed: dict[str, tuple[int, list[int]]], done: tuple[str, ...] = ()) -> torch.Tensor:
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
        counts = {name: count for name, (count, _) in fed.items()}
        output = SimpleNamespace(finished_req_ids=set(done), scheduled_new_reqs=new, num_scheduled_tokens=counts)
        self.add_requests(output)
        for name, (_, blocks) in fed.items():
            self.block_tables.block_tables[0].gpu[self.slots[name], : len(blocks)] = torch.tensor(blocks)
            self.block_tables.num_blocks.np[0, self.slots[name]] = len(blocks)
        self.prepare_inputs(output, batch_desc=None)
        hidden = self.model(rows=sum(counts.values()))
        for name, count in counts.items():
            self.req_states.num_computed_tokens_np[self.slots[name]] += count
        return hidden


class Seen:
    """What is seen around each forward pass of a runner."""

    def __init__(self, runner: V1 | V2) -> None:
        self.runner = runner
        internals.wrap_forward(runner, self.around)

    def around(self, forward: Any) -> Any:
        self.rows = {extra.get("explorer"): rest for extra, *rest in internals.scheduled(self.runner)}
        count = internals.request_count(self.runner)
        self.blocks = {name: rest for name, *rest in (internals.blocks(self.runner, i) for i in range(count))}
        return forward() + 100


@pytest.fixture(params=[V1, V2])
def runner(request: pytest.FixtureRequest) -> V1 | V2:
    return request.param()


def test_rows_positions_and_blocks_of_each_request_over_steps(runner: V1 | V2) -> None:
    seen = Seen(runner)
    hidden = runner.step({"long": (4, [1, 2]), "short": (2, [3]), "nobody": (5, [4])})
    assert torch.equal(hidden, torch.arange(11) + 100)
    first = {name: (row, count) for name, (row, count, _) in seen.rows.items()}
    order = ["long", "short", None] if isinstance(runner, V1) else ["short", "long", None]
    ends = np.cumsum([0, *(first[name][1] for name in order)])
    assert [first[name][0] for name in order] == ends[:-1].tolist()
    assert {name: count for name, (_, count) in first.items()} == {"long": 4, "short": 2, None: 5}
    assert all(position == 0 for _, _, position in seen.rows.values())
    assert seen.blocks == {"long": [True, [1, 2]], "short": [True, [3]], "nobody": [True, [4]]}

    runner.step({"long": (3, [1, 2, 5]), "new": (1, [3])}, done=("short", "nobody"))
    assert {name: rest[1:] for name, rest in seen.rows.items()} == {"long": [3, 4], "new": [1, 0]}
    assert seen.blocks == {"long": [False, [1, 2, 5]], "new": [True, [3]]}


def test_a_request_of_a_name_that_was_there_before(runner: V1 | V2) -> None:
    seen = Seen(runner)
    runner.step({"a": (2, [1])})
    runner.computed = {}
    runner.step({"a": (3, [2])}, done=("a",))
    assert seen.rows == {"a": [0, 3, 0]} and seen.blocks == {"a": [True, [2]]}


def test_a_pass_of_nobody_has_no_rows() -> None:
    """The V2 runner warms up and measures its memory by calling the model; what it prepared last is over."""
    runner = V2()
    seen = Seen(runner)
    assert runner.model(rows=2).tolist() == [100, 101] and seen.rows == {}
    runner.step({"a": (2, [1])})
    assert seen.rows == {"a": [0, 2, 0]}
    runner.model(rows=7)
    assert seen.rows == {} and seen.blocks == {}


def test_the_v2_runner_leaves_the_random_numbers_of_the_user_alone() -> None:
    runner = V2()
    internals.wrap_forward(runner, lambda forward: forward())
    np.random.seed(7)
    wanted = np.random.randint(2**31, size=2).tolist()
    np.random.seed(7)
    runner.step({"a": (2, [1])})
    first = np.random.randint(2**31)
    runner.step({"b": (2, [2]), "c": (1, [3])})
    assert [first, np.random.randint(2**31)] == wanted
    assert len(set(runner.seeds)) == 3 and not set(runner.seeds) & set(wanted)


def test_a_step_that_fails_is_over() -> None:
    runner, fail = V2(), True

    def around(forward: Any) -> Any:
        if fail:
            raise ValueError("no")
        return internals.request_count(runner)

    internals.wrap_forward(runner, around)
    with pytest.raises(ValueError):
        runner.step({"a": (2, [1])})
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
