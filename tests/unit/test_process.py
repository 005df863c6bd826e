"""The process an engine runs in: its stdout, and memory that a forward pass frees stays for the next one."""

from __future__ import annotations

import io
import logging
import platform
import subprocess
import sys

import pytest

from explorer.engine import process


def test_vllm_finds_a_descriptor_where_stdout_has_none(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.StringIO())  # as in a notebook
    with process.stdout_with_descriptor():
        assert sys.stdout.fileno() == 1
    with pytest.raises(OSError):
        sys.stdout.fileno()
    with process.stdout_with_descriptor():  # nothing else changes
        print("hello")
    assert sys.stdout.getvalue() == "hello\n"


def test_a_boot_leaves_the_logs_as_they_were():
    before = logging.root.handlers[:]
    with process.state_kept():
        logging.root.addHandler(logging.StreamHandler())  # as some library's logging.warning does
    assert logging.root.handlers == before


PAGES = 24 * 2**20 // 4096  # of four blocks of 6 MiB, and a little more
COUNT = """
import resource, sys
import torch
from explorer.engine.process import keep_freed_memory

if sys.argv[1] == "kept":
    keep_freed_memory()

def fetched(more):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [torch.zeros(6 * 2**18 + more) for _ in range(4)]
    del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

# each pass is larger than the one before: else glibc may keep its memory, when a small block lies just above
print(min([fetched(i * 2**14) for i in range(12)][4:]))
"""


def pages_fetched(how: str) -> int:
    """The fewest pages that a pass over the blocks gets from the system, once the allocator knows their size."""
    done = subprocess.run([sys.executable, "-c", COUNT, how], check=True, capture_output=True, text=True)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator")
def test_freed_memory_is_kept_for_the_next_pass() -> None:
    assert pages_fetched("not") > PAGES * 0.9
    assert pages_fetched("kept") < PAGES * 0.1
