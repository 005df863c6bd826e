"""The tests' own yardstick: transformers with eager attention in fp32, read and edited with plain PyTorch hooks.

Written from the definitions of the hook points, not from an engine: it shares no code with `explorer`.
"""

from .model import Pass, Reference, reference

__all__ = ["Pass", "Reference", "reference"]
