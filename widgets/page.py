"""What the workbench and its views share: whether the page or Python changes them, and an end that leaves nothing."""

from __future__ import annotations

from typing import Any

import anywidget
import ipywidgets
import traitlets
from ipywidgets.widgets import widget as registry

from . import esm


class Page(anywidget.AnyWidget):
    """A widget that the page changes as Python does, and that can be closed for good."""

    _closed = True  # until it is made: a refused one has nothing to close
    _by_page = False  # whether the page is changing the state, not Python
    _css = traitlets.Unicode(esm.css("workbench")).tag(sync=True)

    def set_state(self, sync_data: dict[str, Any]) -> None:
        """What the page sends. It sends a number many times while it is typed or dragged; Python means each one."""
        self._by_page = True
        try:
            super().set_state(sync_data)
        finally:
            self._by_page = False

    def close(self) -> None:
        """Removes the widget from the kernel, from every page and from boxes and links. A second close is fine."""
        if self._closed:
            return
        self._closed = True
        self._end()
        for holder in list(registry._instances.values()):
            # JupyterLab shows no widget at all after a reload while one refers to another that is gone.
            if isinstance(holder, ipywidgets.Box) and self in holder.children:
                holder.children = [child for child in holder.children if child is not self]
            elif isinstance(holder, ipywidgets.widgets.widget_link.Link) and self in (
                holder.source[0],
                holder.target[0],
            ):
                holder.close()
        layout = self.layout
        super().close()
        layout.close()  # a widget of its own, which ipywidgets would keep for ever

    def _end(self) -> None:
        """What a kind of widget lets go of when it is closed."""
        raise NotImplementedError
