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

# attention module -> what handles its arguments in this pass, by position
_readers: weakref.WeakKeyDictionary[nn.Module, list[tuple[int, Handler]]] = weakref.WeakKeyDictionary()


def reads(attention: nn.Module) -> Reads | None:
    """How to attach to what a layer's attention reads; None where it is of another kind (latent attention)."""
    kernel = internals.attention_module(attention)
    return None if kernel is None else partial(passed, kernel)


class _Passed(NamedTuple):
    """Takes a reader of a module's arguments away again."""

    module: nn.Module
    reader: tuple[int, Handler]

    def remove(self) -> None:
        _readers[self.module].remove(self.reader)
        if not _readers[self.module]:
            del _readers[self.module], self.module.__dict__["forward"]


def passed(module: nn.Module, position: int) -> Attach:
    """One positional argument of a module that some models call through `.forward`, where no hook fires."""

    def attach(handler: Handler) -> Handle:
        if module not in _readers:
            module.__dict__["forward"] = _reading(module, module.forward)
        _readers.setdefault(module, []).append((position, handler))
        return _Passed(module, (position, handler))

    return attach


def _reading(module: nn.Module, forward: Any) -> Any:
    def read(*args: Any, **kwargs: Any) -> Any:
        given = list(args)
        for position, handler in _readers[module]:
            edited = handler(flat(given[position], 1))
            if edited is not None:
                given[position] = replace(given[position], edited, 1)
        return forward(*given, **kwargs)

    return read
