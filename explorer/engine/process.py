"""The process that an engine boots in: what booting changes there is put back."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

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
