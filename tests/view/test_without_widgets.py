"""What a bare kernel shows: where no front end answers a widget, and where the kernel has no
widgets at all.
"""

from __future__ import annotations

import os
import re

import pytest
from support.paths import ROOT

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
    "show": "tracker.show()",
    "explorer": "explore_schedule(depth=4, segment=2)",
    "guess": 'asked = predict_first("0.a", "How many?"); asked.guess("3 KiB")',
}


@pytest.fixture(scope="module", params=["no widget manager", "no widgets"])
def shown(request, tmp_path_factory):
    """For each cell the kinds and contents of what a kernel sent, which nobody answered."""
    from jupyter_client.manager import start_new_kernel

    progress = tmp_path_factory.mktemp("kernel") / "progress.json"
    own = {"PYTHONPATH": str(ROOT), "GRADMEM_LIVE": "1", "GRADMEM_PROGRESS": str(progress)}
    manager, client = start_new_kernel(kernel_name="python3", env=os.environ | own)
    found = {"lost": request.param == "no widgets"}
    try:
        for name, code in (({"none": LOST} if found["lost"] else {}) | CELLS).items():
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
    outputs = [(kind, sent["data"]) for kind, sent in shown[cell] if kind.endswith("display_data")]
    assert outputs and not any(kind == "error" for kind, _ in shown[cell])
    return outputs


def test_nothing_that_is_shown_names_a_widget(shown):
    for cell in CELLS:
        assert not any(VIEW in data for _, data in drawn(shown, cell))


def test_what_moves_ends_in_a_picture_that_carries_its_script(shown):
    for cell in ("plot", "ranks"):
        *first, (_, last) = drawn(shown, cell)
        assert last.keys() == {"text/html", "text/plain"}
        assert "function render(" in last["text/html"]
        assert last["text/html"].count("data:image/png;base64,") == 1
        assert len(first) == (not shown["lost"])
        for kind, data in first:
            assert kind == "display_data" and "appears here when this cell" in data["text/html"]
            assert data["text/plain"] == last["text/plain"]
    assert shown["lost"] or drawn(shown, "plot")[-1][0] == "update_display_data"


def test_what_is_shown_is_also_a_still_picture_in_words(shown):
    for cell in ("show", "explorer"):
        [(_, data)] = drawn(shown, cell)
        assert re.search(
            r'<img src="data:image/png;base64,[^"]+" .*alt="[^"]{40,}"', data["text/html"]
        )
    assert ("data-gradmem-place" in drawn(shown, "explorer")[0][1]["text/html"]) != shown["lost"]


def test_a_guess_can_be_made_in_code_and_stays_in_the_file(shown):
    (_, asked), *answered = drawn(shown, "guess")
    assert '.guess("1.5 GiB")' in asked["text/plain"]
    assert "recorded: 3.00 KiB" in str(shown["guess"])
    if not shown["lost"]:
        assert "How many?" in asked["text/html"] and "Your guess:" not in asked["text/html"]
        [(kind, data)] = answered
        assert kind == "update_display_data" and data["text/plain"] == asked["text/plain"]
        assert "Your guess: 3.00 KiB = 3,072 bytes" in data["text/html"]


def test_a_kernel_without_widgets_says_so_once(shown):
    text = "".join(
        sent["text"]
        for cell in CELLS
        for kind, sent in shown[cell]
        if kind == "stream" and cell != "guess"
    )
    assert text.count("pip install ipywidgets anywidget") == shown["lost"]
