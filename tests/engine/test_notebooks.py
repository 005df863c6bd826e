"""The notebooks run from top to bottom, in a kernel of their own, and show what their text says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"


def run(name: str) -> list[Any]:
    """Execute a notebook; its code cells with their outputs."""
    notebook = nbformat.read(NOTEBOOKS / name, as_version=4)
    client = nbclient.NotebookClient(notebook, timeout=300, store_widget_state=False, kernel_name="python3")
    client.execute(cwd=str(NOTEBOOKS))
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def text(cell: Any) -> str:
    """What a cell printed and returned, as text."""
    parts = [o.get("text", "") or o.get("data", {}).get("text/plain", "") for o in cell.outputs]
    return "\n".join(parts)


@pytest.fixture(scope="module")
def cells() -> list[Any]:
    return run("quickstart.ipynb")


def containing(cells: list[Any], source: str) -> Any:
    return next(cell for cell in cells if source in cell.source)


def test_boot_is_one_quiet_line(cells: list[Any]) -> None:
    outputs = containing(cells, "explorer.boot").outputs
    assert {(o.output_type, o.get("name")) for o in outputs} == {("stream", "stdout")}
    printed = "".join(o.text for o in outputs)
    assert printed.count("\n") == 1  # one line, rewritten in place
    assert "ready in" in printed.split("\r")[-1]
    assert any("loading weights ..." in stage for stage in printed.split("\r")), "progress is shown while it boots"


def test_it_tells_the_story(cells: list[Any]) -> None:
    assert "' Paris' 6" in text(containing(cells, 'capture="blocks.*.hook_out"'))
    assert "[9, 576]" in text(containing(cells, '["blocks.12.hook_out"].shape'))
    suppressed = text(containing(cells, '"op": "suppress"'))
    paris = next(line for line in suppressed.splitlines() if "Paris" in line)
    assert float(paris.split("->")[1].split("%")[0]) < 10
    assert "' Rome'" in text(containing(cells, '"pos": "1:4"')).splitlines()[1]
    original, steered = filter(None, text(containing(cells, "steer =")).splitlines())
    assert original.startswith("' John")
    assert steered.startswith("' Mary")


def test_the_workbench_is_a_widget_and_the_figure_a_plotly_figure(cells: list[Any]) -> None:
    widget = containing(cells, "session.explore").outputs
    assert any("application/vnd.jupyter.widget-view+json" in o.get("data", {}) for o in widget)
    figure = containing(cells, "go.Heatmap").outputs[0].data["application/vnd.plotly.v1+json"]
    assert figure["data"][0]["type"] == "heatmap"
