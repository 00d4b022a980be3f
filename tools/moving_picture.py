"""Films ``docs/live-plot.gif``, the picture of the README: a cell that trains SmolLM2 in
JupyterLab, until its budget is full. Then it writes ``site/run.html``, the page of the same
training under ``gradmem run``. The site's build puts the script and the style into it.

    PYTHONPATH=. python tools/moving_picture.py

Each frame is what Chromium shows while the cell runs, as in ``tests/notebooks/test_browser.py``.
Only the time between frames is ours: a frame of the film is a change of the plot, however long this
machine needed for it.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import nbformat
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from notebooks.browser import Lab, Notebook, chromium  # noqa: E402

from gradmem_lib.view.live import drawing, looks  # noqa: E402

PICTURE = ROOT / "docs" / "live-plot.gif"
PAGE = ROOT / "site" / "run.html"
BEFORE = """
import torch
from gradmem_lib import BudgetExceeded, MemoryTracker
from gradmem_lib.course import models

model, tokenizer = models.smollm2()
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
ids = torch.randint(0, 49152, (8, 128), generator=torch.Generator().manual_seed(0))

def train(rows):
    model(input_ids=ids[:rows], labels=ids[:rows]).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
FILMED = """
try:
    with MemoryTracker(model, optimizer, budget="3 GiB", title="SmolLM2-135M on a card of 3 GiB"):
        for rows in (1, 2, 4, 8):
            train(rows)
except BudgetExceeded as error:
    print(error)
"""
SCRIPT = f"{BEFORE}\nfor rows in (1, 2, 4):\n    train(rows)\n"
HEIGHT, SCALE = 722, 1.25  # of what is filmed, in the page's pixels; the error goes on below
FRAME, STILL = 170, 6000  # milliseconds
MOST_FRAMES = 40


def film() -> list[Image.Image]:
    """The frames: each change of the plot while the cell runs, and the cell as it stays."""
    frames = []
    with tempfile.TemporaryDirectory() as folder, chromium() as browser:
        cells = [nbformat.v4.new_code_cell(source.strip()) for source in (BEFORE, FILMED)]
        kernel = {
            "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}
        }
        notebook = nbformat.v4.new_notebook(cells=cells, metadata=kernel)
        nbformat.write(notebook, Path(folder) / "film.ipynb")
        with (
            Lab(Path(folder)) as lab,
            Notebook(browser, lab, "film.ipynb", width=1060, height=1200, scale=SCALE) as page,
        ):
            page.theme("JupyterLab Light")
            page.command("application:toggle-left-area")
            page.page.add_style_tag(
                content=".jp-cell-toolbar, .jp-Notebook-footer { display: none }"
                # without the frame of the active cell
                ".jp-Notebook-cell { border-color: transparent !important;"
                " outline: none !important; box-shadow: none !important }"
            )
            cell = page.panel.locator(".jp-CodeCell").nth(1)

            def shoot(_=None) -> None:
                box = cell.bounding_box()
                clip = {
                    "x": box["x"] + 70,
                    "y": box["y"],
                    "width": box["width"] - 80,
                    "height": HEIGHT,
                }
                frames.append(
                    Image.open(io.BytesIO(page.page.screenshot(clip=clip))).convert("RGB")
                )

            page.start()
            page.watch(on_frame=shoot)
            cell.locator("canvas.gm-canvas[data-recording=false]").first.wait_for()
            shoot()
    return frames


def write(frames: list[Image.Image], path: Path) -> None:
    """An endless GIF of at most ``MOST_FRAMES`` changes, in one palette; it rests on the last."""
    *moving, last = frames
    step = -(-len(moving) // MOST_FRAMES)
    chosen = [*moving[::step], last]
    both = Image.new("RGB", (last.width, 2 * last.height))
    both.paste(moving[-1])
    both.paste(last, (0, last.height))
    palette = both.quantize(96, dither=Image.Dither.NONE)
    first, *rest = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in chosen]
    times = [FRAME] * (len(chosen) - 1) + [STILL]
    first.save(path, save_all=True, append_images=rest, duration=times, loop=0, optimize=True)


def write_page(path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "train.py").write_text(SCRIPT, encoding="utf-8")
        command = [sys.executable, "-m", "gradmem_lib", "run", "--out", str(path), "train.py"]
        where = os.environ | {"PYTHONPATH": str(ROOT)}
        subprocess.run(command, cwd=folder, env=where, check=True)
    page = path.read_text(encoding="utf-8")
    for part, mark in ((drawing("page"), "THE SCRIPT"), (looks(), "THE STYLE")):
        page = page.replace(part, mark)
    path.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    write_page(PAGE)
    taken = film()
    write(taken, PICTURE)
    print(
        f"{PICTURE.relative_to(ROOT)}: {len(taken)} changes filmed, {PICTURE.stat().st_size:,} "
        "bytes"
    )
