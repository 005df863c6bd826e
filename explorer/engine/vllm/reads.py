"""What vLLM's attention reads, also where it is called without its hooks; and how vLLM's models keep their stream."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any, NamedTuple

from torch import nn

from ..parts import Reads
from ..points import Convention
from ..taps import Attach, Handle, Handler, flat, replace
from . import internals

# Where both hold alike the first is taken: a stream that is one tensor is edited in place.
TRIED = (Convention(fused=False, by_group=False), Convention(fused=True, by_group=True))


class _Readers(NamedTuple):
    """What handles an attention module's arguments in this pass, by position; and the `forward` of its own it had."""

    handlers: list[tuple[int, Handler]]
    before: Any  # None: its class's


_readers: weakref.WeakKeyDictionary[nn.Module, _Readers] = weakref.WeakKeyDictionary()


def reads(attention: nn.Module) -> Reads | None:
    """How to attach to what a layer's attention reads; None where it is of another kind (latent attention)."""
    kernel = internals.attention_module(attention)
    return None if kernel is None else partial(passed, kernel)


class _Passed(NamedTuple):
    """Takes a reader of a module's arguments away again."""

    module: nn.Module
    reader: tuple[int, Handler]

    def remove(self) -> None:
        handlers, before = _readers[self.module]
        handlers.remove(self.reader)
        if handlers:
            return
        del _readers[self.module], self.module.__dict__["forward"]
        if before is not None:
            self.module.__dict__["forward"] = before


def passed(module: nn.Module, position: int) -> Attach:
    """One positional argument of a module that some models call through `.forward`, where no hook fires."""

    def attach(handler: Handler) -> Handle:
        if module not in _readers:
            _readers[module] = _Readers([], module.__dict__.get("forward"))
            module.__dict__["forward"] = _reading(module, module.forward)
        _readers[module].handlers.append((position, handler))
        return _Passed(module, (position, handler))

    return attach


def _reading(module: nn.Module, forward: Any) -> Any:
    def read(*args: Any, **kwargs: Any) -> Any:
        given = list(args)
        for position, handler in _readers[module].handlers:
            if given[position] is None:  # keys and values that another layer has
                continue
            edited = handler(flat(given[position], 1))
            if edited is not None:
                given[position] = replace(given[position], edited, 1)
        return forward(*given, **kwargs)

    return read
