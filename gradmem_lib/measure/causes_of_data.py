"""Causes: data that waits, one large batch, tensors that a script makes outside of its layers."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from math import ceil

from ..units import format_bytes
from .cause import (
    DOMINATES,
    MANY,
    Group,
    Row,
    in_words,
    is_copy_of_a_storage,
)
from .facts import INPUTS, OF_A_TRAINING_STEP, Facts, total
from .timeline import STEP, TOTAL, Holder

OUTLIER = 2  # times the median of all steps
LARGER = 1.2  # times what the same places make in other steps
STEPS_TO_COMPARE = 4
MOST = 0.5  # of the peak: half of it


def _waiting_data(free: Sequence[Holder], facts: Facts) -> Group:
    """A data set, a replay buffer or a row of batches on the device."""
    kinds = defaultdict[tuple, list[Holder]](list)
    for holder in free:
        is_data = holder.category == "other" and holder.op and not is_copy_of_a_storage(holder)
        if is_data and not facts.of_another_model(holder):
            kinds[holder.line, holder.op, holder.shape, holder.dtype].append(holder)
    waiting = list[Holder]()
    one_batch = 0  # of several equal batches, one counts
    for kind in kinds.values():
        if _waits(kind, facts):
            waiting += kind
            rows = max((*kind[0].shape[:1], 1))
            one_batch += ceil(min(facts.batch_rows / rows, 1) * kind[0].nbytes)
    return Group(waiting, changes={"stays": one_batch if facts.batch_rows else None})


def _waits(kind: list[Holder], facts: Facts) -> bool:
    """Whether tensors of one kind are data that waits: ``kind`` has one line, operation, shape and
    dtype.
    """
    if len(kind) > MANY:
        # A list of pieces is no data if a loss joins them, and they are free during the step.
        first, last = facts.samples_of_the_step
        there = [h for h in kind if h.first_sample <= first and last < h.end_sample]
        return 2 * len(there) > len(kind)
    rows = max((*kind[0].shape[:1], 1))
    return rows > facts.batch_rows and any(holder.in_parts for holder in kind)


DATA_WAITS = Row(
    "Data waits on the device",
    "{size} at the peak are {count} tensors from which batches are taken, or which wait to be "
    "used: {kinds}.",
    "keep the data set (or the replay buffer, or the prefetched batches) off the card, and move "
    "one batch at a time: data[indices].to(device).",
    _waiting_data,
    least=DOMINATES,
    condition="If one batch at a time is on the device",
)


def _large_step(free: Sequence[Holder], facts: Facts) -> Group | None:
    """One step that needs much more than the others: its batch has longer rows."""
    if not facts.has_backward_in_step(facts.peak.step):
        return None
    highest = dict[int, int]()  # of each step
    for step, nbytes in facts.rows[:, [STEP, TOTAL]].tolist():
        highest[step] = max(highest.get(step, 0), nbytes)
    usual = int(statistics.median(highest.values()))
    is_larger = len(highest) >= STEPS_TO_COMPARE and facts.peak.total >= OUTLIER * usual
    if not is_larger or not _has_larger_tensors(facts):
        return None
    inputs = [holder for holder in facts.at_peak if holder.module == INPUTS]
    words = {
        "step": facts.peak.step + 1,
        "batch": f", with a batch of {in_words(inputs[0])}" if inputs else "",
        "steps": len(highest),
        "usual": format_bytes(usual),
    }
    made = [h for h in free if h.category == "activations" and h.step == facts.peak.step]
    return Group(made, words, {"nbytes": facts.peak.total - usual})


ONE_LARGE_STEP = Row(
    "One step needs much more than the others",
    "step {step} needs {peak}{batch}; half of the {steps} steps need no more than {usual}.",
    "limit what a batch may have: the length of a row (truncation=True, max_length=...), the "
    "objects or pairs that this line goes over; or make batches with a limit of tokens instead of "
    "rows, so that long rows come in small batches.",
    _large_step,
    moments=OF_A_TRAINING_STEP,
    stays=None,
)


def _has_larger_tensors(facts: Facts) -> bool:
    """Whether places in a model have made larger tensors in the peak's step than in other steps.

    A step that does something else makes tensors in other places, or more of them. Another model's
    weights are made after the first step.
    """
    of_the_peak, of_others = defaultdict[tuple, int](int), defaultdict[tuple, int](int)
    for holder in (*facts.at_peak, *facts.others):
        if holder.category == "parameters" and holder.step > 0:
            return False
        if holder.category != "activations":
            continue
        largest = of_the_peak if holder.step == facts.peak.step else of_others
        place = (holder.module, holder.op, holder.line)
        largest[place] = max(largest[place], holder.nbytes)
    in_both = of_the_peak.keys() & of_others.keys()
    nbytes = sum(of_the_peak[place] for place in in_both)
    return nbytes > LARGER * sum(of_others[place] for place in in_both)


def _one_line(free: Sequence[Holder], facts: Facts) -> Group:
    """Tensors that no layer has made, and one line has: together, or one of them alone, they are
    most of the peak.
    """
    by_line = defaultdict[tuple, list[Holder]](list)
    for holder in free:
        if holder.category == "other" and holder.line is not None:
            # a comprehension is a function of its own in some versions of Python
            by_line[holder.line.file, holder.line.line].append(holder)
    return Group(max(by_line.values(), key=total, default=[]))


ONE_LINE = Row(
    "One line makes most of the peak",
    "{size} at the peak were made, or first read, by one line: {kinds}.",
    "make less of it at once, store it in fewer bytes (a narrower dtype, or x.to_sparse() if most "
    "of it is zeros), or keep it off the card and move the rows that a step needs. torch.stack and "
    "torch.cat need the pieces and the result at the same time: make the result first, and write "
    "each piece into it (result[i] = piece). What is the same for all rows, such as a causal mask, "
    "is needed once (is_causal=True, or a mask of one row). If it is the batch, take a smaller "
    "one.",
    _one_line,
    least=MOST,
    stays=0.5,
    condition="If half of these bytes are gone",
    alone=True,
)
