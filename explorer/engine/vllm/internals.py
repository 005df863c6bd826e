"""The one file that reaches into vLLM's private structure."""

from __future__ import annotations

import dataclasses
import functools
import gc
import inspect
import logging
import os
import re
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn

from ...errors import BootError, EngineError
from ..process import give_back_memory, state_kept, stderr_to, stdout_with_descriptor
from ..protocol import Attention
from .processes import Watch, check_main, kill, last_error, share_out_cores

log = logging.getLogger("explorer.vllm")

SUPPORTED = ("0.20.2", "0.33")  # the oldest and the newest vLLM that this file knows, patch releases of the newest too

# vLLM's CPU worker replaces these for the whole process.
_PATCHED = ((torch, "set_num_threads"), (torch.accelerator, "synchronize"), (torch.accelerator, "empty_cache"))

# What vLLM's `support_torch_compile` puts into a class.
_DECORATED = ("__init__", "__call__", "save_aot_compiled_function", "_ignore_compile_vllm")

_HERE = "vllm.v1.executor.uniproc_executor.UniProcExecutor"  # the executor whose worker is in this process


# what the worker needs


def worker_base() -> type:
    """vLLM's worker class on this platform."""
    if on_cpu():
        from vllm.v1.worker.cpu_worker import CPUWorker

        return CPUWorker  # type: ignore[no-any-return]
    from vllm.v1.worker.gpu_worker import Worker

    return Worker  # type: ignore[no-any-return]


def on_cpu() -> bool:
    """Whether vLLM runs on the CPU here."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


class Place(NamedTuple):
    """Where a worker is: its pipeline stage of `stages`, and there its tensor-parallel rank of `ranks`."""

    rank: int
    ranks: int
    stage: int
    stages: int

    @property
    def first_stage(self) -> bool:
        """Whether it holds the embedding."""
        return self.stage == 0

    @property
    def last_stage(self) -> bool:
        """Whether it holds the final norm and the head."""
        return self.stage == self.stages - 1


def place() -> Place:
    """Where this worker is."""
    from vllm.distributed import get_pp_group, get_tp_group

    tensor, pipeline = get_tp_group(), get_pp_group()
    return Place(tensor.rank_in_group, tensor.world_size, pipeline.rank_in_group, pipeline.world_size)


def prepare_stage(runner: Any) -> None:
    """Allocate what a pipeline stage reads from the one before it.

    vLLM does so in its first warm-up, and has none on a CPU in eager mode.
    """
    if not place().first_stage and runner.intermediate_tensors is None:
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )


def compiled_for() -> list[str]:
    """What decides about a compiled model on a CPU and is not in the key of vLLM's cache."""
    if not on_cpu():
        return []
    amx = torch.cpu._is_amx_tile_supported()
    settings = ("VLLM_CPU_MOE_PREPACK", "VLLM_ZENTORCH_WEIGHT_PREPACK")
    return [torch.backends.cpu.get_cpu_capability(), f"amx={amx}", *(f"{s}={os.environ.get(s)}" for s in settings)]


@contextmanager
def loading_what_was_compiled() -> Iterator[None]:
    """Meanwhile a model that was compiled on a CPU can be loaded from vLLM's cache.

    It calls a method of it that only models compiled by its own backend have (0.20 and 0.32 were seen to), and compiles
    again when that fails.
    """
    load = torch.compiler.load_compiled_function

    def loaded(*args: Any, **kwargs: Any) -> Any:
        function: Any = load(*args, **kwargs)
        compiled = function._artifacts.compiled_fn
        if not hasattr(compiled, "finalize_loading"):
            compiled.finalize_loading = lambda config: None
        return function

    torch.compiler.load_compiled_function = loaded
    try:
        yield
    finally:
        torch.compiler.load_compiled_function = load


def stage_outputs(out: Any) -> tuple[torch.Tensor, ...]:
    """What a forward pass put out, tensors `(rows, d_model)`: the last hidden state, or what goes to the next stage."""
    return (out,) if isinstance(out, torch.Tensor) else tuple(out.tensors.values())


def device_of(worker: Any) -> torch.device:
    """Where a worker computes: on a CPU 0.20 says so in the runner only."""
    return worker.model_runner.device  # type: ignore[no-any-return]


def prepare_experts(model_config: Any) -> None:
    """Make the group of workers that share out experts, where the process's first model had none.

    vLLM makes it together with the other groups, which all engines of a process share.
    """
    from vllm.distributed import parallel_state as groups

    world = groups.get_world_group()
    if model_config.is_moe and groups._EP is None and world.world_size == 1:
        backend = torch.distributed.get_backend(world.device_group)
        groups._EP = groups.init_model_parallel_group([[0]], world.local_rank, backend, group_name="ep")


def give_class_back(decoder: nn.Module) -> None:
    """Undo, for the rest of the process, what vLLM's Transformers backend did to one of transformers' classes.

    It puts its own `__init__` and `__call__` into the class, and transformers can no longer build it. The decoder at
    hand gets them in a class of its own.
    """
    decorated: Any = type(decoder)
    if not decorated.__module__.startswith("transformers.") or "do_not_compile" not in vars(decoder):
        return
    put = {name: vars(decorated)[name] for name in _DECORATED if name in vars(decorated)}
    decoder.__class__ = type(decorated.__name__, (decorated, decorated.__bases__[-1]), put)
    decorated.__bases__ = decorated.__bases__[:-1]
    for name in put:
        delattr(decorated, name)
    decorated.__init__ = inspect.getclosurevars(put["__init__"]).nonlocals["old_init"]


def wrap_forward(runner: Any, around: Callable[[Callable[[], Any]], Any]) -> None:
    """Let `around(forward)` surround each forward pass of the model runner that vLLM built, V1 or V2."""
    if hasattr(runner, "_model_forward"):
        forward = runner._model_forward
        runner._model_forward = lambda *args, **kwargs: around(lambda: forward(*args, **kwargs))
    else:
        runner.explorer = _V2(runner)
        runner.model = _Surrounded(runner.model, runner.explorer.until_over(around))


def wrap_head(runner: Any, after: Callable[[torch.Tensor], None]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Show `after` the logits of each step, one row a request; returns the model's own head."""
    head: Callable[..., Any] = runner.model.compute_logits

    def compute_logits(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        logits = head(hidden_states, *args, **kwargs)
        if logits is not None:
            after(logits)
        return logits

    runner.model.compute_logits = compute_logits
    return head


def scheduled(runner: Any) -> Iterator[tuple[str, dict[str, Any], int, int, int]]:
    """Each request of this step, in row order: id, `extra_args`, first row, row count, position of the first row."""
    steps = getattr(runner, "explorer", None) or _V1(runner)
    ids, starts, computed = steps.batch()
    for i, request_id in enumerate(ids):
        first = int(starts[i])
        yield request_id, steps.extra_args(request_id) or {}, first, int(starts[i + 1]) - first, int(computed[i])


class Given(NamedTuple):
    """Cache blocks that vLLM gives a request for a step, and whether it `starts` (over) there.

    A block's id is one among all, also where layers of different kinds have blocks of their own: what one kind holds
    no other does.
    """

    request: str
    starts: bool
    blocks: list[int]


def wrap_schedule(runner: Any, before: Callable[[set[str], list[Given]], None]) -> None:
    """Tell `before`, ahead of each step, which requests are over and which get blocks of the key-value cache."""
    execute = runner.execute_model

    def execute_model(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        known = scheduled.scheduled_cached_reqs
        given = [Given(new.req_id, True, list(chain(*new.block_ids))) for new in scheduled.scheduled_new_reqs]
        for name, blocks in zip(known.req_ids, known.new_block_ids, strict=True):
            if blocks is not None:
                given.append(Given(name, name in known.resumed_req_ids, list(chain(*blocks))))
        before(set(scheduled.finished_req_ids), given)
        return execute(scheduled, *args, **kwargs)

    runner.execute_model = execute_model


@torch.inference_mode()
def zero_blocks(runner: Any, blocks: Sequence[int]) -> None:
    """Zero blocks of the key-value cache, as vLLM's scheduler counts them, in every layer.

    An attention kernel may count smaller ones: then each is several neighbours there.
    """
    count = runner.kv_cache_config.num_blocks
    for cache in runner.kv_caches:
        axes = [axis for axis in (0, 1) if cache.shape[axis] % count == 0]  # some backends put keys and values first
        if not axes:
            raise EngineError(f"cache of shape {tuple(cache.shape)} has no axis of {count} blocks; please report this")
        if count == 2:  # of which vLLM gives out one, and an axis of 2 may be keys and values
            cache.zero_()
            continue
        parts = cache.shape[axes[0]] // count
        index = torch.tensor(blocks)[:, None] * parts + torch.arange(parts)
        cache.index_fill_(axes[0], index.flatten().to(cache.device), 0)


def cache_bytes(runner: Any) -> int:
    """What the key-value cache takes; layers may share one piece of memory."""
    storages = [cache.untyped_storage() for cache in runner.kv_caches]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@contextmanager
def uncompiled(operations: Sequence[Any]) -> Iterator[None]:
    """Let the layers of this forward pass run as they are written, not as vLLM compiled or recorded them.

    And with vLLM's own kernels for what is `left_to_the_compiler`, as in eager mode.
    """
    from vllm.config import CUDAGraphMode
    from vllm.forward_context import get_forward_context

    context = get_forward_context()
    context.skip_compiled = True
    context.cudagraph_runtime_mode = CUDAGraphMode.NONE
    ways = [operation._forward_method for operation in operations]
    for operation in operations:
        operation._forward_method = operation.forward_cuda
    try:
        yield
    finally:
        for operation, way in zip(operations, ways, strict=True):
            operation._forward_method = way


def left_to_the_compiler(inner: nn.Module) -> list[Any]:
    """The operations of a compiled model that have a kernel of vLLM's for a GPU and do not use it: norms and the like.

    Some are compiled on their own (SiLU), which is slower still.
    """
    from vllm.model_executor.custom_op import CustomOp

    if on_cpu():
        return []
    return [
        module
        for module in inner.modules()
        if isinstance(module, CustomOp)
        and getattr(module._forward_method, "__name__", None) == "forward_native"  # itself, or compiled from it
        and type(module).forward_cuda is not CustomOp.forward_cuda
    ]


def compiles_edits(inner: nn.Module) -> bool:
    """Whether edits go into a compiled graph of this decoder: on a GPU, where what runs uncompiled is slow.

    On a CPU it gains little, and with vLLM 0.32 GPT-2's graph with edits reads memory that was freed.
    """
    return not on_cpu() and getattr(inner, "do_not_compile", True) is False


def most_rows(runner: Any) -> int:
    """The most rows in one forward pass, with those that vLLM pads a recorded graph with."""
    sizes = runner.compilation_config.cudagraph_capture_sizes or ()
    return max(runner.max_num_tokens, *sizes, 1)


class Twin:
    """A decoder compiled a second time, with something attached; it has the same modules and weights.

    Compiled in the first forward pass, or loaded from vLLM's cache. On a GPU each batch size is recorded when it first
    comes, once.
    """

    def __init__(self, runner: Any, inner: nn.Module, attach: Callable[[], Sequence[Any]]) -> None:
        from vllm.compilation.backends import set_model_tag
        from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper
        from vllm.config import set_current_vllm_config

        self._runner = runner
        self._attach: Callable[[], Sequence[Any]] | None = attach
        self._recorded: set[Any] = set()
        self._places = [
            (parent, name)
            for parent in runner.get_model().modules()
            for name, child in parent.named_children()
            if child is inner
        ]
        twin: Any = copy(inner)
        config = copy(runner.vllm_config)  # by this vLLM's cache tells the two apart
        own = {**config.additional_config["explorer"], "attached": True}
        config.additional_config = {**config.additional_config, "explorer": own}
        vars(twin).pop("aot_compiled_fn", None)
        twin.vllm_config = config
        twin.was_aot_compile_fn_loaded_from_disk = False
        twin.compiled = False
        with set_current_vllm_config(config), set_model_tag("explorer"):
            TorchCompileWithNoGuardsWrapper.__init__(twin)
        self._module: nn.Module = twin

    def run(self, forward: Callable[[], Any]) -> Any:
        """Let `forward` run it in place of the decoder."""
        from vllm.config import CUDAGraphMode
        from vllm.forward_context import get_forward_context

        context = get_forward_context()
        replays = context.cudagraph_runtime_mode != CUDAGraphMode.NONE
        replays = replays and self._runner.compilation_config.cudagraph_mode.has_piecewise_cudagraphs()
        context.cudagraph_runtime_mode = CUDAGraphMode.NONE
        with self._in_place():
            if not replays:
                return forward()
            # one graph for any number of requests: attention is not part of it
            size = dataclasses.replace(context.batch_descriptor, num_reqs=None, uniform=False)
            if size not in self._recorded:
                forward()  # what is made ready in a first pass cannot be while a graph is recorded
                context.cudagraph_runtime_mode, context.batch_descriptor = CUDAGraphMode.PIECEWISE, size
                with _recording(self._runner.device):
                    forward()
                self._recorded.add(size)
            context.cudagraph_runtime_mode, context.batch_descriptor = CUDAGraphMode.PIECEWISE, size
            return forward()

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        attached = self._attach() if self._attach is not None else ()
        decoders = [parent._modules[name] for parent, name in self._places]
        for parent, name in self._places:
            parent._modules[name] = self._module
        try:
            yield
            self._attach = None  # it is compiled
        finally:
            for (parent, name), decoder in zip(self._places, decoders, strict=True):
                parent._modules[name] = decoder
            for handle in reversed(attached):
                handle.remove()


@contextmanager
def _recording(device: torch.device) -> Iterator[None]:
    """vLLM records graphs meanwhile."""
    from vllm.compilation.monitor import set_cudagraph_capturing_enabled
    from vllm.distributed.parallel_state import graph_capture

    set_cudagraph_capturing_enabled(True)
    try:
        with graph_capture(device=device):
            yield
    finally:
        set_cudagraph_capturing_enabled(False)


def attention_module(module: nn.Module) -> nn.Module | None:
    """vLLM's `Attention` inside a layer's attention; None where it is of another kind (latent attention)."""
    from vllm.model_executor.layers.attention.attention import Attention as VllmAttention

    return next((m for m in module.modules() if isinstance(m, VllmAttention)), None)


def attention_of(module: nn.Module | None) -> Attention:
    """How vLLM's `Attention` module treats its scores."""
    if module is None:  # nothing is replayed
        return Attention(scale=1.0)
    impl: Any = module.impl
    window = impl.sliding_window
    if isinstance(window, (tuple, list)):  # (left, right) as flash attention counts: the token itself comes on top
        window = window[0] + 1
    return Attention(
        scale=float(impl.scale),
        window=int(window) if window is not None and window > 0 else None,
        softcap=float(impl.logits_soft_cap) if getattr(impl, "logits_soft_cap", None) else None,
        slopes=_numbers(getattr(impl, "alibi_slopes", None)),
        sinks=_numbers(getattr(impl, "sinks", None)),
    )


def _numbers(of_heads: Any) -> tuple[float, ...] | None:
    return None if of_heads is None else tuple(torch.as_tensor(of_heads).float().tolist())


def parameter(model: nn.Module, name: str) -> tuple[torch.Tensor, dict[str, Any]] | None:
    """A named parameter or buffer as this worker holds it, and its layout; None when it has none of that name.

    The layout: `axis` along which workers share it (None: each has it whole); `sections` of that axis here, each
    `[length, copies]`: as many neighbours hold the same; and the `length` of the whole without vLLM's padding.
    """
    path, _, leaf = name.rpartition(".")
    try:
        module: Any = model.get_submodule(path)
        tensor = getattr(module, leaf)
    except AttributeError:
        return None
    if not isinstance(tensor, torch.Tensor):
        return None
    if leaf == "weight" and tensor.numel() == 0 and hasattr(module, "quant_method"):
        tensor = _unpacked(module, tensor)
    axis, sections, length = _layout(module, leaf, tensor)
    return tensor, {"axis": axis, "sections": sections, "length": length}


@torch.inference_mode()
def _unpacked(linear: Any, packed: torch.Tensor) -> torch.Tensor:
    """The weight of a linear layer that keeps nothing but a packed one, as on a CPU: what it makes of unit vectors."""
    width = getattr(linear, "input_size_per_partition", None) or linear.input_size
    units = torch.eye(width, dtype=packed.dtype, device=packed.device)
    return linear.quant_method.apply(linear, units, bias=None).T.contiguous()  # type: ignore[no-any-return]


def _layout(module: Any, leaf: str, tensor: torch.Tensor) -> tuple[int | None, list[list[int]], int | None]:
    from vllm.model_executor.layers.linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    rows = isinstance(module, RowParallelLinear)
    plain = {"weight": 1} if rows else {"weight": 0, "bias": 0}  # vLLM notes it at most tensors, not at packed ones
    axis = getattr(tensor, "input_dim" if rows else "output_dim", plain.get(leaf))
    if axis is None or not isinstance(module, (RowParallelLinear, ColumnParallelLinear, VocabParallelEmbedding)):
        return None, [], None
    if not isinstance(module, VocabParallelEmbedding) and getattr(module, "tp_size", None) == 1:
        return None, [], None  # the only worker, or a layer that every worker keeps whole
    if isinstance(module, QKVParallelLinear):
        lengths = [module.num_heads * module.head_size, *[module.num_kv_heads * module.head_size] * 2]
        return axis, [[n, c] for n, c in zip(lengths, (1, *[module.num_kv_head_replicas] * 2), strict=True)], None
    if isinstance(module, VocabParallelEmbedding):
        return axis, [[tensor.shape[axis], 1]], module.org_vocab_size
    lengths = [tensor.shape[axis]] if rows else module.output_partition_sizes
    return axis, [[n, 1] for n in lengths], None


# the two model runners


class _V1:
    """Steps of the V1 model runner."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner

    def batch(self) -> tuple[Sequence[str], Any, Any]:
        """Of the requests in this step, in row order: ids, first rows (and the end), positions of the first rows."""
        batch = self._runner.input_batch
        return batch.req_ids, self._runner.query_start_loc.np, batch.num_computed_tokens_cpu

    def extra_args(self, request_id: str) -> dict[str, Any] | None:
        return self._runner.requests[request_id].sampling_params.extra_args  # type: ignore[no-any-return]


class _V2:
    """Steps of the V2 model runner: it keeps neither the parameters of its requests nor the batch that it runs."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._extra_args: dict[str, dict[str, Any] | None] = {}
        self._batch: Any = None  # None outside a step: vLLM measures and warms up with forward passes of nobody
        add, prepare = runner.add_requests, runner.prepare_inputs

        def add_requests(scheduled: Any) -> None:
            for request_id in scheduled.finished_req_ids:
                self._extra_args.pop(request_id, None)
            for new in scheduled.scheduled_new_reqs:
                self._extra_args[new.req_id] = new.sampling_params.extra_args
            add(scheduled)

        def prepare_inputs(*args: Any, **kwargs: Any) -> Any:
            self._batch = prepare(*args, **kwargs)
            return self._batch

        runner.add_requests, runner.prepare_inputs = add_requests, prepare_inputs
        # A full graph is replayed without calling the model: record no more than what lies between attention calls.
        mode = runner.compilation_config.cudagraph_mode.mixed_mode()
        runner.compilation_config.cudagraph_mode = type(mode).NONE if mode == type(mode).FULL else mode

    def until_over(self, around: Callable[[Callable[[], Any]], Any]) -> Callable[[Callable[[], Any]], Any]:
        """`around`, after which the step is over."""

        def surrounded(forward: Callable[[], Any]) -> Any:
            try:
                return around(forward)
            finally:
                self._batch = None

        return surrounded

    def batch(self) -> tuple[Sequence[str], Any, Any]:
        """As V1's."""
        if self._batch is None:
            return (), (), ()
        computed = self._runner.req_states.num_computed_tokens_np[self._batch.idx_mapping_np]
        return self._batch.req_ids, self._batch.query_start_loc_np, computed

    def extra_args(self, request_id: str) -> dict[str, Any] | None:
        return self._extra_args[request_id]


class _Surrounded:
    """A model whose calls are surrounded; everything else is its own."""

    def __init__(self, model: nn.Module, around: Callable[[Callable[[], Any]], Any]) -> None:
        self._model, self._around = model, around

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._around(lambda: self._model(*args, **kwargs))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


# what the engine needs


def rpc(llm: Any, method: str, *args: Any) -> list[Any]:
    """Call a method of every worker process; their answers, always in the same order."""
    return llm.collective_rpc(method, args=args)  # type: ignore[no-any-return]


def call(llm: Any, method: str, *args: Any) -> list[Any]:
    """Call a method of the one worker in this process: what `rpc` does without its layers, each cold after a pass."""
    return [getattr(_executor(llm).driver_worker, method)(*args)]


def in_processes(llm: Any) -> bool:
    """Whether the workers are processes of their own, which may die or fail alone."""
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    return not isinstance(_executor(llm), UniProcExecutor)


def _executor(llm: Any) -> Any:
    return _core(llm).engine_core.model_executor


def _processes(executor: Any) -> list[Any]:
    """The worker processes that vLLM's multi-process executor started here; none for other executors."""
    return [worker.proc for worker in getattr(executor, "workers", None) or () if hasattr(worker, "proc")]


def watch(llm: Any) -> Watch:
    """A watch over an engine's worker processes."""
    executor = _executor(llm)
    _one_at_a_time(executor)
    return Watch(
        _processes(executor), lambda: not executor.is_failed and bool(getattr(executor, "shutting_down", False))
    )


class Output(NamedTuple):
    """What a step brought for one request."""

    request_id: str
    tokens: list[int]
    finished: bool


def step(llm: Any) -> list[Output]:
    """One engine step; the outputs of requests that moved."""
    return [Output(o.request_id, o.new_token_ids, o.finished) for o in _core(llm).get_output().outputs]


@functools.lru_cache(16)
def sampling(max_tokens: int, temperature: float, stop_token_ids: tuple[int, ...]) -> Any:
    """vLLM's `SamplingParams`, checked, which takes longer than all else of `add`: to be copied, not changed."""
    from vllm.sampling_params import SamplingParams

    return SamplingParams(
        detokenize=False, max_tokens=max_tokens, temperature=temperature, stop_token_ids=list(stop_token_ids)
    )


def run_ahead(llm: Any, ahead: bool) -> None:
    """Whether vLLM begins a step before the last one is read, where it was booted so and nothing is under way.

    Where nothing is generated there is no next step: it would take as long to see that as all of ours.
    """
    core = _core(llm).engine_core
    if _runs_ahead(core) and not core.batch_queue:
        core.batch_queue_size = core.batch_queue.maxlen if ahead else 1


def catch_up(llm: Any) -> None:
    """See the end of steps that are under way when all is over: they are of requests that have ended."""
    core = _core(llm).engine_core
    while _runs_ahead(core) and core.batch_queue:
        core.step_fn()


def give_up(llm: Any, request_ids: list[str]) -> None:
    """Drop requests after an error, and the steps that are under way: the next run is not to read what they hold.

    One that failed would fail it.
    """
    abort(llm, request_ids)
    core = _core(llm).engine_core
    if _runs_ahead(core):
        core.batch_queue.clear()


def _runs_ahead(core: Any) -> bool:
    return getattr(core, "batch_queue", None) is not None and bool(core.vllm_config.scheduler_config.async_scheduling)


def fit_in_one_pass(llm: Any, lengths: Sequence[int]) -> bool:
    """Whether prompts of these lengths are fed in one forward pass."""
    config = _core(llm).engine_core.vllm_config.scheduler_config
    return len(lengths) <= config.max_num_seqs and sum(lengths) <= config.max_num_batched_tokens


@functools.cache
def _request_class() -> Any:
    from vllm.v1.engine import EngineCoreRequest

    return EngineCoreRequest


def add(llm: Any, request_id: str, ids: Sequence[int], alike: Any, seed: int, extra_args: dict[str, Any]) -> None:
    """Queue a request; its outputs carry `request_id`. `alike` is its `sampling`, but for its seed and extra arguments.

    Straight to vLLM's engine core: the layers before it parse and check what is checked here already, and copy it.
    """
    params = copy(alike)
    params.seed, params.extra_args = seed, extra_args
    request = _request_class()
    _core(llm).add_request(
        request(
            request_id=request_id,
            prompt_token_ids=list(ids),
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
    )


def configured_stops(llm: Any) -> list[int]:
    """The ids that end a generation by the configuration that vLLM uses, which a keyword may have changed."""
    config = llm.llm_engine.model_config
    ends = {**config.try_get_generation_config(), **config.override_generation_config}.get("eos_token_id")
    return ends if isinstance(ends, list) else [] if ends is None else [ends]


def abort(llm: Any, request_ids: list[str]) -> None:
    """Drop queued and running requests."""
    _core(llm).abort_requests(request_ids)


def _core(llm: Any) -> Any:
    """The client of vLLM's engine core, which is in this process."""
    return llm.llm_engine.engine_core


def free(llm: Any, at_once: bool = False) -> None:
    """Free an engine's memory, and leave what other engines share. `at_once`: worker processes have no time to end."""
    processes = _processes(_executor(llm))
    if at_once:
        kill(processes)
    _free_client(llm.llm_engine.engine_core)
    for process in processes:
        process.join()


def free_failed(error: BaseException) -> None:
    """Free what a failed `vllm.LLM(...)` had built already: the frames of its error hold it."""
    frame = error.__traceback__
    while frame is not None:
        owner: Any = frame.tb_frame.f_locals.get("self")
        client = getattr(getattr(owner, "llm_engine", owner), "engine_core", None)
        if hasattr(client, "engine_core"):
            _free_client(client)
            return
        if hasattr(owner, "model_executor"):  # an engine core that its client never got to know
            _shut(owner.model_executor)
            return
        frame = frame.tb_next


def _free_client(client: Any) -> None:
    if hasattr(client, "_finalizer"):  # 0.32 has one, 0.26 has not: it would tear down the process's parallel groups
        client._finalizer.detach()
    core = client.engine_core
    core.structured_output_manager.clear_backend()
    _shut(core.model_executor)
    core.scheduler.shutdown()
    gc.unfreeze()


def _shut(executor: Any) -> None:
    _one_at_a_time(executor)
    executor.shutdown()


def _one_at_a_time(executor: Any) -> None:
    """Have an executor shut down by one thread at a time, and close its queues to and from worker processes then.

    vLLM's own thread shuts it down too, when it sees a worker die: ZeroMQ closes a context in one thread only. Up to
    0.26 vLLM leaves the queues' sockets to the garbage collector: one with a message that nobody took any more makes it
    wait for ever.
    """
    if "shutdown" not in vars(executor):
        parts = weakref.ref(executor), _sockets(executor), threading.RLock()
        executor.shutdown = functools.partial(_shut_in_turn, *parts)  # a bound method would keep the executor alive


def _shut_in_turn(owner: weakref.ref[Any], sockets: list[Any], turn: threading.RLock) -> None:
    executor: Any = owner()
    with turn:
        type(executor).shutdown(executor)
        for socket in sockets:
            socket.context.destroy(linger=0)


def _sockets(executor: Any) -> list[Any]:
    queues = [getattr(executor, "rpc_broadcast_mq", None), *(getattr(executor, "response_mqs", None) or ())]
    sockets = [getattr(queue, name, None) for queue in queues for name in ("local_socket", "remote_socket")]
    return [socket for socket in sockets if socket is not None]


def import_class(architecture: str) -> None:
    """Import a model's class, so that vLLM need not start a process to look at it.

    vLLM does that lest a GPU be touched too early; on a CPU there is none.
    """
    from vllm import ModelRegistry

    if on_cpu():
        name = architecture if architecture in ModelRegistry.models else "TransformersForCausalLM"
        ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())


def construct(path: str, options: dict[str, Any]) -> Any:
    """`vllm.LLM`, sharing no module with another engine: what fails halfway is freed."""
    import vllm
    from vllm.model_executor.layers import rotary_embedding

    # vLLM caches these by their sizes for the whole process: an eager engine would get a compiled one's, and other bits
    rotary_embedding._ROPE_DICT.clear()
    workers = options.get("tensor_parallel_size", 1) * options.get("pipeline_parallel_size", 1)
    if workers > 1:
        check_main()
    if on_cpu():
        if workers > 1:
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", share_out_cores(workers))
        elif options.get("distributed_executor_backend") is None:
            # up to 0.22 the worker gets a process of its own unless the executor is named in full
            options = options | {"distributed_executor_backend": _HERE}
        # 0.20 calls these when it ends, and torch refuses where there is no accelerator; later versions do this as well
        torch.accelerator.synchronize = lambda *_: None  # type: ignore[assignment]
        torch.accelerator.empty_cache = lambda *_: None  # type: ignore[assignment]
    if isinstance(options.get("hf_token"), str):  # vLLM reads the configuration with it, and fetches weights without
        os.environ["HF_TOKEN"] = options["hf_token"]
        options = options | {"hf_token": None}  # vLLM finds it there as well; up to 0.20 it logs its keywords
    computes_here = on_cpu() and options.get("distributed_executor_backend") == _HERE
    threads = torch.get_num_threads()
    try:
        with stdout_with_descriptor():  # up to 0.26 vLLM asks for it; later versions take 1
            return vllm.LLM(model=path, **options)
    except BaseException as error:
        free_failed(error)
        raise
    finally:
        if not computes_here and torch.get_num_threads() != threads:  # vLLM leaves PyTorch one, which is the user's too
            torch.set_num_threads(threads)


def version() -> str:
    """vLLM's version."""
    import vllm

    return str(vllm.__version__)


def check_version() -> None:
    """Raise `BootError` for a vLLM outside the supported range."""
    found, oldest, newest = (
        [int(number) for number in re.findall(r"\d+", text.partition("+")[0])] for text in (version(), *SUPPORTED)
    )
    if found < oldest or found[: len(newest)] > newest:
        raise BootError(
            f"boot: vLLM {version()} is not supported; install one from {SUPPORTED[0]} to {SUPPORTED[1]}, "
            'or boot with engine="transformers"'
        )


def check_runner() -> None:
    """Raise `BootError` when the user asks for a V2 model runner that cannot run here."""
    from vllm.triton_utils import HAS_TRITON

    if uses_v2() and not HAS_TRITON:
        raise BootError(
            "boot: VLLM_USE_V2_MODEL_RUNNER=1 needs a Triton that runs on this machine; unset it to use the V1 runner"
        )


def uses_v2() -> bool:
    """Whether the user asks for the V2 model runner."""
    from vllm import envs

    envs.disable_envs_cache()  # vLLM would go by the environment of this process's first engine
    return bool(envs.VLLM_USE_V2_MODEL_RUNNER)


def is_eager(llm: Any) -> bool:
    """Whether vLLM runs the model as it is written, without compiling it."""
    return bool(llm.llm_engine.model_config.enforce_eager)


def checkpoint(llm: Any) -> tuple[str, Any]:
    """The folder or hub id that was loaded, and its configuration."""
    config = llm.llm_engine.model_config
    return str(config.model), config.hf_config


def max_model_len(llm: Any) -> int:
    """The longest prompt plus one generated token."""
    return int(llm.llm_engine.model_config.max_model_len)


def vocabulary(llm: Any) -> int:
    """How many different tokens there are."""
    return int(llm.llm_engine.model_config.get_vocab_size())


class Lifetime:
    """vLLM's state that belongs to the process: shared by all engines, put back after the last one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # one session may close while another boots
        self._engines = 0
        self._owns_groups = False
        self._originals: dict[tuple[Any, str], Any] = {}

    @contextmanager
    def booting(self) -> Iterator[None]:
        """Set vLLM's environment, undo what booting does to the random state, and keep its noise out of the cell.

        The environment is put back by `one_boot`.

        vLLM's log goes to the logger `vllm`, which writes nowhere unless the user gives it a handler. Native warnings
        go to file descriptor 2; they are read back and logged. A boot that fails leaves nothing behind.
        """
        if torch.cuda.is_initialized():  # there vLLM measures free memory, and fails when more appears meanwhile
            give_back_memory()
        with self._lock:
            if self._engines == 0:
                there = [(owner, name) for owner, name in _PATCHED if hasattr(owner, name)]  # not in every torch
                self._originals = {(owner, name): getattr(owner, name) for owner, name in there}
                self._owns_groups = not torch.distributed.is_initialized()
            self._engines += 1
        os.environ["VLLM_CONFIGURE_LOGGING"] = "0"
        if not logging.getLogger("vllm").handlers:
            logging.getLogger("vllm").addHandler(logging.NullHandler())
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # one process: no copies, no second interpreter to start
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # this process has threads
        os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")  # V1, the runner that CI runs, unless the user chose
        try:
            with state_kept(), warnings.catch_warnings(), stderr_to(log) as said:
                warnings.simplefilter("ignore")
                try:
                    yield
                except Exception as error:
                    if "WorkerProc initialization failed" not in str(error):
                        raise
                    raise BootError(f"boot: a worker process failed to start: {last_error(said())}") from error
        except BaseException:
            self.left()
            raise

    def left(self) -> None:
        """An engine was freed."""
        give_back_memory()
        platforms = sys.modules.get("vllm.platforms")
        if platforms is not None and torch.cuda.is_initialized():
            # where CUDA graphs have their memory: with its graphs gone it may not be used again, but vLLM would
            type(platforms.current_platform)._global_graph_pool = None
        with self._lock:
            self._engines -= 1
            if self._engines:
                return
            groups = sys.modules.get("vllm.distributed.parallel_state")  # not there when vLLM could not be imported
            if self._owns_groups and groups is not None:
                groups.destroy_model_parallel()
                groups.destroy_distributed_environment()
            for (owner, name), function in self._originals.items():
                setattr(owner, name, function)


lifetime = Lifetime()
