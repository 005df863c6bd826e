"""A session without a model: the real Session on an engine whose numbers follow from the ids and the edits alone."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from explorer.engine.protocol import Attention, Model, Request, Result
from explorer.errors import Cancelled
from explorer.hooks import ModelShape
from explorer.jobs import Jobs
from explorer.session import Session

LAYERS = 12


class FakeEngine:
    """Executes at once, or after `delay` seconds; counts calls and requests; `fail` is raised by the next call."""

    def __init__(self, vocabulary: int, layers: int = LAYERS) -> None:
        shape = ModelShape(layers, 48, 4, 2, 12, 96, vocabulary)
        info = {
            "engine": "fake",
            "version": "1",
            "device": "CPU",
            "dtype": "float32",
            "mode": "eager",
        }
        missing = {"blocks.3.ln2.hook_in": "this layer has none"}
        self.model = Model(shape, torch.float32, 512, tuple(Attention(0.3) for _ in range(layers)), missing, info)
        self.delay = 0.0
        self.fail: Exception | None = None
        self.calls = self.requests = 0
        self.gate = threading.Event()
        self.gate.set()

    def execute(
        self, requests: Sequence[Request], progress: Callable[[int, int], None], cancelled: Callable[[], bool]
    ) -> list[Result]:
        self.calls += 1
        self.requests += len(requests)
        end = time.monotonic() + self.delay
        ready = False
        while not ready:
            ready = time.monotonic() >= end and self.gate.is_set()
            if cancelled():  # looked at last: what was cancelled before the gate opened does not pass it
                raise Cancelled("cancelled")
            time.sleep(0 if ready else 0.002)
        if self.fail:
            error, self.fail = self.fail, None
            raise error
        return [self._result(request) for request in requests]

    def _result(self, request: Request) -> Result:
        shape = self.model.shape
        edits = repr(
            [
                (e.hook, e.op, list(e.rows), e.heads, e.factor, None if e.value is None else e.value.tolist())
                for e in request.edits
            ]
        )

        def noise(*size: int, about: str) -> torch.Tensor:
            seed = hashlib.sha256(repr((request.ids, edits, about)).encode()).digest()
            return torch.randn(*size, generator=torch.Generator().manual_seed(int.from_bytes(seed[:8], "big") >> 1))

        rows = len(request.ids)
        captures = {}
        for name in request.capture:
            base = next(shape for point, shape in self._points() if point == name)
            captures[name] = noise(rows, *base, about=name)
        return Result((), noise(rows, shape.d_model, about="head"), noise(shape.d_vocab, about="logits") * 4, captures)

    def _points(self) -> list[tuple[str, tuple[int, ...]]]:
        from explorer.catalogue import Catalogue

        return [(point.name, point.shape) for point in Catalogue(self.model.shape)]

    def logits(self, head_rows: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(head_rows), self.model.shape.d_vocab)

    def release(self, keys: Sequence[str]) -> None:
        pass

    def close(self) -> None:
        pass


def tokenizer() -> Any:
    """Bytes, with the words of the examples whole; byte-level, as GPT-2's."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    built = Tokenizer(BPE(vocab={"<|end|>": 0} | {char: i + 1 for i, char in enumerate(alphabet)}, merges=[]))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=built, eos_token="<|end|>")


def session(words: Any = None) -> tuple[Session, FakeEngine]:
    words = words or tokenizer()
    engine = FakeEngine(len(words))
    return Session("fake-model", "fake-model", engine, words, Jobs("fake-engine")), engine


@pytest.fixture(scope="module", name="session")
def one_session() -> Iterator[Session]:
    """One for all tests of a module, which imports this fixture."""
    made, _ = session()
    yield made
    made.close()
