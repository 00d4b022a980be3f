"""An explorer for checkpointing schedules: change depth, segments and sizes of a chain, and see its
schedule.
"""

from __future__ import annotations

import asyncio
import math
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from ..units import format_bytes
from .explorers import Explorer
from .picture import Picture
from .schedule_record import ScheduleRecord, record_schedule
from .schedules import plot_schedule

WIDTH, ROWS = 8, 32
BOUNDARY = 4 * WIDTH * ROWS  # 1 KiB: the explorer's bytes in KiB are boundaries
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


@lru_cache(256)
def segments_of(depth: int, segment: int, ratio: int, schedule: str) -> list[int]:
    """The explorer's segments: how many layers each has, first segment first."""
    from ..techniques.schedules import best_segments, uniform_segments

    if schedule == "none":
        return [depth]  # one, which is kept
    if schedule == "equal segments":
        return uniform_segments(depth, segment)
    # Inside a segment, this chain keeps no inputs: so a layer adds ratio boundaries, not ratio + 1.
    return best_segments(depth, internal=(ratio - 1) * BOUNDARY, boundary=BOUNDARY)


@lru_cache(16)
def _chain(depth: int, ratio: int) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):  # the learner's random numbers are not used up
        return nn.Sequential(*(_Layer(ratio) for _ in range(depth)))


@lru_cache(256)
def run_chain(depth: int, segment: int, ratio: int, schedule: str) -> ScheduleRecord:
    """Run one real step of a small chain with the explorer's settings (see ``ScheduleExplorer``),
    and record it.
    """
    from ..techniques.checkpointing import checkpoint_layers

    chain = _chain(depth, ratio)
    x = torch.ones(ROWS, WIDTH, requires_grad=True)
    segments = segments_of(depth, segment, ratio, schedule)
    keep_last = schedule != "equal segments"
    with torch.enable_grad(), checkpoint_layers(chain, segments, keep_last=keep_last):
        return record_schedule(chain, lambda: torch.autograd.grad(chain(x).sum(), x))


def curve_segments(depth: int) -> list[int]:
    """The segment lengths for the curve: all up to 16, then each about 19% longer than the last."""
    wanted = {*range(1, min(depth, 16) + 1), depth}
    k = 16.0
    while k < depth:
        wanted.add(round(k))
        k *= 1.19
    return sorted(wanted)


def summary(record: ScheduleRecord) -> str:
    """Peak and work in one line."""
    recomputed = len(record.ran("recompute"))
    return (
        f"Peak {record.peak / BOUNDARY:.0f} boundaries ({format_bytes(record.peak)}) · "
        f"{record.layers + recomputed} forward calls ({record.layers} + {recomputed} again)"
    )


def details(settings: dict, curve: dict[int, int]) -> str:
    """The segments in words, and how they compare with the lowest point that was measured."""
    depth, ratio, schedule = settings["depth"], settings["ratio"], settings["schedule"]
    segments = segments_of(**settings)
    count, first, last = len(segments), segments[0], segments[-1]
    words = "No checkpoints: all internals stay."
    if schedule == "equal segments":
        words = f"{count} segment{'s' * (count > 1)} of {first}"
        words += f", the last of {last}." if last != first else "."
    elif schedule == "best segments":
        lengths = ", ".join(map(str, segments))
        words = f"{count} segments: {lengths}; the last one is kept, not run again."
    rule = f"√(n·x/a) = √({depth}/{ratio}) = {math.sqrt(depth / ratio):.1f}"
    words += f" Rule for equal segments: {rule} layers."
    if set(curve) >= set(curve_segments(depth)):
        lowest = min(curve, key=lambda length: (curve[length], -length))
        words += (
            f" Lowest measured of these: {curve[lowest] / BOUNDARY:.0f} boundaries, with segments "
            f"of {lowest}."
        )
    return words


class ScheduleExplorer(Explorer):
    """Explores schedules of a chain.

    Settings: ``depth`` (4 to 64 layers), ``segment`` (1 to depth layers), ``ratio`` (a/x, bytes
    that a layer keeps inside over bytes of its input: one of ``RATIOS``), ``schedule`` (one of
    ``SCHEDULES``). Each change runs a small chain. Raises ``TypeError`` for an unknown setting, and
    ``ValueError`` for a value that is not allowed.
    """

    defaults = DEFAULTS
    text = "Schedule explorer"

    def __init__(self, **settings):
        super().__init__(**settings)
        depth, segment = self.settings["depth"], self.settings["segment"]
        if depth not in range(4, 65):
            raise ValueError(f"depth is {depth!r}: choose 4 to 64 layers")
        if segment not in range(1, depth + 1):
            raise ValueError(f"segment is {segment!r}: choose 1 to {depth}, the depth")
        for name, known in (("ratio", RATIOS), ("schedule", SCHEDULES)):
            if self.settings[name] not in known:
                choices = ", ".join(map(repr, known))
                raise ValueError(f"{name} is {self.settings[name]!r}: choose one of {choices}")
        self.curve: dict[int, int] = {}  # peaks in bytes, by length of equal segments
        self._task: asyncio.Task | None = None

    def picture(self) -> Picture:
        settings = self.settings
        record = run_chain(**settings)
        lengths = {
            "none": ", no checkpoints",
            "equal segments": f" in segments of {settings['segment']}",
            "best segments": f" in segments of {', '.join(map(str, segments_of(**settings)))}",
        }[settings["schedule"]]
        title = f"{settings['depth']} layers{lengths}, a/x = {settings['ratio']}"
        picture = plot_schedule(record, title=title)
        picture.alt += f" {summary(record)}."
        return picture

    def make_controls(self) -> None:
        import ipywidgets

        start, slider = self.settings, ipywidgets.IntSlider
        self.add("segment", slider, "segment", value=start["segment"], min=1, max=start["depth"])
        self.add("depth", slider, "layers", value=start["depth"], min=4, max=64)
        ratio, schedule = start["ratio"], start["schedule"]
        self.add("ratio", ipywidgets.SelectionSlider, "a/x", options=RATIOS, value=ratio)
        self.add("schedule", ipywidgets.Dropdown, "schedule", options=SCHEDULES, value=schedule)

    def changed(self, change=None) -> None:
        controls = self.controls
        segment, depth, ratio = controls["segment"], controls["depth"], controls["ratio"]
        if segment.max != depth.value:
            # A maximum below the value also changes the value, and that change must not draw.
            segment.unobserve(self.changed, "value")
            segment.max = depth.value
            segment.observe(self.changed, "value")
        segment.disabled = controls["schedule"].value != "equal segments"
        if change is None or change["owner"] in (depth, ratio):
            self._start_curve(depth.value, ratio.value)
        self._draw()

    def _draw(self) -> None:
        now = {name: control.value for name, control in self.controls.items()}
        record = run_chain(**now)
        here: tuple[int | None, str] = (None, now["schedule"])
        if now["schedule"] == "equal segments":
            self.curve[now["segment"]] = record.peak
            here = (now["segment"], "")
        words = summary(record)
        picture = plot_schedule(record, curve=self.curve, here=here)
        with self.answer.hold_sync():
            self.answer.svg = picture.svg(words)
            self.answer.verdict = words
            self.answer.detail = details(now, self.curve)

    def _start_curve(self, depth: int, ratio: int) -> None:
        """Measure the curve. In a kernel this runs between messages, so that a dragged slider does
        not wait for it.
        """
        if self._task is not None:
            self._task.cancel()
            self._task = None
        self.curve = {}
        measuring = self._measure_curve(depth, ratio, self.curve)
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            asyncio.run(measuring)
            return
        self._task = loop.create_task(measuring)

    async def _measure_curve(self, depth: int, ratio: int, curve: dict[int, int]) -> None:
        await asyncio.sleep(0.15)  # do not measure while the slider still moves
        for length in curve_segments(depth):
            curve[length] = run_chain(depth, length, ratio, "equal segments").peak
            await asyncio.sleep(0.002)
        self._draw()


def explore_schedule(**settings: Any) -> None:
    """Display the explorer, starting from ``settings`` (see ``ScheduleExplorer``).

    With ``GRADMEM_LIVE=0``: a still picture.
    """
    ScheduleExplorer(**settings).show()
