"""Draws the checkpointing schedule of a real step: layers against time, with what was stored,
recomputed and freed.

``record_schedule`` watches one real training step. From PyTorch's own dispatch it learns which
layer each operation belongs to, when each storage is allocated, and when its last reference goes
away. No part of the picture comes from a formula, so it can show any way of checkpointing, also
your own, and also mistakes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..units import format_bytes
from .schedule_record import PARTS, ScheduleRecord
from .style import (
    DARK,
    GRID,
    INK,
    LIGHT,
    draw_quiet_axes,
    hatch_ink,
    joined,
    label_peak,
    listed,
    new_figure,
    nice_step,
    picture_bundle,
    scale_of,
    show_bundle,
    style,
)
from .timeline import PHASE_COLORS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


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

MAX_SAMPLES = 1200


def looks_of(record: ScheduleRecord) -> list[str]:
    """For each event, its entry of ``LABELS``: its kind, and whether internals are alive when it
    ends ("": outside).
    """
    names = {"forward": ("dropped", "forward"), "recompute": ("redropped", "recompute")}
    return [
        names.get(event.kind, (event.kind,) * 2)[bool(record.internals[event.layer, t])]
        if event.layer >= 0
        else ""
        for t, event in enumerate(record.events)
    ]


def spans(live_bytes: np.ndarray) -> list[tuple[int, int]]:
    """The spans in which a layer has live bytes (of its input, or of its internals).

    A span is (first event, event that frees the bytes).
    """
    edges = np.flatnonzero(np.diff(np.concatenate([[0], (live_bytes > 0).astype(int), [0]])))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def boxes_of(record: ScheduleRecord) -> dict[str, list[tuple[float, float, float, float]]]:
    """Rectangles (x, y, width, height) by look, in columns and layers, in the order in which they
    are painted.
    """
    n = record.layers
    gap = 0.06 if n <= 24 else 0.0
    thin = 0.34
    boxes: dict[str, list] = {"internals": [], "inputs": []}
    for layer in range(n):
        # Bytes that appear in one event are drawn in the columns after it.
        for start, stop in spans(record.internals[layer]):
            boxes["internals"].append((start + 1, layer + gap, stop - start - 1, 1 - 2 * gap))
        for start, stop in spans(record.inputs[layer]):
            # In the column where the layer itself runs, its cell is enough.
            start += record.events[min(start + 1, stop - 1)].layer == layer
            stop -= stop > start + 1 and record.events[stop - 1].layer == layer
            boxes["inputs"].append((start + 1, layer + (1 - thin) / 2, stop - start - 1, thin))
    boxes = {name: [box for box in found if box[2] > 0] for name, found in boxes.items()}
    for look in ("dropped", "redropped", "forward", "recompute", "backward"):
        boxes[look] = [
            (t, record.events[t].layer + gap, 1, 1 - 2 * gap)
            for t, name in enumerate(looks_of(record))
            if name == look
        ]
    return boxes


def samples(record: ScheduleRecord) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Live bytes over columns: the start of each sample, and its parts.

    Thinned without losing a peak.
    """
    starts = np.array([event.start for event in record.events])
    widths = np.array([max(event.stop - event.start, 1) for event in record.events])
    ops = np.arange(len(record.totals))
    column = np.searchsorted(starts, ops, side="right") - 1
    x = column + (ops - starts[column]) / widths[column]
    window = -(-len(ops) // MAX_SAMPLES)
    if window > 1:
        window_starts = np.arange(0, len(ops), window)
        keep = np.array(
            [first + record.totals[first : first + window].argmax() for first in window_starts]
        )
        return x[keep], {name: values[keep] for name, values in record.live.items()}
    return x, record.live


def plot_schedule(record: ScheduleRecord, *, title: str = "") -> Figure:
    """Draw layers against time and, below on the same axis, the live bytes with their peak.

    See ``show_schedule``.
    """
    grid_height = min(max(0.135 * record.layers, 1.62), 3.9)
    top, gap, low, foot = 0.72, 0.13, 1.1, 0.46
    height = top + grid_height + gap + low + foot
    with style():
        figure = new_figure(8.6, height)
        left, width, legend = 0.064, 0.686, 0.772
        grid = figure.add_axes((left, (foot + low + gap) / height, width, grid_height / height))
        below = figure.add_axes((left, foot / height, width, low / height), sharex=grid)
        _draw_grid(grid, record)
        unit = _draw_bytes(below, record)
        figure.text(
            0.02,
            1 - 0.26 / height,
            title or "Layers over one training step",
            fontsize=11,
            fontweight="bold",
        )
        figure.text(legend, 1 - 0.26 / height, "peak", color=INK)
        figure.text(
            0.985,
            1 - 0.26 / height,
            format_bytes(record.peak),
            fontsize=11,
            fontweight="bold",
            ha="right",
        )
        figure.text(
            0.985,
            1 - 0.42 / height,
            f"{record.peak:,} bytes without weights",
            color=INK,
            fontsize=6.8,
            ha="right",
        )

        _draw_legend(figure, record, (legend, height), top, grid_height + gap)
        below.set_ylabel(unit, color=INK, fontsize=8.5)
    return figure


def _draw_legend(
    figure: Figure, record: ScheduleRecord, at: tuple[float, float], top: float, low: float
) -> None:
    """``at``: the left edge as a fraction of the width, and the figure's height.

    ``top`` and ``low``: inches.
    """
    from matplotlib.patches import Rectangle

    left, height = at

    def row(y: float, look: str, label: str, value: str) -> None:
        """``y``: inches from the top."""
        tall = 0.05 if look == "inputs" and label == LABELS["inputs"] else 0.13
        corner, size = (left, 1 - (y + tall / 2) / height), (0.024, tall / height)
        figure.add_artist(
            Rectangle(corner, *size, transform=figure.transFigure, **_paint(look, small=True))
        )
        figure.text(left + 0.034, 1 - y / height, label, va="center_baseline", fontsize=8)
        figure.text(0.985, 1 - y / height, value, va="center_baseline", ha="right", fontsize=8)

    looks = looks_of(record)
    shown = [name for name in LABELS if name in looks or name in ("internals", "inputs", "free")]
    step = min(0.2, (low - 0.03) / len(shown))
    for i, look in enumerate(shown):
        row(top + i * step, look, LABELS[look], str(looks.count(look) or ""))
    y = top + low + 0.07
    look = {"color": INK, "fontsize": 7.5, "ha": "right", "va": "center_baseline"}
    figure.text(0.985, 1 - y / height, "at the peak", **look)
    for name in reversed(PARTS):
        if record.live[name].any():
            y += 0.2
            row(
                y,
                name,
                PART_LABELS[name],
                format_bytes(int(record.live[name][record.peak_operation])),
            )


def _paint(look: str, small: bool = False) -> dict:
    """How matplotlib fills a box."""
    color = COLORS[look]
    edges = {
        "dropped": COLORS["forward"],
        "redropped": COLORS["recompute"],
        "backward": INK,  # on a dark page, the edge is what shows
        "free": GRID,
    }
    edge = edges.get(look)
    if edge:
        return {
            "facecolor": color,
            "edgecolor": edge,
            "linewidth": 0.7 if small or look == "free" else 0.5,
        }
    return {
        "facecolor": color,
        "edgecolor": (1, 1, 1, 0.75) if look == "recompute" else hatch_ink(color),
        "hatch": HATCHES.get(look, "") * (2 if small else 1),
        "linewidth": 0,
    }


def _draw_grid(ax: Axes, record: ScheduleRecord) -> None:
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    n, columns = record.layers, len(record.events)
    ax.set_xlim(0, columns)
    ax.set_ylim(0, n)
    ax.set_facecolor(COLORS["free"])
    if n <= 32:
        ax.hlines(range(1, n), 0, columns, color=LIGHT, linewidth=0.8, zorder=1)
    for z, (look, boxes) in enumerate(boxes_of(record).items()):
        patches = [Rectangle(box[:2], *box[2:]) for box in boxes]
        ax.add_collection(PatchCollection(patches, zorder=2 + z / 10, **_paint(look)))
    for side in ax.spines.values():
        side.set_visible(False)
    step = round(nice_step(n, 4)) or 1
    ticks = [1, *(k for k in range(step, n + 1, step) if k > 1 and n - k > step / 2), n]
    ax.set_yticks([k - 0.5 for k in ticks], list(map(str, ticks)))
    ax.tick_params(axis="y", length=0, colors=INK, labelsize=8, pad=2)
    ax.tick_params(axis="x", length=0, labelbottom=False)
    ax.set_ylabel("layer", color=INK, fontsize=8.5)
    backward_start = turning_point(record)
    inch = 1 / (ax.get_position().height * ax.figure.get_size_inches()[1])  # in heights of the grid
    for phase, start, stop in (
        ("forward", 0, backward_start),
        ("backward", backward_start, columns),
    ):
        strip = Rectangle(
            (start, 1 + 0.04 * inch),
            stop - start,
            0.17 * inch,
            transform=ax.get_xaxis_transform(),
            facecolor=PHASE_COLORS[phase],
            edgecolor=LIGHT,
            linewidth=0.6,
            clip_on=False,
        )
        ax.add_patch(strip)
        ax.text(
            (start + stop) / 2,
            1 + 0.12 * inch,
            phase,
            transform=ax.get_xaxis_transform(),
            ha="center",
            va="center_baseline",
            fontsize=7.5,
            color=LIGHT if phase == "backward" else DARK,
        )
    ax.plot([backward_start, backward_start], [0, n], color=INK, alpha=0.2, linewidth=0.7, zorder=4)
    at = peak_column(record)
    ax.plot([at, at], [0, n], color=INK, linewidth=0.9, linestyle=(0, (2, 2)), zorder=6)


def turning_point(record: ScheduleRecord) -> int:
    """The column after the last first forward."""
    return max(t for t, event in enumerate(record.events) if event.kind == "forward") + 1


def peak_column(record: ScheduleRecord) -> float:
    event = record.events[record.peak_event]
    inside = (record.peak_operation - event.start + 0.5) / max(event.stop - event.start, 1)
    return record.peak_event + inside


def _draw_bytes(ax: Axes, record: ScheduleRecord) -> str:
    x, live = samples(record)
    x = np.append(x, len(record.events))
    factor, unit = scale_of(record.peak)
    low = np.zeros(len(x))
    for name in PARTS:
        values = np.append(live[name], live[name][-1]) / factor
        if not values.any():
            continue
        paint = _paint(name)
        ax.fill_between(x, low, low + values, step="post", zorder=2, **paint)
        low = low + values
        if len(x) <= 320:  # with more samples, it would look like noise
            ax.step(x, low, where="post", color=LIGHT, linewidth=0.5, zorder=2.5)
    ax.step(x, low, where="post", color=INK, linewidth=0.8 if len(x) <= 320 else 0.6, zorder=3)
    top = record.peak / factor * 1.25
    ax.set_ylim(0, top)
    ax.set_yticks(np.arange(0, top, nice_step(top, 3)))
    draw_quiet_axes(ax)
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.set_xlabel("time: one column each time a layer runs", color=INK, fontsize=8.5)
    at = peak_column(record)
    ax.plot(
        [at, at],
        [record.peak / factor, top],
        color=INK,
        linewidth=0.9,
        linestyle=(0, (2, 2)),
        zorder=3,
    )
    ax.plot(
        [at],
        [record.peak / factor],
        "o",
        markersize=5.5,
        color=DARK,
        markeredgecolor=LIGHT,
        zorder=6,
    )
    near_right = at > 0.7 * len(record.events)
    label_peak(ax, (at, record.peak / factor), record.peak, on_left=near_right, offset=(7, 2))
    return unit


def describe_schedule(record: ScheduleRecord, *, title: str = "") -> str:
    """The picture in words, for those who do not see it."""
    n, recomputed = record.layers, len(record.ran("recompute"))
    first = [
        look
        for look, event in zip(looks_of(record), record.events, strict=True)
        if event.kind == "forward"
    ]
    event = record.events[record.peak_event]
    at, where = (
        record.peak_operation,
        event.kind if event.layer < 0 else f"{event.kind} of layer {event.layer + 1}",
    )
    if event.kind == "recompute":
        where = f"running layer {event.layer + 1} forward again"
    parts = listed({PART_LABELS[name]: int(record.live[name][at]) for name in PARTS})
    recompute_text = "no layer runs forward again"
    if recomputed:
        recompute_text = f"layers run forward again: {recomputed}"
    words = (
        f"Grid of {n} layers against {len(record.events)} columns of time. Forward calls that keep "
        f"internals: {first.count('forward')}, that drop them: {first.count('dropped')}; in "
        f"backward, {recompute_text}. Peak: {format_bytes(record.peak)} ({record.peak:,} bytes) in "
        f"{where.replace('outside', 'the loss')}: {parts}."
    )
    return joined(title, words)


PLAIN_TEXT = "Schedule plot"


def bundle(figure: Figure, words: str, title: str, text: str = PLAIN_TEXT) -> tuple[dict, dict]:
    return picture_bundle(figure, words, joined(text, title))


def schedule_bundle(record: ScheduleRecord) -> tuple[dict, dict]:
    """A record's output in a notebook: the picture, and words for those who do not see it."""
    return bundle(plot_schedule(record), describe_schedule(record), "")


def show_schedule(record: ScheduleRecord, *, title: str = "") -> None:
    """Display ``plot_schedule`` with words for those who do not see it."""
    words = describe_schedule(record, title=title)
    show_bundle(*bundle(plot_schedule(record, title=title), words, title))
