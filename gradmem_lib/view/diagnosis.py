"""Reads what is known of a run, and says why it needs so much memory."""

from typing import Any

from ..measure.diagnosis import Diagnosis as Diagnosis
from ..measure.diagnosis import shares as shares
from ..measure.facts import Facts
from ..measure.timeline import MemorySnapshot


def diagnose(run: Any) -> Diagnosis:
    """Why ``run`` needs its memory, and what could lower its peak.

    ``run``: a ``MemoryTracker``, a ``MemoryCallback``, a ``Prediction``, or the ``BudgetExceeded``
    of a failed run.

    The causes come first, each with its bytes, the lines of the script that made them, and what to
    change. Then come the techniques for an ordinary step, the cheapest first. Their bytes are lower
    bounds, and most runs stay above them: the smallest micro-batch still has a row, and a factored
    state still has its factors. A technique that is already used is named again if it could do
    more. Side effects are not counted: with frozen weights, autograd also saves fewer activations.
    A prediction has no holders and no lines, so only its techniques are known.

    Raises ``TypeError`` for an object without a peak, and ``ValueError`` for a tracker that has
    measured nothing.
    """
    run = getattr(run, "tracker", None) or run
    facts = getattr(run, "facts", None)
    if not isinstance(facts, Facts):
        facts = _facts_of_a_peak(run)
    if not facts.peak.total:
        raise ValueError(
            "nothing was measured yet: give diagnose a tracker whose block has run a step"
        )
    return Diagnosis(facts)


def _facts_of_a_peak(run: Any) -> Facts:
    peak = getattr(run, "peak", None)
    if not isinstance(peak, MemorySnapshot):
        raise TypeError(
            f"diagnose was given {type(run).__name__}: give a MemoryTracker, a Prediction, or the "
            "BudgetExceeded that a run ended with"
        )
    timeline = getattr(run, "timeline", None)
    return Facts(peak, rows=None if timeline is None else timeline.rows)
