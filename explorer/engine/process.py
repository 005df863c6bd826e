"""The process that an engine runs in: what booting changes is put back, what is freed is given back."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import random
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

_one_boot = threading.Lock()


@contextmanager
def one_boot() -> Iterator[None]:
    """Boots take turns: importing and booting set environment variables of all kinds, and none of them stays.

    Two boots at a time would put back each other's.
    """
    with _one_boot:
        before = dict(os.environ)
        try:
            yield
        finally:
            for name in set(os.environ) - set(before):
                del os.environ[name]
            os.environ.update(before)


@contextmanager
def state_kept() -> Iterator[None]:
    """Meanwhile the random state may change, `sys.excepthook` (torch's process groups replace it, for good), and what
    logs are written to: some library's `logging.warning` would set up the root logger, and all of vLLM's lines with it.
    """
    seeds = (random.getstate(), np.random.get_state(), torch.get_rng_state())
    gpu_seeds = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    hook, handlers = sys.excepthook, logging.root.handlers[:]
    try:
        yield
    finally:
        sys.excepthook, logging.root.handlers[:] = hook, handlers
        random.setstate(seeds[0])
        np.random.set_state(seeds[1])
        torch.set_rng_state(seeds[2])
        if gpu_seeds:
            torch.cuda.set_rng_state_all(gpu_seeds)


@contextmanager
def stdout_with_descriptor() -> Iterator[None]:
    """A notebook's `sys.stdout` has no file descriptor: meanwhile it says 1."""
    stream: Any = sys.stdout
    lacking = False
    try:
        stream.fileno()
    except OSError:
        lacking = True
        stream.fileno = lambda: 1
    try:
        yield
    finally:
        if lacking:
            del stream.fileno


@contextmanager
def stderr_to(log: logging.Logger) -> Iterator[Callable[[], str]]:
    """Log what this process and those it starts write to file descriptor 2; gives how to read it meanwhile."""
    with tempfile.TemporaryFile() as noise:

        def said() -> str:
            return os.pread(noise.fileno(), os.fstat(noise.fileno()).st_size, 0).decode(errors="replace")

        saved = os.dup(2)
        os.dup2(noise.fileno(), 2)
        try:
            yield said
        finally:
            os.dup2(saved, 2)
            os.close(saved)
            for line in said().splitlines():
                log.debug("native: %s", line)


def keep_freed_memory() -> None:
    """Have glibc keep up to 64 MiB of freed memory for the next forward pass.

    By default it may hand all of it back to the system and fetch it page by page again: a fifth of the time of a
    large batch. It raises its thresholds to the largest mapped block that was freed, 32 MiB at most (mallopt(3),
    M_MMAP_THRESHOLD), and this stays so in the process; a session that closes gives back what is free.
    """
    torch.empty(2**25 - 2**16, dtype=torch.uint8)  # freed at once


def give_back_memory() -> None:
    """Return what was freed to the machine: allocators, and threads that have ended, keep it otherwise."""
    gc.collect()
    gc.collect()  # what held a module that holds itself, its weight's loader being a method of it, went only now
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        getattr(torch._C, "_host_emptyCache", lambda: None)()  # page-locked memory
    if sys.platform == "linux":
        getattr(ctypes.CDLL(None), "malloc_trim", lambda pad: 0)(0)
