"""How many bytes of some storages were alive at each sample of a run, and until when their step,
turn or round needs them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable

import numpy as np

from .facts import Facts
from .timeline import STEP, Holder


def bytes_alive(holders: Iterable[Holder], facts: Facts, needed_in: str = "") -> np.ndarray:
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
    lifetimes = [(max(h.samples[0], needed_until(h)), h.samples[1], h.nbytes) for h in holders]
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
        self.needed_in, self.samples = needed_in, facts.samples
        self.after_the_run = int(facts.samples[-1]) + 1
        self.steps = facts.rows[:, STEP]
        begins = dict[int, int]()  # of each turn, as far as its forwards are known
        for done in facts.forwards:
            begins.setdefault(done.turn, done.samples[0])
        self.turns, self.begins = list(begins), list(begins.values())
        self.steps_in_place = defaultdict[tuple, list[int]](list)
        if needed_in == "round":
            for holder in sorted((*facts.at_peak, *facts.others), key=lambda other: other.step):
                self.steps_in_place[_place_in_a_round(holder)].append(holder.step)

    def __call__(self, holder: Holder) -> int:
        if self.needed_in == "turn":
            later = bisect_right(self.turns, holder.turn)
            return self.begins[later] if later < len(self.turns) else self.after_the_run
        if self.needed_in == "step":
            return self._first_after(holder.step)
        if self.needed_in == "round":
            steps = self.steps_in_place[_place_in_a_round(holder)]
            later = bisect_right(steps, holder.step)
            return self._first_after(steps[later]) if later < len(steps) else self.after_the_run
        return 0

    def _first_after(self, step: int) -> int:
        """The first sample that is known to come after a step."""
        later = int(np.searchsorted(self.steps, step, side="right"))
        return int(self.samples[later]) if later < len(self.steps) else self.after_the_run


def _place_in_a_round(holder: Holder) -> tuple:
    """The same for storages that are in use one after another."""
    if holder.category == "parameters":
        # of models of several rounds; the parameters of one model are made at the same time
        return holder.line, holder.shape, holder.dtype
    if holder.is_of_training:
        # one parameter has gradients or states of several steps
        return holder.category, holder.module, holder.shape, holder.dtype
    return holder.line, holder.op, holder.dtype
