"""The picture of a schedule, and its explorer."""

from __future__ import annotations

import asyncio
import io
import re
import xml.etree.ElementTree as ET

import pytest
import torch
from support.chains import X, chain, step_of

from gradmem_lib import record_schedule
from gradmem_lib.view import schedule_explorer, schedule_record, schedules


@pytest.fixture(scope="module")
def record():
    layers, _ = chain(8)
    return record_schedule(layers, step_of(layers, [3, 3, 2]))


def test_every_event_is_one_cell_and_stored_bars_lie_between(record):
    boxes = schedules.boxes_of(record)
    cells = [
        (x, int(y), w)
        for look in (*schedule_record.KINDS, "dropped")
        for x, y, w, _ in boxes.get(look, [])
    ]
    assert sorted(cells) == sorted(
        (t, e.layer, 1) for t, e in enumerate(record.events) if e.layer >= 0
    )
    at = {(event.kind, event.layer): t for t, event in enumerate(record.events)}
    internals = {int(y): (x, x + w) for x, y, w, _ in boxes["internals"]}
    assert internals[0] == (at["recompute", 0] + 1, at["backward", 0])
    inputs = {int(y): (x, x + w) for x, y, w, _ in boxes["inputs"]}
    assert inputs[3] == (at["forward", 3] + 1, at["backward", 3])
    assert set(inputs) == {0, 3}


@pytest.mark.parametrize("n", [4, 40])
def test_the_figure_shows_its_peak_and_is_small(n):
    from PIL import Image

    layers, _ = chain(n)
    record = record_schedule(layers, step_of(layers, [n // 2] * 2))
    first, second = (schedules.plot_schedule(record, title="halves").png() for _ in range(2))
    assert first == second and len(first) < 60_000
    assert Image.open(io.BytesIO(first)).width > 1000
    figure = schedules.plot_schedule(record, title="halves")
    words = " ".join(
        t.get_text() for t in [*figure.texts, *figure.axes[0].texts, *figure.axes[1].texts]
    )
    for part in (
        "halves",
        f"{record.peak:,} bytes",
        "forward again, keeps",
        "internals stored",
        "passing through",
    ):
        assert part in words
    below = figure.axes[1]
    assert (
        max(line.get_ydata().max() for line in below.lines if len(line.get_xdata()) > 10) * 1024
        == record.peak
    )


def test_words_for_those_who_do_not_see_it(record, monkeypatch):
    shown = []
    monkeypatch.setattr(
        "IPython.display.display", lambda data, metadata, raw: shown.append((data, metadata))
    )
    schedules.show_schedule(record, title="threes")
    schedules.show_schedule(record)
    (data, metadata), (untitled, _) = shown
    assert (
        data["text/plain"] == "Schedule plot: threes" and untitled["text/plain"] == "Schedule plot"
    )
    alt = metadata["image/png"]["alt"]
    assert re.match(
        "threes: Grid of 8 layers against 2[34] columns of time", alt
    )  # PyTorch 2.11 has one event more
    assert (
        "that keep internals: 2, that drop them: 6; in backward, layers run forward again: 6."
        in alt
    )
    assert f"{record.peak:,} bytes" in alt
    data, _ = record._repr_mimebundle_()
    assert data["text/plain"] == "Schedule plot"


# The explorer.


@pytest.fixture
def explorer():
    shown = schedule_explorer.ScheduleExplorer(depth=9, segment=3, ratio=2)
    shown.widget()
    return shown


def drawn(explorer) -> dict[str, str]:
    """The words of the picture, by role."""
    root = ET.fromstring(explorer.answer.svg)
    assert root.get("role") == "img"
    named = {e.get("id"): e.text for e in root.iter() if e.get("id") and e.text}
    title, description = (named[key] for key in root.get("aria-labelledby").split())
    return {"title": title, "description": description}


def test_every_control_changes_picture_and_words(explorer):
    picture, controls = explorer.answer, explorer.controls
    assert (
        "18 forward calls (9 + 9 again)" in picture.verdict
        and picture.verdict == drawn(explorer)["title"]
    )
    for name, value in (
        ("segment", 5),
        ("ratio", 8),
        ("depth", 12),
        ("schedule", "best segments"),
        ("schedule", "none"),
    ):
        before = picture.svg, picture.verdict, picture.detail
        controls[name].value = value
        assert picture.svg != before[0] and (picture.verdict, picture.detail) != before[1:], (
            name,
            value,
        )
    assert "12 forward calls (12 + 0 again)" in picture.verdict
    assert controls["segment"].disabled
    assert "Grid of 12 layers" in drawn(explorer)["description"]


def test_segments_are_never_longer_than_the_chain(explorer):
    explorer.controls["segment"].value = 9
    explorer.controls["depth"].value = 4
    assert explorer.controls["segment"].value == explorer.controls["segment"].max == 4
    assert "1 segment of 4." in explorer.answer.detail


def test_the_curve_is_measured_and_marks_where_you_are(explorer):
    assert explorer.curve == {
        k: schedule_explorer.run_chain(9, k, 2, "equal segments").peak for k in range(1, 10)
    }
    lowest = min(explorer.curve.values()) // X
    assert f"Lowest measured of these: {lowest} boundaries" in explorer.answer.detail
    here = schedule_explorer.run_chain(9, 3, 2, "equal segments")
    axes = schedules.plot_schedule(here, curve=explorer.curve, here=(3, "")).axes[2]
    line, dot = axes.lines
    assert line.get_xdata().tolist() == list(range(1, 10))
    assert (line.get_ydata() * 1024).tolist() == list(explorer.curve.values())
    assert dot.get_xydata()[0].tolist() == line.get_xydata()[2].tolist()
    best = schedule_explorer.run_chain(9, 3, 2, "best segments")
    axes = schedules.plot_schedule(best, curve=explorer.curve, here=(None, "best")).axes[2]
    assert axes.lines[1].get_ydata()[0] * 1024 == best.peak < min(explorer.curve.values())
    assert "best" in [text.get_text() for text in axes.texts]


def test_in_a_running_kernel_the_curve_follows_between_messages():
    async def drag():
        shown = schedule_explorer.ScheduleExplorer(depth=5)
        shown.widget()
        first = shown.answer.svg
        assert len(shown.curve) == 1
        shown.controls["depth"].value = 6
        await shown._task
        return first, shown

    first, shown = asyncio.run(drag())
    assert set(shown.curve) == set(range(1, 7)) and shown.answer.svg != first
    assert "Lowest measured" in shown.answer.detail


def test_the_explorer_draws_no_random_numbers_of_the_learner():
    schedule_explorer._chain.cache_clear()
    schedule_explorer.run_chain.cache_clear()
    torch.manual_seed(3)
    wanted = torch.rand(3)
    torch.manual_seed(3)
    with torch.no_grad():
        schedule_explorer.run_chain(6, 2, 1, "equal segments")
    assert torch.equal(torch.rand(3), wanted)


WRONG = """
depth=3 -> depth is 3: choose 4 to 64
segment=20 -> segment is 20: choose 1 to 16
ratio=7 -> ratio is 7: choose one of 1, 2
schedule="random" -> schedule is 'random': choose one of 'none'
colour=1 -> no setting named colour: choose from depth
"""


@pytest.mark.parametrize("row", WRONG.strip().splitlines())
def test_explorer_says_what_is_wrong(row):
    wrong, says = row.split(" -> ")
    error = TypeError if "no setting" in says else ValueError
    with pytest.raises(error, match=says):
        schedule_explorer.explore_schedule(**eval(f"dict({wrong})"))
