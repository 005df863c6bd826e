"""One pool of compute threads at a time: a caller gives its own back before the engine works.

Each Python thread that runs a parallel torch operation gets an OpenMP pool of its own. As soon as there are more pool
threads than cores, libgomp lets all of them sleep between operations instead of waiting awake, and a forward pass on
two cores takes a third longer for ever after (measured: 35 ms become 46, and 35 again after this call).
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch

_HARD = 2  # omp_pause_hard: free the threads; the next parallel operation makes new ones


def release_pool() -> None:
    """Free the calling thread's OpenMP pool: microseconds when it has none. Without torch's libgomp: nothing to do.

    Nor where a GPU computes: nobody competes for cores there, and a pool of many threads takes a millisecond to make.
    """
    library = None if torch.cuda.is_initialized() else _libgomp()
    if library is not None:
        library.omp_pause_resource_all(_HARD)


@cache
def _libgomp() -> Any:
    for path in (Path(torch.__file__).parent / "lib").glob("libgomp*.so*"):
        library = ctypes.CDLL(str(path))  # the one that torch has loaded
        if hasattr(library, "omp_pause_resource_all"):
            return library
    return None
