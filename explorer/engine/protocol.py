"""What an engine must do: execute requests, and say what the model it holds looks like."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ..hooks import ModelShape
from ..resolve import RowEdit


@dataclass(frozen=True)
class Attention:
    """What one attention layer does with its scores: `scale`, soft-cap, position bias, mask, softmax.

    window: a query sees that many keys back, itself included.
    slopes: one a head: what a key gains for each position that it is further on (ALiBi).
    sinks: one a head: the score of a key that holds nothing, which the softmax counts in.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    slopes: tuple[float, ...] | None = None
    sinks: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Model:
    """A loaded model as its engine describes it."""

    shape: ModelShape
    dtype: torch.dtype
    max_model_len: int  # tokens of prompt and generation together
    attention: tuple[Attention, ...]  # one a layer
    missing: dict[str, str]  # hook points that cannot fire -> why
    info: dict[str, Any]  # engine, versions, device, mode: for people to read
    apart: bool = False  # whether a norm or multiplier comes between attention or MLP and the stream
    no_head: str | None = None  # why the head gives no logits of other rows than the last; None where it does


@dataclass(frozen=True)
class Request:
    """One prompt to run under one spec.

    `key` is unique among live requests. `capture` names tapped hook points (nothing derived). With `hold` the captures
    stay in the engine, for edits that name `key` as their source, until `release`.
    """

    key: str
    ids: tuple[int, ...]
    edits: tuple[RowEdit, ...] = ()
    capture: tuple[str, ...] = ()
    hold: bool = False
    max_new_tokens: int = 0
    temperature: float = 0.0
    seed: int | None = None
    stop: Callable[[Sequence[int]], bool] | None = None  # given the generated ids: whether to end here

    @property
    def rows(self) -> int:
        """How many tokens are fed when nothing stops the generation early: the last one never is."""
        return len(self.ids) + max(0, self.max_new_tokens - 1)


@dataclass
class Result:
    """What came back for a request of n tokens that generated g more: rows = n + max(g - 1, 0).

    captures: hook -> `(rows, width)` or `(rows, heads, d_head)`, CPU, engine dtype.
    head_rows: `(rows, d_model)`, what the unembedding reads.
    last_logits: `(d_vocab,)` float32 at the last row.
    """

    generated: tuple[int, ...]
    head_rows: torch.Tensor
    last_logits: torch.Tensor
    captures: dict[str, torch.Tensor] = field(default_factory=dict)


class Engine(Protocol):
    """Executes requests. Every method is called from one thread, the session's worker thread."""

    model: Model

    def execute(
        self, requests: Sequence[Request], progress: Callable[[int, int], None], cancelled: Callable[[], bool]
    ) -> list[Result]:
        """Run all requests, batched as the engine sees fit; results in the order asked.

        `progress(done, total)` counts finished requests. When `cancelled()` turns true the engine stops between two
        steps and raises `Cancelled`. After any exception the engine is usable and holds nothing of these requests.
        """

    def logits(self, head_rows: torch.Tensor) -> torch.Tensor:
        """The model's own head on rows kept from a run: `(rows, d_model)` -> `(rows, d_vocab)` float32."""

    def release(self, keys: Sequence[str]) -> None:
        """Drop what is held for these requests."""

    def parameter(self, name: str) -> torch.Tensor:
        """A parameter or buffer of the loaded model, by its path there; whole, CPU. ValueError when there is none."""

    def fires(self) -> dict[str, int]:
        """How often each hook point fired since `reset_fires`; those that never did are left out."""

    def reset_fires(self) -> None:
        """Count from nothing again."""

    def detach(self) -> None:
        """Drop all that is held, for whatever requests."""

    def close(self) -> None:
        """Free the memory. A second call does nothing."""


def unknown_parameter(name: str, close: Sequence[str]) -> ValueError:
    """The refusal of a parameter that the model does not have; `close` are names of some that it has."""
    hint = f"; did you mean {', '.join(close)}?" if close else ""
    return ValueError(f"the model has no parameter {name!r}{hint}")
