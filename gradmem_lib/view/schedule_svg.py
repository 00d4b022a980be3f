"""A schedule as SVG, for the explorer."""

from __future__ import annotations

import hashlib
import math
from html import escape

import numpy as np

from ..measure.schedule_record import PARTS, ScheduleRecord
from ..units import format_bytes
from .schedules import (
    COLORS,
    HATCHES,
    LABELS,
    PART_LABELS,
    boxes_of,
    describe_schedule,
    peak_column,
    samples,
    turning_point,
)
from .style import nice_step

WIDTH, ROWS = 8, 32
BOUNDARY = 4 * WIDTH * ROWS  # 1 KiB: the explorer's bytes in KiB are boundaries

# Reads on white and on black alike.
_BLUE_BOTH = "#4a82cf"
_HALO = 'style="paint-order:stroke;stroke:var(--jp-layout-color0,transparent);stroke-width:5px"'


def schedule_svg(record: ScheduleRecord, settings: dict, curve: dict[int, ScheduleRecord]) -> str:
    """Grid, live bytes and the curve of peak against segment length as one inline ``<svg>`` for light and dark pages."""
    n, columns = record.layers, len(record.events)
    width, left, grid_w, right = 800, 34, 496, 574
    top, grid_h, low_top, low_h, height = 30, 250, 304, 96, 424
    sx, sy = grid_w / columns, grid_h / n
    key = "gs" + hashlib.sha1(repr((settings, sorted(curve))).encode()).hexdigest()[:8]

    def path(boxes) -> str:
        return "".join(
            f"M{left + x * sx:.1f} {top + grid_h - (y + h) * sy:.1f}h{w * sx:.1f}v{h * sy:.1f}h{-w * sx:.1f}z"
            for x, y, w, h in boxes
        )

    def text(x, y, words, *, anchor="start", size=11, weight=400, opacity=0.8) -> str:
        return (
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" font-weight="{weight}" '
            f'fill="currentColor" opacity="{opacity}">{escape(words)}</text>'
        )

    words = describe_schedule(record)
    if curve:
        points = ", ".join(f"{k}: {curve[k].peak / BOUNDARY:.0f}" for k in sorted(curve))
        words += f" Peak in boundaries by segment length: {points}."
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-labelledby="{key}t {key}d" viewBox="0 0 {width} {height}" '
        f'style="width:100%;max-width:{width}px;height:auto;display:block;color:inherit;'
        f'font:11px var(--jp-ui-font-family,system-ui,sans-serif)">',
        f'<title id="{key}t">{escape(summary(record))}</title><desc id="{key}d">{escape(words)}</desc>',
        f"<defs>{''.join(_svg_hatch(key, look) for look in HATCHES)}</defs>",
    ]
    # The grid.
    turn = left + turning_point(record) * sx
    end = left + grid_w
    out += [
        f'<rect x="{left}" y="{top}" width="{grid_w}" height="{grid_h}" fill="currentColor" opacity=".06"/>',
        f'<path d="M{left} {top - 7}H{turn - 2:.1f}" stroke="currentColor" stroke-width="2" opacity=".3"/>',
        f'<path d="M{turn:.1f} {top - 7}H{end}" stroke="currentColor" stroke-width="2" opacity=".75"/>',
        text((left + turn) / 2, top - 13, "forward", anchor="middle"),
        text((turn + end) / 2, top - 13, "backward", anchor="middle"),
    ]
    if n <= 32:
        lines = "".join(f"M{left} {top + i * sy:.1f}h{grid_w}" for i in range(1, n))
        out.append(f'<path d="{lines}" stroke="currentColor" opacity=".1" stroke-width=".8"/>')
    for look, boxes in boxes_of(record).items():
        if boxes:
            out.append(f'<path class="gm-{look}" d="{path(boxes)}" {_svg_paint(key, look)}/>')
    for layer in sorted({1, n, *([n // 2] if n > 3 else [])}):
        out.append(text(left - 5, top + grid_h - (layer - 0.5) * sy + 4, str(layer), anchor="end"))
    out.append(
        f'<text transform="translate(9 {top + grid_h * 0.27:.0f}) rotate(-90)" text-anchor="middle" fill="currentColor" '
        f'opacity=".8">layer</text>'
    )
    # The bytes.
    x, live = samples(record)
    most = max(record.peak, 1) * 1.2

    def bytes_y(value: float) -> float:
        return low_top + low_h - value / most * low_h

    step = nice_step(most / BOUNDARY, 3)
    ticks = [step * i for i in range(int(most / BOUNDARY / step) + 1)]
    for tick in ticks:
        y = bytes_y(tick * BOUNDARY)
        out.append(f'<path d="M{left} {y:.1f}H{end}" stroke="currentColor" opacity=".14"/>')
        out.append(text(left - 5, y + 4, f"{tick:g}", anchor="end"))
    base = np.zeros(len(x))
    for name in PARTS:
        if live[name].any():
            shape = _svg_steps(left + x * sx, bytes_y(base), bytes_y(base + live[name]), end)
            out.append(f'<path class="gm-{name}" d="{shape}" {_svg_paint(key, name)}/>')
            base = base + live[name]
    peak_x, peak_y = left + peak_column(record) * sx, bytes_y(record.peak)
    side = -1 if peak_column(record) > 0.7 * columns else 1
    out += [
        f'<path d="M{peak_x:.1f} {top}V{peak_y:.1f}" stroke="currentColor" stroke-dasharray="3 3"/>',
        f'<circle cx="{peak_x:.1f}" cy="{peak_y:.1f}" r="4" fill="currentColor"/>',
        f'<text x="{peak_x + 8 * side:.1f}" y="{peak_y - 4:.1f}" font-size="12" font-weight="700" fill="currentColor" '
        f'text-anchor="{"end" if side < 0 else "start"}" {_HALO}>peak {record.peak / BOUNDARY:.0f}</text>',
        text(left, low_top - 9, "live bytes, in boundaries"),
        text(end, low_top + low_h + 15, "time: one column each time a layer runs", anchor="end"),
    ]
    out += _svg_curve(record, settings, curve, right, top, width - 10 - right, 150, text)
    # The legend.
    looks, y = record.looks, top + 190

    def row(y: float, look: str, label: str, value: str) -> str:
        return (
            f'<rect x="{right}" y="{y - 6:.1f}" width="18" height="12" {_svg_paint(key, look)}/>'
            + text(right + 26, y + 4, label, size=12, opacity=1)
            + text(width - 10, y + 4, value, size=12, anchor="end", opacity=1)
        )

    out.append(text(width - 10, y + 3, "times", anchor="end"))
    for look, label in LABELS.items():
        if look in looks:
            y += 19
            out.append(row(y, look, label, str(looks.count(look))))
    y += 26
    out.append(text(width - 10, y + 3, "boundaries at the peak", anchor="end"))
    for name in ("passing", "internals", "inputs"):
        y += 19
        at_peak = record.live[name][record.peak_operation] / BOUNDARY
        out.append(row(y, name, PART_LABELS[name], f"{at_peak:.0f}"))
    return "".join(out) + "</svg>"


def _svg_curve(
    record, settings: dict, curve: dict, left: float, top: float, width: float, height: float, text
) -> list[str]:
    """Peak against segment length, as far as it is measured, and where the present settings stand."""
    depth = settings["depth"]
    highest = max([r.peak for r in curve.values()] + [record.peak]) * 1.12

    def px(k: float) -> float:  # logarithmic: short segments are where it turns
        return left + 26 + math.log(k) / math.log(depth) * (width - 34)

    def py(nbytes: float) -> float:
        return top + height - nbytes / highest * height

    out = [
        text(left, top - 13, "peak by length of equal segments"),
        f'<path d="M{left + 20} {top}V{top + height}H{left + width}" fill="none" stroke="currentColor" opacity=".35"/>',
    ]
    step = nice_step(highest / BOUNDARY, 4)
    for i in range(int(highest / BOUNDARY / step) + 1):
        y = py(i * step * BOUNDARY)
        out.append(text(left + 16, y + 4, f"{i * step:g}", anchor="end"))
        out.append(f'<path d="M{left + 20} {y:.1f}H{left + width}" stroke="currentColor" opacity=".12"/>')
    last = -100.0
    for k in (1, 2, 4, 8, 16, 32, 64):
        if k <= depth and px(k) - last > 20:
            out.append(text(px(k), top + height + 14, str(k), anchor="middle"))
            last = px(k)
    points = [(px(k), py(curve[k].peak)) for k in sorted(curve)]
    if points:
        line = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2"/>' for x, y in points)
        out.append(f'<path d="M{line}" fill="none" stroke="{_BLUE_BOTH}" stroke-width="1.6"/>')
        out.append(f'<g fill="{_BLUE_BOTH}">{dots}</g>')
    y = py(record.peak)
    if settings["schedule"] == "equal segments":
        out.append(
            f'<circle class="gm-here" cx="{px(settings["segment"]):.1f}" cy="{y:.1f}" r="5.5" fill="{COLORS["inputs"]}" '
            'stroke="currentColor" stroke-width="1.5"/>'
        )
    else:
        out.append(
            f'<path class="gm-here" d="M{left + 20} {y:.1f}H{left + width}" stroke="{COLORS["inputs"]}" stroke-width="2.5" '
            'stroke-dasharray="7 3"/>'
        )
        # On the side where the curve is not: nothing is lower than the best, nothing higher than none.
        best = settings["schedule"] == "best segments"
        out.append(
            f'<text x="{left + (width if best else 26)}" y="{y + 13 if best and y + 16 < top + height else y - 5:.1f}" '
            f'text-anchor="{"end" if best else "start"}" font-weight="700" fill="currentColor" {_HALO}>'
            f"{settings['schedule']}</text>"
        )
    return out


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
        f'<pattern id="{key}{look}" width="6" height="6" patternUnits="userSpaceOnUse">'
        f'<rect width="6" height="6" fill="{COLORS[look]}"/><g {ink} fill="none">{marks}</g></pattern>'
    )


def summary(record: ScheduleRecord) -> str:
    """Peak and work in one line."""
    again = len(record.ran("recompute"))
    return (
        f"Peak {record.peak / BOUNDARY:.0f} boundaries ({format_bytes(record.peak)}) · "
        f"{record.forward_calls} forward calls ({record.layers} + {again} again)"
    )
