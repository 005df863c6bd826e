"""For programmers: what can be asked of the workers that hold a session's model, beside running prompts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .engine.protocol import Engine
from .given import short


class Worker:
    """The workers of a session, as one: `session.worker`. With several, each answers for what it holds.

    Captures and edits are asked for run by run (`session.run(..., capture=...)`): only what is named is kept and
    copied, and nothing stays set from one run to the next.
    """

    def __init__(self, call: Callable[[Callable[[Engine], Any]], Any]) -> None:
        """`call(fn)` gives `fn(engine)`, from the thread that owns the engine."""
        self._call = call

    def parameter(self, name: str) -> torch.Tensor:
        """A parameter or buffer by its path in the engine's model, whole: `model.layers.0.mlp.down_proj.weight`.

        CPU, in its own dtype. What several workers share is put together as one would hold it. ValueError when there is
        no such path.
        """
        if not isinstance(name, str):
            raise ValueError(f"a parameter is named by a string such as 'lm_head.weight', not by {short(name)}")
        return self._call(lambda engine: engine.parameter(name))  # type: ignore[no-any-return]

    def fires(self) -> dict[str, int]:
        """How often each hook point fired since `reset_fires`: once in each forward pass that captures or edits there.

        EngineError when workers that hold the same hook point counted differently.
        """
        return self._call(lambda engine: engine.fires())  # type: ignore[no-any-return]

    def reset_fires(self) -> None:
        """Count from nothing again."""
        self._call(lambda engine: engine.reset_fires())

    def detach(self) -> None:
        """Let go of everything that is captured or edited for whatever run; a second call does nothing.

        Nothing is attached to the model while no forward pass runs, so there is no more than that to take off.
        """
        self._call(lambda engine: engine.detach())
