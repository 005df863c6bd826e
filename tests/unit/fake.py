"""A model small enough to follow by hand: its catalogue, words, and an engine that runs edits on it in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from explorer.catalogue import Catalogue
from explorer.engine.protocol import Attention, Model, Request, Result, unknown_parameter
from explorer.engine.rows import Held, Span, apply
from explorer.errors import Cancelled
from explorer.hooks import ModelShape
from explorer.jobs import Jobs
from explorer.resolve import RowEdit
from explorer.session import Build, Session

SHAPE = ModelShape(layers=3, d_model=8, heads=4, kv_heads=2, d_head=3, d_mlp=10, d_vocab=20)
MISSING = {"blocks.2.ln2.hook_in": "attention and MLP read the same stream here"}
CATALOGUE = Catalogue(SHAPE, MISSING)
MAX_MODEL_LEN = 16


def words() -> PreTrainedTokenizerFast:
    """Words `w0` to `w16`, one token each, and nothing prepended."""
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i + 3 for i in range(SHAPE.d_vocab - 3)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")


def config(**changes: Any) -> SimpleNamespace:
    """As much of a configuration as sizes are read from, of a model for vLLM; `changes` are fields of it."""
    made = SimpleNamespace(
        architectures=["LlamaForCausalLM"],
        num_hidden_layers=2,
        hidden_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=80,
        vocab_size=160,
        max_position_embeddings=256,
        dtype=torch.float32,
    )
    vars(made).update(changes)
    made.get_text_config = lambda: made
    return made


class FakeEngine:
    """An `Engine`. Every hook point fires: residual ones hold the stream, the others a projection that is added to it.

    `batches` records the requests of each `execute`, `held` what is held, `failing` is raised by the next `execute`.
    """

    def __init__(self, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        attention = (Attention(0.5), Attention(0.5, window=2), Attention(0.5, softcap=3.0))
        info = {"engine": "fake", "device": "cpu", "dtype": str(dtype), "mode": "eager"}
        self.model = Model(SHAPE, dtype, MAX_MODEL_LEN, attention, MISSING, info)
        self.batches: list[list[Request]] = []
        self.held: dict[str, dict[str, torch.Tensor]] = {}
        self.failing: BaseException | None = None
        self.head_calls = 0
        self.closed = 0
        draw = torch.Generator().manual_seed(seed)
        self._embedding = torch.randn(SHAPE.d_vocab, SHAPE.d_model, generator=draw)
        self._unembedding = torch.randn(SHAPE.d_model, SHAPE.d_vocab, generator=draw)
        self._weights = {p.name: torch.randn(SHAPE.d_model, p.width, generator=draw) * 0.3 for p in CATALOGUE}

    def execute(
        self, requests: Sequence[Request], progress: Callable[[int, int], None], cancelled: Callable[[], bool]
    ) -> list[Result]:
        self.batches.append(list(requests))
        if self.failing is not None:
            error, self.failing = self.failing, None
            raise error
        results = []
        for request in requests:
            if cancelled():
                raise Cancelled("cancelled")
            results.append(self._run(request))
            progress(len(results), len(requests))
        for request, result in zip(requests, results, strict=True):
            if request.hold:
                self.held[request.key] = result.captures
        return results

    def logits(self, head_rows: torch.Tensor) -> torch.Tensor:
        self.head_calls += 1
        return (head_rows.float() @ self._unembedding).float()

    def release(self, keys: Sequence[str]) -> None:
        for key in keys:
            del self.held[key]

    def parameter(self, name: str) -> torch.Tensor:
        if name != "unembedding":
            raise unknown_parameter(name, ["unembedding"])
        return self._unembedding

    def fires(self) -> dict[str, int]:
        return {"embed.hook_out": len(self.batches)}

    def reset_fires(self) -> None:
        self.batches.clear()

    def detach(self) -> None:
        self.held.clear()

    def close(self) -> None:
        self.closed += 1

    def _run(self, request: Request) -> Result:
        ids, generated = list(request.ids), []
        while True:
            stream, captures = self._forward(ids, request.edits, request.capture)
            last = stream[-1].float() @ self._unembedding
            if len(generated) >= request.max_new_tokens:
                break
            generated.append(int(last.argmax()))
            if len(generated) == request.max_new_tokens or (request.stop and request.stop(generated)):
                break
            ids.append(generated[-1])
        return Result(tuple(generated), stream, last, captures)

    def _forward(
        self, ids: Sequence[int], edits: Sequence[RowEdit], capture: Sequence[str]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        x = self._embedding[list(ids)].to(self.model.dtype)
        count = torch.arange(1, len(ids) + 1)[:, None]
        captures = {}
        for point in CATALOGUE:
            if point.derived_from or not point.available or point.component in ("logits", "ln_final"):
                continue
            weight = self._weights[point.name].to(x.dtype)
            if point.component == "attn_out":
                x = x + (x.cumsum(0) / count * 0.5).to(x.dtype)  # earlier tokens reach later ones
            rows = x.clone() if point.group == "residual" else x @ weight
            before = rows.clone()
            mine = [e for e in edits if e.hook == point.name]
            apply(rows, point.shape, mine, Span(Held({}, ()), 0, len(ids), 0), self._value)
            if point.name in capture:
                captures[point.name] = rows.reshape(-1, *point.shape).clone()
            x = rows if point.group == "residual" else x + (rows - before) @ weight.T
        return x, captures

    def _value(self, edit: RowEdit) -> torch.Tensor | None:
        if edit.source is None:
            return edit.value
        key, chosen = edit.source
        rows = self.held[key][edit.hook][list(chosen)]
        block = rows if rows.dim() == 3 else rows[:, None]
        return block if edit.heads is None else block[:, list(edit.heads)]


def session(engine: FakeEngine | None = None, build: Build | None = None) -> Session:
    """An open session on a fake engine; `build` makes another for a reboot."""
    return Session("fake", "fake/model", engine or FakeEngine(), words(), Jobs("explorer-fake"), build)
