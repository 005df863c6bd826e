"""The Jupyter side of Activation Explorer: the workbench that `session.explore` opens."""

from .workbench import Workbench, explore

__all__ = ["Workbench", "explore"]
