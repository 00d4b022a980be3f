"""Whether a forward without gradients may be a part of the training step, such as a teacher's, a
frozen encoder's or a target network's, or is an evaluation beside it.

A script does not say which it is, and a validation after each step looks like a teacher. What is
known is how often they run: a part of the step runs between each two calls of the same training
forward, and once or twice. A validation each few steps does not, and a teacher that is given the
whole batch at once does not run between two micro-batches.
"""

from __future__ import annotations

from .facts import EVALUATION, Facts
from .timeline import ForwardPass

IN_A_ROW = 2  # of one line with a batch, at most; more may be a generation or a validation's loop


def largest_evaluation(facts: Facts) -> ForwardPass | None:
    """The forward without gradients in which the peak is, if it is in one."""
    if facts.peak.moment != EVALUATION:
        return None
    passes = [done for done in facts.evaluations if done.step == facts.peak.step]
    largest = max(passes, key=lambda done: done.peak, default=None)
    if largest is None or largest.peak < facts.peak.total:
        return None
    return largest


def peak_may_be_of_the_step(facts: Facts) -> bool:
    """Whether the peak is in a forward without gradients that may be a part of the step."""
    largest = largest_evaluation(facts)
    return largest is not None and may_be_part_of_the_step(largest, facts)


def may_be_part_of_the_step(done: ForwardPass, facts: Facts) -> bool:
    """Whether a forward without gradients may be one that the training runs with each batch: as far
    as is known, it was called between all pairs of the same training forward, and no more than
    twice in a row.
    """
    in_a_row = 0
    calls = 0
    calls_at_last = dict[tuple, int]()  # for each training forward: ``calls`` at its last call
    between = dict[tuple, list[int]]()  # for each: the calls between each two of its own
    for other in facts.forwards:
        if _is_same_call(other, done):
            calls, in_a_row = calls + 1, in_a_row + 1
            if in_a_row > IN_A_ROW:
                return False
        if other.used and other.has_weights:
            in_a_row = 0
            counts = between.setdefault(other.call, [])
            if other.call in calls_at_last:
                counts.append(calls - calls_at_last[other.call])
            calls_at_last[other.call] = calls
    return not between or any(min(counts, default=1) > 0 for counts in between.values())


def _is_same_call(other: ForwardPass, done: ForwardPass) -> bool:
    """Whether another forward without gradients is a call of the same kind."""
    return not other.with_grad and other.call == done.call
