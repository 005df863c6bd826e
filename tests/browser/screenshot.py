"""Takes the pictures of the documentation: the real workbench, with the real engine, in a real JupyterLab.

    python -m tests.browser.screenshot [folder]

writes screenshot.png and screenshot-dark.png to docs/ (or the folder).
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from scripts.chromium import find_chromium

from .conftest import BOOT, CHROMIUM_ARGS, ROOT, Lab, start_lab, stop_lab

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
            lab.evaluate(f"setattr(w, 'state', w.state | {STATE!r})")
            page.wait_for_selector(".axp .edit")
            lab.evaluate("w._session.jobs.call(lambda job: None)")
            page.wait_for_function("() => document.querySelector('.axp .mapbox .empty').hidden")
            for theme, name in (("Light", "screenshot.png"), ("Dark", "screenshot-dark.png")):
                page.evaluate(
                    f"jupyterapp.commands.execute('apputils:change-theme', {{ theme: 'JupyterLab {theme}' }})"
                )
                page.wait_for_timeout(1500)
                page.screenshot(path=folder / name)
                print(folder / name)
            browser.close()
        finally:
            stop_lab(process)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs")
