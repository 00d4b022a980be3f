"""A schedule as SVG, for the explorer."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..units import format_bytes
from .schedule_record import PARTS, ScheduleRecord
from .schedules import (
    COLORS,
    HATCHES,
    LABELS,
    PART_LABELS,
    boxes_of,
    describe_schedule,
    looks_of,
    peak_column,
    samples,
    turning_point,
)
from .style import nice_step
from .svg import frame, svg_halo, svg_text

WIDTH, ROWS = 8, 32
BOUNDARY = 4 * WIDTH * ROWS  # 1 KiB: the explorer's bytes in KiB are boundaries

# Reads on white and on black alike.
_BLUE_BOTH = "#4a82cf"


def schedule_svg(record: ScheduleRecord, settings: dict, curve: dict[int, ScheduleRecord]) -> str:
    """Grid, live bytes and the curve of peak against segment length as one inline ``<svg>`` for
    light and dark pages.
    """
    key = "gs" + hashlib.sha1(repr((settings, sorted(curve))).encode()).hexdigest()[:8]
    words = describe_schedule(record)
    if curve:
        points = ", ".join(f"{k}: {curve[k].peak / BOUNDARY:.0f}" for k in sorted(curve))
        words += f" Peak in boundaries by segment length: {points}."
    hatches = "".join(_svg_hatch(key, look) for look in HATCHES)
    layout = _Layout(key, record)
    shapes = [*layout.grid(), *layout.bytes()]
    shapes += _Curve(record, settings, curve).shapes()
    shapes += layout.legend()
    title = summary(record)
    start = frame(key, VIEW_WIDTH, VIEW_HEIGHT, 11, title=title, words=words, defs=hatches)
    return f"{start}{''.join(shapes)}</svg>"


# The layout in CSS pixels: the grid begins at LEFT and TOP, the live bytes are below it, curve and
# legend begin at RIGHT.
VIEW_WIDTH, VIEW_HEIGHT = 800, 424
LEFT, GRID_WIDTH, RIGHT = 34, 496, 574
TOP, GRID_HEIGHT, LOW_TOP, LOW_HEIGHT = 30, 250, 304, 96
END = LEFT + GRID_WIDTH


@dataclass(frozen=True)
class _Layout:
    """The parts of a ``schedule_svg`` that show one record."""

    key: str
    record: ScheduleRecord

    def x(self, column):
        return LEFT + column * GRID_WIDTH / len(self.record.events)

    def boxes(self, boxes) -> str:
        sx, sy = GRID_WIDTH / len(self.record.events), GRID_HEIGHT / self.record.layers
        return "".join(
            (
                f"M{LEFT + x * sx:.1f} "
                f"{TOP + GRID_HEIGHT - (y + h) * sy:.1f}h{w * sx:.1f}v{h * sy:.1f}h{-w * sx:.1f}z"
            )
            for x, y, w, h in boxes
        )

    def grid(self) -> Iterator[str]:
        """Layers against time."""
        n, backward_start = self.record.layers, self.x(turning_point(self.record))
        sy = GRID_HEIGHT / n
        yield (
            f'<rect x="{LEFT}" y="{TOP}" width="{GRID_WIDTH}" height="{GRID_HEIGHT}" '
            'fill="currentColor" opacity=".06"/>'
        )
        yield (
            f'<path d="M{LEFT} {TOP - 7}H{backward_start - 2:.1f}" stroke="currentColor" '
            'stroke-width="2" '
            'opacity=".3"/>'
        )
        yield (
            f'<path d="M{backward_start:.1f} {TOP - 7}H{END}" stroke="currentColor" '
            'stroke-width="2" '
            'opacity=".75"/>'
        )
        yield svg_text((LEFT + backward_start) / 2, TOP - 13, "forward", anchor="middle")
        yield svg_text((backward_start + END) / 2, TOP - 13, "backward", anchor="middle")
        if n <= 32:
            lines = "".join(f"M{LEFT} {TOP + i * sy:.1f}h{GRID_WIDTH}" for i in range(1, n))
            yield f'<path d="{lines}" stroke="currentColor" opacity=".1" stroke-width=".8"/>'
        for look, boxes in boxes_of(self.record).items():
            if boxes:
                yield (
                    f'<path class="gm-{look}" d="{self.boxes(boxes)}" '
                    f"{_svg_paint(self.key, look)}/>"
                )
        for layer in sorted({1, n, *([n // 2] if n > 3 else [])}):
            yield svg_text(
                LEFT - 5, TOP + GRID_HEIGHT - (layer - 0.5) * sy + 4, str(layer), anchor="end"
            )
        yield (
            f'<text transform="translate(9 {TOP + GRID_HEIGHT * 0.27:.0f}) rotate(-90)" '
            'text-anchor="middle" fill="currentColor" opacity=".8">layer</text>'
        )

    def bytes(self) -> Iterator[str]:
        """Live bytes over the same columns, and their peak."""
        record, (x, live) = self.record, samples(self.record)
        most = max(record.peak, 1) * 1.2

        def bytes_y(value):
            return LOW_TOP + LOW_HEIGHT - value / most * LOW_HEIGHT

        step = nice_step(most / BOUNDARY, 3)
        for i in range(int(most / BOUNDARY / step) + 1):
            y = bytes_y(step * i * BOUNDARY)
            yield f'<path d="M{LEFT} {y:.1f}H{END}" stroke="currentColor" opacity=".14"/>'
            yield svg_text(LEFT - 5, y + 4, f"{step * i:g}", anchor="end")
        base = np.zeros(len(x))
        for name in PARTS:
            if live[name].any():
                shape = _svg_steps(self.x(x), bytes_y(base), bytes_y(base + live[name]), END)
                yield f'<path class="gm-{name}" d="{shape}" {_svg_paint(self.key, name)}/>'
                base = base + live[name]
        at = peak_column(record)
        peak_x, peak_y = self.x(at), bytes_y(record.peak)
        side, anchor = 1, "start"
        if at > 0.7 * len(record.events):
            side, anchor = -1, "end"  # to the left of the peak, where there is room
        yield (
            f'<path d="M{peak_x:.1f} {TOP}V{peak_y:.1f}" stroke="currentColor" '
            'stroke-dasharray="3 3"/>'
        )
        yield f'<circle cx="{peak_x:.1f}" cy="{peak_y:.1f}" r="4" fill="currentColor"/>'
        yield (
            f'<text x="{peak_x + 8 * side:.1f}" y="{peak_y - 4:.1f}" font-size="12" '
            'font-weight="700" fill="currentColor" '
            f'text-anchor="{anchor}" {svg_halo(5)}>peak '
            f"{record.peak / BOUNDARY:.0f}</text>"
        )
        yield svg_text(LEFT, LOW_TOP - 9, "live bytes, in boundaries")
        yield svg_text(
            END, LOW_TOP + LOW_HEIGHT + 15, "time: one column each time a layer runs", anchor="end"
        )

    def legend(self) -> Iterator[str]:
        """The legend: how often each look occurs, and how many boundaries are alive at the peak."""
        record, y = self.record, TOP + 190
        yield svg_text(VIEW_WIDTH - 10, y + 3, "times", anchor="end")
        for look, label in LABELS.items():
            if look in looks_of(record):
                y += 19
                yield self._row(y, look, label, str(looks_of(record).count(look)))
        y += 26
        yield svg_text(VIEW_WIDTH - 10, y + 3, "boundaries at the peak", anchor="end")
        for name in ("passing", "internals", "inputs"):
            y += 19
            at_peak = record.live[name][record.peak_operation] / BOUNDARY
            yield self._row(y, name, PART_LABELS[name], f"{at_peak:.0f}")

    def _row(self, y: float, look: str, label: str, value: str) -> str:
        return (
            (
                f'<rect x="{RIGHT}" y="{y - 6:.1f}" width="18" height="12" '
                f"{_svg_paint(self.key, look)}/>"
            )
            + svg_text(RIGHT + 26, y + 4, label, size=12, opacity=1)
            + svg_text(VIEW_WIDTH - 10, y + 4, value, size=12, anchor="end", opacity=1)
        )


# The curve's axes: its left edge, its right edge, the vertical axis, its top and its foot.
CURVE_RIGHT, CURVE_AXIS = VIEW_WIDTH - 10, RIGHT + 20
CURVE_TOP, CURVE_HEIGHT = TOP, 150
CURVE_FOOT = CURVE_TOP + CURVE_HEIGHT


@dataclass(frozen=True)
class _Curve:
    """The curve of peak against segment length, as far as it is measured, and the point of the
    current settings.
    """

    record: ScheduleRecord
    settings: dict
    curve: dict[int, ScheduleRecord]

    @property
    def highest(self) -> float:
        """The bytes at the top of the picture."""
        peaks = [self.record.peak, *(record.peak for record in self.curve.values())]
        return max(peaks) * 1.12

    def x(self, length: float) -> float:
        # logarithmic, since the curve turns at short segments
        share = math.log(length) / math.log(self.settings["depth"])
        return RIGHT + 26 + share * (CURVE_RIGHT - RIGHT - 34)

    def y(self, nbytes: float) -> float:
        return CURVE_FOOT - nbytes / self.highest * CURVE_HEIGHT

    def shapes(self) -> Iterator[str]:
        yield from self.axes()
        yield from self.line()
        if self.settings["schedule"] == "equal segments":
            yield self.point()
        else:
            yield from self.level()

    def axes(self) -> Iterator[str]:
        yield svg_text(RIGHT, CURVE_TOP - 13, "peak by length of equal segments")
        yield (
            f'<path d="M{CURVE_AXIS} {CURVE_TOP}V{CURVE_FOOT}H{CURVE_RIGHT}" fill="none" '
            'stroke="currentColor" opacity=".35"/>'
        )
        step = nice_step(self.highest / BOUNDARY, 4)
        for i in range(int(self.highest / BOUNDARY / step) + 1):
            y = self.y(i * step * BOUNDARY)
            yield svg_text(RIGHT + 16, y + 4, f"{i * step:g}", anchor="end")
            yield (
                f'<path d="M{CURVE_AXIS} {y:.1f}H{CURVE_RIGHT}" stroke="currentColor" '
                'opacity=".12"/>'
            )
        last = -100.0
        for length in (1, 2, 4, 8, 16, 32, 64):
            if length > self.settings["depth"]:
                break
            x = self.x(length)
            if x - last > 20:  # the numbers do not touch
                yield svg_text(x, CURVE_FOOT + 14, str(length), anchor="middle")
                last = x

    def line(self) -> Iterator[str]:
        points = [
            (self.x(length), self.y(self.curve[length].peak)) for length in sorted(self.curve)
        ]
        if not points:
            return
        line = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2"/>' for x, y in points)
        yield f'<path d="M{line}" fill="none" stroke="{_BLUE_BOTH}" stroke-width="1.6"/>'
        yield f'<g fill="{_BLUE_BOTH}">{dots}</g>'

    def point(self) -> str:
        """Where the current length is."""
        x, y = self.x(self.settings["segment"]), self.y(self.record.peak)
        return (
            f'<circle class="gm-here" cx="{x:.1f}" cy="{y:.1f}" r="5.5" '
            f'fill="{COLORS["inputs"]}" stroke="currentColor" stroke-width="1.5"/>'
        )

    def level(self) -> Iterator[str]:
        """The peak of a schedule that has no length of its own, as a line with its name."""
        schedule, y = self.settings["schedule"], self.y(self.record.peak)
        yield (
            f'<path class="gm-here" d="M{CURVE_AXIS} {y:.1f}H{CURVE_RIGHT}" '
            f'stroke="{COLORS["inputs"]}" stroke-width="2.5" stroke-dasharray="7 3"/>'
        )
        # On the side without the curve: no point is below the best, and none is above "no
        # checkpoint".
        x, anchor, baseline = RIGHT + 26, "start", f"{y - 5:.1f}"
        if schedule == "best segments":
            x, anchor = CURVE_RIGHT, "end"
            if y + 16 < CURVE_FOOT:
                baseline = f"{y + 13:.1f}"
        yield (
            f'<text x="{x}" y="{baseline}" text-anchor="{anchor}" font-weight="700" '
            f'fill="currentColor" {svg_halo(5)}>{schedule}</text>'
        )


def _svg_steps(x: np.ndarray, low: np.ndarray, high: np.ndarray, end: float) -> str:
    """The area between two step functions that hold their value until the next x."""
    edges = np.append(x, end)
    up = "".join(f"H{b:.1f}V{y:.1f}" for b, y in zip(edges[1:-1], high[1:], strict=True))
    down = "".join(f"V{y:.1f}H{a:.1f}" for a, y in zip(edges[-2::-1], low[::-1], strict=True))
    return f"M{x[0]:.1f} {low[0]:.1f}V{high[0]:.1f}{up}H{end:.1f}{down}z"


def _svg_paint(key: str, look: str) -> str:
    edge = {"dropped": _BLUE_BOTH, "redropped": COLORS["recompute"]}.get(look)
    if edge:
        return f'fill="{edge}" fill-opacity=".22" stroke="{edge}" stroke-width="1"'
    if look == "backward":
        return 'fill="currentColor"'
    return f'fill="url(#{key}{look})"' if look in HATCHES else f'fill="{COLORS[look]}"'


def _svg_hatch(key: str, look: str) -> str:
    marks = {
        "/": '<path d="M-1 1L1 -1M0 6L6 0M5 7L7 5"/>',
        ".": '<path d="M3 3h.01" stroke-width="1.4" stroke-linecap="round"/>',
        "x": '<path d="M0 0L6 6M0 6L6 0"/>',
        "\\": '<path d="M-1 5L1 7M0 0L6 6M5 -1L7 1"/>',
    }[HATCHES[look][0]]
    ink = (
        'stroke="#fff" stroke-opacity=".7"'
        if look in ("recompute", "left")
        else 'stroke="#10141c" stroke-opacity=".35"'
    )
    return (
        f'<pattern id="{key}{look}" width="6" height="6" patternUnits="userSpaceOnUse"><rect '
        f'width="6" height="6" fill="{COLORS[look]}"/><g {ink} fill="none">{marks}</g></pattern>'
    )


def summary(record: ScheduleRecord) -> str:
    """Peak and work in one line."""
    recomputed = len(record.ran("recompute"))
    return (
        f"Peak {record.peak / BOUNDARY:.0f} boundaries ({format_bytes(record.peak)}) · "
        f"{record.layers + recomputed} forward calls ({record.layers} + {recomputed} again)"
    )
