"""JupyterLab in a real browser, for tests: a server of its own, a page, and a notebook that runs in
it.

Nothing here depends on the user's Jupyter settings: configuration, data, workspaces and home are
temporary folders, and the kernel is the Python that runs the tests. Waiting is always for a state
of the page, never for an amount of time.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import nbformat
import pytest
from support.paths import ROOT

OFFLINE = ROOT / "tests" / "offline"
CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM_FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
SETTINGS = {
    "@jupyterlab/apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    # Every cell stays in the page, also those out of sight.
    "@jupyterlab/notebook-extension/tracker": {"windowingMode": "none"},
}


def notebook_of(*sources: str):
    """A notebook of code cells, for the Python that runs the tests."""
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    cells = [nbformat.v4.new_code_cell(source.strip()) for source in sources]
    return nbformat.v4.new_notebook(cells=cells, metadata=kernel)


def missing_browser() -> None:
    """Skip, or fail where tests are meant to be complete."""
    words = (
        "no browser for the widget tests: install Chromium (`apt install chromium`), or run "
        "`python -m playwright install chromium`"
    )
    pytest.fail(words, pytrace=False) if os.environ.get("CI") else pytest.skip(words)


@contextmanager
def chromium():
    """A headless Chromium: the system's, or Playwright's own.

    Skips (fails under ``CI``) where there is neither.
    """
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        missing_browser()
    found = next(filter(None, map(shutil.which, CHROMIUM_NAMES)), None)
    with sync_playwright() as playwright:
        if found is None and not Path(playwright.chromium.executable_path).exists():
            missing_browser()
        browser = playwright.chromium.launch(
            executable_path=found, headless=True, args=CHROMIUM_FLAGS
        )
        try:
            yield browser
        finally:
            browser.close()


class Lab:
    """A JupyterLab server on a folder of notebooks, cut off from every network; use it as a context
    manager.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.token = secrets.token_hex(16)

    def __enter__(self) -> Lab:
        self._own = Path(tempfile.mkdtemp(prefix="gradmem-lab-"))
        for name, value in SETTINGS.items():
            path = self._own / "settings" / f"{name}.jupyterlab-settings"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(value))
        kernel = self._own / "data" / "kernels" / "python3" / "kernel.json"
        kernel.parent.mkdir(parents=True)
        command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        kernel.write_text(
            json.dumps({"argv": command, "display_name": "Python 3", "language": "python"})
        )
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.log = self._own / "lab.log"
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "jupyterlab",
                    "--no-browser",
                    "--allow-root",
                    "--ip=127.0.0.1",
                    f"--port={port}",
                    "--ServerApp.port_retries=0",
                    f"--IdentityProvider.token={self.token}",
                    f"--ServerApp.root_dir={self.folder}",
                    "--expose-app-in-browser",
                    "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
                    "--LabApp.extension_manager=readonly",
                ],
                env=self._environment(),
                cwd=self.folder,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        try:
            self._wait_until_up()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._own, ignore_errors=True)

    def _environment(self) -> dict[str, str]:
        import platformdirs

        own = self._own
        env = {
            k: v
            for k, v in os.environ.items()
            if not k.startswith(("JUPYTER", "GRADMEM_LIVE", "PYTEST"))
        }
        env |= {
            "HOME": str(own),
            "IPYTHONDIR": str(own / "ipython"),
            "JUPYTER_CONFIG_DIR": str(own / "config"),
            "JUPYTER_DATA_DIR": str(own / "data"),
            "JUPYTER_RUNTIME_DIR": str(own / "runtime"),
            "JUPYTERLAB_SETTINGS_DIR": str(own / "settings"),
            "JUPYTERLAB_WORKSPACES_DIR": str(own / "workspaces"),
            "JUPYTER_PREFER_ENV_PATH": "0",
            "GRADMEM_PROGRESS": str(own / "progress.json"),
            "GRADMEM_SIZE": "ci",
        }
        # A model that was unpacked once need not be unpacked again.
        env.setdefault("GRADMEM_CACHE", str(platformdirs.user_cache_path("gradmem")))
        paths = (str(OFFLINE), str(ROOT), env.get("PYTHONPATH"))
        env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        return env

    def checks(self) -> dict[str, str]:
        """What the exercises' checks have said so far, by exercise."""
        path = self._own / "progress.json"
        tried = json.loads(path.read_text(encoding="utf-8"))["checks"] if path.exists() else {}
        return {name: entry["outcome"] for name, entry in tried.items()}

    def _wait_until_up(self, seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                urllib.request.urlopen(
                    f"{self.url}/api/status?token={self.token}", timeout=2
                ).close()
                return
            except (urllib.error.URLError, OSError):
                time.sleep(0.1)
        raise RuntimeError(
            f"JupyterLab did not start; its log ends with:\n{self.log.read_text()[-2000:]}"
        )


# A notebook that does not exist, or one without a kernel's name, never gets ready: the race ends
# the wait, and says what the page shows instead.
_READY = """async (seconds) => {
  const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
  const ready = async () => {
    await jupyterapp.restored;
    for (;;) {
      const panel = jupyterapp.shell.currentWidget;
      if (panel && panel.sessionContext) {
        await panel.context.ready;
        await panel.sessionContext.ready;
        const kernel = panel.sessionContext.session && panel.sessionContext.session.kernel;
        if (kernel) { await kernel.info; if (kernel.status === 'idle') return true; }
      }
      await pause(50);
    }
  };
  if (await Promise.race([ready(), pause(1000 * seconds)])) return null;
  const dialog = document.querySelector('.jp-Dialog-content');
  return (dialog || document.querySelector('#main') || document.body).innerText.slice(0, 500);
}"""
# Started, not awaited: the page is sampled while the cells run.
_RUN_ALL = """() => {
  window.gradmemDone = false;
  const running = jupyterapp.commands.execute('notebook:run-all-cells');
  running.finally(() => { window.gradmemDone = true; });
}"""
# Every canvas in a busy cell: the cell's number and the canvas's pixels.
_SAMPLE = """() => ({
  done: window.gradmemDone,
  frames: [
    ...document.querySelectorAll('.jp-NotebookPanel:not(.lm-mod-hidden) .jp-CodeCell')
  ].flatMap((cell, i) =>
    cell.querySelector('.jp-InputPrompt').textContent.includes('*')
      ? [...cell.querySelectorAll('canvas.gm-canvas')]
        .filter((canvas) => +canvas.dataset.points > 0)
        .map((canvas) => [i, canvas.toDataURL()])
      : []),
})"""


class Notebook:
    """One notebook, open in a page of its own."""

    def __init__(
        self,
        browser,
        lab: Lab,
        name: str,
        *,
        width: int = 1280,
        height: int = 1000,
        scale: float = 1,
        ready_within: float = 60,
    ):
        self.context = browser.new_context(
            viewport={"width": width, "height": height}, device_scale_factor=scale
        )
        self.page = page = self.context.new_page()
        page.set_default_timeout(60_000)
        self.errors: list[str] = []
        page.on("pageerror", self._page_error)
        page.goto(f"{lab.url}/lab/tree/{name}?reset&token={lab.token}")
        page.wait_for_function("window.jupyterapp")
        shown = page.evaluate(_READY, ready_within)
        if shown is not None:
            self.context.close()
            raise RuntimeError(
                f"{name} was not ready after {ready_within} s; the page shows: {shown}"
            )
        self.panel = page.locator(".jp-NotebookPanel:not(.lm-mod-hidden)")

    def __enter__(self) -> Notebook:
        return self

    def __exit__(self, *exc) -> None:
        try:  # its kernel would go on and slow the next test down
            self.page.evaluate("() => jupyterapp.shell.currentWidget.sessionContext.shutdown()")
        finally:
            self.context.close()

    def _page_error(self, error) -> None:
        # A widget's script is loaded from a blob; whatever else goes wrong in the page is
        # JupyterLab's own.
        if "blob:" in (error.stack or ""):
            self.errors.append(f"{error.message}\n{error.stack}")

    def command(self, name: str, **arguments) -> None:
        self.page.evaluate(
            "([name, args]) => jupyterapp.commands.execute(name, args)", [name, arguments]
        )

    def theme(self, name: str) -> None:
        """``"JupyterLab Dark"`` or ``"JupyterLab Light"``."""
        self.command("apputils:change-theme", theme=name)
        light = str("Light" in name).lower()
        self.page.wait_for_function(f"document.body.dataset.jpThemeLight === '{light}'")
        self.page.wait_for_function("!document.querySelector('#jupyterlab-splash')")

    def start(self) -> None:
        """Run all cells, without waiting for them."""
        self.page.evaluate(_RUN_ALL)

    def watch(self, *, seconds: float = 240, until=None, on_frame=None) -> int:
        """Look at the live plots of running cells until all cells are done, or ``until(n)`` holds.

        Returns n, the distinct pictures that one cell showed while it ran (of the cell with the
        most).
        """
        seen: dict[int, set[str]] = {}
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            sample = self.page.evaluate(_SAMPLE)
            for cell, picture in sample["frames"]:
                pictures = seen.setdefault(cell, set())
                if picture not in pictures:
                    pictures.add(picture)
                    if on_frame is not None:
                        on_frame(len(pictures))
            most = max(map(len, seen.values()), default=0)
            if sample["done"] or (until is not None and until(most)):
                return most
            time.sleep(0.08)
        raise AssertionError(
            f"the notebook was still running after {seconds} s; its plots so far: {len(seen)}"
        )

    def running(self) -> bool:
        """Whether a cell is still at work."""
        return not self.page.evaluate("window.gradmemDone")

    def run_all(self, *, seconds: float = 240) -> int:
        self.start()
        return self.watch(seconds=seconds)

    def not_run(self) -> list[str]:
        """The code cells that did not come to their end: what follows an error is not run.

        A cell may be folded.
        """
        cells = self.page.evaluate(
            """() => jupyterapp.shell.currentWidget.content.widgets
              .map((cell) => cell.model.sharedModel.toJSON())
              .filter((cell) => cell.cell_type === 'code')
              .map((cell) => [cell.execution_count, cell.source])"""
        )
        assert cells, "no code cell in sight"
        return [source for count, source in cells if count is None]

    def failed(self) -> int:
        """How many outputs are an exception's."""
        return self.page.evaluate(
            """() => jupyterapp.shell.currentWidget.content.widgets
              .filter((cell) => cell.model.type === 'code')
              .flatMap((cell) => cell.model.outputs.toJSON())
              .filter((output) => output.output_type === 'error').length"""
        )

    def output(self, cell: int):
        """The output area of code cell number ``cell``, from 0."""
        return self.panel.locator(".jp-CodeCell").nth(cell).locator(".jp-Cell-outputArea")


def shot(notebook: Notebook, name: str) -> None:
    """Keep a screenshot where ``GRADMEM_SHOTS`` names a folder."""
    if folder := os.environ.get("GRADMEM_SHOTS"):
        notebook.page.screenshot(path=str(Path(folder) / f"{name}.png"))


def assert_explorer_reacts(notebook: Notebook, to: str = "micro-batch") -> None:
    """Its first slider, which has that name, changes the picture and its words."""
    picture = notebook.panel.locator(".gm-explorer")
    picture.first.wait_for()
    handle = notebook.panel.locator(".jupyter-widgets:has(.gm-explorer) [role=slider]").first
    words, drawn = picture.locator(".gm-verdict"), picture.locator("svg").first
    before = words.inner_text(), drawn.inner_html()
    handle.focus()
    notebook.page.keyboard.press("ArrowRight")
    notebook.page.wait_for_function(
        "(before) => document.querySelector('.gm-verdict').textContent !== before", arg=before[0]
    )
    assert drawn.inner_html() != before[1]
    assert handle.get_attribute("aria-label") == to


def assert_explored(page, picture) -> None:
    """A finished picture answers keys, the pointer and a click, wherever it stands."""
    canvas, read = picture.locator("canvas[data-drawn]"), picture.locator(".gm-read")
    canvas.wait_for()  # with its blocks
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    x, y = box["x"] + 0.6 * box["width"], box["y"] + box["height"] - 45
    page.mouse.move(x - 1, y)
    page.mouse.move(x, y)
    assert "alive from " in read.inner_text()
    page.mouse.wheel(0, -400)
    picture.locator("canvas[data-view*=' ']").wait_for()
    page.mouse.click(x, y)
    assert canvas.get_attribute("data-pinned")
    for key, shown, value in (("Escape", "pinned", ""), ("0", "view", ""), ("g", "by", "module")):
        page.keyboard.press(key)
        assert canvas.get_attribute(f"data-{shown}") == value
    row = picture.locator("tbody tr").first
    row.click()
    assert canvas.get_attribute("data-alone") == row.locator("th").inner_text()
    canvas.press("p")
    canvas.press("ArrowUp")
    assert read.inner_text().startswith("operation ") and picture.locator(".gm-block").count() == 1
