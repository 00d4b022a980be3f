"""Lessons in a real browser and without a network, as a learner's Run All: plots that move, then
pictures, no failure.
"""

from __future__ import annotations

import shutil

import pytest
from notebooks.browser import ROOT, Lab, Notebook, assert_explorer_reacts, shot
from support.nightly import ALL

LESSONS = sorted(path.name for path in (ROOT / "lessons").glob("*.ipynb"))
# By night: nbval executes each solution, test_notebooks.py runs lesson 00 as a learner would, and
# test_browser.py shows that plots move. The longest comes first.
CHOSEN = LESSONS[::-1] if ALL else []


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lessons")
    for name in LESSONS:
        shutil.copy(ROOT / "lessons" / name, folder)
    with Lab(folder) as running:
        yield running


@pytest.mark.parametrize("name", CHOSEN)
def test_a_lesson_moves_and_ends_in_pictures(browser, lab, name):
    with Notebook(browser, lab, name) as notebook:
        notebook.start()
        # How many pictures a cell shows depends on the machine. That one plot moves,
        # test_browser.py shows.
        pictures = notebook.watch(
            seconds=800, on_frame=lambda n: n == 5 and shot(notebook, f"lesson_{name[:2]}_live")
        )
        draws = "image/png" in (ROOT / "solutions" / name).read_text(encoding="utf-8")
        moves = draws and name[:2] not in (
            "08",
            "09",
            "10",
        )  # whose pictures are drawn once, after what they show
        assert pictures >= moves and notebook.not_run() == [] and notebook.failed() == 0
        # No stub passes, and the reference takes over; lesson 00 shows a wrong answer on purpose.
        own = {
            each: said
            for each, said in lab.checks().items()
            if each.startswith(f"{int(name[:2])}.")
        }
        assert own == ({"0.1": "not yet"} if name.startswith("00") else {})
        stills = notebook.panel.locator(".jp-OutputArea-output img[src^='data:image/png']")
        if draws:
            stills.first.wait_for(state="attached")  # hidden below a picture that is explored
        assert "Error displaying widget" not in notebook.panel.inner_text()
        assert notebook.panel.locator("canvas.gm-canvas[data-recording=true]").count() == 0
        if name.startswith("06"):
            assert_explorer_reacts(notebook)
        shot(notebook, f"lesson_{name[:2]}_after")
        assert notebook.errors == []
