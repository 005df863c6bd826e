"""One workbench a cell: finds the running cell, and hands its earlier workbench's state to the new one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .workbench import Workbench


@dataclass
class _Cell:
    """What one cell shows: the workbenches of its last execution, and the states of those before."""

    execution: str | None
    shown: list[Workbench] = field(default_factory=list)
    inherited: list[dict[str, Any]] = field(default_factory=list)


_cells: dict[str, _Cell] = {}


def running_cell() -> tuple[str | None, str | None]:
    """The id of the cell being executed and of this execution; None outside a notebook."""
    try:
        from IPython import get_ipython
    except ImportError:
        return None, None
    kernel = getattr(get_ipython(), "kernel", None)
    if kernel is None:
        return None, None
    parent = kernel.get_parent("shell")
    return parent.get("metadata", {}).get("cellId"), parent.get("header", {}).get("msg_id")


def claim(session: Any) -> tuple[_Cell, dict[str, Any] | None]:
    """The place of the next workbench, and the state it takes over.

    Running a cell again closes the workbenches it made before; the first one made now takes over from the first one
    made then, and so on. Outside a notebook a session has one workbench.
    """
    cell_id, execution = running_cell()
    place = _cells.setdefault(cell_id or f"session {id(session)}", _Cell(execution))
    if execution is None or execution != place.execution:
        place.inherited = [workbench.handover() for workbench in place.shown]
        for workbench in list(place.shown):
            workbench.close()
        place.execution = execution
        place.shown = []
    return place, (place.inherited.pop(0) if place.inherited else None)


def forget(workbench: Workbench) -> None:
    """Drops a closed workbench from its cell."""
    for key, place in list(_cells.items()):
        if workbench in place.shown:
            place.shown.remove(workbench)
            if not place.shown and not place.inherited:
                del _cells[key]
