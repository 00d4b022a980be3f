"""Pictures of a training step's schedule: layers against time, with what was stored, recomputed and
freed.

``record_schedule`` watches one real training step. From PyTorch's own dispatch it learns which
layer each operation belongs to, when each storage is allocated, and when its last reference goes
away. No part of the picture comes from a formula, so it can show any way of checkpointing, also
your own, and also mistakes.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import PathPatch
from matplotlib.path import Path

from ..units import format_bytes
from .marks import draw_areas, draw_peak, draw_scale, draw_strip
from .picture import BESIDE, RIGHT, Picture
from .schedule_record import PARTS, ScheduleRecord
from .style import (
    GRID,
    INK,
    LIGHT,
    MAX_POINTS,
    PHASE_COLORS,
    filled,
    joined,
    listed,
    nice_step,
    scale_of,
    style,
)

# Full cells differ in lightness by at least nine steps of CIE L*; inputs, thinner than a cell, and
# memory have shapes too.
COLORS = {
    "forward": "#2f62ab",
    "dropped": "#d3e0f3",
    "recompute": "#22a689",
    "redropped": "#d5efe6",
    "backward": "#262c38",
    "internals": "#f0a765",
    "inputs": "#b3400f",
    "passing": "#f3dc8c",
    "left": "#bd2b52",
    "free": "#80889626",
}

HATCHES = {"recompute": "////", "internals": "..", "passing": "xx", "left": "\\\\"}
# The edges of cells that would be lost on a light or on a dark page.
EDGES = {
    "dropped": COLORS["forward"],
    "redropped": COLORS["recompute"],
    "backward": INK,
    "free": GRID,
}
LABELS = {
    "forward": "forward, keeps internals",
    "dropped": "forward, drops them",
    "recompute": "forward again, keeps",
    "redropped": "forward again, drops",
    "backward": "backward",
    "internals": "internals stored",
    "inputs": "input stored",
    "free": "nothing stored",
}

PART_LABELS = {
    "inputs": "inputs",
    "internals": "internals",
    "passing": "passing through",
    "left": "left at the end",
}

DOTTED = {"color": INK, "linewidth": 0.9, "linestyle": (0, (2, 2))}
Box = tuple[float, float, float, float]


def looks_of(record: ScheduleRecord) -> list[str]:
    """For each event, its entry of ``LABELS``: its kind, and whether internals are alive when it
    ends ("": outside).
    """
    looks = []
    for t, event in enumerate(record.events):
        look = event.kind
        if event.layer < 0:
            look = ""
        elif look != "backward" and not record.internals[event.layer, t]:
            look = {"forward": "dropped", "recompute": "redropped"}[look]
        looks.append(look)
    return looks


def spans(live_bytes: np.ndarray) -> list[tuple[int, int]]:
    """The spans in which a layer has live bytes (of its input, or of its internals).

    A span is (first event, event that frees the bytes).
    """
    edges = np.flatnonzero(np.diff(np.concatenate([[0], (live_bytes > 0).astype(int), [0]])))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def boxes_of(record: ScheduleRecord) -> dict[str, list[Box]]:
    """Rectangles (x, y, width, height) by look, in columns and layers, in the order in which they
    are painted.
    """
    gap = 0.06 if record.layers <= 24 else 0.0
    tall, thin = 1 - 2 * gap, 0.34
    boxes: dict[str, list[Box]] = {"internals": [], "inputs": []}
    for layer in range(record.layers):
        # Bytes that appear in one event are drawn in the columns after it.
        for start, stop in spans(record.internals[layer]):
            boxes["internals"].append((start + 1, layer + gap, stop - start - 1, tall))
        for start, stop in spans(record.inputs[layer]):
            # In the column where the layer itself runs, its cell is enough.
            start += record.events[min(start + 1, stop - 1)].layer == layer
            stop -= stop > start + 1 and record.events[stop - 1].layer == layer
            boxes["inputs"].append((start + 1, layer + (1 - thin) / 2, stop - start - 1, thin))
    boxes |= {look: [] for look in ("dropped", "redropped", "forward", "recompute", "backward")}
    for t, look in enumerate(looks_of(record)):
        if look:
            boxes[look].append((t, record.events[t].layer + gap, 1, tall))
    return {look: [box for box in found if box[2] > 0] for look, found in boxes.items()}


def samples(record: ScheduleRecord) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Live bytes over columns: the start of each sample, and its parts.

    Thinned without losing a peak.
    """
    starts = np.array([event.start for event in record.events])
    widths = np.array([max(event.stop - event.start, 1) for event in record.events])
    ops = np.arange(len(record.totals))
    column = np.searchsorted(starts, ops, side="right") - 1
    x = column + (ops - starts[column]) / widths[column]
    window = -(-len(ops) // MAX_POINTS)
    keep = [
        first + record.totals[first : first + window].argmax()
        for first in range(0, len(ops), window)
    ]
    return x[keep], {name: values[keep] for name, values in record.live.items()}


def turning_point(record: ScheduleRecord) -> int:
    """The column after the last first forward."""
    return max(t for t, event in enumerate(record.events) if event.kind == "forward") + 1


def peak_column(record: ScheduleRecord) -> float:
    event = record.events[record.peak_event]
    inside = (record.peak_operation - event.start + 0.5) / max(event.stop - event.start, 1)
    return record.peak_event + inside


@style()
def plot_schedule(
    record: ScheduleRecord,
    *,
    title: str = "",
    curve: Mapping[int, int] | None = None,
    here: tuple[int | None, str] = (None, ""),
) -> Picture:
    """Draw layers against time and, below on the same axis, the live bytes with their peak.

    ``curve``: peaks in bytes by the length of equal segments, drawn beside it. ``here``: the length
    of this schedule's segments, or ``None`` and its name.
    """
    grid_height = min(max(0.135 * record.layers, 1.62), 3.9)
    if curve is not None:
        grid_height = 3.2  # the picture does not jump when a slider moves
    top, gap, low = 0.72, 0.13, 1.1
    foot = top + grid_height
    words = joined(title, describe_schedule(record))
    heading = title or "Layers over one training step"
    text = joined("Schedule plot", title)
    picture = Picture(8.6, foot + gap + low + 0.46, heading, alt=words, text=text)
    grid = picture.panel(0.064, 0.75, top, foot)
    below = picture.panel(0.064, 0.75, foot + gap, foot + gap + low, sharex=grid)
    grid.set_xlim(0, len(record.events))
    _draw_grid(grid, record)
    _draw_bytes(below, record)
    picture.write_peak(record.peak, f"{record.peak:,} bytes without weights")
    y = top - 0.15
    if curve is not None:
        _draw_curve(picture.panel(BESIDE + 0.03, RIGHT, 0.9, 2.1), record, curve, here)
        y = 2.4
    looks = looks_of(record)
    rows = []
    for name in LABELS:
        if name in looks or name in ("internals", "inputs", "free"):
            rows.append((LABELS[name], _look(name), str(looks.count(name) or "")))
    picture.legend_beside(y, min(0.2, (foot - y) / len(rows)), rows)
    rows = []
    for name in reversed(PARTS):
        if record.live[name].any():
            nbytes = int(record.live[name][record.peak_operation])
            rows.append((PART_LABELS[name], _look(name), format_bytes(nbytes)))
    picture.legend_beside(foot + gap + 0.07, 0.2, rows, "at the peak")
    return picture


def _look(name: str) -> dict:
    if name in EDGES:
        return {"facecolor": COLORS[name], "edgecolor": EDGES[name], "linewidth": 0.6}
    return filled(COLORS[name], HATCHES.get(name, ""))


def _draw_grid(ax: Axes, record: ScheduleRecord) -> None:
    n, columns = record.layers, len(record.events)
    ax.set_ylim(0, n)
    ax.set_facecolor(COLORS["free"])
    ax.grid(False)
    ax.spines["bottom"].set_visible(False)
    if n <= 32:
        ax.hlines(range(1, n), 0, columns, color=LIGHT, linewidth=0.8, zorder=1)
    for z, (look, boxes) in enumerate(boxes_of(record).items()):
        if boxes:
            shape = Path.make_compound_path(*map(_outline, boxes))
            ax.add_patch(PathPatch(shape, zorder=2 + z / 10, **_look(look)))
    step = round(nice_step(n, 4)) or 1
    ticks = [1, *(k for k in range(step, n + 1, step) if k > 1 and n - k > step / 2), n]
    ax.set_yticks([k - 0.5 for k in ticks], list(map(str, ticks)))
    ax.tick_params(axis="x", length=0, labelbottom=False)
    ax.set_ylabel("layer")
    turn = turning_point(record)
    draw_strip(ax, 0, turn, PHASE_COLORS["forward"], ["forward", "fwd"])
    draw_strip(ax, turn, columns, PHASE_COLORS["backward"], ["backward", "bwd"])
    ax.axvline(turn, color=INK, alpha=0.2, linewidth=0.7, zorder=4)
    ax.axvline(peak_column(record), zorder=6, **DOTTED)


def _outline(box: Box) -> Path:
    x, y, width, height = box
    corners = [(x, y), (x + width, y), (x + width, y + height), (x, y + height), (x, y)]
    return Path(corners, closed=True)


def _draw_bytes(ax: Axes, record: ScheduleRecord) -> None:
    x, live = samples(record)
    factor, unit = scale_of(record.peak)
    high = record.peak / factor
    draw_areas(
        ax,
        np.append(x, len(record.events)),
        [(_look(name), live[name] / factor) for name in PARTS],
    )
    ax.set_xlabel("time: one column each time a layer runs")
    draw_scale(ax, high * 1.25, unit, parts=3)
    at = peak_column(record)
    ax.plot([at, at], [high, high * 1.25], zorder=3, **DOTTED)
    draw_peak(ax, at, high, record.peak)


def _draw_curve(
    ax: Axes, record: ScheduleRecord, curve: Mapping[int, int], here: tuple[int | None, str]
) -> None:
    """Peaks by length of equal segments, and where this schedule is."""
    if not curve:  # nothing is measured yet
        ax.set_axis_off()
        return
    highest = max(record.peak, *curve.values())
    factor, unit = scale_of(highest)
    lengths = sorted(curve)
    peaks = [curve[length] / factor for length in lengths]
    line = {"color": COLORS["forward"], "linewidth": 1.2}
    ax.plot(lengths, peaks, marker="o", markersize=2.5, **line)
    ax.set_xscale("log", base=2)  # since the curve turns at short segments
    ax.xaxis.set_major_formatter(lambda length, _: f"{length:g}")
    ax.minorticks_off()
    ax.set_ylim(0, 1.12 * highest / factor)
    ax.set_title(f"peak in {unit} by segment length", loc="left", fontsize=7.5)
    length, name = here
    now = record.peak / factor
    red = COLORS["inputs"]
    if length is not None:
        ax.plot([length], [now], marker="o", markersize=7, color=red, markeredgecolor=INK)
        return
    # A schedule without a length of its own: a line. No point is below the best, and none is above
    # "none".
    ax.axhline(now, color=red, linewidth=2, linestyle=(0, (4, 2)))
    x, up, ha, va = lengths[0], 4, "left", "bottom"
    if now <= min(peaks):
        x, up, ha, va = lengths[-1], -4, "right", "top"
    look = {"textcoords": "offset points", "fontweight": "bold"}
    ax.annotate(name, (x, now), xytext=(0, up), ha=ha, va=va, **look)


def describe_schedule(record: ScheduleRecord) -> str:
    """The picture in words, for those who do not see it."""
    looks = looks_of(record)
    first = [
        look for look, event in zip(looks, record.events, strict=True) if event.kind == "forward"
    ]
    event = record.events[record.peak_event]
    where = f"{event.kind} of layer {event.layer + 1}"
    if event.layer < 0:
        where = "the loss"
    elif event.kind == "recompute":
        where = f"running layer {event.layer + 1} forward again"
    at = record.peak_operation
    parts = listed({PART_LABELS[name]: int(record.live[name][at]) for name in PARTS})
    recomputed = len(record.ran("recompute"))
    recompute_text = "no layer runs forward again"
    if recomputed:
        recompute_text = f"layers run forward again: {recomputed}"
    return (
        f"Grid of {record.layers} layers against {len(record.events)} columns of time. Forward "
        f"calls that keep internals: {first.count('forward')}, that drop them: "
        f"{first.count('dropped')}; in backward, {recompute_text}. Peak: "
        f"{format_bytes(record.peak)} ({record.peak:,} bytes) in {where}: {parts}."
    )


def show_schedule(record: ScheduleRecord, *, title: str = "") -> None:
    """Display ``plot_schedule`` in a notebook."""
    plot_schedule(record, title=title).display()
