"""The peak of each optimizer step of a run, however many steps there are."""

from __future__ import annotations

from dataclasses import dataclass

from ..measure.timeline import MemorySnapshot

KEPT = 512


@dataclass(frozen=True)
class StepPeak:
    """The peak of the steps ``first`` to ``last``, counted from 1, in bytes.

    What comes before the first step (the model is built) is in step 1, and what comes between two
    steps (an evaluation, saving) is in the earlier one. ``moment``: where the peak was.
    ``live_after``: what was live at the end of these steps.
    """

    first: int
    last: int
    total: int
    moment: str
    live_after: int

    @property
    def words(self) -> str:
        return f"{self.first:,}" if self.first == self.last else f"{self.first:,} to {self.last:,}"


class StepPeaks:
    """At most ``KEPT`` peaks. In longer runs each stands for several steps.

    ``count``: the last step that they are of.
    """

    def __init__(self) -> None:
        self.peaks: list[StepPeak] = []
        self.count = 0

    def add(self, peak: MemorySnapshot, live_after: int, last: int) -> None:
        """The peak of what has run since the last call: one step, or several up to ``last``."""
        first = self.count + 1
        self.peaks.append(StepPeak(first, max(first, last), peak.total, peak.moment, live_after))
        self.count = last
        if len(self.peaks) >= KEPT:
            self.peaks = in_rows(self.peaks, KEPT // 2)


def in_rows(peaks: list[StepPeak], at_most: int) -> list[StepPeak]:
    """``peaks`` in at most so many rows, each the highest of neighbours."""
    group = -(-len(peaks) // at_most)
    rows = []
    for start in range(0, len(peaks), group):
        together = peaks[start : start + group]
        highest = max(together, key=lambda peak: peak.total)
        first, last = together[0], together[-1]
        rows.append(
            StepPeak(first.first, last.last, highest.total, highest.moment, last.live_after)
        )
    return rows
