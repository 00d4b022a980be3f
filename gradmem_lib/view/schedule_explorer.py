"""An explorer for checkpointing schedules: change depth, segments and sizes of a chain, and see its
schedule.
"""

from __future__ import annotations

import asyncio
import math
from contextlib import ExitStack
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .live import show_explorer
from .schedule_record import ScheduleRecord, record_schedule
from .schedule_svg import BOUNDARY, ROWS, WIDTH, schedule_svg, summary
from .schedules import bundle, describe_schedule, plot_schedule

EXPLORER_TEXT = "Schedule explorer"
RATIOS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
SCHEDULES = ("none", "equal segments", "best segments")
DEFAULTS = {"depth": 16, "segment": 4, "ratio": 1, "schedule": "equal segments"}


class _Layer(nn.Module):
    """x + W2 relu(W1 x) with frozen weights: autograd keeps ``ratio`` times the bytes of x, and not
    x.
    """

    def __init__(self, ratio: int):
        super().__init__()
        self.inside = nn.Sequential(
            nn.Linear(WIDTH, ratio * WIDTH), nn.ReLU(inplace=True), nn.Linear(ratio * WIDTH, WIDTH)
        )
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (32, 8), and so is the result."""
        return x + self.inside(x)


def segments_of(depth: int, segment: int, ratio: int, schedule: str) -> list[int]:
    """The explorer's segments: how many layers each has, first segment first."""
    from ..techniques.schedules import uniform_segments

    if schedule == "best segments":
        return list(_best(depth, ratio))
    return [depth] if schedule == "none" else uniform_segments(depth, segment)


@lru_cache(256)
def _best(depth: int, ratio: int) -> tuple[int, ...]:
    from ..techniques.schedules import best_segments

    # Inside a segment, this chain keeps no inputs: so a layer adds ratio boundaries, not ratio + 1.
    return tuple(best_segments(depth, internal=(ratio - 1) * BOUNDARY, boundary=BOUNDARY))


@lru_cache(16)
def _chain(depth: int, ratio: int) -> nn.Sequential:
    state = torch.get_rng_state()
    try:
        return nn.Sequential(*(_Layer(ratio) for _ in range(depth)))
    finally:
        torch.set_rng_state(state)  # the explorer must not use up the learner's random numbers


@lru_cache(256)
def run_chain(depth: int, segment: int, ratio: int, schedule: str) -> ScheduleRecord:
    """Run one real step of a small chain with the explorer's settings (see ``ScheduleExplorer``),
    and record it.
    """
    from ..techniques.checkpointing import checkpoint_layers

    chain = _chain(depth, ratio)
    x = torch.ones(ROWS, WIDTH, requires_grad=True)
    with ExitStack() as undo:
        undo.enter_context(torch.enable_grad())
        if schedule != "none":
            last = schedule == "best segments"
            segments = segments_of(depth, segment, ratio, schedule)
            undo.enter_context(checkpoint_layers(chain, segments, keep_last=last))
        return record_schedule(chain, lambda: torch.autograd.grad(chain(x).sum(), x))


def curve_segments(depth: int) -> list[int]:
    """The segment lengths for the curve: all up to 16, then each about 19% longer than the last."""
    wanted = {*range(1, min(depth, 16) + 1), depth}
    k = 16.0
    while k < depth:
        wanted.add(round(k))
        k *= 1.19
    return sorted(wanted)


def _rule(depth: int, ratio: int) -> str:
    return f"√(n·x/a) = √({depth}/{ratio}) = {math.sqrt(depth / ratio):.1f}"


def details(settings: dict, curve: dict[int, ScheduleRecord]) -> str:
    """The segments in words, and how they compare with the lowest point that was measured."""
    depth, ratio, schedule = settings["depth"], settings["ratio"], settings["schedule"]
    segments = segments_of(**settings)
    words = {
        "none": "No checkpoints: all internals stay.",
        "equal segments": f"{len(segments)} segment{'s' * (len(segments) > 1)} of {segments[0]}"
        + (f", the last of {segments[-1]}." if segments[-1] != segments[0] else "."),
        "best segments": (
            f"{len(segments)} segments: {', '.join(map(str, segments))}; the last one is kept, not "
            "run again."
        ),
    }[schedule]
    words += f" Rule for equal segments: {_rule(depth, ratio)} layers."
    if set(curve) >= set(curve_segments(depth)):
        lowest = min(curve, key=lambda k: (curve[k].peak, -k))
        words += (
            f" Lowest measured of these: {curve[lowest].peak / BOUNDARY:.0f} boundaries, with "
            f"segments of {lowest}."
        )
    return words


@cache
def _picture_class():
    import anywidget
    import traitlets

    class SchedulePicture(anywidget.AnyWidget):
        _esm = Path(__file__).with_name("schedule.js")
        _css = Path(__file__).with_name("schedule.css")
        svg = traitlets.Unicode("").tag(sync=True)
        summary = traitlets.Unicode("").tag(sync=True)
        details = traitlets.Unicode("").tag(sync=True)

    return SchedulePicture


class ScheduleExplorer:
    """The explorer's settings, and its widgets once they are shown.

    Settings: ``depth`` (4 to 64 layers), ``segment`` (1 to depth layers), ``ratio`` (a/x, bytes
    that a layer keeps inside over bytes of its input: one of ``RATIOS``), ``schedule`` (one of
    ``SCHEDULES``). Each change runs a small chain. Raises ``TypeError`` for an unknown setting, and
    ``ValueError`` for a value that is not allowed.
    """

    def __init__(self, **settings):
        if unknown := sorted(set(settings) - set(DEFAULTS)):
            raise TypeError(
                f"no setting named {', '.join(unknown)}: choose from {', '.join(DEFAULTS)}"
            )
        self.settings = DEFAULTS | settings
        depth = self.settings["depth"]
        if depth not in range(4, 65):
            raise ValueError(f"depth is {depth!r}: choose 4 to 64 layers")
        if self.settings["segment"] not in range(1, depth + 1):
            raise ValueError(
                f"segment is {self.settings['segment']!r}: choose 1 to {depth}, the depth"
            )
        for name, known in (("ratio", RATIOS), ("schedule", SCHEDULES)):
            if self.settings[name] not in known:
                raise ValueError(
                    f"{name} is {self.settings[name]!r}: choose one of "
                    f"{', '.join(map(repr, known))}"
                )
        self.controls: dict = {}
        self.curve: dict[int, ScheduleRecord] = {}
        self._picture = self._task = None

    def still_bundle(self) -> tuple[dict, dict]:
        """The picture of the starting settings as a mimebundle: (data, metadata)."""
        settings = self.settings
        record = run_chain(**settings)
        title = {
            "none": f"{settings['depth']} layers, no checkpoints",
            "equal segments": f"{settings['depth']} layers in segments of {settings['segment']}",
            "best segments": (
                f"{settings['depth']} layers in segments of "
                f"{', '.join(map(str, segments_of(**settings)))}"
            ),
        }[settings["schedule"]] + f", a/x = {settings['ratio']}"
        words = describe_schedule(record, title=title) + f" {summary(record)}."
        return bundle(plot_schedule(record, title=title), words, "", EXPLORER_TEXT)

    def widget(self):
        """The controls over the picture, as one ipywidget."""
        import ipywidgets

        start = self.settings

        def looks() -> dict:
            layout = ipywidgets.Layout(width="auto", margin="2px 14px 2px 0")
            return {"style": {"description_width": "96px"}, "layout": layout}

        self.controls = {
            "segment": ipywidgets.IntSlider(
                start["segment"], 1, start["depth"], description="segment", **looks()
            ),
            "depth": ipywidgets.IntSlider(start["depth"], 4, 64, description="layers", **looks()),
            "ratio": ipywidgets.SelectionSlider(
                options=RATIOS, value=start["ratio"], description="a/x", **looks()
            ),
            "schedule": ipywidgets.Dropdown(
                options=SCHEDULES, value=start["schedule"], description="schedule", **looks()
            ),
        }
        self._picture = _picture_class()()
        for control in self.controls.values():
            control.observe(self._changed, "value")
        self._changed()
        grid = ipywidgets.Layout(
            grid_template_columns="repeat(auto-fit, minmax(300px, 1fr))", max_width="820px"
        )
        return ipywidgets.VBox(
            [ipywidgets.GridBox(list(self.controls.values()), layout=grid), self._picture]
        )

    def _changed(self, change=None) -> None:
        controls = self.controls
        if controls["segment"].max != controls["depth"].value:
            # A maximum below the value also changes the value, and that change must not draw.
            controls["segment"].unobserve(self._changed, "value")
            controls["segment"].max = controls["depth"].value
            controls["segment"].observe(self._changed, "value")
        controls["segment"].disabled = controls["schedule"].value != "equal segments"
        now = {name: control.value for name, control in controls.items()}
        if (
            not self.curve
            or change is None
            or change["owner"] in (controls["depth"], controls["ratio"])
        ):
            self._start_curve(now["depth"], now["ratio"])
        self._draw()

    def _draw(self) -> None:
        now = {name: control.value for name, control in self.controls.items()}
        record = run_chain(**now)
        if now["schedule"] == "equal segments":
            self.curve[now["segment"]] = record
        with self._picture.hold_sync():
            self._picture.svg = schedule_svg(record, now, self.curve)
            self._picture.summary = summary(record)
            self._picture.details = details(now, self.curve)

    def _start_curve(self, depth: int, ratio: int) -> None:
        """Measure the curve. In a kernel this runs between messages, so that a dragged slider does
        not wait for it.
        """
        if self._task is not None:
            self._task.cancel()
            self._task = None
        self.curve = {}
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            for k in curve_segments(depth):
                self.curve[k] = run_chain(depth, k, ratio, "equal segments")
            return
        self._task = loop.create_task(self._measure_curve(depth, ratio, self.curve))

    async def _measure_curve(
        self, depth: int, ratio: int, curve: dict[int, ScheduleRecord]
    ) -> None:
        await asyncio.sleep(0.15)  # do not measure while the slider still moves
        for k in curve_segments(depth):
            curve[k] = run_chain(depth, k, ratio, "equal segments")
            await asyncio.sleep(0.002)
        self._draw()


def explore_schedule(**settings: Any) -> None:
    """Display the explorer, starting from ``settings`` (see ``ScheduleExplorer``).

    With ``GRADMEM_LIVE=0``: a still picture.
    """
    explorer = ScheduleExplorer(**settings)
    show_explorer(explorer, EXPLORER_TEXT)
