"""The worker on a small stack instead of vLLM: batches, edits, captures, held sources, and an idle model left alone."""

from __future__ import annotations

import contextlib
import importlib
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from explorer.engine.vllm import internals
from explorer.engine.vllm.shards import Shard
from explorer.engine.vllm.wire import pack, unpack

from .stack import SHAPE, Stack


class Base:
    """What the worker needs of vLLM's: a model runner with a model and a forward pass."""

    vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(dtype=torch.float32), additional_config={"explorer": {"shape": vars(SHAPE)}}
    )

    def load_model(self) -> None:
        stack = Stack()
        self.model_runner = SimpleNamespace(
            model=stack,
            _model_forward=lambda: self.forward(),
            execute_model=lambda scheduled: self.model_runner._model_forward(),
            device=torch.device("cpu"),
        )
        self.steps: list[tuple[str, list[int]]] = []

    def forward(self) -> torch.Tensor:
        ids = torch.tensor([i for _, prompt in self.steps for i in prompt])
        return self.model_runner.model(ids, tuple(len(prompt) for _, prompt in self.steps))


@pytest.fixture
def worker(monkeypatch):
    module = "explorer.engine.vllm.worker"
    monkeypatch.setattr(internals, "worker_base", lambda: Base)
    monkeypatch.setattr(internals, "place", lambda: internals.Place(0, 1, 0, 1))
    monkeypatch.setattr(internals, "attention_module", lambda attention: attention.attn)
    monkeypatch.setattr(internals, "prepare_experts", lambda config: None)
    before = sys.modules.pop(module, None)
    made = importlib.import_module(module).ExplorerWorker()
    if before is None:
        del sys.modules[module]
    else:
        sys.modules[module] = before
    made.load_model()

    def scheduled(runner):
        row = 0
        for key, ids in made.steps:
            yield key, {"explorer": key} if key else {}, row, len(ids), 0
            row += len(ids)

    monkeypatch.setattr(internals, "scheduled", scheduled)
    made.uncompiled = []

    @contextlib.contextmanager
    def uncompiled(operations):
        made.uncompiled.append(len(made.steps))
        yield

    monkeypatch.setattr(internals, "uncompiled", uncompiled)
    monkeypatch.setattr(internals, "compiles_edits", lambda inner: False)
    step(made, nobody=[1, 2, 3])  # the first forward pass is the study's
    made.uncompiled.clear()
    return made


def schedule(worker, **prompts: list[int]) -> SimpleNamespace:
    """A step in which each named request feeds its whole prompt, to block 1, 2 and so on."""
    worker.steps = [(key if key != "nobody" else "", ids) for key, ids in prompts.items()]
    new = [SimpleNamespace(req_id=key, block_ids=([1 + n],)) for n, (key, _) in enumerate(worker.steps)]
    known = SimpleNamespace(req_ids=[], new_block_ids=[])
    return SimpleNamespace(finished_req_ids=[], scheduled_new_reqs=new, scheduled_cached_reqs=known)


def step(worker, **prompts: list[int]) -> torch.Tensor:
    """One step in which each named request feeds its whole prompt."""
    assert worker.model_runner.model.hooks() == 0
    hidden = worker.model_runner.execute_model(schedule(worker, **prompts))
    assert worker.model_runner.model.hooks() == 0
    ends = torch.tensor([len(ids) for ids in prompts.values()]).cumsum(0) - 1
    worker.model_runner.model.compute_logits(hidden[ends])
    return hidden


def request(key, capture, edits, hold=False, rows=0):
    """A request as it comes over the wire."""
    return {"key": key, "capture": capture, "edits": edits, "hold": hold, "rows": rows}


def wire(hook, op, rows, **fields):
    base = {
        "hook": hook,
        "op": op,
        "rows": {"list": rows},
        "heads": None,
        "factor": None,
        "value": None,
        "source": None,
    }
    return base | fields


def test_capture_edit_and_plain_requests_share_a_step(worker):
    stack, prompt, other = worker.model_runner.model, [3, 1, 4], [1, 5]
    edit = wire("blocks.0.hook_out", "set", [1], value="v")
    capture = ["blocks.0.hook_out", "blocks.0.attn.o.hook_in"]
    worker.explorer_open(
        [
            request("clean", capture, []),
            request("patched", capture, [edit]),
        ],
        {"v": pack(torch.full((1, 1, 8), 0.5))},
    )
    plain = stack(torch.tensor(other))
    hidden = step(worker, clean=prompt, nobody=other, patched=prompt)
    torch.testing.assert_close(hidden[:3], stack(torch.tensor(prompt)))
    torch.testing.assert_close(hidden[3:5], plain)
    clean, patched = worker.explorer_read({"clean": 3, "patched": 3})
    rows = [unpack(a["captures"]["blocks.0.hook_out"]) for a in (clean, patched)]
    assert rows[1][1].eq(0.5).all()
    assert torch.equal(rows[0][[0, 2]], rows[1][[0, 2]])
    assert unpack(clean["captures"]["blocks.0.attn.o.hook_in"]).shape == (3, 4, 2)
    assert (clean["edited"], patched["edited"]) == ({}, {"blocks.0.hook_out": [1]})
    assert torch.equal(unpack(clean["head_rows"]), hidden[:3])
    assert torch.equal(unpack(clean["last_logits"]), hidden[2] @ stack.head)
    assert not torch.equal(hidden[5:], hidden[:3])


def test_a_patch_reads_what_another_request_held(worker):
    hook = "blocks.1.attn.o.hook_in"
    worker.explorer_open([request("source", [hook, "blocks.0.hook_out"], [], hold=True)], {})
    step(worker, source=[7, 8, 9])
    patch = {"key": "source", "rows": [2, 0]}
    edits = [
        wire(hook, "patch", [0, 1], heads=[3], source=patch),
        wire("blocks.0.hook_out", "patch", [0, 1], source=patch),
    ]
    worker.explorer_open([request("target", [hook, "blocks.0.hook_out"], edits)], {})
    step(worker, target=[3, 1, 4])
    source, target = worker.explorer_read({"source": 3, "target": 3})
    z = [unpack(a["captures"][hook]) for a in (source, target)]
    assert torch.equal(z[1][[0, 1], 3], z[0][[2, 0], 3])
    stream = [unpack(a["captures"]["blocks.0.hook_out"]) for a in (source, target)]
    assert torch.equal(stream[1][[0, 1]], stream[0][[2, 0]])
    worker.explorer_release(["source", "target", "nobody"])
    with pytest.raises(KeyError):
        worker.explorer_read({"source": 3})


def test_a_row_too_many_is_not_read(worker):
    """vLLM may have begun a step more than a generation that was stopped has rows."""
    hook, head, prompt = "blocks.0.hook_out", worker.model_runner.model.head, [3, 1, 4]
    worker.explorer_open([request("a", [hook], [])], {})
    hidden = step(worker, a=prompt)
    worker._rows.held["a"].last_logits = {1: hidden[1] @ head, 2: hidden[2] @ head}
    (whole,), (less,) = worker.explorer_read({"a": 3}), worker.explorer_read({"a": 2})
    assert torch.equal(unpack(less["captures"][hook]), unpack(whole["captures"][hook])[:2])
    for answer, rows in ((whole, 3), (less, 2)):
        assert torch.equal(unpack(answer["head_rows"]), hidden[:rows])
        assert torch.equal(unpack(answer["last_logits"]), hidden[rows - 1] @ head)


def test_unknown_hooks_open_nothing(worker):
    good = request("good", [], [])
    with pytest.raises(ValueError, match=r"no tap for blocks\.9\.hook_out"):
        worker.explorer_open([good, request("bad", ["blocks.9.hook_out"], [])], {})
    with pytest.raises(KeyError):
        worker.explorer_read({"good": 1})


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (wire("blocks.0.hook_out", "zap", [0], value="v"), "zap at blocks.0.hook_out: there is no such op"),
        (wire("blocks.0.hook_out", "scale", [0]), "it has no factor"),
        (wire("blocks.0.hook_out", "set", [0]), "it has no value"),
        (wire("blocks.0.hook_out", "patch", [0]), "it has no source"),
        (wire("blocks.0.hook_out", "suppress", [0], heads=[1]), r"heads 0 to 0, not \(1,\)"),
        (wire("blocks.0.attn.o.hook_in", "suppress", [0], heads=[-1]), "heads 0 to 3"),
        (wire("blocks.0.attn.o.hook_in", "set", [0], value="v"), r"shape \(1, 1, 8\) does not fill \(1, 4, 2\)"),
        (wire("blocks.0.hook_out", "add", [0, 1, 2], value="two"), r"shape \(2, 1, 8\) does not fill \(3, 1, 8\)"),
        (wire("blocks.0.hook_out", "add", [0], value="flat"), r"shape \(8,\) does not fill"),
    ],
)
def test_edits_are_checked_once_more_where_they_act(worker, edit, says):
    tensors = {"v": torch.ones(1, 1, 8), "two": torch.ones(2, 1, 8), "flat": torch.ones(8)}
    good = request("good", [], [wire("blocks.0.hook_out", "suppress", [0])])
    with pytest.raises(ValueError, match=says):
        worker.explorer_open([good, request("bad", [], [edit])], {name: pack(t) for name, t in tensors.items()})
    assert not worker._rows.held


def test_the_head_on_rows_kept(worker):
    rows = torch.randn(4, 8)
    logits = unpack(worker.explorer_logits(pack(rows)))
    assert torch.equal(logits, rows @ worker.model_runner.model.head)
    assert logits.dtype == torch.float32


def test_logits_outside_a_step_are_nobodys(worker):
    """On a GPU vLLM measures its memory with a dummy pass: more logits than there are requests."""
    worker.model_runner.model.compute_logits(torch.randn(5, 8))
    worker.explorer_open([request("a", [], [])], {})
    hidden = step(worker, a=[3, 1])
    worker.model_runner.model.compute_logits(torch.randn(5, 8))
    (answer,) = worker.explorer_read({"a": 2})
    assert torch.equal(unpack(answer["last_logits"]), hidden[1] @ worker.model_runner.model.head)


def test_a_step_that_fails_leaves_no_hook(worker):
    worker.explorer_open([request("a", ["blocks.0.hook_out"], [])], {})
    with pytest.raises(IndexError):
        step(worker, a=[3, 99])  # an id past the vocabulary
    assert worker.model_runner.model.hooks() == 0


def test_what_an_edit_wrote_before_a_step_failed_is_cleared(worker, monkeypatch):
    zeroed = []
    monkeypatch.setattr(internals, "zero_blocks", lambda runner, blocks: zeroed.append(blocks))
    edit = wire("blocks.0.hook_out", "suppress", [0])
    worker.explorer_open([request("a", [], [edit]), request("b", ["embed.hook_out"], [])], {})
    last = worker.model_runner.model.model.norm.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        worker.model_runner.execute_model(schedule(worker, b=[3], a=[1, 5]))
    last.remove()
    step(worker, c=[3], d=[1])
    assert zeroed == [[2]]


def test_a_question_that_cannot_be_answered_is_an_answer(worker):
    assert worker.explorer_answer("explorer_fires") == {"answer": {}}
    says = worker.explorer_answer("explorer_logits", pack(torch.randn(2, 5)))
    assert says["raised"] == "RuntimeError" and "shapes cannot be multiplied" in says["says"]
    assert worker.explorer_answer("explorer_read", {"nobody": 1}) == {"raised": "KeyError", "says": "'nobody'"}


@pytest.mark.parametrize("ranks", [1, 2])
def test_one_worker_of_several_that_has_no_memory_left_is_the_end_of_all(worker, monkeypatch, ranks):
    """The others wait for it inside the head, where nobody can tell them."""

    def head(rows):
        raise torch.OutOfMemoryError("no memory")

    worker._head, worker._place = head, worker._place._replace(ranks=ranks)
    if ranks > 1:
        with pytest.raises(torch.OutOfMemoryError):
            worker.explorer_answer("explorer_logits", pack(torch.randn(2, 8)))
    else:
        assert worker.explorer_answer("explorer_logits", pack(torch.randn(2, 8)))["raised"] == "OutOfMemoryError"


def test_what_it_says_of_the_model(worker, monkeypatch):
    impl = SimpleNamespace(scale=0.5, sliding_window=(3, 0), logits_soft_cap=0, sinks=torch.tensor([1.0, 2.0]))
    for layer in worker.model_runner.model.model.layers:
        layer.self_attn.attn.impl = impl
    shared = torch.zeros(2, 8)
    worker.model_runner.kv_caches = [shared[0], shared[1], torch.zeros(3)]  # two layers in one piece of memory
    seen = worker.explorer_describe()
    assert seen["shape"] == vars(SHAPE)
    assert (seen["dtype"], seen["device"]) == ("float32", "cpu")
    assert seen["cache_bytes"] == 4 * (16 + 3)
    attention = {"scale": 0.5, "window": 4, "softcap": None, "slopes": None, "sinks": (1.0, 2.0)}
    assert seen["attention"] == [[0, attention], [1, attention]]
    assert seen["shards"]["blocks.1.attn.o.hook_in"] == [0, 4, 4, 0]


# --- one of several ---------------------------------------------------------------------------------------------------


def half(stage: int) -> Stack:
    """One of two pipeline stages: an Identity stands for what the other one holds."""
    stack = Stack()
    stack.model.layers[1 - stage] = nn.Identity()
    if stage == 0:
        stack.model.norm = nn.Identity()
    return stack


@pytest.fixture(params=[0, 1])
def stage(request, worker, monkeypatch):
    monkeypatch.setattr(internals, "place", lambda: internals.Place(0, 1, request.param, 2))
    monkeypatch.setattr(internals, "prepare_stage", lambda runner: None)
    stack = half(request.param)
    monkeypatch.setattr(sys.modules[__name__], "Stack", lambda: stack)
    made = type(worker)()
    made.load_model()
    return request.param, made


def test_a_stage_has_taps_for_what_it_holds(stage):
    number, made = stage
    names = set(made._taps)
    assert all(name.startswith(f"blocks.{number}.") for name in names if name.startswith("blocks."))
    # the second stage's embedding is there (tied to the head), but nothing calls it
    assert (
        names - {n for n in names if n.startswith("blocks.")}
        == [{"embed.hook_out"}, {"ln_final.hook_normalized"}][number]
    )
    assert [layer for layer, _ in _described(made)["attention"]] == [number]


def _described(made):
    impl = SimpleNamespace(scale=0.5, sliding_window=None)
    for layer in made._parts.layers.values():
        layer.attention.attn.impl = impl
    made.model_runner.kv_caches = []
    return made.explorer_describe()


def test_a_stage_leaves_to_the_other_what_the_other_holds(stage):
    number, made = stage
    here, there = f"blocks.{number}.hook_out", f"blocks.{1 - number}.hook_out"
    edits = [wire(here, "suppress", [0]), wire(there, "suppress", [0])]
    made.explorer_open([request("a", [here, there], edits)], {})
    held = made._rows.held["a"]
    assert (list(held.edits), held.elsewhere, list(held.capture)) == ([here], (there,), [here])
    with pytest.raises(ValueError, match=r"no tap for blocks\.9\.hook_out"):
        made.explorer_open([request("b", ["blocks.9.hook_out"], [])], {})


def test_only_the_last_stage_has_the_head(stage):
    number, made = stage
    assert (made.explorer_logits(pack(torch.randn(2, 8))) is None) == (number == 0)


def test_what_several_passes_captured_is_joined_when_it_has_come_to_the_host(worker, monkeypatch):
    worker.explorer_open([request("a", ["embed.hook_out"], [])], {})
    there = [torch.zeros(2, 8), torch.zeros(1, 8)]
    worker._rows.held["a"].chunks["embed.hook_out"] = {0: there[0], 2: there[1]}
    arrive = lambda device: [rows.fill_(1) for rows in there]  # noqa: E731
    monkeypatch.setitem(type(worker).explorer_read.__globals__, "wait_for", arrive)
    (answer,) = worker.explorer_read({"a": 3})
    assert unpack(answer["captures"]["embed.hook_out"]).eq(1).all()


def test_copies_are_answered_once_unless_asked_for(worker):
    worker._shards |= {"embed.hook_out": Shard(0, 8, 8, copy=1)}
    worker.explorer_open([request("a", ["embed.hook_out", "blocks.0.hook_out"], [])], {})
    step(worker, a=[3, 1])
    (answer,), (whole,) = worker.explorer_read({"a": 2}), worker.explorer_read({"a": 2}, True)
    assert list(answer["captures"]) == ["blocks.0.hook_out"]
    assert set(whole["captures"]) == {"embed.hook_out", "blocks.0.hook_out"}
    assert worker.explorer_fires() == {"embed.hook_out": 1, "blocks.0.hook_out": 1}
    worker.explorer_reset_fires()
    worker.explorer_detach()
    assert worker.explorer_fires() == {}
    with pytest.raises(KeyError):
        worker.explorer_read({"a": 2})
