"""A real JupyterLab, a real Chromium, one kernel for the whole session; cells are replaced for each test."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from scripts.chromium import find_chromium

ROOT = Path(__file__).resolve().parents[2]
CHROMIUM_ARGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
KERNEL = "jupyterapp.shell.currentWidget.sessionContext.session.kernel"
READY = f"""() => {{ const k = window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel;
    return k?.connectionStatus === 'connected' && k.status === 'idle' && {KERNEL} }}"""
LISTEN = f"""() => {{ window.kernelErrors = []; {KERNEL}.iopubMessage.connect((_, m) => {{
    if (m.header.msg_type === 'error') kernelErrors.push(m.content.evalue);
    if (m.content.name === 'stderr') kernelErrors.push(m.content.text) }}) }}"""
RUN = """async (cells) => { const m = jupyterapp.shell.currentWidget.content.model.sharedModel;
    m.deleteCellRange(0, m.cells.length);
    m.insertCells(0, cells.map(s => ({cell_type: 'code', source: s, metadata: {}, outputs: []})));
    return await jupyterapp.commands.execute('notebook:run-all-cells') }"""
ASK = f"""async (code) => {{ let text = ''; const future = {KERNEL}.requestExecute({{ code, store_history: false }});
    future.onIOPub = (m) => {{
        if (m.header.msg_type === 'stream' && m.content.name === 'stdout') text += m.content.text;
        if (m.header.msg_type === 'error') text += m.content.evalue }};
    await future.done; return text.trim() }}"""
expect.set_options(timeout=20000)  # the machine may be busy; a page that is right is right at once
BOOT = "import explorer\nif 'session' not in globals(): session = explorer.boot('smollm2-135m')"


def start_lab(folder: Path) -> tuple[subprocess.Popen[bytes], str]:
    """JupyterLab on an empty notebook in `folder`, with settings of its own; returns the process and the page's URL."""
    (folder / "root").mkdir()
    (folder / "cfg/labconfig").mkdir(parents=True)
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
    nbformat.write(nbformat.v4.new_notebook(metadata=kernel), folder / "root/test.ipynb")
    (folder / "cfg/labconfig/page_config.json").write_text(
        '{"disabledExtensions": {"@jupyterlab/apputils-extension:announcements": true}}'
    )
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    token = secrets.token_hex(16)
    url = f"http://127.0.0.1:{port}"
    own = {
        "PYTHONPATH": str(ROOT),
        "IPYTHONDIR": f"{folder}/ipython",
        "JUPYTER_CONFIG_DIR": f"{folder}/cfg",
        "JUPYTER_DATA_DIR": f"{folder}/data",
        "JUPYTER_RUNTIME_DIR": f"{folder}/runtime",
        "JUPYTERLAB_SETTINGS_DIR": f"{folder}/settings",
        "JUPYTERLAB_WORKSPACES_DIR": f"{folder}/workspaces",
    }
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1", f"--port={port}"]
    command += [
        "--ServerApp.port_retries=0",
        f"--ServerApp.root_dir={folder}/root",
        f"--IdentityProvider.token={token}",
    ]
    command += ["--LabApp.expose_app_in_browser=True", "--LabApp.news_url=None"]
    command += ["--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate"]
    log = folder / "lab.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, env=os.environ | own, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    for _ in range(600):
        try:
            urllib.request.urlopen(f"{url}/api/status?token={token}", timeout=1)
            return process, f"{url}/doc/tree/test.ipynb?reset&token={token}"
        except OSError:
            assert process.poll() is None, log.read_text()
            time.sleep(0.1)
    stop_lab(process)
    raise AssertionError("JupyterLab did not answer within a minute:\n" + log.read_text())


def stop_lab(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)  # the server stops its kernels itself
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)


class Lab:
    """The notebook in the browser: runs cells, and keeps what the kernel and the network said meanwhile."""

    def __init__(self, page: Page, url: str) -> None:
        self.page = page
        self.url = url
        self.outside: list[str] = []
        self.frames: list[tuple[float, int]] = []
        self.console: list[str] = []
        page.on("request", self._request)
        page.on("websocket", lambda ws: ws.on("framereceived", self._frame))
        page.on("console", lambda m: self.console.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda error: self.console.append(str(error)))
        self.open()

    def open(self) -> None:
        self.page.goto(self.url)
        self.page.wait_for_function(READY, timeout=90000)
        self.page.evaluate(LISTEN)

    def reload(self) -> None:
        """Saves the notebook and loads the page anew."""
        self.page.evaluate("jupyterapp.commands.execute('docmanager:save')")
        self.page.wait_for_function("() => !jupyterapp.shell.currentWidget.context.model.dirty")
        self.open()

    def run(self, *cells: str) -> None:
        """Replaces the notebook's cells and runs them all; an exception in one fails the test."""
        self.page.evaluate("() => { kernelErrors.length = 0 }")
        done = self.page.evaluate(RUN, list(cells))
        assert done, self.errors()

    def evaluate(self, expression: str) -> Any:
        """The value of a Python expression in the kernel, as JSON; asked beside the notebook, in the main thread."""
        answer = str(self.page.evaluate(ASK, f"import json; print(json.dumps({expression}))"))
        try:
            return json.loads(answer)
        except json.JSONDecodeError:
            raise AssertionError(f"the kernel says to {expression}: {answer}") from None

    def rerun(self) -> None:
        """Runs the notebook's cells again, as they are."""
        assert self.page.evaluate("jupyterapp.commands.execute('notebook:run-all-cells')"), self.errors()

    def close_all(self) -> None:
        """Closes every widget in the kernel, those of cells that are gone too."""
        for kind in ("workbench", "views"):
            self.evaluate(f"[w.close() for w in list(__import__('widgets.{kind}').{kind}.opened)]")

    def errors(self) -> list[str]:
        return list(self.page.evaluate("kernelErrors"))

    def _request(self, request: Any) -> None:
        if not request.url.startswith(("http://127.0.0.1", "data:", "blob:")):
            self.outside.append(request.url)

    def _frame(self, payload: str | bytes) -> None:
        self.frames.append((time.monotonic(), len(payload)))


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=find_chromium(), args=CHROMIUM_ARGS)
        yield launched
        launched.close()


@pytest.fixture(scope="session")
def lab(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    process, url = start_lab(tmp_path_factory.mktemp("lab"))
    try:
        notebook = Lab(browser.new_page(viewport={"width": 1280, "height": 720}), url)
        notebook.page.set_default_timeout(20000)
        notebook.run(os.environ.get("EXPLORER_TEST_BOOT", BOOT))
        yield notebook
    finally:
        stop_lab(process)


@pytest.fixture
def notebook(lab: Lab) -> Iterator[Lab]:
    """The notebook for one test. No exception in the kernel or the page, and no request that leaves the machine."""
    lab.console.clear()
    lab.page.evaluate("() => { kernelErrors.length = 0 }")
    yield lab
    errors = lab.errors()
    # also after a test that failed half-way: the next ones are about other things
    lab.close_all()
    # What the page was sending when its widget was closed finds nobody: the kernel says so in its log.
    errors += [text for text in lab.errors()[len(errors) :] if not text.startswith("No such comm: ")]
    assert errors == []
    assert [text for text in lab.console if "favicon" not in text] == []
    assert lab.outside == []
