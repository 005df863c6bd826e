"""transformers' models as it ships them: vLLM alters the classes of those that it runs through transformers."""

from __future__ import annotations

import importlib.util
from functools import cache
from types import ModuleType
from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING


def model_class(config: Any) -> Any:
    """The causal language model of a configuration."""
    known = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return getattr(imported_anew(known.__module__), known.__name__)


@cache
def imported_anew(name: str) -> ModuleType:
    """A second copy of an imported module, which nobody else holds."""
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
