"""A recorded timeline in words, and its geometry: where samples, phases and steps are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..measure.timeline import BY, PHASE, TOTAL
from ..names import CATEGORIES, PHASES
from ..units import format_bytes
from .style import PHASE_LABELS, joined, listed

if TYPE_CHECKING:
    import numpy as np

    from ..measure.timeline import MemorySnapshot, Timeline


GROWING_WORDS = "growing bytes"  # in legends, below the categories
MOST_BATCHES = 12  # marks of changes of the batch's size; more would hide the picture


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


def highest_of(timelines: list[Timeline | None]) -> int:
    """The highest peak of those that were measured; 0 if none was."""
    return max((max(t.totals) for t in timelines if t is not None and len(t)), default=0)


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


def edges_of(operations: Sequence[float]) -> np.ndarray:
    """Where each of n samples begins on the axis of operations, and where the last one ends:
    float64 (n + 1,).

    A sample holds until the next one. Samples of one operation share its width: what an error
    frees is one more sample of the operation that failed, and the peak before it has to be seen.
    The last operation is drawn at least a hundredth of the picture wide, for the same reason.
    ``edgesOf`` in run.js is the same rule.
    """
    import numpy as np

    starts, counts = np.unique(operations, return_counts=True)
    last_width = max(1.0, (starts[-1] - starts[0]) / 100)
    ends = np.append(starts[1:], starts[-1] + last_width)
    edges = []
    for start, end, count in zip(starts, ends, counts, strict=True):
        edges.extend(np.linspace(start, end, count, endpoint=False))
    return np.append(edges, ends[-1])


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
