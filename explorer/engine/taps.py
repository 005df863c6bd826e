"""Taps: how the tensor of a hook point is read and replaced while a module runs.

A tap is attached for one forward pass, and only where that pass has work: an idle model runs without a single hook.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from .rows import Edited


class Handle(Protocol):
    """What attaching gives back."""

    def remove(self) -> None:
        """Detach."""


Handler = Callable[[torch.Tensor], "Edited | None"]  # given a hook point's rows `(rows, width)`
Attach = Callable[[Handler], Handle]


@dataclass(frozen=True)
class Tap:
    """How to attach a handler to one hook point, and the shape of its rows."""

    attach: Attach
    shape: tuple[int, ...]


def flat(x: torch.Tensor, batch_axes: int) -> torch.Tensor:
    """`(rows, width)` of a tensor whose first axes (one, or batch and position) count rows."""
    return x.reshape(x.shape[:batch_axes].numel(), -1)


def replace(x: torch.Tensor, edited: Edited, batch_axes: int = 1) -> torch.Tensor:
    """`x` with the edited rows in place of its own."""
    index, rows = edited
    return flat(x, batch_axes).index_copy(0, index, rows).reshape(x.shape)


def output(module: nn.Module, columns: slice = slice(None), batch_axes: int = 1) -> Attach:
    """A module's output, or some of its columns. Tuples keep their other entries (a linear's bias)."""

    def attach(handler: Handler) -> Handle:
        def hook(_: nn.Module, __: Any, out: Any) -> Any:
            whole = out[0] if isinstance(out, tuple) else out
            edited = handler(flat(whole, batch_axes)[:, columns])
            if edited is None:
                return None
            index, rows = edited
            new = flat(whole, batch_axes).clone()
            new[index, columns] = rows
            new = new.reshape(whole.shape)
            return (new, *out[1:]) if isinstance(out, tuple) else new

        return module.register_forward_hook(hook)

    return attach


def argument(module: nn.Module, position: int, batch_axes: int = 1) -> Attach:
    """One positional argument of a module."""

    def attach(handler: Handler) -> Handle:
        def hook(_: nn.Module, args: tuple[Any, ...]) -> Any:
            edited = handler(flat(args[position], batch_axes))
            if edited is None:
                return None
            new = replace(args[position], edited, batch_axes)
            return (*args[:position], new, *args[position + 1 :])

        return module.register_forward_pre_hook(hook)

    return attach


def normalized(norm: nn.Module, eps: float, stream: Callable[[tuple[Any, ...]], torch.Tensor]) -> Attach:
    """The last stream divided by its root mean square: what the final norm computes before its weight."""

    def attach(handler: Handler) -> Handle:
        def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
            x = stream(args)
            wide = x.float()
            handler((wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype))

        return norm.register_forward_pre_hook(hook)

    return attach
