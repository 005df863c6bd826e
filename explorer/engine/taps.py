"""Taps: how the tensor of a hook point is read and replaced while a module runs.

A tap is attached for one forward pass, and only where that pass has work: an idle model runs without a single hook.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from .rows import Changed, Columns


class Handle(Protocol):
    """What attaching gives back."""

    def remove(self) -> None:
        """Detach. Of several at one module the last one attached goes first."""


# Given the module where a hook point is and its rows `(rows, width)`; returns those that it changed, if any.
Handler = Callable[[nn.Module, torch.Tensor], Changed | None]
Attach = Callable[[Handler], Handle]


@dataclass(frozen=True)
class Tap:
    """How to attach a handler to one hook point, and the shape of its rows."""

    attach: Attach
    shape: tuple[int, ...]


def flat(x: torch.Tensor, batch_axes: int | None = None) -> torch.Tensor:
    """`(rows, width)` of a tensor whose first axes count rows: all but the last one, unless told how many."""
    axes = x.dim() - 1 if batch_axes is None else batch_axes
    return x if axes == 1 and x.dim() == 2 else x.reshape(x.shape[:axes].numel(), -1)


def replace(x: torch.Tensor, changed: Changed, batch_axes: int | None = None) -> torch.Tensor:
    """`x` with the changed rows in place of its own."""
    return changed.put(flat(x, batch_axes)).reshape(x.shape)


def output(module: nn.Module, columns: Columns | None = None, batch_axes: int | None = None) -> Attach:
    """A module's output, or some of its columns. Of a tuple the first entry, and a bias that is yet to be added."""

    def attach(handler: Handler) -> Handle:
        def hook(module: nn.Module, _: Any, out: Any) -> Any:
            whole, *rest = out if isinstance(out, tuple) else (out,)
            if rest and isinstance(rest[0], torch.Tensor) and rest[0].shape == whole.shape[-1:]:
                whole, rest[0] = whole + rest[0], None
            rows = flat(whole, batch_axes)
            changed = handler(module, rows if columns is None else rows[:, columns])
            if changed is None:
                return None
            new = changed.put(rows, columns).reshape(whole.shape)
            return (new, *rest) if isinstance(out, tuple) else new

        return module.register_forward_hook(hook)

    return attach


def argument(module: nn.Module, position: int, batch_axes: int | None = None) -> Attach:
    """One positional argument of a module."""

    def attach(handler: Handler) -> Handle:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> Any:
            changed = handler(module, flat(args[position], batch_axes))
            if changed is None:
                return None
            new = replace(args[position], changed, batch_axes)
            return (*args[:position], new, *args[position + 1 :])

        return module.register_forward_pre_hook(hook)

    return attach


def in_place(module: nn.Module) -> Attach:
    """The stream that a module reads and that is added back afterwards: one tensor, so edits are written into it."""

    def attach(handler: Handler) -> Handle:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            changed = handler(module, flat(args[0]))
            if changed is not None:
                args[0].copy_(replace(args[0], changed))

        return module.register_forward_pre_hook(hook)

    return attach


def multiplied(attach: Attach, factor: float) -> Attach:
    """What the model multiplies by `factor` before it uses it. What it uses of an edited row is off by one rounding."""

    def attach_multiplied(handler: Handler) -> Handle:
        def multiply(module: nn.Module, x: torch.Tensor) -> Changed | None:
            changed = handler(module, x * factor)
            return None if changed is None else changed.divided(factor)

        return attach(multiply)

    return attach_multiplied


def normalized(
    norm: nn.Module, eps: float, stream: Callable[[tuple[Any, ...]], torch.Tensor], subtract_mean: bool = False
) -> Attach:
    """The last stream divided by its root mean square, its mean subtracted before in a LayerNorm.

    This is what the final norm computes before its weight.
    """

    def attach(handler: Handler) -> Handle:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            x = flat(stream(args))
            wide = x.float()
            if subtract_mean:
                wide = wide - wide.mean(-1, keepdim=True)
            handler(module, (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype))

        return norm.register_forward_pre_hook(hook)

    return attach
