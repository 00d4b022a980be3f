"""A notebook that was saved, and whose kernel is gone: opened again in JupyterLab, and converted to
a page without a network.
"""

from __future__ import annotations

import os
import subprocess
import sys

import nbformat
import pytest
from notebooks.browser import Lab, Notebook, assert_explored, chromium, notebook_of, shot
from support.paths import ROOT

CELLS = [
    """
import torch
from gradmem_lib import MemoryTracker, explore_schedule, predict_first
from gradmem_lib.view.live import LivePlot
model = torch.nn.Linear(300, 300)
optimizer = torch.optim.AdamW(model.parameters())
""",
    'predict_first("0.a", "How many bytes?")',
    'answered = predict_first("0.b", "And now?")\nanswered.guess("3 KiB")',
    """
with MemoryTracker(model, optimizer, title="ten steps") as tracker:
    for _ in range(10):
        model(torch.ones(50, 300)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
""",
    "tracker.show()",
    "explore_schedule(depth=4, segment=2)",
    "LivePlot(title='never finished').start()",
]
TRAINS = """
for _ in range(3):
    model(torch.ones(50, 300)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
LOST = ("model not found", "Error displaying widget", "Loading widget")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The path of a notebook as it is after a run."""
    from nbclient import NotebookClient

    folder = tmp_path_factory.mktemp("saved")
    notebook = notebook_of(*CELLS)
    own = {
        "PYTHONPATH": str(ROOT),
        "GRADMEM_LIVE": "1",
        "GRADMEM_PROGRESS": str(folder / "progress.json"),
    }
    NotebookClient(notebook, timeout=300, kernel_name="python3").execute(env=os.environ | own)
    path = folder / "saved.ipynb"
    nbformat.write(notebook, path)
    return path


def test_a_converted_notebook_is_explored_without_a_network(saved):
    from nbconvert import HTMLExporter

    page_path = saved.with_suffix(".html")
    page_path.write_text(HTMLExporter().from_filename(str(saved))[0], encoding="utf-8")
    with chromium() as browser:
        context = browser.new_context(viewport={"width": 1280, "height": 2400})
        # require.js and MathJax, which nbconvert asks the network for, do not come.
        context.route("http*://**", lambda route: route.abort())
        page = context.new_page()
        page.goto(page_path.as_uri(), wait_until="domcontentloaded")
        pictures = page.locator("canvas.gm-canvas:not([data-points='0'])")
        pictures.nth(1).wait_for()
        assert pictures.count() == 2
        words = page.locator("body").inner_text()
        assert not any(error in words for error in LOST)
        assert "How many bytes?" in words and "Your guess: 3.00 KiB" in words
        assert page.locator("img[alt*='4 layers in segments of 2']").is_visible()
        # The second one has its script from the first.
        assert_explored(page, page.locator(".gm-live").nth(1))
        if folder := os.environ.get("GRADMEM_SHOTS"):
            page.screenshot(path=f"{folder}/converted.png", full_page=True)


def test_a_notebook_that_is_opened_again_shows_what_was_saved(saved):
    """JupyterLab does not trust this file, so no script runs: the still pictures show."""
    with (
        chromium() as browser,
        Lab(saved.parent) as lab,
        Notebook(browser, lab, saved.name, height=2400) as notebook,
    ):
        stills = notebook.panel.locator(".jp-OutputArea-output img")
        stills.nth(2).wait_for()
        assert all(still.is_visible() for still in stills.all()) and stills.count() == 3
        words = notebook.panel.inner_text()
        assert not any(error in words for error in LOST)
        assert "How many bytes?" in words and "Your guess: 3.00 KiB" in words
        assert "appears here when this cell has run to its end" in words
        shot(notebook, "reopened")


def test_the_page_of_a_script_is_explored(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "\n".join([CELLS[0].replace(", explore_schedule, predict_first", ""), TRAINS])
    )
    command = [sys.executable, "-m", "gradmem_lib", "run", "--out", "run.html", str(script)]
    subprocess.run(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True)
    assert (tmp_path / "run.html").stat().st_size < 150_000
    with chromium() as browser:
        page = browser.new_page()
        page.goto((tmp_path / "run.html").as_uri())
        assert_explored(page, page.locator(".gm-live"))
