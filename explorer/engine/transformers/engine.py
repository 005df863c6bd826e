"""The transformers engine: for machines without vLLM, and as a second opinion. PyTorch hooks, no key-value cache."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from ...catalogue import Catalogue
from ...errors import BootError, Cancelled
from ...given import first_line, short
from ...hooks import ModelShape
from ...models import hub_options
from ..host import wait_for
from ..parts import find_parts
from ..points import Convention
from ..protocol import Attention, Model, Request, Result, unknown_parameter
from ..rows import Rows, Span, check, join, keep_head_rows
from ..shapes import BATCH_TOKENS, check_sizes, model_dtype, model_length, model_shape, read_config
from ..study import judge, read
from ..taps import Tap, flat
from . import attention

INSTALL = "pip install 'activation-explorer[transformers]'"
KEYWORDS = (
    *("dtype", "max_model_len", "max_num_batched_tokens", "trust_remote_code", "revision", "hf_token", "device"),
    "gpu_memory_utilization",  # accepted without effect: this engine reserves nothing
)
# What holds here anyway, so that a boot that says so works with either engine.
NEUTRAL = {
    "mode": "eager",
    "enforce_eager": True,
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "skip_tokenizer_init": True,
    "disable_log_stats": True,
    "enable_prefix_caching": False,
}
COLDEST = 0.01  # of sampling, as in vLLM: logits divided by much less overflow
STUDIED = 12  # tokens of the first forward pass
TRIED = (Convention(fused=False, by_group=True), Convention(fused=False, by_group=False))


@dataclass
class _Running:
    """A request on its way: the tokens fed so far, and those generated."""

    request: Request
    ids: list[int]
    generated: list[int]
    sampler: torch.Generator | None


class TransformersEngine:
    """An `Engine` on `AutoModelForCausalLM`.

    Prompts of a batch are padded on the right, where causal attention never looks. A generation runs the whole sequence
    again for each token, so that captures and edits mean what they mean in one pass: simple and exact, slow for long
    texts.
    """

    def __init__(
        self, path: str, options: dict[str, Any], stop_ids: Sequence[int], progress: Callable[[str], None]
    ) -> None:
        """Raises `BootError` before weights load, ImportError with the install line without transformers."""
        progress("importing transformers")
        try:
            import transformers
            from transformers import AutoModelForCausalLM
        except ImportError as error:
            raise ImportError(f"the transformers engine needs transformers ({error}): {INSTALL}") from error
        for name, value in options.items():
            if name not in KEYWORDS and (name, value) not in NEUTRAL.items():
                close = difflib.get_close_matches(name, KEYWORDS, n=1, cutoff=0.8)
                hint = f"did you mean {close[0]!r}?" if close else "engine='vllm' may"
                raise BootError(f"boot: the transformers engine does not take {name}={value!r}; {hint}")
        check_sizes(options)
        config = read_config(path, options)
        shape = model_shape(config)
        dtype = model_dtype(options.get("dtype"), config)
        length = model_length(options.get("max_model_len"), config)
        device = _device(options.get("device") or ("cuda" if torch.cuda.is_available() else "cpu"))
        progress("loading weights")
        attention.register()
        with _no_bars():
            try:
                loaded: Any = AutoModelForCausalLM.from_pretrained(
                    path, dtype=getattr(torch, dtype), attn_implementation=attention.NAME, **hub_options(options)
                )
            except (ValueError, OSError) as error:
                raise BootError(f"boot: transformers refuses the model: {first_line(error)}") from error
        self._lm: Any = loaded.to(device).eval()
        self._device = device
        self._stop_ids = set(stop_ids)
        self._batch_tokens = int(options.get("max_num_batched_tokens", BATCH_TOKENS))
        self._parts: Any = find_parts(self._lm, attention.reads)
        progress("first forward pass")
        layers = self._parts.layers.items()
        treated = {i: attention.describe(layer.attention, i, self._parts.inner) for i, layer in layers}
        self._taps, missing = self._study(shape, treated, min(STUDIED, length, shape.d_vocab))
        points = Catalogue(shape, apart=True)
        self._rows = Rows({point.name: self._taps[point.name].shape for point in points if point.name in self._taps})
        self.model = Model(
            shape=shape,
            dtype=getattr(torch, dtype),
            max_model_len=length,
            attention=tuple(treated.values()),
            missing=missing,
            info={
                "engine": f"transformers {transformers.__version__}",
                "device": device.type,
                "dtype": dtype,
                "mode": "eager",
                "weights_bytes": sum(weight.nbytes for weight in self._lm.parameters()),
            },
            # what is not shown to be one with a module's output is a hook of its own, and missing
            apart=self._parts.apart or any(name.endswith("hook_mlp_out") for name in missing),
        )

    @torch.no_grad()
    def execute(
        self, requests: Sequence[Request], progress: Callable[[int, int], None], cancelled: Callable[[], bool]
    ) -> list[Result]:
        """See `Engine.execute`."""
        try:
            self._rows.held |= {r.key: self._rows.prepare(r.edits, r.capture, r.hold, r.rows) for r in requests}
            states = [_Running(r, list(r.ids), [], self._sampler(r)) for r in requests]
            running, done = states, 0
            while running:
                going = []
                for batch in _batches(running, self._batch_tokens):
                    if cancelled():
                        raise Cancelled("cancelled")
                    self._pass(batch)
                    on = [state for state in batch if self._goes_on(state)]
                    going += on
                    done += len(batch) - len(on)
                    progress(done, len(requests))
                running = going
            wait_for(self._device)
            results = [self._result(state) for state in states]
        except BaseException:
            self.release([r.key for r in requests])
            raise
        self.release([r.key for r in requests if not r.hold])
        return results

    @torch.no_grad()
    def logits(self, head_rows: torch.Tensor) -> torch.Tensor:
        """See `Engine.logits`."""
        one = torch.zeros(1, 1, dtype=torch.long, device=self._device)
        return self._forward(one, lambda _: head_rows.to(self._device)).cpu()

    def release(self, keys: Sequence[str]) -> None:
        """See `Engine.release`."""
        self._rows.release(keys)

    def parameter(self, name: str) -> torch.Tensor:
        """See `Engine.parameter`."""
        tied = dict(self._lm.named_parameters(remove_duplicate=False))  # one tensor under several names
        tensors = tied | dict(self._lm.named_buffers())
        if name not in tensors:
            raise unknown_parameter(name, difflib.get_close_matches(name, tensors))
        return tensors[name].detach().cpu().clone()  # type: ignore[no-any-return]

    def fires(self) -> dict[str, int]:
        """See `Engine.fires`."""
        return dict(self._rows.fired)

    def reset_fires(self) -> None:
        """See `Engine.reset_fires`."""
        self._rows.fired.clear()

    def detach(self) -> None:
        """See `Engine.detach`."""
        self._rows.held.clear()

    def close(self) -> None:
        """See `Engine.close`."""
        self._lm = self._parts = None
        self._taps = {}
        self._rows = Rows({})

    def _pass(self, batch: Sequence[_Running]) -> None:
        """One forward pass of every sequence in a batch, from its first token."""
        width = max(len(state.ids) for state in batch)
        ids = torch.tensor([state.ids + [0] * (width - len(state.ids)) for state in batch], device=self._device)
        spans = [
            Span(self._rows.held[state.request.key], i * width, len(state.ids), 0) for i, state in enumerate(batch)
        ]
        with self._rows.attached(self._taps, self._rows.work(spans), self._device):
            logits = self._forward(ids, partial(_last_rows, spans))
        for span, row in zip(spans, logits, strict=True):
            span.held.last_logits = {span.end: row.clone()}

    @torch.no_grad()
    def _study(
        self, shape: ModelShape, treated: Mapping[int, Attention], tokens: int
    ) -> tuple[dict[str, Tap], dict[str, str]]:
        """The taps, and the hook points that are missing with the reasons."""
        ids = torch.arange(tokens, device=self._device)[None]
        _, reading = read(self._parts, shape, TRIED, lambda: self._forward(ids, lambda hidden: hidden[-1:]))
        return judge(self._parts, shape, reading, treated)

    def _forward(self, ids: torch.Tensor, choose: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """A forward pass that ends with the model's head, float32, on the rows that `choose` makes of its last ones.

        The head is the model's own forward: some scale or cap their logits after the product, in their own ways.
        """

        def hook(_: nn.Module, __: Any, out: Any) -> Any:
            out.last_hidden_state = choose(flat(out.last_hidden_state))[None]
            return out

        handle = self._parts.inner.register_forward_hook(hook)
        try:
            # all ones, padding too: it is on the right, where causal attention never looks
            logits = self._lm(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
        finally:
            handle.remove()
        return logits[0].float()

    def _goes_on(self, state: _Running) -> bool:
        """Sample what comes next, if more is wanted, and feed it; False when the request is done."""
        request = state.request
        if len(state.generated) >= request.max_new_tokens:
            return False
        logits = self._rows.held[request.key].last_logits[len(state.ids) - 1]
        if request.temperature == 0 or not logits.max().isfinite():  # nothing to draw from: the Run will say so
            token = int(logits.argmax())
        else:
            chances = torch.softmax(logits.cpu() / max(request.temperature, COLDEST), dim=-1)
            token = int(torch.multinomial(chances, 1, generator=state.sampler))
        state.generated.append(token)
        stopped = token in self._stop_ids or (request.stop is not None and request.stop(state.generated))
        if stopped or len(state.generated) == request.max_new_tokens:
            return False
        state.ids.append(token)
        return True

    def _result(self, state: _Running) -> Result:
        held = self._rows.held[state.request.key]
        result = Result(
            generated=tuple(state.generated),
            head_rows=join(held.head_rows),
            last_logits=held.last_logits[len(state.ids) - 1].cpu(),
            captures={name: join(chunks).cpu() for name, chunks in held.chunks.items()},
        )
        check(state.request, result, held.edited)
        return result

    @staticmethod
    def _sampler(request: Request) -> torch.Generator | None:
        if request.temperature == 0:
            return None
        sampler = torch.Generator()
        if request.seed is None:
            sampler.seed()
        else:
            sampler.manual_seed(request.seed)
        return sampler


def _last_rows(spans: Sequence[Span], hidden: torch.Tensor) -> torch.Tensor:
    """The last row of each sequence; all of them are kept for later."""
    keep_head_rows(spans, hidden)
    return hidden[[span.row + span.count - 1 for span in spans]]


def _device(name: Any) -> torch.device:
    try:
        return torch.empty(0, device=name).device
    except Exception as error:  # of many kinds
        raise BootError(f"boot: device={short(name)} is not there: {first_line(error)}") from error


@contextmanager
def _no_bars() -> Iterator[None]:
    """Boot shows its own progress."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _batches(states: Sequence[_Running], tokens: int) -> Iterator[list[_Running]]:
    """In order, as many together as have no more tokens, padding included."""
    batch: list[_Running] = []
    for state in states:
        width = max(len(s.ids) for s in [*batch, state])
        if batch and width * (len(batch) + 1) > tokens:
            yield batch
            batch = []
        batch.append(state)
    if batch:
        yield batch
