"""What each op of a spec does to a tensor: one position and one head at a time."""

from __future__ import annotations

from typing import Any

import torch


def apply(x: torch.Tensor, edit: dict[str, Any], source: torch.Tensor | None = None) -> None:
    """One edit on `(positions, width)` or `(positions, heads, d_head)`, in place, one position and head at a time."""

    def chosen(field: str, length: int) -> list[int]:
        given = edit.get(field)
        given = list(range(length)) if given is None else [given] if isinstance(given, int) else list(given)
        return [length + i if i < 0 else i for i in given]

    positions = chosen("pos", len(x))
    heads = chosen("head", x.shape[1]) if x.dim() == 3 else [0]
    value = None if edit.get("value") is None else torch.as_tensor(edit["value"], dtype=x.dtype).to(x.device)
    from_rows = None
    if source is not None:
        from_rows = positions if edit.get("source_pos") is None else chosen_in(edit["source_pos"], len(source))
    for n, p in enumerate(positions):
        for m, h in enumerate(heads):
            cell = x[p, h] if x.dim() == 3 else x[p]
            if edit["op"] == "suppress":
                cell.zero_()
            elif edit["op"] == "scale":
                cell.mul_(edit["factor"])
            elif edit["op"] == "patch":
                assert source is not None and from_rows is not None
                row = source[from_rows[n]]
                cell.copy_(row[h] if x.dim() == 3 else row)
            else:
                assert value is not None
                part = _part(value, cell, n, m, len(positions), len(heads))
                cell.copy_(part if edit["op"] == "set" else cell + part)


def chosen_in(given: Any, length: int) -> list[int]:
    """Positions of a source."""
    return [length + i if i < 0 else i for i in ([given] if isinstance(given, int) else given)]


def _part(value: torch.Tensor, cell: torch.Tensor, n: int, m: int, positions: int, heads: int) -> torch.Tensor:
    """What `value` says for the n-th chosen position and the m-th chosen head."""
    width = cell.shape[0]
    if value.dim() == 0 or value.shape == (width,):
        return value
    if value.shape == (heads, width):
        return value[m]
    if value.shape == (heads * width,):
        return value.view(heads, width)[m]
    assert value.shape[0] == positions, f"value of shape {tuple(value.shape)}"
    return _part(value[n], cell, 0, m, 1, heads)
