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
Columns = slice | torch.Tensor  # which columns of a projection's output


@dataclass(frozen=True)
class Tap:
    """How to attach a handler to one hook point, and the shape of its rows."""

    attach: Attach
    shape: tuple[int, ...]


def flat(x: torch.Tensor, batch_axes: int | None = None) -> torch.Tensor:
    """`(rows, width)` of a tensor whose first axes count rows: all but the last one, unless told how many."""
    return x.reshape(x.shape[: x.dim() - 1 if batch_axes is None else batch_axes].numel(), -1)


def replace(x: torch.Tensor, edited: Edited, batch_axes: int | None = None) -> torch.Tensor:
    """`x` with the edited rows in place of its own."""
    index, rows = edited
    return flat(x, batch_axes).index_copy(0, index, rows).reshape(x.shape)


def output(module: nn.Module, columns: Columns = slice(None), batch_axes: int | None = None) -> Attach:
    """A module's output, or some of its columns. Of a tuple the first entry, and a bias that is yet to be added."""

    def attach(handler: Handler) -> Handle:
        def hook(_: nn.Module, __: Any, out: Any) -> Any:
            whole, *rest = out if isinstance(out, tuple) else (out,)
            if rest and isinstance(rest[0], torch.Tensor) and rest[0].shape == whole.shape[-1:]:
                whole, rest[0] = whole + rest[0], None
            edited = handler(flat(whole, batch_axes)[:, columns])
            if edited is None:
                return None
            index, rows = edited
            part = flat(whole, batch_axes)[index]
            part[:, columns] = rows
            new = replace(whole, (index, part), batch_axes)
            return (new, *rest) if isinstance(out, tuple) else new

        return module.register_forward_hook(hook)

    return attach


def argument(module: nn.Module, position: int, batch_axes: int | None = None) -> Attach:
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


def in_place(module: nn.Module) -> Attach:
    """The stream that a module reads and that is added back afterwards: one tensor, so edits are written into it."""

    def attach(handler: Handler) -> Handle:
        def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
            edited = handler(flat(args[0]))
            if edited is not None:
                args[0].copy_(replace(args[0], edited))

        return module.register_forward_pre_hook(hook)

    return attach


def multiplied(attach: Attach, factor: float) -> Attach:
    """What the model multiplies by `factor` before it uses it. What it uses of an edited row is off by one rounding."""

    def attach_multiplied(handler: Handler) -> Handle:
        def multiply(x: torch.Tensor) -> Edited | None:
            edited = handler(x * factor)
            return None if edited is None else (edited[0], edited[1] / factor)

        return attach(multiply)

    return attach_multiplied


def normalized(
    norm: nn.Module, eps: float, stream: Callable[[tuple[Any, ...]], torch.Tensor], subtract_mean: bool = False
) -> Attach:
    """The last stream divided by its root mean square, its mean subtracted before in a LayerNorm.

    This is what the final norm computes before its weight.
    """

    def attach(handler: Handler) -> Handle:
        def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
            x = flat(stream(args))
            wide = x.float()
            if subtract_mean:
                wide = wide - wide.mean(-1, keepdim=True)
            handler((wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype))

        return norm.register_forward_pre_hook(hook)

    return attach
