"""The transformers engine: for machines without vLLM, and as a second opinion. PyTorch hooks, no key-value cache."""

from __future__ import annotations

import difflib
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from ..errors import BootError, Cancelled
from ..hooks import ModelShape
from ..models import hub_options
from .protocol import Attention, Model, Request, Result, unknown_parameter
from .rows import Rows, Span, check, join
from .shapes import BATCH_TOKENS, check_sizes, model_dtype, model_length, model_shape, read_config
from .taps import Attach, Handle, Handler, Tap, argument, flat, normalized, output, replace

INSTALL = "pip install 'activation-explorer[transformers]'"
ATTENTION = "activation-explorer"  # the name of our attention function in transformers' own registry
KEYWORDS = (
    *("dtype", "max_model_len", "max_num_batched_tokens", "trust_remote_code", "revision", "hf_token", "device"),
    "gpu_memory_utilization",  # accepted without effect: this engine reserves nothing
)

# self_attn module -> what handles its rotated queries and keys in this pass, by argument
_handlers: weakref.WeakKeyDictionary[nn.Module, dict[int, Handler]] = weakref.WeakKeyDictionary()


@dataclass
class _Running:
    """A request on its way: the tokens fed so far, and those generated."""

    request: Request
    ids: list[int]
    generated: list[int]
    sampler: torch.Generator | None


class TransformersEngine:
    """An `Engine` on `AutoModelForCausalLM`, for Llama-shaped models.

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
            neutral = (name, value) == ("mode", "eager") or (name.endswith("_parallel_size") and value == 1)
            if name not in KEYWORDS and not neutral:
                raise BootError(
                    f"boot: the transformers engine does not take {name}={value!r}; it is for engine='vllm'"
                )
        check_sizes(options)
        config = read_config(path, options)
        shape = model_shape(config)
        dtype = model_dtype(options.get("dtype"), config)
        length = model_length(options.get("max_model_len"), config)
        device = torch.device(options.get("device") or ("cuda" if torch.cuda.is_available() else "cpu"))
        progress("loading weights")
        _register()
        with _no_bars():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                path, dtype=getattr(torch, dtype), attn_implementation=ATTENTION, **hub_options(options)
            )
        self._lm: Any = loaded.to(device).eval()
        self._device = device
        self._stop_ids = set(stop_ids)
        self._batch_tokens = int(options.get("max_num_batched_tokens", BATCH_TOKENS))
        self._taps = find_taps(self._lm.model, shape)
        self._rows = Rows({name: tap.shape for name, tap in self._taps.items()})
        self.model = Model(
            shape=shape,
            dtype=getattr(torch, dtype),
            max_model_len=length,
            attention=tuple(_attention_of(layer.self_attn, config) for layer in self._lm.model.layers),
            missing={},
            info={
                "engine": f"transformers {transformers.__version__}",
                "device": device.type,
                "dtype": dtype,
                "mode": "eager",
                "weights_bytes": sum(weight.nbytes for weight in self._lm.parameters()),
            },
        )
        progress("first forward pass")
        self.execute([Request("warm-up", (0, 0))], lambda done, total: None, lambda: False)

    @torch.inference_mode()
    def execute(
        self, requests: Sequence[Request], progress: Callable[[int, int], None], cancelled: Callable[[], bool]
    ) -> list[Result]:
        """See `Engine.execute`."""
        try:
            self._rows.held |= {r.key: self._rows.prepare(r.edits, r.capture) for r in requests}
            states = [_Running(r, list(r.ids), [], self._sampler(r)) for r in requests]
            running = states
            while running:
                going = []
                for batch in _batches(running, self._batch_tokens):
                    if cancelled():
                        raise Cancelled("cancelled")
                    self._pass(batch)
                    going += [state for state in batch if self._goes_on(state)]
                    progress(len(requests) - len(running) + len(batch), len(requests))
                running = going
            results = [self._result(state) for state in states]
        except BaseException:
            self.release([r.key for r in requests])
            raise
        self.release([r.key for r in requests if not r.hold])
        return results

    @torch.inference_mode()
    def logits(self, head_rows: torch.Tensor) -> torch.Tensor:
        """See `Engine.logits`."""
        return self._lm.lm_head(head_rows.to(self._device)).float().cpu()  # type: ignore[no-any-return]

    def release(self, keys: Sequence[str]) -> None:
        """See `Engine.release`."""
        self._rows.release(keys)

    def parameter(self, name: str) -> torch.Tensor:
        """See `Engine.parameter`."""
        tensors = dict(self._lm.named_parameters()) | dict(self._lm.named_buffers())
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
        self._lm = None
        self._taps = {}
        self._rows = Rows({})

    def _pass(self, batch: Sequence[_Running]) -> None:
        """One forward pass of every sequence in a batch, from its first token."""
        width = max(len(state.ids) for state in batch)
        ids = torch.tensor([state.ids + [0] * (width - len(state.ids)) for state in batch], device=self._device)
        spans = [
            Span(self._rows.held[state.request.key], i * width, len(state.ids), 0) for i, state in enumerate(batch)
        ]
        with ExitStack() as attached:
            for name, its_spans in self._rows.work(spans).items():
                handle = self._taps[name].attach(partial(self._rows.handle, name, its_spans))
                attached.callback(handle.remove)
            hidden = flat(self._lm.model(input_ids=ids, use_cache=False).last_hidden_state, 2)
        for span in spans:
            span.keep_head_rows(hidden)
            span.held.last_logits = self._lm.lm_head(hidden[span.row + span.count - 1]).float()

    def _goes_on(self, state: _Running) -> bool:
        """Sample what comes next, if more is wanted, and feed it; False when the request is done."""
        request = state.request
        if len(state.generated) >= request.max_new_tokens:
            return False
        logits = self._rows.held[request.key].last_logits
        assert logits is not None
        if request.temperature == 0:
            token = int(logits.argmax())
        else:
            chances = torch.softmax(logits.cpu() / request.temperature, dim=-1)
            token = int(torch.multinomial(chances, 1, generator=state.sampler))
        state.generated.append(token)
        stopped = token in self._stop_ids or (request.stop is not None and request.stop(state.generated))
        if stopped or len(state.generated) == request.max_new_tokens:
            return False
        state.ids.append(token)
        return True

    def _result(self, state: _Running) -> Result:
        held = self._rows.held[state.request.key]
        assert held.last_logits is not None
        result = Result(
            generated=tuple(state.generated),
            head_rows=join(held.head_rows).cpu(),
            last_logits=held.last_logits.cpu(),
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


def find_taps(inner: Any, shape: ModelShape) -> dict[str, Tap]:
    """The taps of a Llama-shaped transformers model. Tensors are `(batch, position, ...)`."""
    width = (shape.d_model,)
    heads, kv_heads = (shape.heads, shape.d_head), (shape.kv_heads, shape.d_head)
    eps = inner.norm.variance_epsilon
    taps = {
        "embed.hook_out": Tap(output(inner.embed_tokens, batch_axes=2), width),
        "ln_final.hook_normalized": Tap(normalized(inner.norm, eps, lambda args: flat(args[0], 2)), width),
    }
    for i, layer in enumerate(inner.layers):
        attention, mlp = layer.self_attn, layer.mlp
        q, k, v = _projections(attention, shape)
        taps |= {
            f"blocks.{i}.hook_in": Tap(argument(layer, 0, batch_axes=2), width),
            f"blocks.{i}.attn.q.hook_out": Tap(q, heads),
            f"blocks.{i}.attn.k.hook_out": Tap(k, kv_heads),
            f"blocks.{i}.attn.v.hook_out": Tap(v, kv_heads),
            f"blocks.{i}.attn.hook_rot_q": Tap(_rotated(attention, 0), heads),
            f"blocks.{i}.attn.hook_rot_k": Tap(_rotated(attention, 1), kv_heads),
            f"blocks.{i}.attn.o.hook_in": Tap(argument(attention.o_proj, 0, batch_axes=2), heads),
            f"blocks.{i}.attn.hook_out": Tap(output(attention, batch_axes=2), width),
            f"blocks.{i}.ln2.hook_in": Tap(_in_place(layer.post_attention_layernorm), width),
            f"blocks.{i}.mlp.out.hook_in": Tap(argument(mlp.down_proj, 0, batch_axes=2), (shape.d_mlp,)),
            f"blocks.{i}.mlp.hook_out": Tap(output(mlp, batch_axes=2), width),
            f"blocks.{i}.hook_out": Tap(output(layer, batch_axes=2), width),
        }
    return taps


def _projections(attention: nn.Module, shape: ModelShape) -> tuple[Attach, Attach, Attach]:
    """Queries, keys and values as projected: three modules, or columns of one."""
    fused = getattr(attention, "qkv_proj", None)
    if fused is None:
        modules: list[Any] = [attention.q_proj, attention.k_proj, attention.v_proj]
        q, k, v = (output(module, batch_axes=2) for module in modules)
        return q, k, v
    first, kv = shape.heads * shape.d_head, shape.kv_heads * shape.d_head
    bounds = (0, first, first + kv, first + 2 * kv)
    q, k, v = (output(fused, slice(a, b), batch_axes=2) for a, b in pairwise(bounds))
    return q, k, v


def _in_place(norm: nn.Module) -> Attach:
    """The stream that a norm reads and that is added back afterwards: one tensor, so edits are written into it."""

    def attach(handler: Handler) -> Handle:
        def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
            edited = handler(flat(args[0], 2))
            if edited is not None:
                args[0].copy_(replace(args[0], edited, 2))

        return norm.register_forward_pre_hook(hook)

    return attach


def _rotated(attention: nn.Module, which: int) -> Attach:
    """Queries (0) or keys (1) as attention reads them, after norm and rotary."""

    def attach(handler: Handler) -> Handle:
        _handlers.setdefault(attention, {})[which] = handler
        return _Detach(attention, which)

    return attach


class _Detach:
    """Takes a handler of rotated queries or keys away again."""

    def __init__(self, attention: nn.Module, which: int) -> None:
        self._place = (attention, which)

    def remove(self) -> None:
        attention, which = self._place
        del _handlers[attention][which]


def _register() -> None:
    """Give transformers our attention under a name that only our models use."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    AttentionInterface.register(ATTENTION, _attend)
    AttentionMaskInterface.register(ATTENTION, eager_mask)


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


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Eager attention with taps: `(batch, heads, position, d_head)` in, `(batch, position, heads, d_head)` out."""
    handlers = _handlers.get(module, {})
    query, key = (_visit(handlers.get(i), x) for i, x in enumerate((query, key)))
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    scores = torch.matmul(query, key.transpose(2, 3)) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    pattern = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return torch.matmul(pattern, value).transpose(1, 2).contiguous(), None


def _visit(handler: Handler | None, x: torch.Tensor) -> torch.Tensor:
    if handler is None:
        return x
    by_row = x.transpose(1, 2)
    edited = handler(flat(by_row, 2))
    return x if edited is None else replace(by_row, edited, 2).transpose(1, 2)


def _attention_of(attention: Any, config: Any) -> Attention:
    kinds = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    if kinds is not None and kinds[attention.layer_idx] != "sliding_attention":
        window = None
    return Attention(scale=float(attention.scaling), window=window)


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
