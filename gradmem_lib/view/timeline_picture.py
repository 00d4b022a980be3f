"""Live bytes by category over the operations of a run: stacked areas with phases, peak and budget.

The scripts in ``plot`` draw the same, while the run goes on.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes

from ..measure.timeline import BY, MemorySnapshot, Timeline
from ..names import CATEGORIES
from ..units import format_bytes
from .marks import DASHES, LETTER, draw_areas, draw_peak, draw_scale, draw_strip, points_per_unit
from .picture import BESIDE, Picture
from .style import (
    ALARM,
    GROWING,
    GROWING_HATCH,
    INK,
    LIGHT,
    MAX_POINTS,
    PHASE_COLORS,
    PHASE_LABELS,
    filled,
    look_of,
    plate,
    reach_of,
    scale_of,
    shortened,
    style,
)
from .timeline import (
    GROWING_WORDS,
    MOST_BATCHES,
    describe,
    edges_of,
    growing_at,
    highest_of,
    peak_of,
    phase_runs,
    step_runs,
)

_SHORT = {"forward": "fwd", "backward": "bwd", "optimizer_step": "step"}
_GROWING_LOOK = filled(GROWING, GROWING_HATCH)


@style()
def plot_timeline(
    timeline: Timeline,
    *,
    title: str = "",
    budget: int | None = None,
    peak: MemorySnapshot | None = None,
    beside: tuple[str, Timeline] | None = None,
) -> Picture:
    """Draw live bytes by category over the operations of ``timeline``, with its phases and its
    peak.

    Args:
        timeline: what a tracker recorded, in bytes.
        title: a heading.
        budget: bytes; drawn as a line.
        peak: the ``MemorySnapshot`` of the peak. Without it, the timeline's largest sample is used.
        beside: the title and the timeline of another run, drawn as an outline.

    Raises ``ValueError`` if the timeline has no samples.
    """
    if not len(timeline):
        raise ValueError(
            "this timeline has no samples: run something inside `with MemoryTracker(...)` first"
        )
    total, parts, phase, at = peak_of(timeline, peak)
    words = describe(timeline, title=title, budget=budget, peak=peak)
    if beside is not None:
        words += f" Beside it, {beside[0]} with a peak of {format_bytes(max(beside[1].totals))}."
    picture = Picture(8.6, 3.5, shortened(title or "Memory by category", 66), alt=words)
    ax = picture.panel(0.078, 0.75, 0.68, 3)
    phases = draw_timeline(ax, timeline, budget, peak, beside=beside)
    where = f"in {PHASE_LABELS[phase]}" if phase in PHASE_LABELS else ""
    picture.write_peak(total, f"{total:,} bytes", where)
    # Categories from the top of the stack to its foot; of all these, the bytes that grow; phases.
    rows = [(name, look_of(name), format_bytes(parts[name])) for name in reversed(CATEGORIES)]
    growing = growing_at(timeline, at)
    if growing:
        rows.append((GROWING_WORDS, _GROWING_LOOK, format_bytes(growing)))
    foot = picture.legend_beside(0.74, 0.245, rows, "at the peak") + 0.12
    picture.legend_beside(foot, 0.24, [(PHASE_LABELS[p], _phase_look(p), "") for p in phases])
    if not phases:
        picture.write(BESIDE, foot + 0.24, "strip: steps", fontsize=8)
    if beside is not None:
        name, other = beside
        words = f"- - {shortened(name, 22)}: {format_bytes(max(other.totals))}"
        picture.write(BESIDE, 3.38, words, fontsize=8)
    return picture


def _phase_look(phase: str) -> dict:
    return {"facecolor": PHASE_COLORS[phase]}


@style()
def plot_ranks(
    timelines: list[Timeline | None], *, title: str = "", budget: int | None = None
) -> Picture:
    """Live bytes by category of several ranks side by side on one scale; ``None`` stands for a rank
    that was not measured.
    """
    words = []
    for rank, timeline in enumerate(timelines):
        words.append(f"Rank {rank}. {describe(timeline, title=title, budget=budget)}")
    heading = shortened(title or "Memory by category", 100)
    picture = Picture(8.6, 3.2, heading, alt=" ".join(words))
    highest = highest_of(timelines)
    left, gap = 0.07, 0.022
    width = (0.985 - left + gap) / len(timelines)
    for rank, timeline in enumerate(timelines):
        start = left + rank * width
        ax = picture.panel(start, start + width - gap, 0.78, 2.4)
        picture.write(start, 0.5, f"rank {rank}", fontweight="bold")
        if timeline is None or not len(timeline):
            ax.set_axis_off()
            ax.text(0.5, 0.5, "not measured to its end", ha="center", transform=ax.transAxes)
            continue
        draw_timeline(ax, timeline, budget, highest=highest)
        peak = format_bytes(max(timeline.totals))
        picture.write(start + width - gap, 0.5, f"peak {peak}", ha="right")
        if rank:
            ax.set_ylabel("")
            ax.set_yticklabels([])
    picture.categories(left, 3.05)
    return picture


def draw_timeline(
    ax: Axes,
    timeline: Timeline,
    budget: int | None,
    peak: MemorySnapshot | None = None,
    highest: int = 0,
    beside: tuple[str, Timeline] | None = None,
) -> list[str]:
    """Draw into ``ax``. Returns the phases that occur. One of several has an axis up to
    ``highest``, and a peak without name. ``beside``: another run.
    """
    total, _, _, at = peak_of(timeline, peak)
    shown = timeline.decimate(MAX_POINTS)
    x = edges_of(shown.events)
    reach = max(total, highest, *shown.totals)
    if beside is not None:
        reach = max(reach, *beside[1].totals)
    factor, unit = scale_of(reach)
    headroom, line = 1.08, None
    if budget is not None:
        headroom, line = 1.2, budget / factor  # room for the budget's name, above all data
    top = round(reach_of(reach, budget) * headroom)
    draw_areas(ax, x, [(look, nbytes / factor) for look, nbytes in _stack(shown)])
    if beside is not None:
        _draw_beside(ax, beside[1].decimate(MAX_POINTS), factor)
    ax.set_xlabel("operations")
    draw_scale(ax, top / factor, unit)
    peak_x = edges_of(timeline.events)[at]
    draw_peak(ax, peak_x, total / factor, 0 if highest else total, line)
    if budget is not None:
        # On the side without the peak, so that the two labels do not overlap.
        _mark_budget(ax, budget, factor, top, right=peak_x < (x[0] + x[-1]) / 2)
    _mark_batches(ax, shown.batches)
    return _draw_phases(ax, x, shown.phases)


def _draw_beside(ax: Axes, shown: Timeline, factor: int) -> None:
    """The outline of another run, which may be longer."""
    edges = edges_of(shown.events)
    nbytes = np.append(shown.totals, shown.totals[-1]) / factor
    ax.step(edges, nbytes, where="post", color=LIGHT, linewidth=2.4, alpha=0.7, zorder=3.5)
    ax.step(edges, nbytes, where="post", color=INK, linewidth=1.1, linestyle=DASHES, zorder=3.6)
    ax.set_xlim(right=max(ax.get_xlim()[1], edges[-1]))


def _stack(shown: Timeline) -> list[tuple[dict, np.ndarray]]:
    """(look, bytes at each sample) of each area, from the foot of the stack: the bytes that grow,
    then the others by category.
    """
    by_category = shown.rows[:, BY]
    areas = []
    if shown.growing is not None:
        by_category = by_category - shown.growing
        areas.append((_GROWING_LOOK, shown.growing.sum(axis=1)))
    for name, nbytes in zip(CATEGORIES, by_category.T, strict=True):
        areas.append((look_of(name), nbytes))
    return areas


def _mark_budget(ax: Axes, budget: int, factor: int, top: int, right: bool) -> None:
    """A line at ``budget`` with its name above it; the name alone, if it is above the picture."""
    label, height = f"budget {format_bytes(budget)}", budget
    above, align = 4, "bottom"
    if budget <= top:
        ax.axhline(budget / factor, color=ALARM, linewidth=1.4, linestyle=DASHES, zorder=5)
    else:
        label += " (above this picture)"
        height, above, align = top, -4, "top"
    ax.annotate(
        label,
        (int(right), height / factor),
        xycoords=("axes fraction", "data"),
        xytext=(-5 if right else 5, above),
        textcoords="offset points",
        ha="right" if right else "left",
        va=align,
        **plate(ALARM),
    )


def _mark_batches(ax: Axes, batches: Sequence[tuple[int, int]]) -> None:
    """A line where the batch's size changes, and above the strip the size from there on."""
    if len(batches) > MOST_BATCHES:
        return
    left, right = ax.get_xlim()
    free = left  # where the next label may begin
    for change, (operation, rows) in enumerate(batches):
        if change:  # the first size is no change
            ax.axvline(operation, color=INK, linewidth=1.1, linestyle=(0, (2, 2)), zorder=4.5)
        label = f"batch {rows:,}"
        width = (LETTER * len(label) + 6) / points_per_unit(ax)
        start = max(min(operation, right - width), left)
        if start >= free:
            free = start + width
            ax.text(start, 1.1, label, transform=ax.get_xaxis_transform(), fontsize=7.5)


def _draw_phases(ax: Axes, x: np.ndarray, phases: list[str]) -> list[str]:
    """The strip above the areas: one box a phase, or a step where phases are too many."""
    runs = phase_runs(x, phases)
    boxes = []
    for phase, start, stop in runs:
        if phase in PHASE_LABELS:
            names = (PHASE_LABELS[phase], _SHORT[phase])
            boxes.append((start, stop, PHASE_COLORS[phase], names))
    steps = step_runs(runs)
    if steps:
        boxes = []
    for number, (start, stop) in enumerate(steps, 1):
        color = PHASE_COLORS["backward" if number % 2 else "forward"]
        boxes.append((start, stop, color, (f"step {number}", f"{number}")))
    for box in boxes:
        draw_strip(ax, *box)
        if len(boxes) <= 40:
            ax.axvline(box[0], color=INK, alpha=0.16, linewidth=0.7, zorder=4)
    if steps:
        return []  # no colour means a phase
    return [phase for phase in PHASE_LABELS if phase in phases]
