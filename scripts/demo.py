"""Open JupyterLab on the quickstart notebook: this machine only, with a token, quiet about news and updates."""

from __future__ import annotations

import os
import sys
import webbrowser
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOK = "notebooks/quickstart.ipynb"


def browser_there() -> bool:
    """Whether there is a browser to open: not with BROWSER=none, nor without a browser or a display."""
    if os.environ.get("BROWSER") == "none":
        return False
    if sys.platform.startswith("linux") and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        return False
    try:
        webbrowser.get()
    except webbrowser.Error:
        return False
    return True


def command(arguments: list[str]) -> list[str]:
    """The JupyterLab command line; `arguments` come last, so that they win."""
    options = [
        "--ip=127.0.0.1",
        f"--ServerApp.root_dir={ROOT}",
        # the single-document view, without a sidebar: the workbench fits a laptop's screen
        f"--LabApp.default_url=/doc/tree/{NOTEBOOK}",
        "--LabApp.extension_manager=readonly",  # no catalogue from the network, no news, no look for updates
        "--LabApp.news_url=None",
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
    ]
    if not browser_there() and "--no-browser" not in arguments:
        options.append("--no-browser")
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        options.append("--allow-root")
    return [sys.executable, "-m", "jupyterlab", *options, *arguments]


def main() -> int:
    if not (ROOT / NOTEBOOK).is_file():
        print(f"demo: {NOTEBOOK} is missing: check the project out again", file=sys.stderr)
        return 1
    line = command(sys.argv[1:])
    os.environ["JUPYTER_PREFER_ENV_PATH"] = "1"  # the kernel of this .venv, not one of the same name in the home folder
    print(
        f"demo: JupyterLab opens on {NOTEBOOK}; no window? click the http://127.0.0.1 address below (Ctrl-C ends)",
        flush=True,
    )
    if os.name == "nt":  # no exec worth the name
        import subprocess

        return subprocess.call(line, cwd=ROOT)
    os.chdir(ROOT)
    os.execv(line[0], line)


if __name__ == "__main__":
    sys.exit(main())
