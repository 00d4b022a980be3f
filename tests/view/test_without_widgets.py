"""What a bare kernel shows: where no front end answers a widget, where the kernel has no widgets
at all, and where nothing may move.
"""

from __future__ import annotations

import base64
import os
import re

import pytest
from support.paths import ROOT

from gradmem_lib.view.live import drawing

VIEW = "application/vnd.jupyter.widget-view+json"
LOST = "import sys; sys.modules |= dict.fromkeys(['ipywidgets', 'anywidget'])\n"
CELLS = {
    "plot": """
import torch
from gradmem_lib import MemoryTracker, explore_schedule, predict_first
model = torch.nn.Linear(300, 300)
with MemoryTracker(model, title="a layer") as tracker:
    model(torch.ones(50, 300)).sum().backward()
""",
    "ranks": """
from gradmem_lib.view.ranks import RankPictures
with RankPictures(2) as pictures:
    pictures.on_report(0, 0, "start", "two", None)
    pictures.on_report(0, 0, "finish", tracker.timeline)
""",
    "interrupted": """
from gradmem_lib.view.live import LivePlot, show_timeline
plot = LivePlot(title="a layer", budget=10**6)
plot.start()
for _ in range(3):
    plot.push(tracker.timeline, tracker.current)
try:
    raise KeyboardInterrupt
except KeyboardInterrupt:
    plot.finish(tracker.timeline, tracker.peak)
""",
    "show": "tracker.show()",
    "figure": "tracker.plot()",
    "empty": "show_timeline(type(tracker.timeline)(tracker.timeline.rows[:0]))",
    "schedule": "explore_schedule(depth=4, segment=2)",
    "explorer": "from gradmem_lib.course.learner.explorer import explore\nexplore()",
    "guess": 'asked = predict_first("0.a", "How many?"); asked.guess("3 KiB")',
}
# pyplot, if it was imported, and the widgets that are there.
LEFT = """
import sys
widgets = sys.modules.get("ipywidgets")
made = widgets.widgets.widget._instances.values() if widgets else []
print("pyplot" if "matplotlib.pyplot" in sys.modules else "",
      [type(w).__name__ for w in made if type(w).__name__ == "MemoryView"])
"""
TEXTS = {
    "plot": "MemoryTracker plot: a layer",
    "ranks": "MemoryTracker plot: two, 2 ranks",
    "interrupted": "MemoryTracker plot: a layer",
    "show": "MemoryTracker plot: a layer",
    "figure": "Memory figure",
    "schedule": "Schedule explorer",
    "explorer": "Memory explorer",
}
MOVING, LOST_WIDGETS, STILL = MODES = ("no widget manager", "no widgets", "still")


@pytest.fixture(scope="module", params=MODES)
def shown(request, tmp_path_factory):
    """For each cell the kinds and contents of what a kernel sent, which nobody answered."""
    from jupyter_client.manager import start_new_kernel

    mode = request.param
    progress = tmp_path_factory.mktemp("kernel") / "progress.json"
    own = {"PYTHONPATH": str(ROOT), "GRADMEM_PROGRESS": str(progress)}
    own["GRADMEM_LIVE"] = "0" if mode == STILL else "1"
    manager, client = start_new_kernel(kernel_name="python3", env=os.environ | own)
    found = {"mode": mode}
    first = {"none": LOST} if mode == LOST_WIDGETS else {}
    try:
        for name, code in (first | CELLS | {"left": LEFT}).items():
            sent = found[name] = []
            client.execute_interactive(
                code,
                timeout=120,
                output_hook=lambda m, sent=sent: sent.append((m["msg_type"], m["content"])),
            )
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    return found


def drawn(shown: dict, cell: str) -> list[tuple[str, dict]]:
    """What the cell displayed, and what it displayed instead of that, which is what stays on the
    page.
    """
    outputs = [(kind, sent) for kind, sent in shown[cell] if "data" in sent and "comm" not in kind]
    assert outputs and not any(kind == "error" for kind, _ in shown[cell])
    return outputs


def printed(shown: dict, *cells: str) -> str:
    return "".join(sent["text"] for cell in cells for kind, sent in shown[cell] if kind == "stream")


def test_nothing_that_is_shown_names_a_widget_and_none_is_left(shown):
    for cell in CELLS:
        assert not any(VIEW in sent["data"] for _, sent in drawn(shown, cell))
    assert printed(shown, "left").strip() == "[]"


@pytest.mark.parametrize("cell", TEXTS)
def test_every_output_has_its_text_and_a_still_picture_in_words(shown, cell):
    _, last = drawn(shown, cell)[-1]
    data = last["data"]
    assert data["text/plain"] == TEXTS[cell]
    if shown["mode"] == STILL:
        assert data.keys() == {"image/png", "text/plain"}
        png, words = data["image/png"], last["metadata"]["image/png"]["alt"]
    else:
        image = r'<img src="data:image/png;base64,([^"]+)" .*alt="([^"]+)"'
        png, words = re.search(image, data["text/html"]).groups()
    assert base64.b64decode(png).startswith(b"\x89PNG") and len(words) >= 40


@pytest.mark.parametrize("cell", ["plot", "ranks", "interrupted"])
def test_what_moves_ends_in_a_picture_that_carries_its_script(shown, cell):
    *first, (kind, last) = drawn(shown, cell)
    assert len(first) == (shown["mode"] == MOVING)
    for before, sent in first:
        assert (before, kind) == ("display_data", "update_display_data")
        assert "appears here when this cell" in sent["data"]["text/html"]
        assert sent["data"]["text/plain"] == TEXTS[cell]
    if shown["mode"] == STILL:
        assert "Peak: " in last["metadata"]["image/png"]["alt"]
        return
    # The script explores the picture, and shows the still one where it does not run.
    assert last["data"].keys() == {"text/html", "text/plain"}
    text = last["data"]["text/html"]
    assert "function render(" in text and text.count("data:image/png;base64,") == 1
    assert len(text) < 60_000 + len(drawing())


def test_nothing_recorded_is_said_and_an_explorer_has_its_place(shown):
    [(_, empty)] = drawn(shown, "empty")
    assert "nothing was recorded" in empty["data"]["text/html"]
    for cell in ("schedule", "explorer"):
        [(_, sent)] = drawn(shown, cell)
        has_place = "data-gradmem-place" in sent["data"].get("text/html", "")
        assert has_place == (shown["mode"] == MOVING)


def test_a_guess_can_be_made_in_code_and_stays_in_the_file(shown):
    (_, asked), *answered = drawn(shown, "guess")
    assert '.guess("1.5 GiB")' in asked["data"]["text/plain"]
    assert "recorded: 3.00 KiB" in printed(shown, "guess")
    if shown["mode"] == MOVING:
        asked = asked["data"]
        assert "How many?" in asked["text/html"] and "Your guess:" not in asked["text/html"]
        [(kind, sent)] = answered
        assert kind == "update_display_data" and sent["data"]["text/plain"] == asked["text/plain"]
        assert "Your guess: 3.00 KiB = 3,072 bytes" in sent["data"]["text/html"]


def test_a_kernel_without_widgets_says_so_once(shown):
    text = printed(shown, *CELLS)
    assert text.count("pip install ipywidgets anywidget") == (shown["mode"] == LOST_WIDGETS)
