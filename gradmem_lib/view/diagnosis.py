"""Says in words which techniques of ``measure.diagnosis`` could lower a peak, how far at best, and
which cannot.
"""

from dataclasses import dataclass
from typing import Any

from ..measure.diagnosis import lowest_peaks
from ..measure.timeline import MemorySnapshot
from ..units import format_bytes

WORTH = 0.02  # of the peak; a smaller saving is no reason to change a recipe


@dataclass(frozen=True)
class Diagnosis:
    """``peak``, and ``lowest``: for each technique, by name, the lowest peak in bytes that it can
    reach.
    """

    peak: MemorySnapshot
    lowest: dict[str, int]

    @property
    def helps(self) -> list[str]:
        """The techniques that can lower the peak by 2% or more, the most promising first."""
        helpful = [
            name for name, nbytes in self.lowest.items() if nbytes <= (1 - WORTH) * self.peak.total
        ]
        return sorted(helpful, key=lambda name: self.lowest[name])

    @property
    def cannot_help(self) -> list[str]:
        return [name for name in self.lowest if name not in self.helps]

    def __str__(self) -> str:
        peak = self.peak
        lines = [f"The peak is {format_bytes(peak.total)}, in {peak.phase}: {shares(peak)}."]
        if self.helps:
            width = max(len(name) for name in self.helps)
            lines.append("What can lower it, and to what at best:")
            lines += [
                f"  {name:<{width}}  {format_bytes(self.lowest[name])}" for name in self.helps
            ]
        if self.cannot_help:
            lines.append(f"What cannot: {'; '.join(self.cannot_help)}.")
        return "\n".join(lines)

    __repr__ = __str__


def shares(moment: MemorySnapshot) -> str:
    """The large categories of ``moment`` in per cent, the largest first."""
    parts = sorted(moment.by_category.items(), key=lambda part: -part[1])
    return ", ".join(
        f"{n / moment.total:.0%} {name}" for name, n in parts if n >= WORTH * moment.total
    )


def diagnose(run: Any) -> Diagnosis:
    """What could lower the peak of ``run``: a ``MemoryTracker``, a ``Prediction``, or the
    ``BudgetExceeded`` of a failed run.

    The bytes are lower bounds, and most runs stay above them: the smallest micro-batch still has a
    row, and a factored state still has its factors. A technique that is already used is named again
    if it could do more. Side effects are not counted: with frozen weights, autograd also saves
    fewer activations.

    Raises ``TypeError`` for an object without a peak, and ``ValueError`` for a tracker that has
    measured nothing.
    """
    peak = getattr(run, "snapshot", None) or getattr(run, "peak", None)
    if not isinstance(peak, MemorySnapshot):
        raise TypeError(
            f"diagnose was given {type(run).__name__}: give a MemoryTracker, a Prediction, or the "
            "BudgetExceeded that a run ended with"
        )
    if not peak.total:
        raise ValueError(
            "nothing was measured yet: give diagnose a tracker whose block has run a step"
        )
    timeline = getattr(run, "timeline", None)
    largest = getattr(run, "largest_at_peak", None)
    holders = getattr(run, "everything", None) or (largest(10**9) if largest else None)
    return Diagnosis(peak, lowest_peaks(peak, None if timeline is None else timeline.rows, holders))
