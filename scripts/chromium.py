"""Find a Chromium for the browser tests, or bring one: on the PATH, Playwright's own, or the system's package."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ON_PATH = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
ADVICE = (
    "install Chromium (Debian, Ubuntu: apt-get install chromium), "
    "or type `.venv/bin/python -m playwright install chromium`"
)


class NoChromium(RuntimeError):
    """There is no Chromium here; the message is one line and says what to install."""


def find_chromium() -> str:
    """The executable the browser tests should start. Raises NoChromium when there is none."""
    for name in ON_PATH:
        if path := shutil.which(name):
            return path
    if path := playwright_chromium():
        return path
    raise NoChromium(f"the browser tests need Chromium: type `make chromium`, or {ADVICE}")


def playwright_chromium() -> str | None:
    """The Chromium that Playwright downloaded, if any. Asked in a process of its own: its API may be in use here."""
    code = "from playwright.sync_api import sync_playwright as p\nwith p() as pw: print(pw.chromium.executable_path)"
    done = run([sys.executable, "-c", code], timeout=60)
    path = done.stdout.strip()
    return path if done.returncode == 0 and Path(path).is_file() else None


def run(command: list[str], timeout: float) -> subprocess.CompletedProcess[str]:
    """Run quietly; a command that hangs is killed and counts as failed (124), one that is not there too (127)."""
    try:
        return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 124, "", f"no answer within {timeout:g} s")
    except OSError as error:
        return subprocess.CompletedProcess(command, 127, "", str(error))


def install_chromium() -> str:
    """Find a Chromium or install one; returns its executable. Raises NoChromium with what was tried."""
    try:
        return find_chromium()
    except NoChromium:
        pass
    tried = []
    print("chromium: none on the PATH, trying Playwright's own download", flush=True)
    done = run([sys.executable, "-m", "playwright", "install", "chromium"], timeout=300)
    if done.returncode == 0 and (path := playwright_chromium()):
        return path
    tried.append(f"playwright install chromium: {last_line(done)}")
    if shutil.which("apt-get") and hasattr(os, "geteuid") and os.geteuid() == 0:
        print("chromium: trying apt-get", flush=True)
        for command in (["update"], ["install", "-y", "--no-install-recommends", "chromium"]):
            done = run(["env", "DEBIAN_FRONTEND=noninteractive", "apt-get", *command], timeout=900)
            if done.returncode != 0:
                tried.append(f"apt-get {' '.join(command)}: {last_line(done)}")
                break
        else:
            return find_chromium()
    raise NoChromium(f"the browser tests need Chromium: {ADVICE} (tried: {'; '.join(tried)})")


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    return next((line for line in lines if line.startswith(("E:", "Error", "ERROR"))), (lines or ["no message"])[-1])


if __name__ == "__main__":
    try:
        print(f"chromium: {install_chromium() if '--install' in sys.argv[1:] else find_chromium()}")
    except NoChromium as problem:
        sys.exit(f"chromium: {problem}")
