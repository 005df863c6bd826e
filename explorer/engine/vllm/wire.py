"""Tensors across process borders: dtype, shape and bytes, never pickle."""

from __future__ import annotations

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
    dtype = getattr(torch, packed["dtype"], None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"not a dtype: {packed['dtype']!r}")
    if not packed["data"]:
        return torch.empty(packed["shape"], dtype=dtype)
    return torch.frombuffer(bytearray(packed["data"]), dtype=dtype).reshape(packed["shape"])
