"""The worker: vLLM's own, plus taps that capture and edit rows of the requests that ask for it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ...hooks import ModelShape
from ..rows import Held, Rows, Span, join
from . import internals
from .blocks import Blocks, may_spoil
from .taps import find_taps
from .wire import pack, unpack, unpack_edit


class ExplorerWorker(internals.worker_base()):  # type: ignore[misc]
    """vLLM's worker with the explorer in it. Everything it is asked and answers is msgpack-native data."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load as vLLM does, then find the taps and wrap the forward pass. The model itself is not touched."""
        super().load_model(*args, **kwargs)
        config = self.vllm_config.model_config.hf_text_config
        attention = self.model_runner.model.model.layers[0].self_attn.attn
        shape = ModelShape(**self.vllm_config.additional_config["explorer"]["shape"])
        self._shape = replace(shape, d_head=attention.head_size)  # some of vLLM's models ignore the configuration's
        self._taps = find_taps(self.model_runner.model, self._shape, config.rms_norm_eps)
        self._rows = Rows({name: tap.shape for name, tap in self._taps.items()})
        self._blocks = Blocks(self.model_runner)
        self._spans: list[Span | None] = []
        internals.wrap_forward(self.model_runner, self._step)
        self._head = internals.wrap_head(self.model_runner, self._keep_logits)

    # what the engine asks for

    def explorer_describe(self) -> dict[str, Any]:
        """Sizes, dtype and device of the model, and how each layer's attention treats its scores."""
        layers = self.model_runner.model.model.layers
        return {
            "shape": vars(self._shape),
            "dtype": str(self.vllm_config.model_config.dtype).removeprefix("torch."),
            "device": str(self.device),
            "attention": [vars(internals.attention_of(layer.self_attn.attn)) for layer in layers],
        }

    def explorer_open(self, requests: list[dict[str, Any]], tensors: dict[str, Any]) -> None:
        """Announce requests: key, edits and captures. `tensors` are the values that edits name, packed, by content."""
        values = {name: unpack(packed).to(self.device) for name, packed in tensors.items()}
        self._rows.held |= {
            r["key"]: self._rows.prepare([unpack_edit(edit, values) for edit in r["edits"]], r["capture"])
            for r in requests
        }

    def explorer_read(self, keys: list[str]) -> list[dict[str, Any]]:
        """What finished requests captured, in the order of `keys`."""
        return [_pack(self._rows.held[key]) for key in keys]

    def explorer_release(self, keys: list[str]) -> None:
        """Forget requests, finished or not."""
        self._rows.release(keys)

    def explorer_logits(self, rows: dict[str, Any]) -> dict[str, Any]:
        """The model's own head on rows `(rows, d_model)`."""
        with torch.inference_mode():
            return pack(self._head(unpack(rows).to(self.device)).float())

    # what happens in a step

    def _step(self, forward: Callable[[], Any]) -> Any:
        self._spans = []
        for extra, row, count, start in internals.scheduled(self.model_runner):
            held = self._rows.held.get(extra.get("explorer", ""))
            self._spans.append(None if held is None else Span(held, row, count, start))
        ours = [span for span in self._spans if span is not None]
        self._blocks.clean()
        with contextlib.ExitStack() as attached:
            work = self._rows.work(ours)
            if work:
                internals.run_uncompiled()
            for name, spans in work.items():
                handle = self._taps[name].attach(partial(self._rows.handle, name, spans))
                attached.callback(handle.remove)
            hidden = forward()
        for i, span in enumerate(self._spans):
            if span is not None:
                span.keep_head_rows(hidden)
                if may_spoil(span, hidden):
                    self._blocks.spoil(i)
        return hidden

    def _keep_logits(self, logits: torch.Tensor) -> None:
        spans, self._spans = self._spans, []
        if not spans:  # vLLM tries its sampler out at boot, without a step
            return
        for span, row in zip(spans, logits, strict=True):
            if span is not None:
                span.held.last_logits = row.clone()


def _pack(held: Held) -> dict[str, Any]:
    assert held.last_logits is not None
    return {
        "captures": {name: pack(join(chunks)) for name, chunks in held.chunks.items()},
        "head_rows": pack(join(held.head_rows)),
        "last_logits": pack(held.last_logits.float()),
        "edited": held.edited,
    }
