"""Causes: bytes that grow from step to step."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import inf

import numpy as np

from ..units import format_bytes
from .cause import (
    ALMOST_ALL,
    LINES,
    WORTH,
    Cause,
    belongs_to_training,
    in_words,
    larger_than_its_tensor,
    lines_of,
    place_in_training,
)
from .causes_of_evaluation import evaluation_results
from .causes_of_holders import GROWS, GROWTH, SEVERAL, kept_by_a_name
from .facts import BETWEEN_STEPS, IN_BACKWARD, Facts, total
from .made_by_forwards import lines_of_results
from .timeline import STEP, Holder, Turn

# Bytes that grow by this part of the peak double it in a thousand steps.
LATE = 0.75  # if bytes grow until a run's end, its peak is in the last quarter of its steps
HISTORY = 5
SHORTER_HISTORY = f"torch.optim.LBFGS(..., history_size={HISTORY})"


def growing_bytes(facts: Facts) -> Cause | None:
    """Tensors of the same kind from many earlier steps: losses, outputs, metrics, kept graphs."""
    if facts.peak_time < LATE * (facts.times - 1):
        return None  # later steps did not need more
    growing = _kinds_that_grow(facts)
    holders = [holder for kind in growing for holder in kind]
    nbytes = total(holders)
    if not holders:
        return None
    times = {facts.time_of(holder) for holder in holders}
    each = nbytes // len(times)
    if nbytes < WORTH * facts.peak.total and each < GROWS * facts.peak.total:
        return None
    largest_first = sorted(growing, key=total, reverse=True)
    kinds_in_words = [in_words(kind[0]) for kind in largest_first]
    more = ""
    if len(kinds_in_words) > LINES:
        more = f" and {len(kinds_in_words) - LINES} more"
    evidence = (
        f"{format_bytes(nbytes)} at the peak were made in {len(times)} earlier {facts.unit}s, "
        f"about {format_bytes(each)} a {facts.unit}: {'; '.join(kinds_in_words[:LINES])}{more}."
    )
    remedy = _remedy_of_growth(holders, facts)
    lines = lines_of_results(holders, facts)
    needed_in = "round" if any(map(belongs_to_training, holders)) else facts.unit
    cause = Cause(GROWTH, nbytes, evidence, remedy, lines, holders, holders, needed_in=needed_in)
    last_batch = _last_batch(growing, facts)
    if SHORTER_HISTORY in remedy:
        condition = f"If the history has {HISTORY} steps"
        return replace(cause, stays=min(nbytes, HISTORY * each), condition=condition)
    if last_batch:
        condition = "If only those of the last step are kept"
        return replace(cause, stays=last_batch, condition=condition)
    return cause


def _last_batch(growing: list[list[Holder]], facts: Facts) -> int:
    """The bytes of what was made right before the peak's step: it may be the batch of this step."""
    nbytes = 0
    for kind in growing:
        for holder in kind:
            is_last = facts.time_of(holder) == facts.peak_time - 1
            if is_last and holder.made_in == BETWEEN_STEPS and not belongs_to_training(holder):
                nbytes += holder.nbytes
    return nbytes


def growing_holders(facts: Facts) -> Sequence[Holder]:
    """The storages that pictures show as a band of their own."""
    for find in (kept_by_a_name, growing_bytes, growing_tensor, evaluation_results):
        cause = find(facts)
        if cause is not None:
            return cause.growing
    return ()


def _kinds_that_grow(facts: Facts) -> list[list[Holder]]:
    kinds = defaultdict[tuple, list[Holder]](list)
    for holder in facts.at_peak:
        if not 0 <= facts.time_of(holder) < facts.peak_time:
            continue  # it was there before the first step, or is of the peak's own step
        if belongs_to_training(holder):
            kinds[place_in_training(holder)].append(holder)
        else:
            # In a cache, each tensor may have another shape.
            kinds[holder.line, holder.op, holder.dtype].append(holder)
    growing = []
    for kind in kinds.values():
        old = kind
        if belongs_to_training(kind[0]):
            old = _of_earlier_rounds(kind, facts)
        are_several = len(set(map(facts.time_of, old))) >= SEVERAL
        if are_several and _goes_on_for_ever(kind, facts):
            growing.append(old)
    return growing


def _of_earlier_rounds(kind: list[Holder], facts: Facts) -> list[Holder]:
    """Those of ``kind`` that others have taken the place of.

    The newest ones are in use. So are weights that are still updated after later ones were made:
    the layers of a model that grows, or a head for each task.
    """
    names = set[str]()
    if facts.structure is not None:
        names.update(facts.structure.shapes)
    # In a run of several models, those of all rounds may have the same names.
    with_name = Counter(holder.module for holder in kind)
    times = sorted(set(map(facts.time_of, kind)))
    old = []
    for holder in kind:
        has_a_name = holder.module in names and with_name[holder.module] == 1
        of_the_model = holder.category == "parameters" and has_a_name
        later = bisect_right(times, facts.time_of(holder))
        if of_the_model or later == len(times):
            continue
        # Without an optimizer, nothing is known of updates: they are -1.
        if holder.updated <= times[later]:
            old.append(holder)
    return old


def _goes_on_for_ever(holders: list[Holder], facts: Facts) -> bool:
    """Whether they come from several steps until the last ones, and none of them was ever dropped.

    A window for an average keeps the last n of something. It does not grow for ever, since the
    first ones are gone. Neither does a list of the first n, such as examples for a picture.
    """
    steps = sorted({facts.time_of(holder) for holder in holders})
    gap = max(after - before for before, after in pairwise(steps))  # more than 1: every n steps
    goes_on = facts.peak_time - steps[-1] <= gap + 1  # the peak's own step may keep nothing so far
    begins_early = steps[0] <= gap
    return goes_on and (begins_early or _none_was_dropped(holders, facts))


def _none_was_dropped(holders: list[Holder], facts: Facts) -> bool:
    """Whether ``holders``, which begin late, are known to be no window: it drops an old one for
    each new one.
    """
    if facts.samples is None:
        return False
    freed = [holder for holder in facts.others if holder.samples[1] <= facts.samples[-1]]
    if facts.freed_since > min(holder.samples[0] for holder in holders):
        return False  # what was freed before they began is not known
    dropped_later = [holder for holder in holders if holder.samples[1] <= facts.samples[-1]]
    if dropped_later and len(dropped_later) < len(holders):
        return False  # a window: some of them went, and not all at once as at the end of an epoch
    for holder in freed:
        if not _same_code(holder, holders[0]):
            continue
        # What lives until the next step is a variable that is overwritten then.
        if _time_at(holder.samples[1], facts) - facts.time_of(holder) > 1:
            return False
    return True


def _time_at(sample: int, facts: Facts) -> float:
    """How many steps (or turns) were finished at a sample; infinite if that is not known."""
    if facts.has_optimizer:
        row = min(int(np.searchsorted(facts.samples, sample)), len(facts.samples) - 1)
        return int(facts.rows[row, STEP])
    begun = [done.turn for done in facts.forwards if done.samples[0] <= sample]
    return begun[-1] if begun else inf


def _remedy_of_growth(holders: list[Holder], facts: Facts) -> str:
    categories = Counter[str]()
    for holder in holders:
        categories[holder.category] += holder.nbytes
    largest = categories.most_common(1)[0][0]
    if largest == "gradients":
        return (
            "the gradients of earlier steps are kept. Keep a number of each, p.grad.norm().item(), "
            "or copies off the card: p.grad.cpu()."
        )
    if largest == "optimizer" and not _have_shapes_of_parameters(holders, facts):
        return (
            "one optimizer keeps a history of its steps, until the history is full: give it a "
            f"shorter one, {SHORTER_HISTORY}."
        )
    if largest == "optimizer":
        return (
            "the states of earlier optimizers are kept. Make one optimizer before the loop, or "
            "drop the old one before the new one is made. If a model of each round is kept as well,"
            " keep its results, and its weights on the host."
        )
    if largest == "parameters":
        return (
            "the models of earlier rounds are kept. Keep their results as numbers, and weights "
            "that are needed again on the host: {name: t.cpu() for name, t in "
            "model.state_dict().items()}."
        )
    remedy = (
        "something of each step is kept, such as a list of losses, outputs or metrics, what a hook "
        "stores, or a sum of losses. Keep numbers instead of tensors: loss.item(), or "
        "tensor.detach().cpu() for what has to stay a tensor."
    )
    if all(holder.made_in == IN_BACKWARD for holder in holders):
        remedy += (
            " What backwards have made here are derivatives. A Jacobian has one for each output and"
            " each input, and between different rows of a batch they are zeros: take it of one row"
            " after another, and reduce each at once."
        )
    inside = {holder.op for holder in holders if holder.category == "activations" and holder.module}
    shapes = {holder.shape for holder in holders}
    if len(inside) <= 1 and 2 * len(shapes) > len(holders):
        remedy += " A cache with an entry for each shape or length needs a limit (maxsize=...)."
    if len(inside) > 1:
        remedy += (
            " Whole graphs of earlier steps are alive: what goes from one step to the next, such as"
            " a running loss or a hidden state, keeps them, so detach it (hidden.detach())."
            " An exception that is kept does the same: its traceback has the tensors of the step"
            " that failed, so keep str(error)."
        )
    if any(larger_than_its_tensor(holder) for holder in holders):
        remedy += (
            " A loss of one number can lie in a storage as large as the tensor that it was computed"
            " from, and .detach() keeps this storage: use .item()."
        )
    return remedy


def _have_shapes_of_parameters(holders: list[Holder], facts: Facts) -> bool:
    """Whether most of the bytes are states that belong to one parameter each."""
    if facts.structure is None:
        return True
    shapes = set(facts.structure.shapes.values())
    of_parameters = [holder for holder in holders if holder.shape in shapes]
    return 2 * total(of_parameters) > total(holders)


def growing_tensor(facts: Facts) -> Cause | None:
    """One tensor that a longer one replaces in each step, as ``torch.cat([history, new])`` does."""
    survivors = []
    for holder in facts.at_peak:
        # A batch is made before the step that it belongs to, but it is no sum of earlier ones.
        joined = holder.op == "aten.cat" and not belongs_to_training(holder)
        survived = facts.time_of(holder) == facts.peak_time - 1
        if joined and survived:
            survivors.append(holder)
    if not survivors:
        return None
    old = max(survivors, key=lambda holder: holder.nbytes)
    # Pictures show its growth: in each step, another tensor was this one.
    replaced = [h for h in facts.joined if _same_code(h, old) and h.nbytes < old.nbytes]
    begins = min((facts.time_of(holder) for holder in replaced), default=facts.peak_time)
    starts = _beginnings_of_steps(facts, begins)
    if len(starts) <= SEVERAL:
        return None
    rises = [after.live > before.live for before, after in pairwise(starts)]
    growth = starts[-1].live - starts[0].live
    if sum(rises) < ALMOST_ALL * len(rises) or growth < WORTH * facts.peak.total:
        return None
    if old.nbytes < growth // 2:
        return None
    holders = [old]
    for holder in facts.at_peak:
        is_longer = _same_code(holder, old) and holder.nbytes > old.nbytes
        if is_longer and facts.time_of(holder) == facts.peak_time:
            holders.append(holder)  # the longer one, which is being made
    each = growth // (len(starts) - 1)
    first = starts[0].step if facts.has_optimizer else starts[0].number
    evidence = (
        f"{format_bytes(total(holders))} at the peak are a tensor that becomes longer in each "
        f"{facts.unit}, by about {format_bytes(each)}: {in_words(holders[-1])}. "
        f"{format_bytes(starts[0].live)} were live when {facts.unit} {first + 1} began, and "
        f"{format_bytes(starts[-1].live)} when the peak's began."
    )
    remedy = (
        "keep only numbers of it, or put the pieces into a list off the card, "
        "history.append(x.detach().cpu()), and join them once at the end."
    )
    growing = [*replaced, *holders]
    nbytes, lines = total(holders), lines_of(holders)
    return Cause(GROWTH, nbytes, evidence, remedy, lines, holders, growing)


def _same_code(one: Holder, other: Holder) -> bool:
    """Whether the same line has made both, by the same operation."""
    return (one.line, one.op, one.dtype) == (other.line, other.op, other.dtype)


def _beginnings_of_steps(facts: Facts, first: int) -> list[Turn]:
    """The first turn of each step from ``first`` on, and from the second step on, until the peak.
    The first step makes the optimizer's states.
    """
    starts: list[Turn] = []
    for turn in facts.turns:
        by_step = facts.has_optimizer
        new = not starts or not by_step or turn.step > starts[-1].step
        time = turn.step if by_step else turn.number
        late_enough = time >= first and (turn.step > 0 or not by_step)
        if turn.number <= facts.peak.turn and new and late_enough:
            starts.append(turn)
    return starts
