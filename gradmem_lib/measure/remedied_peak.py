"""How high the peak is at most when the remedy of a cause is applied.

Where a cause's bytes go, another moment may become the peak. So the bytes are taken away from every
moment of the run in which they can go, and the highest total that remains is the new peak. When in
doubt, bytes count as needed: the peak with the remedy may be lower than what is said here, and not
higher.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ..names import CATEGORIES, MOMENTS
from ..units import format_bytes
from .cause import WORTH, Cause, within
from .facts import IN_BACKWARD, Facts
from .timeline import BY, MOMENT, STEP, TOTAL, Holder


def limit_of(cause: Cause, facts: Facts) -> str:
    """A sentence on the peak that is left, or nothing.

    It is needed only where the peak is higher than "without these bytes" lets a reader expect.
    Nothing is said of a remedy if it is not known how much the remedy needs itself.
    """
    if cause.stays is None:
        return ""
    peak, moment = peak_without(cause, facts)
    expected = facts.peak.total - cause.nbytes
    if peak <= expected + WORTH * facts.peak.total:
        return ""
    so_far = "" if facts.ended else " so far"
    if peak > (1 - WORTH) * facts.peak.total:
        return f"{cause.condition}, the peak{so_far} may be almost as high, {within(moment)}."
    return f"{cause.condition}, the peak{so_far} is at most {format_bytes(peak)}, {within(moment)}."


def peak_without(cause: Cause, facts: Facts) -> tuple[int, str]:
    """The peak in bytes, at most, when the remedy of ``cause`` is applied, and its moment."""
    goes = cause.nbytes - (cause.stays or 0)
    left, moment = facts.peak.total - goes, facts.peak.moment
    if facts.samples is None or not cause.holders:
        return left, moment  # nothing is known of the other moments
    # In no moment does the remedy take away more bytes than at the peak.
    taken_away = np.clip(_can_go(cause, facts), 0, goes)
    remaining = facts.rows[:, TOTAL] - taken_away
    highest = int(remaining.argmax())
    if remaining[highest] > left:
        left, moment = int(remaining[highest]), MOMENTS[facts.rows[highest, MOMENT]]
    return left, moment


def _can_go(cause: Cause, facts: Facts) -> np.ndarray:
    """The bytes that the remedy can take away at each of ``facts.rows``, at most: int64 (samples,).

    They are the bytes of the categories that it acts on, without those that it does not reach.
    """
    categories = _categories_touched(cause)
    columns = [CATEGORIES.index(category) for category in categories]
    can_go = facts.rows[:, BY][:, columns].sum(axis=1)
    # What was there at the peak, and is not of the cause, stays.
    of_the_cause = {id(holder) for holder in cause.holders}
    others = []
    for holder in facts.at_peak:
        if holder.category in categories and id(holder) not in of_the_cause:
            others.append(holder)
    can_go -= _bytes_alive(others, facts)
    # What the peak's backward needs after the cause's bytes are free, it needs with the remedy too.
    are_free = _bytes_alive(cause.holders, facts) == 0
    can_go[_in_backward_of_peak(facts) & are_free] = 0
    return can_go


def _categories_touched(cause: Cause) -> set[str]:
    """The categories of the bytes that go with the cause's own bytes."""
    categories = {holder.category for holder in cause.holders}
    if any(_may_have_a_gradient(holder) for holder in cause.holders):
        # Where an activation goes, its gradient and what is computed from it go as well.
        categories |= {"activations", "temporaries", "other"}
    return categories


def _may_have_a_gradient(holder: Holder) -> bool:
    """Whether a backward may make a gradient of this tensor."""
    if holder.category not in ("activations", "temporaries"):
        return False
    return holder.dtype is None or holder.dtype.is_floating_point


def _bytes_alive(holders: Iterable[Holder], facts: Facts) -> np.ndarray:
    """The bytes of ``holders`` at each of ``facts.rows``, or less: int64 (samples,).

    A long run keeps one sample of several. A row then stands for all samples between the rows on
    its two sides, and a holder counts in it only if it was alive in all of these samples.
    """
    samples = facts.samples
    sample_before = np.concatenate(([-1], samples[:-1]))
    sample_after = np.concatenate((samples[1:], samples[-1:] + 1))
    nbytes = np.zeros(len(samples), dtype=np.int64)
    for holder in holders:
        first, stop = holder.samples  # alive in first, ..., stop - 1
        alive_throughout = (first <= sample_before + 1) & (sample_after <= stop)
        nbytes[alive_throughout] += holder.nbytes
    return nbytes


def _in_backward_of_peak(facts: Facts) -> np.ndarray:
    """Which of ``facts.rows`` are of the backward of the peak's turn: bool (samples,)."""
    begun, ended = 0, np.inf  # from the last forward of this turn to the first one of a later turn
    for done in facts.forwards:
        if done.turn == facts.peak.turn:
            begun = max(begun, done.samples[0])
        elif done.turn > facts.peak.turn:
            ended = min(ended, done.samples[0])
    of_step = facts.rows[:, STEP] == facts.peak.step
    of_turn = (facts.samples >= begun) & (facts.samples < ended)
    in_backward = facts.rows[:, MOMENT] == MOMENTS.index(IN_BACKWARD)
    return of_step & of_turn & in_backward
