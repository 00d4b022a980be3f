"""How high the peak is at most when the remedy of a cause is applied.

Where a cause's bytes go, another moment may become the peak. So they are taken away from every
moment of the run in which they are sure to go, and the highest total that remains is the new peak.
Sure are the tensors that the cause names, and those of other steps that the same line has made in a
forward like theirs. All other bytes count as needed, for an ordinary step has activations as well:
the peak with the remedy may be lower than what is said here, and not higher.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable

import numpy as np

from ..names import MOMENTS
from ..units import format_bytes
from .cause import WORTH, Cause, within
from .facts import Facts, total
from .timeline import MOMENT, STEP, TOTAL, Holder


def limit_of(cause: Cause, facts: Facts) -> str:
    """A sentence on the peak that is left, or nothing.

    It is needed only where the peak is higher than "without these bytes" lets a reader expect.
    Nothing is said of a remedy if it is not known how much the remedy needs itself.
    """
    if cause.stays is None or cause.stays >= cause.nbytes:
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
    remaining = facts.rows[:, TOTAL] - _taken_away(cause, facts)
    highest = int(remaining.argmax())
    if remaining[highest] > left:
        left, moment = int(remaining[highest]), MOMENTS[facts.rows[highest, MOMENT]]
    return left, moment


def _taken_away(cause: Cause, facts: Facts) -> np.ndarray:
    """The bytes that the remedy is sure to take away at each of ``facts.rows``, and never more than
    at the peak: int64 (samples,).
    """
    stays = cause.stays or 0
    named = list({id(holder): holder for holder in (*cause.holders, *cause.growing)}.values())
    needed_in = cause.needed_in
    turns = {holder.turn for holder in named if holder.category == "activations"}
    if turns and max(turns) < facts.peak.turn:
        # All were left by earlier turns, whose own backwards may have needed them.
        needed_in = needed_in or "turn"
    of_the_named = _bytes_alive(named, facts, needed_in) - stays
    places = {_place_of(holder, facts) for holder in named}
    alike_at_peak = [holder for holder in facts.at_peak if _place_of(holder, facts) in places]
    others_alike = [holder for holder in facts.others if _place_of(holder, facts) in places]
    # Of tensors like the named ones, as many stay as at the peak: the batch in use, the first of
    # several forwards.
    could_go = [h for h in alike_at_peak if not _is_needed_at_peak(h, needed_in, facts)]
    stay_with_them = max(total(could_go) - cause.nbytes, 0)
    of_all_alike = _bytes_alive(alike_at_peak + others_alike, facts, needed_in)
    of_all_alike -= stays + stay_with_them
    return np.clip(np.maximum(of_the_named, of_all_alike), 0, cause.nbytes - stays)


def _is_needed_at_peak(holder: Holder, needed_in: str, facts: Facts) -> bool:
    """Whether the peak is in the step (or turn) that has made ``holder`` and needs it."""
    if needed_in == "turn":
        return holder.turn >= facts.peak.turn
    return needed_in in ("step", "round") and holder.step >= facts.peak.step


def _place_of(holder: Holder, facts: Facts) -> tuple:
    """Where in a program a storage was made: by which line and operation, in which shape, and in
    which forward (as its result or not) or after it. A function that is called by the training and
    by an evaluation has made storages in two places.
    """
    done = facts.maker_of(holder)
    call: object = None
    if done is None and facts.forwards:
        # Before the first forward that is known: it may be of any forward of a long run.
        call = id(holder)
    elif done is not None:
        inside = holder.first_sample < done.end_sample
        kind = (done.with_grad, done.has_graph, done.used, done.differentiable, done.chained)
        call = (inside, done.call, *kind)
    made = (holder.line, holder.op, holder.module, holder.shape, holder.dtype, holder.made_in)
    return (*made, holder.category, holder.is_result, call)


def _bytes_alive(holders: Iterable[Holder], facts: Facts, needed_in: str) -> np.ndarray:
    """The bytes of ``holders`` at each of ``facts.rows``, or less: int64 (samples,).

    A long run keeps one sample of several. A row then stands for all samples between the rows on
    its two sides, and a holder counts in it only if it was alive in all of these samples. It does
    not count as long as it is ``needed_in`` the step, turn or round that made it.
    """
    samples = facts.samples
    sample_before = np.concatenate(([facts.first_sample - 1], samples[:-1]))
    sample_after = np.concatenate((samples[1:], samples[-1:] + 1))
    needed_until = _NeededUntil(needed_in, facts)
    # alive in samples first, ..., stop - 1
    lifetimes = [(max(h.first_sample, needed_until(h)), h.end_sample, h.nbytes) for h in holders]
    first, stop, nbytes = np.array(lifetimes, dtype=np.int64).reshape(-1, 3).T
    begins = np.searchsorted(sample_before, first - 1)
    ends = np.searchsorted(sample_after, stop, side="right")
    is_in_a_row = begins < ends
    change = np.zeros(len(samples) + 1, dtype=np.int64)
    np.add.at(change, begins[is_in_a_row], nbytes[is_in_a_row])
    np.subtract.at(change, ends[is_in_a_row], nbytes[is_in_a_row])
    return change.cumsum()[:-1]


class _NeededUntil:
    """The first sample at which a storage can be gone: after the step (or turn) that made it, or
    after the step that made what has taken its place. ``needed_in``: as in ``Cause``.
    """

    def __init__(self, needed_in: str, facts: Facts):
        self.needed_in = needed_in
        self.after_the_run = int(facts.samples[-1]) + 1
        # of each step, or of each turn as far as its forwards are known: a sample in it, in order
        self.times, self.samples = facts.rows[:, STEP].tolist(), facts.samples.tolist()
        if needed_in == "turn":
            begins = dict[int, int]()
            for done in facts.forwards:
                begins.setdefault(done.turn, done.first_sample)
            self.times, self.samples = list(begins), list(begins.values())
        self.steps_in_place = defaultdict[tuple, list[int]](list)
        if needed_in == "round":
            for holder in sorted((*facts.at_peak, *facts.others), key=lambda other: other.step):
                self.steps_in_place[_place_in_a_round(holder)].append(holder.step)

    def __call__(self, holder: Holder) -> int:
        if self.needed_in in ("", "nothing"):
            return 0
        time = holder.turn if self.needed_in == "turn" else holder.step
        if self.needed_in == "round":
            steps = self.steps_in_place[_place_in_a_round(holder)]
            later = bisect_right(steps, holder.step)
            if later == len(steps):
                return self.after_the_run
            time = steps[later]
        later = bisect_right(self.times, time)
        return self.samples[later] if later < len(self.times) else self.after_the_run


def _place_in_a_round(holder: Holder) -> tuple:
    """The same for storages that are in use one after another."""
    if holder.category == "parameters":
        # of models of several rounds; the parameters of one model are made at the same time
        return holder.line, holder.shape, holder.dtype
    if holder.is_of_training:
        # one parameter has gradients or states of several steps
        return holder.category, holder.module, holder.shape, holder.dtype
    return holder.line, holder.op, holder.dtype
