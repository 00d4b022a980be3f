"""The pictures of memory: palette, frames, stills, bars, and what a notebook keeps of them."""

from __future__ import annotations

import asyncio
import base64
import io
import itertools
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import nbformat
import numpy as np
import pytest

from gradmem_lib.measure.timeline import MemorySnapshot, Timeline
from gradmem_lib.names import CATEGORIES, PHASES
from gradmem_lib.planning.cards import CARDS, find_card
from gradmem_lib.planning.cost import beyond
from gradmem_lib.prediction import allocator
from gradmem_lib.techniques import accounting
from gradmem_lib.units import GiB, MiB, format_bytes
from gradmem_lib.view import bars, explorer, live, style
from gradmem_lib.view import timeline as stills

ROOT = Path(__file__).resolve().parent.parent


def timeline_of(samples: int, steps: int = 3) -> Timeline:
    """A run that looks like training: activations rise and fall, gradients and optimizer states stay."""
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
        timeline.totals[at], {k: v[at] for k, v in timeline.by_category.items()}, timeline.phases[at]
    )


# The palette ---------------------------------------------------------------------------------------------------------

# Severe colour-blindness as linear maps of RGB (Machado, Oliveira and Fernandes 2009).
SIGHT = {
    "normal": np.eye(3),
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}  # fmt: skip


def lab(color: str, sight="normal") -> np.ndarray:
    """CIE L*a*b* of ``"#rrggbb"``, as seen with ``sight``."""
    rgb = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    linear = np.clip(np.array(SIGHT[sight]) @ linear, 0, 1)
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ linear
    f = xyz / [0.9505, 1.0, 1.089]
    f = np.where(f > 0.008856, np.cbrt(f), 7.787 * f + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def test_palette_survives_greyscale_by_lightness_and_by_hatch():
    assert set(style.COLORS) == set(style.HATCHES) == set(CATEGORIES)
    lightness = [lab(color)[0] for color in style.COLORS.values()]
    assert min(abs(a - b) for a, b in itertools.combinations(lightness, 2)) > 9
    assert len(set(style.HATCHES.values())) == len(CATEGORIES)


@pytest.mark.parametrize("sight", SIGHT)
def test_palette_survives_colour_blindness(sight):
    seen = [lab(color, sight) for color in style.COLORS.values()]
    assert min(np.linalg.norm(a - b) for a, b in itertools.combinations(seen, 2)) > 20


# Frames of the live plot ---------------------------------------------------------------------------------------------


def test_a_frame_holds_the_whole_picture():
    timeline = timeline_of(5000)
    peak, current = snapshot_of(timeline, timeline.peak_index), snapshot_of(timeline, 4321)
    frame = live.encode_frame(timeline, peak, current)
    head = np.frombuffer(frame, "<f8", live.HEADER_VALUES)
    n = int(head[1])
    assert 300 < n <= style.MAX_POINTS
    assert len(frame) == 8 * live.HEADER_VALUES + 4 * 8 * n <= 13_000
    assert head[3] == peak.total and head[4] == timeline.events[timeline.peak_index]
    assert PHASES[int(head[5])] == peak.phase and PHASES[int(head[7])] == current.phase
    assert head[6] == current.total
    assert head[8:14].tolist() == list(peak.by_category.values())
    assert head[14:].tolist() == list(current.by_category.values())
    body = np.frombuffer(frame, "<f4", offset=8 * live.HEADER_VALUES).reshape(8, n)
    shown = timeline.decimate(style.MAX_POINTS)
    assert np.array_equal(body[0], shown.rows[:, 0]) and np.array_equal(body[1], shown.rows[:, 1])
    assert np.allclose(body[2:].sum(axis=0), shown.rows[:, 2], rtol=1e-6)
    assert body[2:].sum(axis=0).max() == pytest.approx(peak.total, rel=1e-6), (
        "thinning must not lose the peak"
    )


def test_a_frame_before_the_first_operation_is_a_header_alone():
    for nothing in (None, Timeline(np.zeros((0, 9), np.int64))):
        assert live.encode_frame(nothing, None, None)[8:] == bytes(8 * (live.HEADER_VALUES - 1))


# Still pictures ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("samples, budget", [(1, None), (2, 10**9), (200, 150 * MiB), (9000, 2 * GiB)])
def test_stills_are_small_and_the_same_every_time(samples, budget):
    from PIL import Image

    def draw():
        return style.png(stills.plot_timeline(timeline_of(samples, steps=9), title="a run", budget=budget))

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
    words = " ".join(t.get_text() for t in [*figure.texts, *figure.axes[0].texts])
    total = timeline.totals[timeline.peak_index]
    for part in ("a run", f"{total:,} bytes", "budget 150.00 MiB", "forward", "backward", *CATEGORIES):
        assert part in words
    assert figure.axes[0].get_xlabel() == "operations" and figure.axes[0].get_ylabel() == "MiB"


def test_a_budget_far_above_the_run_does_not_flatten_it():
    timeline = timeline_of(300)
    highest = max(timeline.totals)
    figure = stills.plot_timeline(timeline, budget=40 * GiB)
    assert figure.axes[0].get_ylim()[1] * MiB < 1.2 * highest
    assert any("above this picture" in t.get_text() for t in figure.axes[0].texts)


def test_an_own_axes_and_settings_are_respected():
    import matplotlib
    from matplotlib.figure import Figure

    before = dict(matplotlib.rcParams)
    figure = Figure()
    assert stills.plot_timeline(timeline_of(50), ax=figure.subplots()) is figure
    assert dict(matplotlib.rcParams) == before


def test_nothing_recorded_is_said_in_words():
    empty = Timeline(np.zeros((0, 9), np.int64))
    with pytest.raises(ValueError, match="no samples"):
        stills.plot_timeline(empty)
    data, _ = live.still_bundle(empty, title="x")
    assert data == {
        "text/html": "<em>Memory of x: nothing was recorded.</em>",
        "text/plain": "MemoryTracker plot: x",
    }


def test_description_names_the_peak_exactly():
    timeline = timeline_of(300)
    words = stills.describe(timeline, title="a run", budget=GiB)
    at = timeline.peak_index
    assert f"{timeline.totals[at]:,} bytes" in words and f"operation {timeline.events[at]:,}" in words
    assert "optimizer 56.00 MiB" in words and "1,073,741,824 bytes" in words


def test_phase_runs_join_neighbours():
    runs = stills.phase_runs([0, 3, 6, 9, 12], ["forward", "forward", "backward", "idle", "idle"])
    assert runs == [("forward", 0, 6), ("backward", 6, 9), ("idle", 9, 12)]


@pytest.mark.parametrize("span, step", [(100, 20), (45, 10), (1.2, 0.5), (0, None)])
def test_axis_steps_are_round(span, step):
    assert style.nice_step(span) == pytest.approx(step) if step else style.nice_step(span) > 0


# Bars ----------------------------------------------------------------------------------------------------------------

SVG = "{http://www.w3.org/2000/svg}"


def test_bars_are_in_proportion_and_described():
    parts = {"parameters": 14 * GiB, "gradients": 7 * GiB, "optimizer": 28 * GiB}
    root = ET.fromstring(bars.bar_svg({"a < b": parts}, cards={"24 GB card": 24 * GiB}, title="T & U"))
    assert root.get("role") == "img"
    named = {e.get("id"): e.text for e in root.iter() if e.get("id") and e.text}
    title, description = (named[key] for key in root.get("aria-labelledby").split())
    assert title == "T & U" and "a < b: 49.00 GiB" in description and "24 GB card, 24.00 GiB" in description
    boxes = {e.get("data-category"): e for e in root.iter(f"{SVG}rect") if e.get("class") == "gm-part"}
    assert set(boxes) == set(parts)
    per_byte = {float(box.get("width")) / parts[name] for name, box in boxes.items()}
    assert max(per_byte) == pytest.approx(min(per_byte), rel=0.01)
    patterns = {f"url(#{e.get('id')})" for e in root.iter(f"{SVG}pattern")}
    assert {box.get("fill") for box in boxes.values()} <= patterns
    line = next(e for e in root.iter(f"{SVG}line") if e.get("class") == "gm-card")
    start = float(boxes["parameters"].get("x"))
    assert (float(line.get("x1")) - start) / (24 * GiB) == pytest.approx(max(per_byte), rel=0.01)


def test_bars_are_the_same_every_time_and_do_not_share_names():
    one, other = ({"x": {"activations": n * GiB}} for n in (1, 2))
    assert bars.bar_svg(one) == bars.bar_svg(one)
    ids = [
        {e.get("id") for e in ET.fromstring(bars.bar_svg(these)).iter() if e.get("id")}
        for these in (one, other)
    ]
    assert not ids[0] & ids[1]


def test_bars_refuse_a_category_without_a_colour():
    with pytest.raises(ValueError, match="no colour for logits: the categories are parameters"):
        bars.bar_svg({"x": {"logits": 1}})


# The explorer --------------------------------------------------------------------------------------------------------


def test_verdict_changes_at_the_last_byte():
    card = CARDS["RTX 3070 8GB"]
    room = card.nbytes - allocator.CONTEXT - allocator.workspace(card.capability)
    last, over = (explorer.Answer({"parameters": n}, "", reserved=n) for n in (room, room + 1))
    assert explorer.verdict(last, card.name).startswith("Fits with 0 B to spare") and explorer.fits(
        last, card.name
    )
    assert explorer.verdict(over, card.name).startswith("Exceeds by 1 B") and not explorer.fits(
        over, card.name
    )


def test_verdict_is_that_of_plan_where_the_tensors_alone_would_fit():
    settings = explorer.DEFAULTS | {"batch_size": 1, "seq_len": 4096, "card": "6 GiB"}
    card, found = find_card("6 GiB"), explorer.answer(settings)
    prediction = explorer.trace(settings)
    needs = prediction.peak.total + sum(beyond(prediction, card.capability).values())
    assert found.total < card.nbytes < needs
    assert explorer.verdict(found, "6 GiB").startswith(f"Exceeds by {format_bytes(needs - card.nbytes)}: ")
    assert "CUDA context" in explorer.detail(found, settings)
    assert explorer.verdict(explorer.preview(settings), "6 GiB").startswith("Exceeds by")


@pytest.mark.parametrize("model", accounting.SHAPES)
@pytest.mark.parametrize("checkpointing", explorer.CHECKPOINTING.values())
def test_every_model_has_a_picture(model, checkpointing):
    settings = explorer.DEFAULTS | {"model": model, "checkpointing": checkpointing}
    found = explorer.preview(settings)
    root = ET.fromstring(explorer.picture(settings, found))
    shown = sum(int(e.get("data-bytes")) for e in root.iter(f"{SVG}rect") if e.get("data-bytes"))
    assert shown == found.total == explorer.estimate(settings).total


@pytest.mark.parametrize("model", accounting.SHAPES)
def test_a_shape_and_its_config_are_the_same_model(model):
    shape = accounting.SHAPES[model]
    assert accounting.Shape.from_config(shape.config(), model) == shape


TINY = {"model": "tiny Llama", "batch_size": 4, "seq_len": 256}


@pytest.mark.parametrize(
    "changed",
    [
        *({"precision": name} for name in accounting.PRECISIONS),
        *({"optimizer": name, "batch_size": 1, "seq_len": 32} for name in explorer.OPTIMIZERS.values()),
        {"attention": "eager"},
        {"checkpointing": "per-layer"},
        {"checkpointing": 2},
        {"model": "GPT-2", "seq_len": 2048, "batch_size": 1, "checkpointing": 16},
    ],
    ids=str,
)
def test_the_trace_is_of_what_the_closed_form_describes(changed):
    settings = explorer.DEFAULTS | TINY | changed
    formula, found = explorer.estimate(settings), explorer.answer(settings)
    assert found.total == pytest.approx(formula.total, rel=0.02)
    assert "by an exact trace" in found.words and f"{abs(formula.total - found.total):,} bytes" in found.words


def test_what_no_recipe_can_train_keeps_the_closed_form_and_says_why():
    settings = explorer.DEFAULTS | TINY | {"precision": "float32-master", "optimizer": "sgd"}
    found = explorer.answer(settings)
    assert found.by_category == explorer.estimate(settings).by_category
    assert "no exact figure: float32-master is written for AdamW" in found.words


def test_controls_change_picture_and_words(monkeypatch):
    monkeypatch.setattr(explorer, "answer", explorer.preview)
    shown = explorer.Explorer(model="Llama-2-7B", card="A100 80GB", batch_size=3)
    shown.widget()
    picture, before = shown._picture, shown._picture.svg
    assert picture.fits
    shown.controls["precision"].value = "float32"
    assert picture.svg != before and not picture.fits and picture.verdict.startswith("Exceeds by")
    for name in ("model", "card", "batch_size", "seq_len", "optimizer", "attention", "checkpointing"):
        before = picture.svg
        options = [o[1] if isinstance(o, tuple) else o for o in shown.controls[name].options]
        shown.controls[name].value = next(o for o in options if o != shown.controls[name].value)
        assert picture.svg != before, name


def test_only_where_a_slider_comes_to_rest_is_traced(monkeypatch):
    asked = []

    def traced(settings):
        asked.append(settings["batch_size"])
        return explorer.Answer({"parameters": settings["batch_size"]}, "Traced.")

    monkeypatch.setattr(explorer, "answer", traced)
    timers = []

    class Timer:
        def __init__(self, act):
            self.act, self.cancelled = act, False
            timers.append(self)

        def cancel(self):
            self.cancelled = True

    class Loop:
        call_soon_threadsafe = staticmethod(lambda act: act())
        call_later = staticmethod(lambda seconds, act: Timer(act))

    shown = explorer.Explorer()
    shown._loop = Loop()
    shown.widget()
    picture, controls = shown._picture, shown.controls
    for size in (8, 16, 32):
        controls["batch_size"].value = size
        assert picture.pending and "By the closed form" in picture.detail
    assert [timer.cancelled for timer in timers] == [True, True, True, False] and not asked
    timers[-1].act()
    assert asked == [32] and not picture.pending
    assert "Traced." in picture.detail and "of 32 bytes" in picture.detail
    controls["card"].value = "RTX 2060 6GB"
    assert not picture.pending, "another card needs no new trace"
    controls["batch_size"].value = 64
    assert picture.pending
    controls["batch_size"].value = 32
    assert not picture.pending and "Traced." in picture.detail, "what was traced is kept"
    assert asked == [32]


def test_a_trace_that_comes_too_late_is_kept_and_not_shown(monkeypatch):
    async def drag():
        shown = explorer.Explorer()
        shown.widget()

        def slow(settings):  # the slider moves while this is computed
            if settings["batch_size"] == 8:
                shown.controls["batch_size"].value = 16
            return explorer.Answer({"parameters": settings["batch_size"]}, "Traced.")

        monkeypatch.setattr(explorer, "answer", slow)
        drawn = []
        shown._picture.observe(lambda change: drawn.append(change.new), "detail")
        shown.controls["batch_size"].value = 8
        while shown._picture.pending:
            await asyncio.sleep(0.01)
        assert "of 16 bytes" in drawn[-1] and not any("of 8 bytes" in words for words in drawn)
        shown.controls["batch_size"].value = 8
        assert not shown._picture.pending and "of 8 bytes" in drawn[-1]

    asyncio.run(asyncio.wait_for(drag(), 60))


@pytest.mark.parametrize(
    "wrong, error, says",
    [
        ({"model": "GPT-9"}, ValueError, "model is 'GPT-9': choose one of 'tiny Llama'"),
        ({"card": "abacus"}, ValueError, "no card is known as 'abacus'"),
        ({"precision": "fp3"}, ValueError, "precision is 'fp3'"),
        ({"colour": 1}, TypeError, "no setting named colour: choose from model"),
    ],
)
def test_explorer_says_what_is_wrong(wrong, error, says):
    with pytest.raises(error, match=says):
        explorer.explore(**wrong)


# In a script, and in a kernel ----------------------------------------------------------------------------------------

RUN = """
import torch
from gradmem_lib import MemoryTracker
model = torch.nn.Linear(300, 300)
with MemoryTracker(model, title="a layer", live={live}) as tracker:
    for _ in range(20):
        model(torch.ones(50, 300)).sum().backward()
"""


def test_a_plain_script_draws_nothing_and_imports_nothing_for_it():
    code = RUN.format(live=None) + (
        "import sys\n"
        "from gradmem_lib.view.live import LivePlot, show_timeline\n"
        "plot = LivePlot(title='x'); plot.start(); plot.push(tracker.timeline, tracker.peak, tracker.current)\n"
        "plot.finish(tracker.timeline, tracker.peak); show_timeline(tracker.timeline)\n"
        "print([m for m in ('anywidget', 'ipywidgets', 'matplotlib', 'matplotlib.pyplot') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


PLOT = """
from gradmem_lib.view.live import LivePlot, show_timeline
plot = LivePlot(title="a layer", budget=10**6)
plot.start()
for _ in range(3):
    plot.push(tracker.timeline, tracker.peak, tracker.current, "forward")
try:
    raise KeyboardInterrupt
except KeyboardInterrupt:
    plot.finish(tracker.timeline, tracker.peak)
"""
LEFT = """
import sys
widgets = sys.modules.get("ipywidgets")
print("pyplot" if "matplotlib.pyplot" in sys.modules else "", [type(w).__name__ for w in (
    widgets.widgets.widget._instances.values() if widgets else []) if type(w).__name__ == "MemoryView"])
"""


def executed(env_live: str, monkeypatch) -> list[list]:
    """The outputs of each cell of a small notebook, run in a real kernel."""
    from nbclient import NotebookClient

    monkeypatch.setenv("GRADMEM_LIVE", env_live)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    cells = [
        RUN.format(live=False), PLOT, LEFT, "show_timeline(tracker.timeline, title='a layer')",
        "from gradmem_lib.view.explorer import explore\nexplore()",
        "show_timeline(type(tracker.timeline)(tracker.timeline.rows[:0]))", "tracker.plot()",
    ]  # fmt: skip
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c.strip()) for c in cells])
    NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    return [cell.outputs for cell in notebook.cells]


def test_a_notebook_keeps_the_same_text_and_a_picture_with_and_without_widgets(monkeypatch):
    moving, still = executed("1", monkeypatch), executed("0", monkeypatch)
    view = "application/vnd.jupyter.widget-view+json"
    for outputs in (moving, still):
        _, plot, left, shown, explored, empty, figure = outputs
        assert [len(cell) for cell in outputs] == [0, 1, 1, 1, 1, 1, 1]
        for cell, text in ((plot, "MemoryTracker plot: a layer"), (shown, "MemoryTracker plot: a layer"),
                           (explored, "Memory explorer"), (figure, "Memory figure")):  # fmt: skip
            assert cell[0].data["text/plain"] == text
            assert base64.b64decode(cell[0].data["image/png"]).startswith(b"\x89PNG")
        assert set(plot[0].data) == {"image/png", "text/plain"}
        assert "Peak:" in plot[0].metadata["image/png"]["alt"]
        assert left[0].text.strip() == "[]", "pyplot was imported, or a widget was left behind"
        assert "nothing was recorded" in empty[0].data["text/html"]
    assert view in moving[3][0].data and view in moving[4][0].data
    assert not any(view in output.get("data", {}) for cell in still for output in cell)
