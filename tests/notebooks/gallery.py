"""Each kind of widget in each surrounding, as screenshots on one page to look at: ``make gallery``.

The notebook runs in JupyterLab in a light and a dark theme, in a narrow window and at 150 %, is
then opened again without its kernel, and is converted to a page. The light run is also shown as
people see it who do not tell all colours apart, and as a screen reader is told of it.
"""

from __future__ import annotations

import html
import sys
from dataclasses import dataclass
from pathlib import Path

import nbformat
from notebooks.browser import Lab, Notebook, chromium, notebook_of
from notebooks.test_saved import CELLS

NAME = "gallery.ipynb"
EXPLORE = "from gradmem_lib.course.learner.explorer import explore\nexplore()"
WATERFALL = """
from gradmem_lib.view.waterfall import Waterfall
Waterfall(budget="2 MiB").add("ten steps", tracker.peak).add("the same again", tracker.peak)
"""
GROWS = """
history = []
with MemoryTracker(model, optimizer, title="a history grows, and so does the batch") as tracker:
    for rows in (500, 500, 500, 500, 1000, 1000, 1000, 1000):
        history.append(model(torch.ones(rows, 300)))
        history[-1].sum().backward()
        optimizer.step()
        optimizer.zero_grad()
tracker.plot()
"""
HEIGHT = 5000  # CSS pixels, enough for all cells
# Chromium's names for kinds of colour blindness.
VISIONS = ("deuteranopia", "protanopia", "tritanopia", "achromatopsia")


@dataclass(frozen=True)
class Surrounding:
    """A window of JupyterLab: its width in CSS pixels, its theme, and device pixels per pixel."""

    name: str
    width: int = 1280
    theme: str = "Light"
    zoom: float = 1.0


RUNS = (
    Surrounding("light"),
    Surrounding("dark", theme="Dark"),
    Surrounding("900 px", width=900),
    # A zoomed page has fewer CSS pixels on the same screen.
    Surrounding("150 %", width=853, zoom=1.5),
)


def open_in(browser, lab: Lab, where: Surrounding) -> Notebook:
    notebook = Notebook(
        browser, lab, NAME, width=where.width, height=HEIGHT, scale=where.zoom, ready_within=180
    )
    notebook.theme(f"JupyterLab {where.theme}")
    return notebook


def take_shots(folder: Path) -> list[str]:
    """Screenshots in ``folder``; returns their names."""
    nbformat.write(notebook_of(*CELLS, EXPLORE, WATERFALL, GROWS), folder / NAME)
    names = []
    with chromium() as browser, Lab(folder) as lab:
        for where in RUNS:
            with open_in(browser, lab, where) as notebook:
                names += shots_of_a_run(notebook, folder, where)
        for where in RUNS[:2]:
            with open_in(browser, lab, where) as notebook:
                notebook.page.screenshot(path=folder / f"reopened, {where.name}.png")
            names.append(f"reopened, {where.name}")
        names.append(convert(browser, folder))
    return names


def shots_of_a_run(notebook: Notebook, folder: Path, where: Surrounding) -> list[str]:
    """Runs all cells, takes screenshots and saves the notebook; returns the screenshots' names."""
    notebook.run_all(seconds=600)
    notebook.panel.locator(".gm-explorer svg").first.wait_for()
    notebook.page.screenshot(path=folder / f"{where.name}.png")
    notebook.page.evaluate("() => jupyterapp.shell.currentWidget.context.save()")
    if where is not RUNS[0]:
        return [where.name, *states_of_a_picture(notebook, folder, where)]
    write_spoken(notebook, folder)
    return [where.name, *as_others_see(notebook, folder)]


def states_of_a_picture(notebook: Notebook, folder: Path, where: Surrounding) -> list[str]:
    """Screenshots of a finished picture as a reader changes it; returns their names."""
    picture = notebook.panel.locator(".gm-live:has(canvas[data-drawn])").last
    canvas, press = picture.locator("canvas.gm-canvas"), notebook.page.keyboard.press
    canvas.focus()
    names = []
    for state, keys in {
        "a block": ("p", "ArrowUp", "ArrowUp"),
        "pinned": ("Enter", "End"),
        "zoomed": ("p", "+", "+"),
        "by line": ("0", "g", "g"),
        "alone": ("Escape", "g", "g"),
    }.items():
        for key in keys:
            press(key)
        if state == "alone":
            picture.locator("tbody tr").nth(2).click()
        names.append(f"{where.name}, {state}")
        picture.screenshot(path=folder / f"{names[-1]}.png")
    return names


def as_others_see(notebook: Notebook, folder: Path) -> list[str]:
    """Screenshots of the same page under each of ``VISIONS``; returns their names."""
    chromium_itself = notebook.context.new_cdp_session(notebook.page)
    for vision in VISIONS:
        chromium_itself.send("Emulation.setEmulatedVisionDeficiency", {"type": vision})
        notebook.page.screenshot(path=folder / f"{vision}.png")
    chromium_itself.send("Emulation.setEmulatedVisionDeficiency", {"type": "none"})
    return list(VISIONS)


def write_spoken(notebook: Notebook, folder: Path) -> None:
    """What a screen reader is told of each output, in ``spoken.txt``."""
    outputs = notebook.panel.locator(".jp-OutputArea-output").all()
    spoken = "\n\n".join(output.aria_snapshot() for output in outputs)
    (folder / "spoken.txt").write_text(spoken + "\n", encoding="utf-8")


def convert(browser, folder: Path) -> str:
    from nbconvert import HTMLExporter

    page_path = folder / "converted.html"
    page_path.write_text(HTMLExporter().from_filename(str(folder / NAME))[0], encoding="utf-8")
    page = browser.new_context(viewport={"width": 1280, "height": 800}).new_page()
    page.route("http*://**", lambda route: route.abort())  # as without a network
    page.goto(page_path.as_uri(), wait_until="domcontentloaded")
    page.locator("canvas.gm-canvas:not([data-points='0'])").first.wait_for()
    page.screenshot(path=folder / "converted.png", full_page=True)
    return "converted"


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    figures = "".join(
        f'<figure><figcaption>{html.escape(name)}</figcaption><img src="{html.escape(name)}.png" '
        f'alt="" width="620"></figure>'
        for name in take_shots(folder)
    )
    page = folder / "index.html"
    spoken = '<p><a href="spoken.txt">What a screen reader is told</a></p>'
    page.write_text(f"<title>Gallery</title>{spoken}{figures}", encoding="utf-8")
    print(f"To look at: {page}")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
