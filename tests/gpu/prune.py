"""A CUDA library without the machine code of other GPUs: zeroed in place, it loads as before and packs well."""

from __future__ import annotations

import struct
from collections.abc import Iterator

FATBIN = struct.pack("<I", 0xBA55ED50)
PTX, MACHINE = 1, 2  # what an element of a fat binary holds


def pruned(library: bytes, chip: int) -> bytearray:
    """The library for GPUs of compute capability `chip` (90: H100, H200). PTX that they can compile stays."""
    kept = bytearray(library)
    for kind, arch, start, size in _elements(library):
        if not (arch == chip if kind == MACHINE else arch <= chip):
            kept[start : start + size] = bytes(size)
    return kept


def _elements(library: bytes) -> Iterator[tuple[int, int, int, int]]:
    """Kind, compute capability, offset and size of everything that the library's fat binaries hold."""
    at = library.find(FATBIN)
    while at >= 0:
        version, header, size = struct.unpack_from("<HHQ", library, at + 4)
        end = at + header + size
        if version == 1 and header == 16 and end <= len(library):
            at += header
            while at < end:
                kind, _, header, size, _, _, _, _, arch = struct.unpack_from("<HHIQIIHHI", library, at)
                if kind not in (PTX, MACHINE) or not 32 <= header <= 4096 or at + header + size > end:
                    raise ValueError(f"a fat binary holds something unknown at byte {at}: kind {kind}, {size} bytes")
                yield kind, arch, at + header, size
                at += header + size
        else:
            at += 4
        at = library.find(FATBIN, at)
