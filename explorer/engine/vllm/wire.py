"""Tensors across process borders: dtype, shape and bytes, never pickle."""

from __future__ import annotations

import math
from typing import Any

import torch


def pack(tensor: torch.Tensor) -> dict[str, Any]:
    """A tensor as msgpack-native data; bf16 exactly, in 2 bytes a number."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "data": flat.view(torch.uint8).numpy().tobytes(),
    }


def unpack(packed: dict[str, Any]) -> torch.Tensor:
    """The tensor that `pack` packed, in memory of its own. Raises ValueError for anything that is no packed tensor."""
    name, shape, data = packed.get("dtype"), packed.get("shape"), packed.get("data")
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"not a dtype: {name!r}")
    if (
        not isinstance(shape, (list, tuple))
        or not isinstance(data, bytes)
        or math.prod(shape) * dtype.itemsize != len(data)
    ):
        raise ValueError(f"the bytes are no {name} tensor of shape {shape}")
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape) if data else torch.empty(shape, dtype=dtype)
