"""The worker: vLLM's own, plus taps that capture and edit rows of the requests that ask for it."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, replace
from typing import Any

import torch

from ...catalogue import Catalogue
from ...errors import BootError
from ...hooks import ModelShape
from ...resolve import RowEdit
from ..host import to_host, wait_for
from ..parts import find_parts
from ..points import find_taps
from ..process import keep_freed_memory
from ..rows import Held, LastLogits, Rows, Span, join, keep_head_rows
from ..study import judge, read
from . import internals
from .blocks import Blocks
from .processes import end_with_parent, ignore_interrupts
from .program import Program
from .reads import TRIED, reads
from .shards import cut, partial_sums, shard_of
from .wire import pack, received, share, unpack_edit, unpack_values

log = logging.getLogger("explorer.vllm")


class ExplorerWorker(internals.worker_base()):  # type: ignore[misc]
    """vLLM's worker with the explorer in it. Everything it is asked and answers is msgpack-native data.

    One of several holds some layers (its pipeline stage's) and of those some heads and neurons (its tensor-parallel
    part). All are asked the same; each does and answers what it holds.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        end_with_parent()
        super().__init__(*args, **kwargs)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load as vLLM does, then find the taps and wrap the forward pass. The model itself is not touched."""
        ignore_interrupts()
        keep_freed_memory()
        internals.prepare_experts(self.vllm_config.model_config)
        super().load_model(*args, **kwargs)
        whole = ModelShape(**self.vllm_config.additional_config["explorer"]["shape"])
        self._place = place = internals.place()
        self._parts = find_parts(self.model_runner.model, reads)
        internals.give_class_back(self._parts.inner)
        self._operations = internals.left_to_the_compiler(self._parts.inner)
        # some models have the embedding and the norm in every stage, but nothing calls them there
        if not place.first_stage:
            self._parts = replace(self._parts, embedding=None)
        if not place.last_stage:
            self._parts = replace(self._parts, norm=None)
        self._shape, self._here = self._sizes(whole)
        self._taps = find_taps(self._parts, self._here)
        self._program: Program | None = None  # of a compiled model
        self._missing: dict[str, str] | None = None  # the first forward pass shows it
        self._refused: str | None = None
        catalogue = Catalogue(self._shape, apart=True)
        self._shards = {
            name: shard_of(catalogue[name].shape[0], tap.shape[0], place.rank, place.ranks)
            for name, tap in self._taps.items()
        }
        self._elsewhere = {point.name for point in catalogue} - set(self._taps) if place.stages > 1 else set()
        self._rows = Rows({point.name: self._taps[point.name].shape for point in catalogue if point.name in self._taps})
        self._blocks = Blocks(self.model_runner)
        self._spans: list[Span | None] = []
        self._served = LastLogits()
        internals.prepare_stage(self.model_runner)
        internals.wrap_schedule(self.model_runner, self._blocks.give)
        internals.wrap_forward(self.model_runner, self._step)
        self._head = internals.wrap_head(self.model_runner, self._keep_logits)

    def determine_available_memory(self) -> int:
        """As vLLM does. On a CPU this is where a model is compiled, or loaded as it was compiled before."""
        with internals.loading_what_was_compiled():
            return super().determine_available_memory()  # type: ignore[no-any-return]

    def _sizes(self, configured: ModelShape) -> tuple[ModelShape, ModelShape]:
        """The sizes of the model, and of what is held here, as the modules have them.

        Some of vLLM's models ignore the configuration's.
        """
        layers = self._parts.layers.values()
        attention = next((m for m in (internals.attention_module(layer.attention) for layer in layers) if m), None)
        down = next((layer.down for layer in layers if layer.down is not None), None)
        here = replace(
            configured,
            d_head=getattr(attention, "head_size", configured.d_head),
            heads=getattr(attention, "num_heads", configured.heads),
            kv_heads=getattr(attention, "num_kv_heads", configured.kv_heads),
            d_mlp=getattr(down, "input_size_per_partition", configured.d_mlp),
        )
        whole = replace(here, d_mlp=getattr(down, "input_size", configured.d_mlp))
        if self._place.ranks > 1:
            whole = replace(whole, heads=configured.heads, kv_heads=configured.kv_heads)
        return whole, here

    # what the engine asks for

    def explorer_answer(self, method: str, *args: Any) -> dict[str, Any]:
        """What a method answers, or what it raised: an error that left one of several workers would end them all.

        So one must that may be this worker's alone (no memory left): the others wait for it, perhaps for ever.
        """
        try:
            return {"answer": getattr(self, method)(*args)}
        except torch.OutOfMemoryError:
            if self._place.ranks > 1:
                raise
            return {"raised": "OutOfMemoryError", "says": "out of memory"}
        except Exception as error:
            log.warning("a worker failed at %s", method, exc_info=True)
            return {"raised": type(error).__name__, "says": str(error)}

    def explorer_describe(self) -> dict[str, Any]:
        """Sizes, dtype and device of the model, how each layer's attention treats its scores, and what is held here.

        Once there was a forward pass also which hooks are missing, or why the model is refused.
        """
        return {
            "shape": vars(self._shape),
            "missing": self._missing,
            "apart": self._parts.apart,
            "refused": self._refused,
            "dtype": str(self.vllm_config.model_config.dtype).removeprefix("torch."),
            "device": str(internals.device_of(self)),
            "cache_bytes": internals.cache_bytes(self.model_runner),
            "attention": [
                [i, vars(internals.attention_of(internals.attention_module(layer.attention)))]
                for i, layer in self._parts.layers.items()
            ],
            "shards": {name: list(astuple(shard)) for name, shard in self._shards.items()},
        }

    def explorer_open(self, requests: list[dict[str, Any]], tensors: dict[str, Any]) -> None:
        """Announce requests: key, edits and captures. `tensors` are the values that edits name, packed, by content."""
        values = unpack_values(tensors, internals.device_of(self))
        self._rows.held |= {r["key"]: self._prepare(r, values) for r in requests}

    def _prepare(self, request: dict[str, Any], values: dict[str, torch.Tensor]) -> Held:
        edits = [unpack_edit(edit, values) for edit in request["edits"]]
        held = self._rows.prepare(
            [self._cut(edit) for edit in edits if edit.hook not in self._elsewhere],
            [name for name in request["capture"] if name not in self._elsewhere],
            request["hold"],
            request["rows"],
        )
        held.elsewhere = tuple({edit.hook for edit in edits} & self._elsewhere)
        return held

    def _cut(self, edit: RowEdit) -> RowEdit:
        if edit.hook not in self._taps:
            return edit  # refused in a moment
        return cut(edit, self._shards[edit.hook], heads=len(self._taps[edit.hook].shape) == 2)

    def explorer_read(
        self, rows: Mapping[str, int], copies: bool = False, shared: bool = False, forget: Sequence[str] = ()
    ) -> list[dict[str, Any]]:
        """What finished requests captured here, by key how many `rows` each has; those to `forget` are released.

        Where vLLM runs ahead there may be a row more, of a step that began before the text was seen to have ended.

        What several workers hold alike is answered by the first of them, or by all that hold `copies`. Whoever asks
        from the same process may have it `shared`: tensors as they are.
        """
        device = internals.device_of(self)
        wait_for(device)  # what passes sent to the host is put together there
        answers = [self._answer(self._rows.held[key], count, copies) for key, count in rows.items()]
        self._rows.release(forget)
        wait_for(device)
        give = share if shared else pack
        for answer in answers:
            answer["captures"] = {name: give(captured) for name, captured in answer["captures"].items()}
            answer |= {name: give(answer[name]) for name in ("head_rows", "last_logits") if name in answer}
        return answers

    def explorer_release(self, keys: list[str]) -> None:
        """Forget requests, finished or not."""
        self._rows.release(keys)

    def explorer_logits(self, rows: Any, shared: bool = False) -> Any:
        """The model's own head on rows `(rows, d_model)`. None from workers that take part, or not even that."""
        if not self._place.last_stage:
            return None
        device = internals.device_of(self)
        with torch.inference_mode():
            logits = self._head(received(rows).to(device))
        if logits is None or self._place.rank:
            return None
        logits = logits.float() if device.type == "cpu" else to_host(logits, torch.float32)
        wait_for(device)
        return share(logits) if shared else pack(logits)

    def explorer_parameter(self, name: str) -> dict[str, Any]:
        """A parameter or buffer as it is held here, and how to put the whole together; or `close` names of others."""
        found = internals.parameter(self.model_runner.model, name)
        if found is None:
            names = [n for n, _ in self.model_runner.model.named_parameters()]
            return {"close": difflib.get_close_matches(name, names)}
        tensor, layout = found
        return {"tensor": pack(tensor), "stage": self._place.stage, **layout}

    def explorer_fires(self) -> dict[str, int]:
        """How often each hook point fired here, in the forward passes that had work for it."""
        return dict(self._rows.fired)

    def explorer_reset_fires(self) -> None:
        """Count from nothing again."""
        self._rows.fired.clear()

    def explorer_begin_trial(self) -> bool:
        """Whether edits go into a compiled graph here. They are to be tried; what fires meanwhile is not counted."""
        self._before_trial = self._rows.fired.copy()
        return self._program is not None

    def explorer_end_trial(self, passed: bool) -> None:
        """What came of it; without `passed` edits stay out of the graph from now on."""
        self._rows.fired = self._before_trial
        if not passed:
            self._program = None

    def explorer_detach(self) -> None:
        """Forget every request. Nothing is attached to the model while no forward pass runs."""
        self._rows.held.clear()

    # what happens in a step

    def _study(self, forward: Callable[[], Any]) -> Any:
        """The first forward pass: every hook point is read, to see by which convention and which are missing."""
        result, reading = read(self._parts, self._here, TRIED, forward)
        try:
            self._taps, missing = judge(self._parts, self._here, reading, {})
            self._missing = missing | (partial_sums(self._parts) if self._place.ranks > 1 else {})
            self._compile()
        except BootError as error:
            self._refused = str(error)
        return result

    def _compile(self) -> None:
        """Have the edits in the graph, where the model is compiled and held by one worker.

        Several would each decide by what they hold of an edit, but all have to run the same.
        """
        alone = self._place.ranks == self._place.stages == 1
        if alone and internals.compiles_edits(self._parts.inner):
            catalogue = Catalogue(self._shape, self._missing, apart=self._parts.apart)
            chosen = [point.name for point in catalogue if point.editable and point.available]
            taps = {name: self._taps[name] for name in chosen}
            dtype = self.vllm_config.model_config.dtype
            try:
                self._program = Program(self.model_runner, self._parts, taps, self._rows, dtype)
            except Exception as error:  # whatever this vLLM's compiler has against a second decoder
                log.warning("this model's graph cannot take edits (%s): they run uncompiled instead", error)

    def _step(self, forward: Callable[[], Any]) -> Any:
        self._spans, ours = [], {}
        for request, extra, row, count, start in internals.scheduled(self.model_runner):
            held = self._rows.held.get(extra.get("explorer", ""))
            if held is not None:
                ours[request] = Span(held, row, count, start)
            self._spans.append(ours.get(request))
        outputs = None
        try:
            hidden = self._forward(forward, list(ours.values()))
            outputs = internals.stage_outputs(hidden)
        finally:  # a pass that failed may have written to the cache before
            self._blocks.watch(ours, outputs)
            if outputs is None or not self._place.last_stage:  # nobody asks for logits, and what they hold is large
                self._spans = []
        if self._place.last_stage:
            keep_head_rows(list(ours.values()), hidden)
        return hidden

    def _forward(self, forward: Callable[[], Any], ours: list[Span]) -> Any:
        work = self._rows.work(ours)
        studies = self._missing is None and self._refused is None and bool(self._spans)
        if not work and not studies:
            return forward()
        if self._program is not None and self._program.set(work):
            return self._program.run(forward)
        device = internals.device_of(self)
        with internals.uncompiled(self._operations), self._rows.attached(self._taps, work, device):
            return self._study(forward) if studies else forward()

    def _keep_logits(self, logits: torch.Tensor) -> None:
        spans, self._spans = self._spans, []
        if spans:  # vLLM tries its sampler out at boot, without a step
            self._served.keep(spans, logits)

    def _answer(self, held: Held, rows: int, copies: bool) -> dict[str, Any]:
        """The tensors, on their way to the host."""
        answer: dict[str, Any] = {
            "captures": {
                name: _in_host(join(chunks, rows))
                for name, chunks in held.chunks.items()
                if copies or self._shards[name].copy == 0
            },
            "edited": held.edited,
        }
        if held.head_rows and self._place.rank == 0:
            answer["head_rows"] = _in_host(join(held.head_rows, rows))
        if held.last_logits and self._place.rank == 0:
            answer["last_logits"] = _in_host(held.last_logits[rows - 1], torch.float32)
        return answer


def _in_host(x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    if x.device.type != "cpu":
        return to_host(x, dtype)
    return x if dtype is None else x.to(dtype)
