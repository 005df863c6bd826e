"""What vLLM's attention reads, also where it is called without its hooks; and how vLLM's models keep their stream."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from torch import nn

from ..parts import Reads
from ..points import Convention
from ..taps import Attach, Handle, Handler, flat, replace
from . import internals

# Where both hold alike the first is taken: a stream that is one tensor is edited in place.
TRIED = (Convention(fused=False, by_group=False), Convention(fused=True, by_group=True))


def reads(attention: nn.Module) -> Reads | None:
    """How to attach to what a layer's attention reads; None where it is of another kind (latent attention)."""
    kernel = internals.attention_module(attention)
    return None if kernel is None else partial(passed, kernel)


class _Wrapped(NamedTuple):
    """Gives a module the `forward` back that it had of its own, if any. The last one attached goes first."""

    module: nn.Module
    before: Callable[..., Any] | None

    def remove(self) -> None:
        del self.module.__dict__["forward"]
        if self.before is not None:
            self.module.__dict__["forward"] = self.before


def passed(module: nn.Module, position: int) -> Attach:
    """One positional argument of a module that some models call through `.forward`, where no hook fires."""

    def attach(handler: Handler) -> Handle:
        before, forward = module.__dict__.get("forward"), module.forward

        def read(*args: Any, **kwargs: Any) -> Any:
            given = args[position]  # None: keys and values that another layer has
            changed = None if given is None else handler(module, flat(given, 1))
            if changed is not None:
                args = (*args[:position], replace(given, changed, 1), *args[position + 1 :])
            return forward(*args, **kwargs)

        module.__dict__["forward"] = read
        return _Wrapped(module, before)

    return attach
