"""Takes the pictures of the documentation: the real workbench, with the real engine, in a real JupyterLab.

    python -m tests.browser.screenshot [folder]

writes screenshot.png (the whole page), attention.png, activations.png and history.png (one view each), and each of them
as *-dark.png, to docs/ (or the folder).
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

from scripts.chromium import find_chromium

from .conftest import BOOT, CHROMIUM_ARGS, ROOT, Lab, start_lab, stop_lab
from .pages import settled

PROMPT = "When Mary and John went to the store, Mary gave a drink to"
CELLS = (
    'import explorer\nsession = explorer.boot("smollm2-135m")',
    f"w = session.explore({PROMPT!r})\nw",
)
STATE = {
    "source": PROMPT.replace(", Mary", ", John"),
    "positions": [9],
    "compare": [" Mary", " John"],
    "hook": "blocks.12.hook_out",
    "tab": "norms",
    "of": "change",
    "form": {"op": "patch"},
    "edits": [
        {
            "hook": "blocks.12.hook_out",
            "op": "patch",
            "pos": 9,
            "source": {"prompt": PROMPT.replace(", Mary", ", John")},
        }
    ],
}
# Picture -> what is chosen for it, and the view it shows.
PICTURES: dict[str, tuple[dict[str, Any], str]] = {
    "screenshot": ({}, ""),
    "attention": ({"hook": "blocks.12.attn.hook_pattern", "tab": "attention", "of": "clean"}, ".heat"),
    "activations": ({"tab": "hook"}, ".heat"),
    "history": ({}, ".past"),
}


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch, sync_playwright() as playwright:
        process, url = start_lab(Path(scratch))
        try:
            browser = playwright.chromium.launch(executable_path=find_chromium(), args=CHROMIUM_ARGS)
            page = browser.new_page(viewport={"width": 1280, "height": 1060}, device_scale_factor=1.5)
            page.set_default_timeout(60000)
            lab = Lab(page, url)
            lab.run(BOOT)
            lab.run(*CELLS[1:])
            page.wait_for_selector(".axp .tok")
            page.get_by_role("button", name="Dismiss").click()
            for name, (chosen, view) in PICTURES.items():
                lab.evaluate(f"setattr(w, 'state', w.state | {STATE | chosen!r})")
                page.wait_for_selector(".axp .edit")
                if view == ".past":
                    page.get_by_role("button", name="History").click()
                for theme, end in (("Light", ""), ("Dark", "-dark")):
                    page.evaluate(
                        f"jupyterapp.commands.execute('apputils:change-theme', {{ theme: 'JupyterLab {theme}' }})"
                    )
                    settled(lab)
                    page.wait_for_function("() => document.querySelector('.axp .mapbox .empty').hidden")
                    page.wait_for_timeout(1500)  # JupyterLab's style sheets
                    place = page.locator(f".axp {view}") if view else page
                    place.screenshot(path=folder / f"{name}{end}.png")
                    print(folder / f"{name}{end}.png")
            browser.close()
        finally:
            stop_lab(process)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs")
