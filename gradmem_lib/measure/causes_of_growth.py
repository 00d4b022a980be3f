"""Causes: one tensor that becomes longer, and what pictures show of all that grows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from ..units import format_bytes
from .cause import ALMOST_ALL, WORTH, Cause, belongs_to_training, in_words, lines_of
from .causes_of_holders import COLLECTED, GROWTH, OF_A_TRAINER, SEVERAL, kept_by_a_name
from .facts import BETWEEN_STEPS, Facts, total
from .timeline import ForwardPass, Holder


class Beginning(NamedTuple):
    """Of a step, a turn or a forward: its name in words, and the live bytes."""

    words: str
    live: int


def growing_holders(facts: Facts) -> Sequence[Holder]:
    """The storages that pictures show as a band of their own."""
    for find in (kept_by_a_name, growing_tensor):
        cause = find(facts)
        if cause is not None:
            return cause.growing
    return ()


def growing_tensor(facts: Facts) -> Cause | None:
    """One tensor that a longer one replaces in each step, or in each forward of an evaluation, as
    ``torch.cat([history, new])`` does.
    """
    survivors = _survivors(facts)
    if not survivors:
        return None
    old = max(survivors, key=lambda holder: holder.nbytes)
    # Pictures show its growth: in each step, another tensor was this one.
    replaced = [h for h in facts.joined if _same_code(h, old) and h.nbytes < old.nbytes]
    first = min([old, *replaced], key=lambda holder: holder.samples[0])
    in_steps = facts.time_of(old) < facts.peak_time
    if in_steps:
        name, unit, starts = GROWTH, facts.unit, _beginnings_of_steps(facts, first)
    else:
        name, unit, starts = COLLECTED, "forward", _beginnings_of_forwards(facts, first)
    if len(starts) <= SEVERAL:
        return None
    rises = [after.live > before.live for before, after in pairwise(starts)]
    growth = starts[-1].live - starts[0].live
    if sum(rises) < ALMOST_ALL * len(rises) or growth < WORTH * facts.peak.total:
        return None
    # One line may join several: the logits and the hidden states of all batches.
    holders = [holder for holder in survivors if _same_code(holder, old)]
    if total(holders) < growth // 2:
        return None
    for holder in facts.at_peak:
        is_longer = _same_code(holder, old) and holder.nbytes > old.nbytes
        if is_longer and facts.time_of(holder) == facts.peak_time:
            holders.append(holder)  # the longer one, which is being made
    if _is_full(holders[-1], facts):
        return None
    each = growth // (len(starts) - 1)
    evidence = (
        f"{format_bytes(total(holders))} at the peak are in tensors that become longer in each "
        f"{unit}, by about {format_bytes(each)}: {in_words(holders[-1])}. "
        f"{format_bytes(starts[0].live)} were live when {starts[0].words} began, and "
        f"{format_bytes(starts[-1].live)} when {starts[-1].words} began."
    )
    growing = [*replaced, *holders]
    nbytes, lines = total(holders), lines_of(holders)
    return Cause(name, nbytes, evidence, _remedy(old, in_steps), lines, holders, growing)


def _survivors(facts: Facts) -> list[Holder]:
    """The joined tensors that were there before the peak's step, or its last forward."""
    survivors = []
    for holder in facts.at_peak:
        # A batch is made before the step that it belongs to, but it is no sum of earlier ones.
        joined = holder.op == "aten.cat" and not belongs_to_training(holder)
        if joined and _has_survived(holder, facts):
            survivors.append(holder)
    return survivors


def _is_full(newest: Holder, facts: Facts) -> bool:
    """Whether the next one has as many bytes: a window of the last rows, as a bank of features."""
    later = []
    for holder in (*facts.joined, *facts.others):
        if _same_code(holder, newest) and holder.samples[0] > newest.samples[0]:
            later.append(holder)
    following = min(later, key=lambda holder: holder.samples[0], default=None)
    return following is not None and following.nbytes == newest.nbytes


def _remedy(old: Holder, in_steps: bool) -> str:
    remedy = (
        "keep only numbers of it, or put the pieces into a list off the card, "
        "history.append(x.detach().cpu()), and join them once at the end."
    )
    if in_steps:
        return remedy
    if old.held is not None and not old.held.in_script:
        return OF_A_TRAINER
    return f"{remedy} A smaller batch does not help."


def _has_survived(holder: Holder, facts: Facts) -> bool:
    """Whether it was there before the peak's step, or before the last forward of an evaluation."""
    if facts.time_of(holder) == facts.peak_time - 1:
        return True
    of_models = _forwards_of_the_peak(facts)
    is_earlier = bool(of_models) and holder.samples[0] < of_models[-1].samples[0]
    of_this_step = facts.time_of(holder) == facts.peak_time
    in_no_layer = holder.made_in == BETWEEN_STEPS  # layers join keys and values
    return facts.outside_of_training and of_this_step and in_no_layer and is_earlier


def _forwards_of_the_peak(facts: Facts) -> list[ForwardPass]:
    """The forwards without gradients of the peak's own step: those of one evaluation."""
    of_models = [done for done in facts.evaluations if done.has_weights]
    return [done for done in of_models if done.step == facts.peak.step]


def _same_code(one: Holder, other: Holder) -> bool:
    """Whether the same line has made both, by the same operation."""
    return (one.line, one.op, one.dtype) == (other.line, other.op, other.dtype)


def _beginnings_of_forwards(facts: Facts, first: Holder) -> list[Beginning]:
    """Of an evaluation's forwards from the one after ``first`` on."""
    later = []
    for number, done in enumerate(_forwards_of_the_peak(facts), 1):
        if done.samples[0] > first.samples[0]:
            later.append(Beginning(f"forward {number}", done.live_before))
    return later


def _beginnings_of_steps(facts: Facts, first: Holder) -> list[Beginning]:
    """Of the steps (or turns) from that of ``first`` on until the peak; of steps, from the second
    one on, since the first one makes the optimizer's states.
    """
    by_step = facts.has_optimizer
    starts: list[Beginning] = []
    last = -1
    for turn in facts.turns:
        time = turn.step if by_step else turn.number
        is_new = time > last and turn.number <= facts.peak.turn
        if is_new and time >= facts.time_of(first) and (turn.step > 0 or not by_step):
            starts.append(Beginning(f"{facts.unit} {time + 1}", turn.live))
            last = time
    return starts
