"""Still pictures of memory: stacked areas over a run, stacked bars against a card.

One palette serves every picture of the course. Its six colours differ in lightness by at least nine
steps of CIE L*, so they stay apart in greyscale and for colour-blind readers, and each category
also carries a hatch of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ..measure.timeline import BY, PHASE, TOTAL
from ..names import CATEGORIES, PHASES
from ..units import format_bytes
from .style import (
    ALARM,
    COLORS,
    DARK,
    GROWING,
    GROWING_HATCH,
    HATCHES,
    INK,
    LIGHT,
    MAX_POINTS,
    axis_top,
    draw_entry,
    draw_quiet_axes,
    hatch_ink,
    joined,
    label_peak,
    listed,
    new_figure,
    nice_step,
    plate,
    scale_of,
    shortened,
    style,
)

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ..measure.timeline import MemorySnapshot, Timeline


GROWING_WORDS = "growing bytes"  # in legends, below the categories
PHASE_LABELS = {"forward": "forward", "backward": "backward", "optimizer_step": "optimizer step"}
_SHORT_PHASE_LABELS = {"forward": "fwd", "backward": "bwd", "optimizer_step": "step"}
MOST_BATCHES = 12  # marks of changes of the batch's size; more would hide the picture
PHASE_COLORS = {"forward": "#dfe3ea", "backward": "#7b8495", "optimizer_step": "#262c38"}


def peak_of(
    timeline: Timeline, peak: MemorySnapshot | None
) -> tuple[int, dict[str, int], str, int]:
    """(total bytes, bytes by category, phase, sample index) of ``peak``, or of the timeline's
    largest sample.
    """
    at = timeline.peak_index
    if peak is None:
        row = timeline.rows[at].tolist()
        return row[TOTAL], dict(zip(CATEGORIES, row[BY], strict=True)), PHASES[row[PHASE]], at
    # After reset_peak(), the peak's sample may not be the largest one.
    same = (timeline.rows[:, TOTAL] == peak.total).nonzero()[0]
    return peak.total, peak.by_category, peak.phase, int(same[0]) if len(same) else at


def describe(
    timeline: Timeline | None, *, title: str = "", budget: int | None = None, peak=None
) -> str:
    """The picture in words, for those who do not see it."""
    name = joined("Memory", title, by=" of ")
    if timeline is None or not len(timeline):
        return f"{name}: nothing was recorded."
    total, parts, phase, at = peak_of(timeline, peak)
    largest_first = dict(sorted(parts.items(), key=lambda part: -part[1]))
    words = (
        f"{name} over {timeline.events[-1]:,} operations, stacked by category. Peak: "
        f"{format_bytes(total)} ({total:,} bytes) at operation {timeline.events[at]:,}, in "
        f"{PHASE_LABELS.get(phase, phase)}: {listed(largest_first)}."
    )
    growing = growing_at(timeline, at)
    if growing:
        words += f" {format_bytes(growing)} of it grow from step to step."
    if budget is not None:
        words += f" Budget: {format_bytes(budget)} ({budget:,} bytes)."
    return words + _batches_in_words(timeline)


def growing_at(timeline: Timeline, sample: int) -> int:
    """How many of the bytes at ``sample`` grow from step to step."""
    return 0 if timeline.growing is None else int(timeline.growing[sample].sum())


def _batches_in_words(timeline: Timeline) -> str:
    """The sizes of the batch, as a sentence after another one; empty if they do not change."""
    if not timeline.batches:
        return ""
    if len(timeline.batches) > MOST_BATCHES:
        sizes = [rows for _, rows in timeline.batches]
        return f" The batch has {min(sizes):,} to {max(sizes):,} rows."
    parts = [f"{rows:,} from operation {operation:,} on" for operation, rows in timeline.batches]
    return f" Rows of the batch: {', '.join(parts)}."


def plot_timeline(
    timeline: Timeline,
    *,
    title: str = "",
    budget: int | None = None,
    ax: Axes | None = None,
    peak=None,
) -> Figure:
    """Draw live bytes by category over the operations of ``timeline``, with its phases and its
    peak.

    Values hold until the next sample, so the areas are steps: memory does not change between
    operations.

    Args:
        timeline: what a tracker recorded, in bytes.
        title: a heading.
        budget: bytes; drawn as a line.
        ax: matplotlib axes to draw into. Without it, a new figure with a legend is made.
        peak: the ``MemorySnapshot`` of the peak. Without it, the timeline's largest sample is used.

    Returns the matplotlib ``Figure``. Raises ``ValueError`` if the timeline has no samples.
    """
    if not len(timeline):
        raise ValueError(
            "this timeline has no samples: run something inside `with MemoryTracker(...)` first"
        )
    total, parts, phase, at = peak_of(timeline, peak)
    with style():
        if ax is not None:
            draw_areas(ax, timeline, budget, peak)
            if title:
                ax.set_title(title, loc="left", pad=24)
            return ax.figure
        alt = describe(timeline, title=title, budget=budget, peak=peak)
        figure = new_figure(8.6, 3.5, alt)
        axes = figure.add_axes((0.078, 0.145, 0.672, 0.66))
        used = draw_areas(axes, timeline, budget, peak)
        figure.text(
            0.078,
            0.93,
            shortened(title or "Memory by category", 62),
            fontsize=11,
            fontweight="bold",
            va="baseline",
        )
        figure.text(0.772, 0.93, "peak", color=INK, va="baseline")
        figure.text(
            0.985,
            0.93,
            format_bytes(total),
            fontsize=11,
            fontweight="bold",
            ha="right",
            va="baseline",
        )
        where = PHASE_LABELS.get(phase, phase)
        figure.text(0.772, 0.865, f"in {where}" if phase != "idle" else "", color=INK, fontsize=6.8)
        figure.text(0.985, 0.865, f"{total:,} bytes", color=INK, fontsize=6.8, ha="right")
        _draw_legend(figure, 0.772, 0.79, parts, used, growing_at(timeline, at))
    return figure


def draw_areas(
    ax: Axes, timeline: Timeline, budget: int | None, peak, highest: int = 0
) -> list[str]:
    """Draw into ``ax``. Returns the phases that occur. One of several has an axis up to
    ``highest``, and a peak without name.
    """
    import numpy as np

    total, _, _, at = peak_of(timeline, peak)
    shown = timeline.decimate(MAX_POINTS)
    x = edges_of(shown.events)
    one_of_several, highest = highest > 0, max(total, highest, *shown.totals)
    factor, unit = scale_of(highest)
    top = axis_top(highest, budget)
    # Spikes this close would be covered by their own outline.
    dense = len(x) > 150
    low = np.zeros(len(x))
    for color, hatch, nbytes in _stack(shown):
        values = np.append(nbytes, nbytes[-1]) / factor
        if values.any():
            ax.fill_between(
                x,
                low,
                low + values,
                step="post",
                facecolor=color,
                hatch=hatch,
                edgecolor=hatch_ink(color),
                linewidth=0.0,
                zorder=2,
            )
            ax.step(
                x,
                low + values,
                where="post",
                color=LIGHT,
                linewidth=0.2 if dense else 0.7,
                zorder=2.5,
            )
            low = low + values
    outline = {"linewidth": 0.3, "alpha": 0.5} if dense else {"linewidth": 0.8}
    ax.step(x, low, where="post", color=INK, zorder=3, **outline)

    ax.set_xlim(x[0], x[-1])
    ax.set_ylim(0, top / factor)
    _draw_axes(ax, top / factor, unit)
    peak_at = (edges_of(timeline.events)[at], total / factor)
    _mark_peak(ax, peak_at)
    if not one_of_several:
        near_right = peak_at[0] > x[0] + 0.75 * (x[-1] - x[0])
        label_peak(ax, peak_at, total, on_left=near_right, offset=(10, 3))
    if budget is not None:
        # On the side without the peak, so that the two labels do not overlap.
        _mark_budget(ax, budget, factor, top, right=peak_at[0] < (x[0] + x[-1]) / 2)
    _mark_batches(ax, shown.batches)
    return _draw_phases(ax, x, shown.phases)


def edges_of(operations: Sequence[float]) -> np.ndarray:
    """Where each of n samples begins on the axis of operations, and where the last one ends:
    float64 (n + 1,).

    A sample holds until the next one. Samples of one operation share its width: what an error
    frees is one more sample of the operation that failed, and the peak before it has to be seen.
    The last operation is drawn at least a hundredth of the picture wide, for the same reason.
    ``edgesOf`` in live.js is the same rule.
    """
    import numpy as np

    starts, counts = np.unique(operations, return_counts=True)
    last_width = max(1.0, (starts[-1] - starts[0]) / 100)
    ends = np.append(starts[1:], starts[-1] + last_width)
    edges = []
    for start, end, count in zip(starts, ends, counts, strict=True):
        edges.extend(np.linspace(start, end, count, endpoint=False))
    return np.append(edges, ends[-1])


def _stack(shown: Timeline) -> list[tuple[str, str, np.ndarray]]:
    """(colour, hatch, bytes at each sample) of each area, from the foot of the stack: the bytes
    that grow, then the others by category.
    """
    by_category = shown.rows[:, BY]
    areas = []
    if shown.growing is not None:
        by_category = by_category - shown.growing
        areas.append((GROWING, GROWING_HATCH, shown.growing.sum(axis=1)))
    for name, nbytes in zip(CATEGORIES, by_category.T, strict=True):
        areas.append((COLORS[name], HATCHES[name], nbytes))
    return areas


def _draw_axes(ax: Axes, top: float, unit: str) -> None:
    """Ticks, grid and labels for an axis that reaches ``top``, in ``unit``."""
    import numpy as np

    draw_quiet_axes(ax)
    ax.set_xlabel("operations", color=INK, fontsize=8.5)
    ax.set_ylabel(unit, color=INK, fontsize=8.5)
    ax.set_yticks(np.arange(0, top, nice_step(top)))
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    ax.xaxis.get_major_locator().set_params(integer=True)


def _mark_peak(ax: Axes, at: tuple[float, float]) -> None:
    """A dot on the peak, drawn whole also at the picture's edge."""
    x, y = at
    ax.plot(
        [x],
        [y],
        marker="o",
        markersize=6,
        color=DARK,
        markeredgecolor=LIGHT,
        zorder=6,
        clip_on=False,
    )


def _mark_budget(ax: Axes, budget: int, factor: int, top: int, right: bool) -> None:
    label = f"budget {format_bytes(budget)}"
    if budget <= top:
        ax.axhline(budget / factor, color=ALARM, linewidth=1.4, linestyle=(0, (5, 3)), zorder=5)
    else:
        label += " (above this picture)"
    at = min(budget, top)
    ax.annotate(
        label,
        (int(right), at / factor),
        xycoords=("axes fraction", "data"),
        xytext=(-5 if right else 5, -6),
        textcoords="offset points",
        ha="right" if right else "left",
        va="top",
        fontsize=8.5,
        fontweight="bold",
        zorder=7,
        **plate(ALARM),
    )


def _mark_batches(ax: Axes, batches: Sequence[tuple[int, int]]) -> None:
    """A line where the batch's size changes, and above the strip the size from there on."""
    if len(batches) > MOST_BATCHES:
        return
    left, right = ax.get_xlim()
    points = _points_per_operation(ax)
    free = left  # where the next label may begin
    for change, (operation, rows) in enumerate(batches):
        if change:  # the first size is no change
            ax.axvline(operation, color=INK, linewidth=1.1, linestyle=(0, (2, 2)), zorder=4.5)
        label = f"batch {rows:,}"
        width = (4.5 * len(label) + 6) / points
        start = max(min(operation, right - width), left)
        if start < free:
            continue
        free = start + width
        ax.text(
            start,
            1.1,
            label,
            transform=ax.get_xaxis_transform(),
            color=INK,
            fontsize=7.5,
            va="baseline",
        )


def _points_per_operation(ax: Axes) -> float:
    left, right = ax.get_xlim()
    return ax.get_position().width * ax.figure.get_size_inches()[0] * 72 / (right - left)


def phase_runs(events, phases) -> list[tuple[str, float, float]]:
    """Neighbouring samples of one phase as (phase, first operation, first operation of the next
    phase).
    """
    runs: list[list] = []
    for event, phase in zip(events, phases, strict=False):
        if runs and runs[-1][0] == phase:
            continue
        if runs:
            runs[-1][2] = event
        runs.append([phase, event, event])
    if runs:
        runs[-1][2] = events[-1]
    return list(map(tuple, runs))


def step_runs(runs: list[tuple[str, float, float]]) -> list[tuple[float, float]]:
    """The steps as (first operation, first operation of the next step), where phases are too many
    to tell apart; otherwise none. A step goes up to the end of its optimizer step.
    """
    if len(runs) <= 24:
        return []
    steps = []
    start = runs[0][1]
    for phase, _, stop in runs:
        if phase == "optimizer_step":
            steps.append((start, stop))
            start = stop
    return steps if len(steps) > 1 else []


def _draw_phases(ax: Axes, x, phases: list[str]) -> list[str]:
    """The strip above the areas: one box a phase, named where the name fits."""
    from matplotlib.patches import Rectangle

    phase_transform = ax.get_xaxis_transform()
    points = _points_per_operation(ax)
    all_runs = phase_runs(x, phases)
    runs = [run for run in all_runs if run[0] in PHASE_LABELS]
    steps = step_runs(all_runs)
    boxes = []  # (start, stop, colour, its names from long to short)
    for phase, start, stop in [] if steps else runs:
        names = (PHASE_LABELS[phase], _SHORT_PHASE_LABELS[phase])
        boxes.append((start, stop, PHASE_COLORS[phase], names))
    for number, (start, stop) in enumerate(steps, 1):
        color = PHASE_COLORS["backward" if number % 2 else "forward"]
        boxes.append((start, stop, color, (f"step {number}", f"{number}")))
    for start, stop, color, names in boxes:
        ax.add_patch(
            Rectangle(
                (start, 1.015),
                stop - start,
                0.06,
                transform=phase_transform,
                facecolor=color,
                edgecolor=LIGHT,
                linewidth=0.6,
                clip_on=False,
            )
        )
        fitting = (name for name in names if 4.5 * len(name) + 4 < (stop - start) * points)
        if label := next(fitting, ""):
            ax.text(
                (start + stop) / 2,
                1.043,
                label,
                transform=phase_transform,
                ha="center",
                va="center_baseline",
                fontsize=7.5,
                color="#14181f" if color == PHASE_COLORS["forward"] else "#ffffff",
            )
        if len(boxes) <= 40:
            ax.axvline(start, color=INK, alpha=0.16, linewidth=0.7, zorder=4)
    if steps:
        return []  # no colour means a phase
    return [phase for phase in PHASE_LABELS if any(run[0] == phase for run in runs)]


def _draw_legend(
    figure: Figure,
    x: float,
    y: float,
    parts: Mapping[str, int],
    phases: list[str],
    growing: int,
) -> None:
    """Categories from the top of the stack to its foot, with their bytes at the peak; of all these,
    the bytes that grow; then the phases.
    """

    def row(y, label, color, hatch, value):
        draw_entry(figure, label, (x, y), (0.021, 0.052), 0.029, (color, hatch))
        figure.text(0.985, y, value, va="center_baseline", ha="right", fontsize=8.5)

    figure.text(0.985, y, "at the peak", color=INK, fontsize=8, ha="right", va="center_baseline")
    height = 0.07 if growing else 0.075  # one row more has to fit
    for name in reversed(CATEGORIES):
        y -= height
        row(y, name, COLORS[name], HATCHES[name], format_bytes(parts[name]))
    if growing:
        y -= height
        row(y, GROWING_WORDS, GROWING, GROWING_HATCH, format_bytes(growing))
    y -= 0.035
    if not phases:
        figure.text(x, y - 0.068, "strip: steps", color=INK, fontsize=8, va="center_baseline")
    for phase in phases:
        y -= 0.068
        row(y, PHASE_LABELS[phase], PHASE_COLORS[phase], "", "")
