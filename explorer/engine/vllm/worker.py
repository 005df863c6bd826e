"""The worker: vLLM's own, plus taps that capture and edit rows of the requests that ask for it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ...hooks import ModelShape
from . import internals
from .rows import Held, Span, WireEdit, apply, join, keep, read_edits
from .taps import Edited, find_taps
from .wire import pack, unpack


class ExplorerWorker(internals.worker_base()):  # type: ignore[misc]
    """vLLM's worker with the explorer in it. Everything it is asked and answers is msgpack-native data."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load as vLLM does, then find the taps and wrap the forward pass. The model itself is not touched."""
        super().load_model(*args, **kwargs)
        config = self.vllm_config.model_config.hf_text_config
        self._shape = ModelShape(**self.vllm_config.additional_config["explorer"]["shape"])
        self._taps = find_taps(self.model_runner.model, self._shape, config.rms_norm_eps)
        self._held: dict[str, Held] = {}
        self._tensors: dict[str, torch.Tensor] = {}
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
        values = {name: unpack(packed) for name, packed in tensors.items()}
        opened: dict[str, Held] = {}
        for request in requests:
            hooks = (*request["capture"], *(edit["hook"] for edit in request["edits"]))
            unknown = [name for name in hooks if name not in self._taps]
            if unknown:
                raise ValueError(f"no tap for {unknown[0]}")
            edits = read_edits(request["edits"], values, self.device)
            opened[request["key"]] = Held(edits, tuple(request["capture"]))
        self._held |= opened

    def explorer_read(self, keys: list[str]) -> list[dict[str, Any]]:
        """What finished requests captured, in the order of `keys`."""
        return [_pack(self._held[key]) for key in keys]

    def explorer_release(self, keys: list[str]) -> None:
        """Forget requests, finished or not."""
        for key in keys:
            self._held.pop(key, None)

    def explorer_logits(self, rows: dict[str, Any]) -> dict[str, Any]:
        """The model's own head on rows `(rows, d_model)`."""
        with torch.inference_mode():
            return pack(self._head(unpack(rows).to(self.device)).float())

    # what happens in a step

    def _step(self, forward: Callable[[], Any]) -> Any:
        self._spans = []
        for extra, row, count, start in internals.scheduled(self.model_runner):
            held = self._held.get(extra.get("explorer", ""))
            self._spans.append(None if held is None else Span(held, row, count, start))
        work: dict[str, list[Span]] = {}
        for span in self._spans:
            if span is not None:
                for name in dict.fromkeys((*span.held.edits, *span.held.capture)):
                    work.setdefault(name, []).append(span)
        with contextlib.ExitStack() as attached:
            for name, spans in work.items():
                handle = self._taps[name].attach(partial(self._handle, name, spans))
                attached.callback(handle.remove)
            hidden = forward()
        for span in self._spans:
            if span is not None:
                keep(span.held.head_rows, span.start, hidden[span.row : span.row + span.count].clone())
        return hidden

    def _handle(self, name: str, spans: list[Span], x: torch.Tensor) -> Edited | None:
        """Edit, then capture, the rows of one hook point."""
        touched: list[int] = []
        if any(name in span.held.edits for span in spans):
            x = x.clone()
            for span in spans:
                edits = span.held.edits.get(name)
                if edits:
                    touched += apply(x, self._taps[name].shape, edits, span, partial(self._value, name))
        for span in spans:
            if name in span.held.capture:
                rows = x[span.row : span.row + span.count].clone()
                keep(span.held.chunks.setdefault(name, {}), span.start, rows.reshape(-1, *self._taps[name].shape))
        if not touched:
            return None
        index = torch.tensor(sorted(set(touched)), device=x.device)
        return index, x[index]

    def _value(self, name: str, edit: WireEdit) -> torch.Tensor | None:
        if edit.source is None:
            return edit.value
        key, rows = edit.source
        source = self._held[key].rows_of(name)[list(rows)]
        block = source if source.dim() == 3 else source[:, None]
        return block if edit.heads is None else block[:, list(edit.heads)]

    def _keep_logits(self, logits: torch.Tensor) -> None:
        for span, row in zip(self._spans, logits, strict=True):
            if span is not None:
                span.held.last_logits = row.clone()


def _pack(held: Held) -> dict[str, Any]:
    assert held.last_logits is not None
    return {
        "captures": {name: pack(held.rows_of(name)) for name in held.chunks},
        "head_rows": pack(join(held.head_rows)),
        "last_logits": pack(held.last_logits.float()),
        "edited": held.edited,
    }
