"""The Jupyter side of Activation Explorer: the workbench that `session.explore` opens, and its views by themselves."""

from .views import AttentionView, Heatmap, HookPicker, LogitCompare, SpecEditor, TokenPicker
from .workbench import Workbench, explore

__all__ = [
    "AttentionView",
    "Heatmap",
    "HookPicker",
    "LogitCompare",
    "SpecEditor",
    "TokenPicker",
    "Workbench",
    "explore",
]
