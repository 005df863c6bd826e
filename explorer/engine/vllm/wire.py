"""Requests and tensors across process borders: plain data, tensors as dtype, shape and bytes, never pickle."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...resolve import RowEdit
from ..protocol import Request


def pack(tensor: torch.Tensor) -> dict[str, Any]:
    """A tensor as msgpack-native data; bf16 exactly, in 2 bytes a number."""
    memory = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape), "data": bytearray(memory)}


def share(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor for the same process: on the CPU, its memory not copied where it is there already.

    A part of a larger one is copied, or who keeps it would keep the rest of its batch; but not from page-locked memory,
    where the copy takes longer than a small model's forward pass.

    vLLM works in inference mode, and what is made there may not take part in a user's autograd or be written to: what
    comes back may.
    """
    here = tensor.cpu()
    memory = here.untyped_storage()
    if memory.nbytes() > here.nbytes and not here.is_pinned():
        here = here.clone()
        memory = here.untyped_storage()
    if not here.is_inference():
        return here
    return torch.empty(0, dtype=here.dtype).set_(memory, here.storage_offset(), here.shape, here.stride())


def received(given: Any) -> torch.Tensor:
    """A tensor that was shared, or one that was packed on its way between processes."""
    return given if isinstance(given, torch.Tensor) else unpack(given)


def unpack(packed: dict[str, Any]) -> torch.Tensor:
    """The tensor that `pack` packed. Raises ValueError for anything that is no packed tensor.

    A bytearray becomes the tensor's own memory.
    """
    name, shape, data = packed.get("dtype"), packed.get("shape"), packed.get("data")
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"not a dtype: {name!r}")
    if (
        not isinstance(shape, (list, tuple))
        or not isinstance(data, (bytes, bytearray))
        or math.prod(shape) * dtype.itemsize != len(data)
    ):
        raise ValueError(f"the bytes are no {name} tensor of shape {shape}")
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data) if isinstance(data, bytes) else data, dtype=dtype).reshape(shape)


def pack_requests(requests: Sequence[Request]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """What a worker has to know of requests, and each distinct tensor that they name once, by its content."""
    tensors: dict[str, Any] = {}
    packed = [
        {
            "key": r.key,
            "capture": list(r.capture),
            "edits": [_pack_edit(edit, tensors) for edit in r.edits],
            "hold": r.hold,
            "rows": r.rows,
        }
        for r in requests
    ]
    return packed, tensors


def unpack_values(packed: Mapping[str, dict[str, Any]], device: torch.device) -> dict[str, torch.Tensor]:
    """The tensors that `pack_requests` packed, on a device: those of a dtype in one copy, each a part of it."""
    values = {name: unpack(tensor) for name, tensor in packed.items()}
    for dtype in {value.dtype for value in values.values()}:
        mine = {name: value for name, value in values.items() if value.dtype == dtype}
        there = torch.cat([value.reshape(-1) for value in mine.values()]).to(device)
        parts = there.split([value.numel() for value in mine.values()])
        values |= {name: part.view(value.shape) for (name, value), part in zip(mine.items(), parts, strict=True)}
    return values


def unpack_edit(packed: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> RowEdit:
    """The edit that `pack_requests` packed. KeyError for a tensor that was not sent along."""
    rows, source = packed["rows"], packed["source"]
    return RowEdit(
        hook=packed["hook"],
        op=packed["op"],
        rows=range(*rows["range"]) if "range" in rows else tuple(rows["list"]),
        heads=None if packed["heads"] is None else tuple(packed["heads"]),
        factor=packed["factor"],
        value=None if packed["value"] is None else tensors[packed["value"]],
        source=None if source is None else (source["key"], tuple(source["rows"])),
    )


def _pack_edit(edit: RowEdit, tensors: dict[str, Any]) -> dict[str, Any]:
    name = None
    if edit.value is not None:
        packed = pack(edit.value)
        name = hashlib.sha256(repr((packed["dtype"], packed["shape"])).encode() + packed["data"]).hexdigest()
        tensors[name] = packed
    rows = edit.rows
    return {
        "hook": edit.hook,
        "op": edit.op,
        "rows": {"range": [rows.start, rows.stop, rows.step]} if isinstance(rows, range) else {"list": list(rows)},
        "heads": None if edit.heads is None else list(edit.heads),
        "factor": edit.factor,
        "value": name,
        "source": None if edit.source is None else {"key": edit.source[0], "rows": list(edit.source[1])},
    }
