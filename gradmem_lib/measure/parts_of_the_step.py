"""Whether a forward without gradients is a part of the training step, such as a teacher's, a frozen
encoder's or a target network's, or an evaluation beside it.

A script does not say which it is. What tells them apart is how often they run: a part of the step
runs between each two calls of the same training forward. A validation each few steps does not, and
a teacher that is given the whole batch at once does not run between two micro-batches.
"""

from __future__ import annotations

from .facts import EVALUATION, Facts
from .timeline import ForwardPass

TIMES = 2  # of a part of the step, so many calls at least
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


def peak_is_of_a_frozen_part(facts: Facts) -> bool:
    """Whether the peak is in a forward without gradients that is a part of the training step."""
    largest = largest_evaluation(facts)
    return largest is not None and is_part_of_the_step(largest, facts)


def is_part_of_the_step(done: ForwardPass, facts: Facts) -> bool:
    """Whether a forward without gradients is known to run with each batch of the training.

    A module that is trained itself is not: its forward without gradients may be a validation after
    each step, and nothing tells the two apart.
    """
    is_trained = any(other.number == done.number and other.used for other in facts.forwards)
    calls = [other for other in facts.forwards if _is_same_call(other, done)]
    if is_trained or len(calls) < TIMES:
        return False
    for between in _calls_between(done, facts):
        if between and min(between) > 0 and max(between) <= IN_A_ROW:
            return True
    return False


def may_be_part_of_the_step(done: ForwardPass, facts: Facts) -> bool:
    """Whether it is not known that training goes on without it: it was called between all pairs of
    the same training forward, or there are no such pairs.
    """
    between = _calls_between(done, facts)
    return any(not calls or min(calls) > 0 for calls in between)


def _is_same_call(other: ForwardPass, done: ForwardPass) -> bool:
    """Whether another forward without gradients is of the same module and line."""
    return not other.with_grad and (other.line, other.number) == (done.line, done.number)


def _calls_between(done: ForwardPass, facts: Facts) -> list[list[int]]:
    """For each training forward of the script (a module, and the line that calls it), how often
    the forward ``done`` was called between each two of its calls.
    """
    counts: dict[tuple, list[int]] = {}
    calls_so_far = 0
    at_the_last_call: dict[tuple, int] = {}
    for other in facts.forwards:
        call = (other.line, other.number)
        if _is_same_call(other, done):
            calls_so_far += 1
        if not (other.used and other.has_weights):
            continue
        pairs = counts.setdefault(call, [])
        if call in at_the_last_call:
            pairs.append(calls_so_far - at_the_last_call[call])
        at_the_last_call[call] = calls_so_far
    return list(counts.values())
