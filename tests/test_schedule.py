"""The picture of a schedule: events of real steps against independent counts, its bytes against the tracker, the explorer."""

from __future__ import annotations

import asyncio
import base64
import io
import itertools
import xml.etree.ElementTree as ET

import nbformat
import numpy as np
import pytest
import torch
from test_view import ROOT, SIGHT, lab
from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.checkpoint import checkpoint

from gradmem_lib.measure import schedule_record
from gradmem_lib.measure.schedule_record import record_schedule
from gradmem_lib.measure.tracker import MemoryTracker
from gradmem_lib.techniques.checkpointing import checkpoint_layers
from gradmem_lib.view import schedule_explorer, schedules
from gradmem_lib.view.style import png

SVG = "{http://www.w3.org/2000/svg}"
X = 4 * 32 * 8  # bytes of a batch


class Layer(nn.Module):
    """Keeps ``ratio`` batches for backward, and writes down when it runs."""

    def __init__(self, index: int, calls: list[int], ratio: int = 3):
        super().__init__()
        self.index, self.calls = index, calls
        self.inside = nn.Sequential(nn.Linear(8, 8 * ratio), nn.ReLU(inplace=True), nn.Linear(8 * ratio, 8))
        self.requires_grad_(False)

    def forward(self, x):
        self.calls.append(self.index)
        return x + self.inside(x)


def chain(n: int, ratio: int = 3):
    calls: list[int] = []
    return nn.Sequential(*(Layer(i, calls, ratio) for i in range(n))), calls


def in_segments(layers, segments, x, *, reentrant=False, keep_last=True):
    """A schedule by hand: the last segment runs without a checkpoint."""
    start = 0
    for i, length in enumerate(segments):
        part = layers[start : start + length]
        kept = keep_last and i == len(segments) - 1
        x = part(x) if kept else checkpoint(part, x, use_reentrant=reentrant)
        start += length
    return x


def batch():
    return torch.randn(32, 8, requires_grad=True)


def step_of(layers, segments, **options):
    x = batch()
    return lambda: torch.autograd.grad(in_segments(layers, segments, x, **options).sum(), x)


# What ran, and in which order ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("segments", [[8], [4, 4], [3, 3, 2], [1] * 8])
def test_forward_calls_are_those_that_the_layers_counted(segments):
    layers, calls = chain(8)
    record = record_schedule(layers, step_of(layers, segments))
    assert record.ran("forward", "recompute") == calls
    assert record.forward_calls == len(calls) == 16 - segments[-1]
    assert record.ran("forward") == list(range(8))
    assert record.ran("backward") == list(range(7, -1, -1))


def test_each_segment_runs_again_just_before_its_backward():
    layers, _ = chain(8)
    record = record_schedule(layers, step_of(layers, [3, 3, 2]))
    ran = [f"{event.kind[0]}{event.layer}" for event in record.events]
    assert " ".join(ran) == "f0 f1 f2 f3 f4 f5 f6 f7 o-1 b7 b6 r3 r4 r5 b5 b4 b3 r0 r1 r2 b2 b1 b0"
    assert record.looks[:9] == ["dropped"] * 6 + ["forward"] * 2 + [""]
    stops = [event.stop for event in record.events]
    assert [event.start for event in record.events] == [0, *stops[:-1]] and stops[-1] == len(record.totals)


def test_reentrant_checkpoints_are_heard_as_well():
    layers, calls = chain(6)
    x = batch()
    record = record_schedule(layers, lambda: in_segments(layers, [3, 3], x, reentrant=True).sum().backward())
    assert record.ran("forward", "recompute") == calls
    assert record.ran("recompute") == [0, 1, 2]
    assert record.ran("backward") == [5, 4, 3, 2, 1, 0]
    assert record.looks[:6] == ["dropped"] * 3 + ["forward"] * 3


class ByHand(torch.autograd.Function):
    """A checkpoint as a learner writes it."""

    @staticmethod
    def forward(ctx, run, x):
        ctx.run = run
        ctx.save_for_backward(x)
        return run(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.run(x)
        torch.autograd.backward(out, grad)
        return None, x.grad


def test_a_checkpoint_written_by_hand():
    layers, calls = chain(6)
    x = batch()
    first, second = layers[:2], layers[2:4]

    def step():
        layers[4:](ByHand.apply(second, ByHand.apply(first, x))).sum().backward()

    record = record_schedule(layers, step)
    assert record.ran("forward", "recompute") == calls == [0, 1, 2, 3, 4, 5, 2, 3, 0, 1]
    assert record.ran("recompute") == [2, 3, 0, 1]
    assert record.ran("backward") == [5, 4, 3, 2, 1, 0]
    turn = [event.kind for event in record.events].index("outside")
    assert [layer for layer in range(6) if record.internals[layer, turn]] == [4, 5]


def test_nested_segments_run_some_layers_three_times():
    layers, calls = chain(8)
    x = batch()
    with checkpoint_layers(layers, [[2, 2], 4]):
        record = record_schedule(layers, lambda: layers(x).sum().backward())
    assert record.ran("forward", "recompute") == calls
    assert record.ran("recompute") == [0, 1, 2, 3, 0, 1]
    again = [
        look for look, event in zip(record.looks, record.events, strict=True) if event.kind == "recompute"
    ]
    assert again == ["redropped"] * 2 + ["recompute"] * 4


@pytest.mark.parametrize("every", [1, 2, [2, 1, 2]])
def test_layers_without_submodules(every):
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    x = batch()
    with checkpoint_layers(layers, every):
        record = record_schedule(layers, lambda: layers(x).sum().backward())
    assert record.ran("forward") == [0, 1, 2, 3, 4] and record.ran("backward") == [4, 3, 2, 1, 0]
    assert record.ran("recompute") == {1: [4, 3, 2, 1, 0], 2: [4, 2, 3, 0, 1]}.get(
        every if every in (1, 2) else 0, [2, 0, 1]
    )


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return x * self.scale


def test_layers_that_are_run_by_their_forward_are_known_by_their_weights():
    layers = [Scale() for _ in range(4)]
    x = torch.randn(32, 8)

    def step():
        out = x
        for layer in layers:
            out = layer.forward(out)
        out.backward(torch.ones(32, 8))

    record = record_schedule(layers, step)
    assert record.ran("forward") == [0, 1, 2, 3] and record.ran("backward") == [3, 2, 1, 0]


@pytest.mark.parametrize("how", ["none", "transformers", "segments"])
def test_a_llama(how):
    from gradmem_lib.course.models import tiny_llama

    model = tiny_llama(layers=4, hidden=32, heads=2, intermediate=64, vocab=64)
    layers = model.model.layers
    tokens = torch.arange(64).view(2, 32)
    calls: list[int] = []
    hooks = [
        layer.self_attn.register_forward_pre_hook(lambda *_, i=i: calls.append(i))
        for i, layer in enumerate(layers)
    ]
    handle = checkpoint_layers(model, [2, 2], keep_last=False) if how == "segments" else None
    if how == "transformers":
        older = model.gradient_checkpointing_enable  # transformers before 5.23
        getattr(model, "activation_checkpointing_enable", older)({"use_reentrant": False})
    record = record_schedule(layers, lambda: model(input_ids=tokens, labels=tokens).loss.backward())
    assert record.ran("forward", "recompute") == calls
    assert (
        record.ran("recompute") == {"none": [], "transformers": [3, 2, 1, 0], "segments": [2, 3, 0, 1]}[how]
    )
    assert record.ran("backward") == [3, 2, 1, 0]
    assert [e.kind for e in record.events].count("outside") == 2, "the embedding, and the head with the loss"
    assert record.inputs.max() == 4 * 2 * 32 * 32, "a mask or position table was taken for a layer's input"
    weights = sum(p.nbytes for p in model.parameters())
    assert record.live["left"][-1] == weights, "what is left of the step is its gradients"
    for hook in hooks:
        hook.remove()
    if handle:
        handle.remove()


# What was stored, and when -------------------------------------------------------------------------------------------


def test_internals_are_stored_from_the_last_forward_to_backward():
    layers, _ = chain(8, ratio=5)
    record = record_schedule(layers, step_of(layers, [3, 3, 2]))
    for layer in range(8):
        ran = [t for t, event in enumerate(record.events) if event.layer == layer]
        *_, last_forward, backward = ran
        assert record.stored(layer) == [(last_forward, backward)]
        assert set(record.internals[layer]) == {0, 5 * X}


def test_boundaries_are_stored_from_when_they_are_made():
    layers, _ = chain(8)
    record = record_schedule(layers, step_of(layers, [3, 3, 2]))
    at = {(event.kind, event.layer): t for t, event in enumerate(record.events)}
    # The input of the second segment is the output of layer 2, and is let go with the backward of layer 3.
    assert record.stored(3, "inputs") == [(at["forward", 2], at["backward", 3])]
    assert record.stored(0, "inputs") == [(0, len(record.events))], "the caller still holds the batch"
    for layer in (1, 2, 4, 5, 7):  # inside a segment: handed on, and gone when the next layer has run
        assert all(stop - start == 1 for start, stop in record.stored(layer, "inputs"))
    assert set(record.inputs[3]) == {0, X}
    with pytest.raises(ValueError, match='takes "internals" or "inputs", not \'outputs\''):
        record.stored(3, "outputs")


@pytest.mark.parametrize("segments", [[12], [4, 4, 4], [5, 4, 2, 1]])
def test_the_peak_is_the_trackers(segments):
    layers, _ = chain(12)
    step = step_of(layers, segments)
    record = record_schedule(layers, step)
    with MemoryTracker(layers, live=False) as tracker:
        step()
    parameters = tracker.peak.by_category["parameters"]
    assert tracker.peak.by_category["other"] == X, "the batch"
    assert record.peak == tracker.peak.total - parameters
    assert record.peak == sum(int(part[record.peak_operation]) for part in record.live.values())
    event = record.events[record.peak_event]
    assert event.start <= record.peak_operation < event.stop
    kinds = {phase for phase, peak in tracker.peak_by_phase.items() if peak == tracker.peak.total}
    assert kinds == {"backward"} and event.kind in ("backward", "recompute")


def test_gradients_of_parameters_are_left_after_the_step():
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    x = torch.randn(32, 8)
    record = record_schedule(layers, lambda: layers(x).sum().backward())
    assert record.live["left"][-1] == 4 * (8 * 8 + 8) * 4
    assert record.totals[-1] == record.live["left"][-1] + X + 2 * 4, "the batch, the loss and its gradient"


# Leaving no trace ----------------------------------------------------------------------------------------------------


def listeners():
    hooks = (torch_module._global_forward_pre_hooks, torch_module._global_forward_hooks)
    return [len(h) for h in hooks] + [_get_current_dispatch_mode()]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_nothing_listens_after_an_exception(error):
    layers, _ = chain(3)
    before = listeners()

    def step():
        assert listeners() != before
        in_segments(layers, [2, 1], batch()).sum().backward()
        raise error("stop")

    with pytest.raises(error, match="stop"):
        record_schedule(layers, step)
    assert listeners() == before


def test_gradients_and_random_numbers_are_the_same_as_without_a_recorder():
    layers, _ = chain(4)
    layers.insert(2, nn.Dropout(0.3))
    x = batch()

    def step():
        torch.manual_seed(1)
        (gradient,) = torch.autograd.grad(in_segments(layers, [2, 2, 1], x).square().sum(), x)
        return gradient

    plain, heard = step(), []
    record_schedule(layers, lambda: heard.append(step()))
    assert torch.equal(plain, heard[0])


@pytest.mark.parametrize(
    "layers, step, error, says",
    [
        ([nn.Linear(8, 8), 3], lambda: None, TypeError, "was given int.*for a Llama, model.model.layers"),
        ([], lambda: None, TypeError, "was given none"),
        ([nn.Linear(8, 8)], lambda: None, ValueError, "layer 0 of 1, from 0, was not seen to run forward"),
    ],
)
def test_mistakes_are_explained(layers, step, error, says):
    with pytest.raises(error, match=says):
        record_schedule(layers, step)


def test_a_step_without_backward_is_explained():
    layers, _ = chain(3)
    with pytest.raises(ValueError, match=r"not seen to run backward \(and 2 more\)"):
        record_schedule(layers, lambda: layers(batch()))


# The picture ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def record():
    layers, _ = chain(8)
    return record_schedule(layers, step_of(layers, [3, 3, 2]))


def test_the_cells_survive_greyscale_and_colour_blindness():
    cells = [schedules.COLORS[look] for look in ("forward", "dropped", "recompute", "internals", "backward")]
    assert min(abs(lab(a)[0] - lab(b)[0]) for a, b in itertools.combinations(cells, 2)) > 9
    for sight in SIGHT:
        seen = [lab(color, sight) for color in cells]
        assert min(np.linalg.norm(a - b) for a, b in itertools.combinations(seen, 2)) > 20, sight


def test_every_event_is_one_cell_and_stored_bars_lie_between(record):
    boxes = schedules.boxes_of(record)
    cells = [
        (x, int(y), w) for look in (*schedule_record.KINDS, "dropped") for x, y, w, _ in boxes.get(look, [])
    ]
    assert sorted(cells) == sorted((t, e.layer, 1) for t, e in enumerate(record.events) if e.layer >= 0)
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
    first, second = (png(schedules.plot_schedule(record, title="halves")) for _ in range(2))
    assert first == second and len(first) < 60_000
    assert Image.open(io.BytesIO(first)).width > 1000
    figure = schedules.plot_schedule(record, title="halves")
    words = " ".join(t.get_text() for t in [*figure.texts, *figure.axes[0].texts, *figure.axes[1].texts])
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


def test_thinning_keeps_the_peak(record, monkeypatch):
    monkeypatch.setattr(schedules, "MAX_SAMPLES", 20)
    x, live = schedules.samples(record)
    assert len(x) <= 20 and sum(live.values()).max() == record.peak
    assert (np.diff(x) > 0).all()


def test_words_for_those_who_do_not_see_it(record, monkeypatch):
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda data, metadata, raw: shown.append((data, metadata)))
    schedules.show_schedule(record, title="threes")
    schedules.show_schedule(record)
    (data, metadata), (untitled, _) = shown
    assert data["text/plain"] == "Schedule plot: threes" and untitled["text/plain"] == "Schedule plot"
    alt = metadata["image/png"]["alt"]
    assert alt.startswith("threes: Grid of 8 layers against 23 columns of time")
    assert "that keep internals: 2, that drop them: 6; in backward, layers run forward again: 6." in alt
    assert f"{record.peak:,} bytes" in alt
    data, _ = record._repr_mimebundle_()
    assert data["text/plain"] == "Schedule plot"


# The explorer --------------------------------------------------------------------------------------------------------


@pytest.fixture
def explorer():
    shown = schedule_explorer.ScheduleExplorer(depth=9, segment=3, ratio=2)
    shown.widget()
    return shown


def drawn(explorer) -> dict[str, str]:
    """The words of the picture, by role."""
    root = ET.fromstring(explorer._picture.svg)
    assert root.get("role") == "img"
    named = {e.get("id"): e.text for e in root.iter() if e.get("id") and e.text}
    title, description = (named[key] for key in root.get("aria-labelledby").split())
    return {"title": title, "description": description}


def test_every_control_changes_picture_and_words(explorer):
    picture, controls = explorer._picture, explorer.controls
    assert "18 forward calls (9 + 9 again)" in picture.summary and picture.summary == drawn(explorer)["title"]
    for name, value in (
        ("segment", 5),
        ("ratio", 8),
        ("depth", 12),
        ("schedule", "best segments"),
        ("schedule", "none"),
    ):
        before = picture.svg, picture.summary, picture.details
        controls[name].value = value
        assert picture.svg != before[0] and (picture.summary, picture.details) != before[1:], (name, value)
    assert "12 forward calls (12 + 0 again)" in picture.summary
    assert controls["segment"].disabled
    assert "Grid of 12 layers" in drawn(explorer)["description"]


def test_segments_are_never_longer_than_the_chain(explorer):
    explorer.controls["segment"].value = 9
    explorer.controls["depth"].value = 4
    assert explorer.controls["segment"].value == explorer.controls["segment"].max == 4
    assert "1 segment of 4." in explorer._picture.details


def test_the_curve_is_measured_and_marks_where_you_are(explorer):
    assert set(explorer.curve) == set(range(1, 10))
    assert {k: r.peak for k, r in explorer.curve.items()} == {
        k: schedule_explorer.run_chain(9, k, 2, "equal segments").peak for k in range(1, 10)
    }
    lowest = min(r.peak for r in explorer.curve.values()) // X
    assert f"Lowest measured of these: {lowest} boundaries" in explorer._picture.details
    root = ET.fromstring(explorer._picture.svg)
    here = next(e for e in root.iter(f"{SVG}circle") if e.get("class") == "gm-here")
    dots = [(float(e.get("cx")), float(e.get("cy"))) for e in root.iter(f"{SVG}circle") if e.get("r") == "2"]
    assert len(dots) == 9 and dots[2] == (float(here.get("cx")), float(here.get("cy")))


def test_at_a_ratio_of_one_the_lowest_point_is_the_square_root():
    for n in (9, 25):
        peaks = {
            k: schedule_explorer.run_chain(n, k, 1, "equal segments").peak
            for k in schedule_explorer.curve_segments(n)
        }
        assert peaks[round(n**0.5)] == min(peaks.values()) < min(peaks[1], peaks[n])


def test_best_segments_are_lower_than_all_equal_ones():
    for n, ratio in ((12, 4), (24, 5)):
        equal = min(schedule_explorer.run_chain(n, k, ratio, "equal segments").peak for k in range(1, n + 1))
        assert schedule_explorer.run_chain(n, 1, ratio, "best segments").peak < equal


def test_in_a_running_kernel_the_curve_follows_between_messages():
    async def drag():
        shown = schedule_explorer.ScheduleExplorer(depth=5)
        shown.widget()
        first = shown._picture.svg
        assert len(shown.curve) == 1
        shown.controls["depth"].value = 6
        await shown._task
        return first, shown

    first, shown = asyncio.run(drag())
    assert set(shown.curve) == set(range(1, 7)) and shown._picture.svg != first
    assert "Lowest measured" in shown._picture.details


def test_the_explorer_draws_no_random_numbers_of_the_learner():
    schedule_explorer._chain.cache_clear()
    schedule_explorer.run_chain.cache_clear()
    torch.manual_seed(3)
    wanted = torch.rand(3)
    torch.manual_seed(3)
    with torch.no_grad():
        schedule_explorer.run_chain(6, 2, 1, "equal segments")
    assert torch.equal(torch.rand(3), wanted)


@pytest.mark.parametrize(
    "wrong, error, says",
    [
        ({"depth": 3}, ValueError, "depth is 3: choose 4 to 64"),
        ({"segment": 20}, ValueError, "segment is 20: choose 1 to 16"),
        ({"ratio": 7}, ValueError, "ratio is 7: choose one of 1, 2"),
        ({"schedule": "random"}, ValueError, "schedule is 'random': choose one of 'none'"),
        ({"colour": 1}, TypeError, "no setting named colour: choose from depth"),
    ],
)
def test_explorer_says_what_is_wrong(wrong, error, says):
    with pytest.raises(error, match=says):
        schedule_explorer.explore_schedule(**wrong)


def test_a_notebook_keeps_a_picture_with_and_without_widgets(monkeypatch):
    from nbclient import NotebookClient

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    cells = [
        "import os, sys\nfrom gradmem_lib import explore_schedule\n"
        "os.environ['GRADMEM_LIVE'] = '0'\nexplore_schedule()",
        "os.environ['GRADMEM_LIVE'] = '1'\nexplore_schedule()",
        "print('matplotlib.pyplot' in sys.modules)",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    still, live, pyplot = (cell.outputs for cell in notebook.cells)
    for outputs in (still, live):
        assert outputs[0].data["text/plain"] == "Schedule explorer"
        assert base64.b64decode(outputs[0].data["image/png"]).startswith(b"\x89PNG")
        assert "16 layers in segments of 4" in outputs[0].metadata["image/png"]["alt"]
    view = "application/vnd.jupyter.widget-view+json"
    assert view in live[0].data and view not in still[0].data
    assert pyplot[0].text == "False\n"
