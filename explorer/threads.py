"""How the engine's compute threads wait for one another: awake where the cores are theirs, asleep where they share.

Each Python thread that runs a parallel torch operation gets an OpenMP pool of its own. As soon as there are more pool
threads than cores, libgomp lets all of them sleep between operations instead of waiting awake. Where nothing else runs,
a forward pass on two cores takes longer then: a caller gives its own pool back before the engine works.
Where another program works on the same cores, a thread that waits awake keeps both it and its own pool from going on.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

_GRAIN = 32768  # numbers that torch gives a thread at the least
_HARD = 2  # omp_pause_hard: free the threads; the next parallel operation makes new ones


def release_pool() -> None:
    """Free the calling thread's OpenMP pool: microseconds when it has none. Without torch's libgomp: nothing to do.

    Nor where a GPU computes: nobody competes for cores there, and a pool of many threads takes a millisecond to make.
    """
    library = None if torch.cuda.is_initialized() else _libgomp()
    if library is not None:
        library.omp_pause_resource_all(_HARD)


@contextmanager
def sharing_cores() -> Iterator[None]:
    """Let the engine's threads sleep while they wait: a second pool makes them more than there are cores.

    Nothing to do where `release_pool` has nothing to do. Source: GOMP_SPINCOUNT in the manual of libgomp.
    """
    if torch.cuda.is_initialized() or _libgomp() is None:
        yield
        return
    held, over = threading.Event(), threading.Event()

    def hold() -> None:
        try:
            torch.ones(_GRAIN * (os.cpu_count() or 1)).neg_()
        finally:
            held.set()
        over.wait()

    holder = threading.Thread(target=hold, name="explorer-sharing-cores", daemon=True)
    holder.start()
    held.wait()
    try:
        yield
    finally:
        over.set()
        holder.join()


@cache
def _libgomp() -> Any:
    for path in (Path(torch.__file__).parent / "lib").glob("libgomp*.so*"):
        library = ctypes.CDLL(str(path))  # the one that torch has loaded
        if hasattr(library, "omp_pause_resource_all"):
            return library
    return None
