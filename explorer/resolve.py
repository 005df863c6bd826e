"""A spec against a model and a prompt: checked, and turned into rows, heads and values before anything runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from .catalogue import Catalogue, HookPoint
from .errors import SpecError
from .given import Once, Refuse, integers, plain, plural, short
from .positions import Extent, distinct, positions, source_positions
from .specs import Edit, Source, describe


@dataclass(frozen=True)
class RowEdit:
    """An edit as an engine applies it: everything resolved to numbers.

    `rows` are absolute positions; `value` is `(positions | 1, heads | 1, width | 1)`; `source` is the key of a request
    whose captures are held, and its absolute positions, one for each of `rows`.
    """

    hook: str
    op: str
    rows: range | tuple[int, ...]
    heads: tuple[int, ...] | None = None
    factor: float | None = None
    value: torch.Tensor | None = None
    source: tuple[str, tuple[int, ...]] | None = None


def resolve(
    edits: Sequence[Edit],
    catalogue: Catalogue,
    extent: Extent,
    dtype: torch.dtype,
    source: Callable[[Source, HookPoint], tuple[Extent, str | torch.Tensor]],
    once: Once,
) -> tuple[RowEdit, ...]:
    """Check every edit, as `parse` gives it, against the model and the prompt: turn it into rows, heads and values.

    `source` says how long a patch source is and where its values are: the key of a held request, or the hook's rows
    themselves as a `(rows, ...)` tensor. Raises `SpecError` naming the edit.
    """
    return tuple(_resolve(edit, i, catalogue, extent, dtype, source, once) for i, edit in enumerate(edits))


def _resolve(
    edit: Edit,
    index: int,
    catalogue: Catalogue,
    extent: Extent,
    dtype: torch.dtype,
    source: Callable[[Source, HookPoint], tuple[Extent, str | torch.Tensor]],
    once: Once,
) -> RowEdit:
    def refuse(problem: str) -> SpecError:
        return SpecError(f"{describe(edit, index)}: {problem}", index)

    try:
        point = catalogue.require(edit.hook)
    except SpecError as error:
        raise refuse(str(error)) from None
    if not point.editable:
        raise refuse(f"{point.name} can be captured but not edited: {_read_only(point)}")
    heads = _heads(edit.head, point, refuse)
    rows = positions(edit.pos, edit.phase, extent, "pos", "prompt", refuse)
    if edit.op in ("add", "set"):
        shape = (point.heads if heads is None else len(heads), point.shape[-1]) if point.heads else (1, point.width)
        try:
            numbers = once(_numbers, edit.value, dtype)
        except SpecError as error:
            raise refuse(str(error)) from None
        value = _value(numbers, point, heads, shape, len(rows), refuse)
        return RowEdit(point.name, edit.op, rows, heads, value=value)
    if edit.op == "scale":
        return RowEdit(point.name, edit.op, rows, heads, factor=_factor(edit.factor, dtype, refuse))
    if edit.op == "suppress":
        return RowEdit(point.name, edit.op, rows, heads)
    try:
        source_extent, values = source(edit.source, point)
    except SpecError as error:
        raise refuse(str(error)) from None
    source_rows = source_positions(edit.pos, edit.source_pos, edit.phase, source_extent, refuse)
    if len(source_rows) != len(rows):
        counts = f"{plural(len(rows), 'position')} to write, but {plural(len(source_rows), 'position')} of the source"
        others = ", or a source run that generated as many tokens" if edit.phase == "decode" else ""
        raise refuse(f"the patch has {counts} to read; give pos and source_pos of equal count{others}")
    if isinstance(values, str):
        return RowEdit(point.name, "patch", rows, heads, source=(values, tuple(source_rows)))
    block = _chosen(values, source_rows).reshape(len(rows), point.heads or 1, point.shape[-1])
    return RowEdit(point.name, "set", rows, heads, value=block if heads is None else block[:, list(heads)])


def pin(edit: Edit, resolved: RowEdit, rows: int) -> Edit | None:
    """The edit as it acted on the first `rows` rows, written for a prompt of that many tokens; None if on none."""
    kept = [i for i, position in enumerate(resolved.rows) if position < rows]
    if not kept:
        return None
    changes: dict[str, Any] = {"pos": [resolved.rows[i] for i in kept], "phase": "prompt"}
    if edit.op == "patch":
        if resolved.source is not None:
            source_rows: Sequence[int] = resolved.source[1]
        else:  # values that a Run held
            run = edit.source.run
            extent = Extent(run.prompt_length, run.rows)
            source_rows = source_positions(edit.pos, edit.source_pos, edit.phase, extent, SpecError)
        changes["source_pos"] = [source_rows[i] for i in kept]
    elif resolved.value is not None and resolved.value.shape[0] > 1:
        value = resolved.value[kept]
        if resolved.heads is not None:
            value = value.expand(-1, len(resolved.heads), -1)
        elif value.shape[1] == 1:
            value = value[:, 0]
        changes["value"] = value
    return replace(edit, **changes)


def _chosen(values: torch.Tensor, rows: range | tuple[int, ...]) -> torch.Tensor:
    """Rows of a tensor; one, or one stretch of them, without a copy: nobody writes to what a Run holds."""
    if len(rows) == 1:
        return values.narrow(0, rows[0], 1)
    return values[rows.start : rows.stop : rows.step] if isinstance(rows, range) else values[list(rows)]


def _heads(head: Any, point: HookPoint, refuse: Refuse) -> tuple[int, ...] | None:
    if head is None:
        return None
    if point.heads is None:
        raise refuse(
            f"{point.name} has no heads; remove head, or choose a hook that has them, such as attn.o.hook_in (z)"
        )
    if isinstance(head, str):
        raise refuse(f"head takes whole numbers such as 0 or [0, 1, 2], not {short(head)}")
    heads = integers(head, "head", refuse)
    for h in heads:
        if not 0 <= h < point.heads:
            kind = "key-value heads" if point.component in ("k", "rot_k", "v") else "heads"
            hint = f"; the last is head={point.heads - 1}" if h < 0 else ""
            raise refuse(f"there is no head {h}: {point.name} has {kind} 0 to {point.heads - 1}{hint}")
    return distinct(heads, "head", refuse)


def _factor(factor: Any, dtype: torch.dtype, refuse: Refuse) -> float:
    number = plain(factor)
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        raise refuse(f"factor must be one number, not {short(factor)}")
    largest = torch.finfo(dtype).max
    if number != number or number in (math.inf, -math.inf):
        raise refuse(f"factor is {number}; it must be finite")
    if abs(number) > largest:
        raise refuse(f"factor is {short(factor)}, too large for the model's {_name(dtype)} (at most {largest:.4g})")
    return float(number)


def _value(
    tensor: torch.Tensor,
    point: HookPoint,
    heads: tuple[int, ...] | None,
    shape: tuple[int, int],
    rows: int,
    refuse: Refuse,
) -> torch.Tensor:
    """The numbers of a value as `(rows | 1, heads | 1, width | 1)`."""
    if tensor.dim() == 0:
        return tensor.reshape(1, 1, 1)
    count, width = shape
    # accepted shapes of one position's value -> (heads | 1, width)
    single: dict[tuple[int, ...], tuple[int, int]] = {}
    if point.heads is None:
        single[(width,)] = (1, width)
    elif heads is None:
        single[(count * width,)] = (count, width)
        single[(count, width)] = (count, width)
    else:
        single[(width,)] = (1, width)
        single[(count, width)] = (count, width)
    given = tuple(tensor.shape)
    if given in single:
        return tensor.reshape(1, *single[given])
    if given[0] == rows and given[1:] in single:
        return tensor.reshape(rows, *single[given[1:]])
    one = ", ".join(map(str, single))
    each = " or ".join(str((rows, *shape)) for shape in single)
    raise refuse(
        f"value has shape {given} but {point.name} takes a number, {one}, or {each} for the {plural(rows, 'position')} "
        "that pos chooses"
    )


def _numbers(value: Any, dtype: torch.dtype) -> torch.Tensor:
    """An array of numbers in any form, as a CPU tensor of a float dtype that holds it exactly.

    Raises `SpecError`, which does not name the edit, where it is none, or holds what a model of `dtype` cannot.
    """
    if isinstance(value, (str, bytes, Mapping)) or callable(value):
        raise SpecError(f"value must be a number or an array of numbers, not {short(value)}")
    try:
        if isinstance(value, np.ndarray):
            value = value.copy(order="C")  # torch reads no reversed arrays
        elif not isinstance(value, torch.Tensor):
            value = plain(value)
        tensor = torch.as_tensor(value).detach().cpu()
        if isinstance(value, (int, float, list)) and tensor.dtype != torch.bool and not tensor.is_complex():
            tensor = torch.as_tensor(value, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise SpecError(f"value is no array of numbers: {error}") from None
    if tensor.dtype == torch.bool or tensor.is_complex():
        raise SpecError(f"value must hold real numbers, not {_name(tensor.dtype)}")
    if not tensor.is_floating_point() or tensor.itemsize == 1:
        tensor = tensor.to(torch.float64)
    if not torch.isfinite(tensor).all():
        raise SpecError("value holds NaN or infinity; use 'suppress' to zero")
    if not torch.isfinite(tensor.to(dtype)).all():
        largest = torch.finfo(dtype).max
        reach = float(tensor.abs().max())
        raise SpecError(f"value holds {reach:.4g}, too large for the model's {_name(dtype)} (at most {largest:.4g})")
    return tensor


def _read_only(point: HookPoint) -> str:
    editable = {"pattern": "edit q, k or z of the layer", "scores": "edit q, k or z of the layer"}
    return editable.get(point.component, "edit the last layer's hook_out")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
