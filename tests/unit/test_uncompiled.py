"""Layers of a compiled model that run as they are written: with vLLM's kernels, and without again afterwards."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from explorer.engine.vllm import internals

CustomOp = pytest.importorskip("vllm.model_executor.custom_op").CustomOp


class Without(CustomOp):
    """An operation that has no kernel."""

    def __init__(self, way: str, compiles: bool = False) -> None:
        nn.Module.__init__(self)  # its own asks for a configuration
        method = getattr(self, way)
        self._forward_method = torch.compile(method, dynamic=True, backend="eager") if compiles else method

    @staticmethod
    def forward_native(x: torch.Tensor) -> torch.Tensor:
        return x + 1


class Operation(Without):
    """An operation that has one."""

    def forward_cuda(self, x: torch.Tensor) -> torch.Tensor:
        return x + 2


def test_what_the_compiler_was_to_do_has_its_kernel_meanwhile(monkeypatch):
    operations = [
        Operation("forward_native"),
        Operation("forward_native", compiles=True),  # on its own, as SiLU is
        Operation("forward_cuda"),
        Without("forward_native"),
    ]
    context = SimpleNamespace(skip_compiled=False, cudagraph_runtime_mode=None)
    monkeypatch.setattr("vllm.forward_context.get_forward_context", lambda: context)
    monkeypatch.setattr(internals, "on_cpu", lambda: False)
    model, x = nn.ModuleList(operations), torch.zeros(2)

    def adds() -> list[float]:
        return [float(operation(x)[0]) for operation in operations]

    found = internals.left_to_the_compiler(model)
    assert found == operations[:2]
    with internals.uncompiled(found):
        assert adds() == [2, 2, 2, 1]
        assert context.skip_compiled
    assert adds() == [1, 1, 2, 1]
    assert hasattr(operations[1]._forward_method, "_torchdynamo_orig_callable")


def test_on_a_cpu_every_operation_stays_as_it_is():
    assert internals.left_to_the_compiler(nn.ModuleList([Operation("forward_native")])) == []
