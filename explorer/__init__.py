"""Activation Explorer: look inside a language model on vLLM, and change what it thinks."""

from .booting import boot
from .collect import stack
from .errors import BootError, Cancelled, EngineError, ExplorerError, ModelNotFound, NotFinite, SessionClosed, SpecError
from .runs import Comparison, Run
from .session import Session
from .specs import Edit

__version__ = "0.1.0"
__all__ = [
    "BootError",
    "Cancelled",
    "Comparison",
    "Edit",
    "EngineError",
    "ExplorerError",
    "ModelNotFound",
    "NotFinite",
    "Run",
    "Session",
    "SessionClosed",
    "SpecError",
    "boot",
    "stack",
]
