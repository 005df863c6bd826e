"""The host's memory, and the ways between it and a device."""

from __future__ import annotations

import platform
from array import array
from typing import Any

import torch

PINS = "microsoft" not in platform.uname().release.lower()  # on WSL, CUDA can lock but little memory
MOST = 2**24  # bytes that wait on the device to be copied together, in all parcels of a pass: the last of them late
TYPES = {"q": torch.int64, "i": torch.int32, "f": torch.float32, "B": torch.uint8}  # of the numbers in arrays
FEW = 2**20  # bytes for which less memory is not worth one more copy


def to_host(x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A copy in the host's memory. From a GPU it is under way when this returns: `wait_for` the device before reading.

    Into page-locked memory, which PyTorch keeps and gives out again: a tenth of the time of a copy to any other.
    """
    if x.device.type != "cuda":
        return x.to("cpu", dtype or x.dtype, copy=True)
    return _host_memory(x, x.shape, dtype or x.dtype).copy_(x, non_blocking=True)


def to_device(device: torch.device, *arrays: array[Any]) -> list[torch.Tensor]:
    """Numbers as tensors, in one copy that nothing waits for. Those of more bytes each come first."""
    host = torch.frombuffer(bytearray().join(arrays), dtype=torch.uint8)
    if PINS and device.type == "cuda":
        host = host.pin_memory()  # PyTorch gives it out again only when the copy is done
    parts = host.to(device, non_blocking=True).split([len(numbers) * numbers.itemsize for numbers in arrays])
    return [part.view(TYPES[numbers.typecode]) for part, numbers in zip(parts, arrays, strict=True)]


def wait_for(device: torch.device) -> None:
    """Wait until what a device was given to do is done, in the order of this thread's work: all of ours is."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()  # a fifth of the time of `torch.cuda.synchronize`


class Parcel:
    """What one request captures in a pass, on its way to the host: many tensors in few copies.

    They are gathered in a piece of the device's memory, which goes to as much page-locked memory when it is full. Its
    copy is in the order of the device's work, as everything here, so nothing has to wait: a tensor may be written to or
    freed right after it was added. Page-locked memory comes in powers of two, and so do pieces: the largest that what
    is yet to come fills, so that who keeps the tensors keeps little else.
    """

    def __init__(self, numbers: int, most: int = MOST) -> None:
        """`numbers` is how many are to come, as far as is known; a piece has `most` bytes, or one larger tensor."""
        self._to_come, self._most = numbers, most
        self._forget()

    def add(self, x: torch.Tensor) -> torch.Tensor:
        """A copy of `x` `(rows, width)` in the host's memory: to be read when the parcel was sent and waited for."""
        count = x.numel()
        if count > self._room or x.dtype != self._here.dtype:
            self.send()
            self._begin(x)
        place = x.shape, (x.shape[1], 1), self._used
        self._used += count
        self._room -= count
        self._to_come -= count
        self._here.as_strided(*place).copy_(x)
        return self._there.as_strided(*place)

    def send(self) -> None:
        """Send what was added and is still here."""
        if self._used:
            self._there[: self._used].copy_(self._here[: self._used], non_blocking=True)
            self._forget()

    def _begin(self, x: torch.Tensor) -> None:
        """Begin a piece, with room for `x` at least."""
        room = min(self._to_come, self._most // x.itemsize)
        if room * x.itemsize > FEW:
            room = 1 << room.bit_length() - 1
        self._room = room = max(room, x.numel())
        self._here = x.new_empty(room)
        with torch.inference_mode(False):  # else all parts of it would be tensors of inference mode
            self._there = _host_memory(x, (room,), x.dtype)

    def _forget(self) -> None:
        self._here = self._there = torch.empty(0)
        self._used = self._room = 0


def _host_memory(x: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Memory of the host that copies from the device of `x` are fast to."""
    return torch.empty(shape, dtype=dtype, pin_memory=PINS and x.device.type == "cuda")
