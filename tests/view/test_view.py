"""The pictures of memory: palette, frames, stills, bars, and what a notebook keeps of them."""

from __future__ import annotations

import io
import itertools
import re
import subprocess
import sys
import threading
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.colors import to_hex
from support.paths import ROOT

from gradmem_lib.measure.timeline import MemorySnapshot, Timeline
from gradmem_lib.names import CATEGORIES, PHASES
from gradmem_lib.units import GiB, MiB, format_bytes
from gradmem_lib.view import live, picture, schedules, style
from gradmem_lib.view import timeline_picture as stills
from gradmem_lib.view.interrupt import keep_own_lines


def timeline_of(samples: int, steps: int = 3) -> Timeline:
    """A run that looks like training: activations rise and fall, gradients and optimizer states
    stay.
    """
    rows = np.zeros((samples, 3 + len(CATEGORIES)), dtype=np.int64)
    place = np.arange(samples) * steps / samples % 1
    rows[:, 0] = np.arange(samples) * 3
    rows[:, 1] = np.select([place < 0.3, place < 0.8], [1, 2], 3)
    rows[:, 3] = 28 * MiB
    rows[:, 4] = np.where(place > 0.3, (place - 0.3) * 40 * MiB, 0)
    rows[:, 5] = 56 * MiB
    rows[:, 6] = np.where(place < 0.3, place * 200 * MiB, np.maximum(0.8 - place, 0) * 120 * MiB)
    rows[:, 7] = np.where(np.arange(samples) % 7 == 0, 5 * MiB, 0)
    rows[:, 8] = 4224
    rows[:, 2] = rows[:, 3:].sum(axis=1)
    return Timeline(rows)


def snapshot_of(timeline: Timeline, at: int) -> MemorySnapshot:
    return MemorySnapshot(
        timeline.totals[at],
        {k: v[at] for k, v in timeline.by_category.items()},
        timeline.phases[at],
    )


# The palette.

# Severe colour-blindness as linear maps of RGB (Machado, Oliveira and Fernandes 2009).
SIGHT = {
    "normal": "1 0 0  0 1 0  0 0 1",
    "protan": "0.152286 1.052583 -0.204868 0.114503 0.786281 0.099216 -0.003882 -0.048116 1.051998",
    "deutan": "0.367322 0.860646 -0.227968 0.280085 0.672501 0.047413 -0.011820 0.042940 0.968881",
    "tritan": "1.255528 -0.076749 -0.178779 -0.078411 0.930809 0.147602 0.004733 0.691367 0.303900",
}
TO_XYZ = "0.4124 0.3576 0.1805  0.2126 0.7152 0.0722  0.0193 0.1192 0.9505"


def matrix(numbers: str) -> np.ndarray:
    """Three rows of three numbers."""
    return np.array(numbers.split(), dtype=float).reshape(3, 3)


def lab(color: str, sight="normal") -> np.ndarray:
    """CIE L*a*b* of ``"#rrggbb"``, as seen with ``sight``."""
    rgb = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    linear = np.clip(matrix(SIGHT[sight]) @ linear, 0, 1)
    f = matrix(TO_XYZ) @ linear / [0.9505, 1.0, 1.089]
    f = np.where(f > 0.008856, np.cbrt(f), 7.787 * f + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


# What grows is drawn on the page itself: white, or the dark background of JupyterLab.
PALETTES = {
    "on white": [*style.COLORS.values(), "#ffffff"],
    "on black": [*style.COLORS.values(), "#111111"],
    "cells of a schedule": [
        schedules.COLORS[look]
        for look in ("forward", "dropped", "recompute", "internals", "backward")
    ],
}


@pytest.mark.parametrize("palette", PALETTES.values(), ids=PALETTES)
@pytest.mark.parametrize("sight", SIGHT)
def test_palette_survives_greyscale_and_colour_blindness(sight, palette):
    for one, other in itertools.combinations([lab(color, sight) for color in palette], 2):
        assert np.linalg.norm(one - other) > 20
        assert sight != "normal" or abs(one[0] - other[0]) > 9


def test_every_category_has_its_colour_and_a_hatch_of_its_own():
    assert set(style.COLORS) == set(style.HATCHES) == set(CATEGORIES)
    assert len({*style.HATCHES.values(), style.GROWING_HATCH}) == len(CATEGORIES) + 1


# Frames of the live plot.


def test_a_frame_holds_the_whole_picture():
    timeline = timeline_of(5000)
    peak, current = snapshot_of(timeline, timeline.peak_index), snapshot_of(timeline, 4321)
    frame = live.encode_frame(timeline, peak, current)
    head = np.frombuffer(frame, "<f8", live.HEADER_VALUES)
    n = int(head[1])
    assert 300 < n <= style.MAX_POINTS
    assert len(frame) == 8 * live.HEADER_VALUES + 4 * (8 * n + 1) <= 13_010
    assert head[3] == peak.total and head[4] == timeline.events[timeline.peak_index]
    assert PHASES[int(head[5])] == peak.phase and PHASES[int(head[7])] == current.phase
    assert head[6] == current.total
    assert head[8:14].tolist() == list(peak.by_category.values())
    assert head[14:].tolist() == list(current.by_category.values())
    body = np.frombuffer(frame, "<f4", offset=8 * live.HEADER_VALUES)[:-1].reshape(8, n)
    shown = timeline.decimate(style.MAX_POINTS)
    assert np.array_equal(body[0], shown.rows[:, 0]) and np.array_equal(body[1], shown.rows[:, 1])
    assert np.allclose(body[2:].sum(axis=0), shown.rows[:, 2], rtol=1e-6)
    assert body[2:].sum(axis=0).max() == pytest.approx(peak.total, rel=1e-6), (
        "thinning must not lose the peak"
    )


def test_a_frame_before_the_first_operation_is_a_header_alone():
    for nothing in (None, Timeline(np.zeros((0, 9), np.int64))):
        assert live.encode_frame(nothing, None, None) == bytes(8 * live.HEADER_VALUES)


def test_a_frame_with_marks_holds_what_grows_and_the_sizes_of_the_batch():
    plain, marked = timeline_of(50), timeline_of(50)
    marked.growing = np.arange(50 * 6).reshape(50, 6)
    marked.batches = [(0, 8), (60, 16)]
    frames = [np.frombuffer(live.encode_frame(t, None, None), "<f4") for t in (plain, marked)]
    both = len(frames[0]) - 1
    assert np.array_equal(frames[0][:both], frames[1][:both]) and frames[0][both] == 0
    marks = frames[1][both:]
    assert marks[0] == 6 and marks[-4:].tolist() == [0, 8, 60, 16]
    assert np.array_equal(marks[1:-4].reshape(6, 50), marked.growing.T)


# Still pictures.


@pytest.mark.parametrize("samples, budget", [(1, None), (9000, 150 * MiB)])
def test_stills_are_small_and_the_same_every_time(samples, budget):
    from PIL import Image

    def draw():
        timeline = timeline_of(samples, steps=9)
        return stills.plot_timeline(timeline, title="a run", budget=budget).png()

    first = draw()
    assert first == draw()
    assert len(first) < 60_000
    image = Image.open(io.BytesIO(first))
    assert image.width > 1000 and "Software" not in image.info
    wanted = np.array([int(style.COLORS["parameters"][i : i + 2], 16) for i in (1, 3, 5)])
    distance = np.abs(np.asarray(image.convert("RGB")).astype(int) - wanted).max(axis=2)
    assert (distance < 12).sum() > 5000, "the parameters' area is not there"


def test_a_still_states_its_peak_and_budget():
    timeline = timeline_of(300)
    figure = stills.plot_timeline(timeline, title="a run", budget=150 * MiB)
    words = " ".join(words_of(figure))
    total = timeline.totals[timeline.peak_index]
    for part in (
        "a run",
        f"{total:,} bytes",
        "budget 150.00 MiB",
        "forward",
        "backward",
        *CATEGORIES,
    ):
        assert part in words
    assert figure.axes[0].get_xlabel() == "operations" and figure.axes[0].get_ylabel() == "MiB"
    words = stills.describe(timeline, title="a run", budget=GiB)
    at = timeline.events[timeline.peak_index]
    assert f"{total:,} bytes" in words and f"operation {at:,}" in words
    assert "optimizer 56.00 MiB" in words and "1,073,741,824 bytes" in words


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("samples", [1, 2, 10, 100_000])
def test_a_block_of_any_length_is_drawn_without_a_warning(samples):
    timeline = timeline_of(samples)
    if samples == 2:
        timeline.rows[:, 0] = 0  # two moments, and no operation
    figure = stills.plot_timeline(timeline)
    figure.canvas.draw()
    numbers = [label.get_text() for label in figure.axes[0].get_xticklabels()]
    assert len(set(numbers)) == len(numbers) and "-0" not in numbers


OPERATIONS = st.lists(st.integers(0, 10**6), min_size=1, max_size=30).map(sorted)


@given(OPERATIONS)
def test_every_sample_is_as_wide_as_it_holds(operations):
    edges = stills.edges_of(operations)
    assert len(edges) == len(operations) + 1 and (np.diff(edges) > 0).all()
    for number, operation in enumerate(operations):
        later = [other for other in operations if other > operation]
        assert operation <= edges[number] < min(later, default=edges[-1])
    assert edges[-1] - operations[-1] > 0.0099 * (operations[-1] - operations[0])


@pytest.mark.parametrize("after_it", [0, 1, 2])
def test_a_peak_is_drawn_also_where_an_error_ends_the_run(after_it):
    """What the error frees are more samples of the operation that failed."""
    timeline = timeline_of(20 + after_it)
    timeline.rows[19, 6] = 10 * timeline.rows[:, 2].max()
    timeline.rows[19:, 0] = timeline.rows[19, 0]
    timeline.rows[:, 2] = timeline.rows[:, 3:].sum(axis=1)
    lines = stills.plot_timeline(timeline).axes[0].lines
    (dot,) = (line for line in lines if line.get_marker() == "o")
    (outline,) = (line for line in lines if line.get_zorder() == 3)
    x, y = outline.get_data()
    at = int(np.searchsorted(x, dot.get_xdata()[0], side="right")) - 1
    width = (x[at + 1] - x[at]) / (x[-1] - x[0])
    assert y[at] == dot.get_ydata()[0] and width * (1 + after_it) > 0.009


def test_a_long_title_does_not_run_into_the_figures_beside_it():
    figure = stills.plot_timeline(timeline_of(100), title="thirty steps of a model " * 9)
    title, peak = figure.texts[:2]
    assert title.get_text().endswith("…")
    assert title.get_window_extent().x1 < peak.get_window_extent().x0


def words_of(figure) -> list[str]:
    return [text.get_text() for text in [*figure.texts, *figure.axes[0].texts]]


def test_bytes_that_grow_are_a_band_at_the_foot():
    timeline = timeline_of(300)
    plain = words_of(stills.plot_timeline(timeline))
    assert stills.GROWING_WORDS not in plain and not any("batch" in words for words in plain)
    assert "grow" not in stills.describe(timeline)
    timeline.growing = np.zeros((300, 6), dtype=np.int64)
    timeline.growing[:, 0] = np.arange(300) // 100 * 8 * MiB
    figure = stills.plot_timeline(timeline)
    at_peak = format_bytes(int(timeline.growing[timeline.peak_index].sum()))
    assert stills.GROWING_WORDS in words_of(figure) and at_peak in words_of(figure)
    assert f"{at_peak} of it grow from step to step" in stills.describe(timeline)
    band, parameters, *_ = figure.axes[0].collections
    assert band.get_hatch() == style.GROWING_HATCH
    # The band rises to 16 MiB, and what is drawn on it is as high in all as without it.
    assert band.get_datalim(figure.axes[0].transData).y1 == 16
    assert parameters.get_datalim(figure.axes[0].transData).y1 == 28


def test_changes_of_the_batch_are_marked_unless_they_are_too_many():
    timeline = timeline_of(300)
    timeline.batches = [(0, 8), (300, 16), (310, 32)]
    assert [words for words in words_of(stills.plot_timeline(timeline)) if "batch" in words] == [
        "batch 8",
        "batch 16",  # and no third one on top of it
    ]
    said = "Rows of the batch: 8 from operation 0 on, 16 from operation 300 on, 32 from"
    assert said in stills.describe(timeline)
    timeline.batches = [(3 * n, 1 + n % 7) for n in range(90)]
    assert not any("batch" in words for words in words_of(stills.plot_timeline(timeline)))
    assert "The batch has 1 to 7 rows." in stills.describe(timeline)


def interrupted_in_a_library() -> KeyboardInterrupt:
    """A ``KeyboardInterrupt`` out of a library's function that was called from here."""
    import json

    class Endless:
        def __iter__(self):
            raise KeyboardInterrupt

    try:
        json.JSONEncoder(default=lambda value: list(value)).encode({"key": Endless()})
    except KeyboardInterrupt as interrupt:
        keep_own_lines()
        return interrupt


def test_an_interrupt_shows_the_lines_of_no_library():
    entry, files = interrupted_in_a_library().__traceback__, []
    while entry is not None:
        files.append(entry.tb_frame.f_code.co_filename)
        entry = entry.tb_next
    assert set(files) == {__file__} and len(files) == 3


def test_a_picture_in_a_notebook_at_work_can_be_read_out(monkeypatch):
    timeline = timeline_of(50)
    figure = stills.plot_timeline(timeline, title='a "run"')
    built, metadata = figure._repr_mimebundle_()
    assert set(built) == {"image/png", "text/plain"}
    assert metadata["image/png"]["alt"] == stills.describe(timeline, title='a "run"')
    monkeypatch.setattr(picture, "live_enabled", lambda: True)
    at_work, _ = figure._repr_mimebundle_()
    page = ElementTree.fromstring(re.sub(r"(<img [^>]*)>", r"\1/>", at_work.pop("text/html")))
    (image,) = page.iter("img")
    assert image.get("alt") == metadata["image/png"]["alt"]
    assert image.get("src") == "data:image/png;base64," + built["image/png"]
    assert at_work == built


def test_settings_are_the_pictures_own_inside_and_the_readers_outside():
    import matplotlib

    before = dict(matplotlib.rcParams)
    with matplotlib.rc_context({"font.size": 30, "text.color": "red"}):
        title = stills.plot_timeline(timeline_of(50), title="x").texts[0]
    assert to_hex(title.get_color()) == style.INK
    assert dict(matplotlib.rcParams) == before


def test_two_threads_that_draw_leave_the_readers_settings():
    import matplotlib

    before = dict(matplotlib.rcParams)
    inside = [threading.Event(), threading.Event()]
    may_leave = [threading.Event(), threading.Event()]

    def draw(number):
        with style.style():
            inside[number].set()
            may_leave[number].wait(10)

    threads = [threading.Thread(target=draw, args=(number,)) for number in (0, 1)]
    for thread, entered in zip(threads, inside, strict=True):
        thread.start()
        entered.wait(0.5)  # the second one waits for the first
    for thread, leave in zip(threads, may_leave, strict=True):
        leave.set()
        thread.join()
    assert dict(matplotlib.rcParams) == before


def test_nothing_recorded_is_said_in_words():
    empty = Timeline(np.zeros((0, 9), np.int64))
    with pytest.raises(ValueError, match="no samples"):
        stills.plot_timeline(empty)
    data, _ = live.Moving("x").bundle()
    assert data == {
        "text/html": "<em>Memory of x: nothing was recorded.</em>",
        "text/plain": "MemoryTracker plot: x",
    }


# In a script.

SCRIPT = """
import sys
import torch
from gradmem_lib import MemoryTracker
from gradmem_lib.view.live import LivePlot, show_timeline
model = torch.nn.Linear(300, 300)
with MemoryTracker(model, title="a layer") as tracker:
    for _ in range(20):
        model(torch.ones(50, 300)).sum().backward()
plot = LivePlot(title="x")
plot.start()
plot.push(tracker.timeline, tracker.current)
plot.finish(tracker.timeline, tracker.peak)
show_timeline(tracker.timeline)
drawing = ("anywidget", "ipywidgets", "matplotlib", "matplotlib.pyplot")
print([name for name in drawing if name in sys.modules])
"""


def test_a_plain_script_draws_nothing_and_imports_nothing_for_it():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_several_ranks_stand_side_by_side_on_one_scale():
    lower, higher = timeline_of(300), timeline_of(600)
    higher.rows[:, 2:] *= 3
    figure = stills.plot_ranks([lower, higher, None], title="three ranks", budget=900 * MiB)
    axes = figure.axes
    assert axes[0].get_ylim() == axes[1].get_ylim() and axes[0].get_ylim()[1] * MiB > max(
        higher.totals
    )
    shown = {text.get_text() for text in figure.texts}
    peaks = {f"peak {format_bytes(max(timeline.totals))}" for timeline in (lower, higher)}
    assert {"rank 0", "rank 1", "rank 2", *peaks} <= shown
    assert "not measured to its end" in [text.get_text() for text in axes[2].texts]
    assert {"three ranks", *CATEGORIES} <= shown
