"""The host's memory, and the ways between it and a device."""

from __future__ import annotations

import platform
from array import array
from collections.abc import Callable
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
    return torch.empty(x.shape, dtype=dtype or x.dtype, pin_memory=PINS).copy_(x, non_blocking=True)


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

    def __init__(self, numbers: int, sent: Callable[[str, torch.Tensor], object], most: int = MOST) -> None:
        """`numbers` is how many are to come, as far as is known; a piece has `most` bytes, or one larger tensor.

        `sent` is told each tensor's name and gets it, flat, in the host's memory: to be read when it was waited for.
        """
        self._to_come, self._sent, self._most = numbers, sent, most
        self._forget()

    def add(self, name: str, x: torch.Tensor) -> None:
        """Take a copy of `x` `(rows, width)` along."""
        rows, width = x.shape
        count = rows * width
        if self._end + count > self._room or x.dtype != self._piece.dtype:
            self.send()
            self._begin(x)
        self._piece.as_strided((rows, width), (width, 1), self._end).copy_(x)
        self._end += count
        self._added.append((name, count))

    def send(self) -> None:
        """Send what was added and is still here."""
        if not self._added:
            return
        with torch.inference_mode(False):  # else all parts of it would be tensors of inference mode
            there = to_host(self._piece[: self._end])
        names, counts = zip(*self._added, strict=True)
        self._to_come -= self._end
        self._forget()
        for name, part in zip(names, there.split(counts), strict=True):
            self._sent(name, part)

    def _begin(self, x: torch.Tensor) -> None:
        """Begin a piece, with room for `x` at least."""
        room = min(self._to_come, self._most // x.itemsize)
        if room * x.itemsize > FEW:
            room = 1 << room.bit_length() - 1
        self._room = max(room, x.numel())
        self._piece = x.new_empty(self._room)

    def _forget(self) -> None:
        self._piece = torch.empty(0)
        self._room = self._end = 0
        self._added: list[tuple[str, int]] = []
