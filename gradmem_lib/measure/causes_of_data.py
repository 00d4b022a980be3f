"""Causes: data that waits, tensors that a script makes outside of its layers, one large batch."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from math import ceil

from ..names import CATEGORIES
from ..units import format_bytes
from .cause import (
    DOMINATES,
    FILLED,
    LINES,
    MANY,
    WORTH,
    Cause,
    belongs_to_training,
    in_words,
    is_copy_of_a_storage,
    lines_of,
    lines_of_forwards,
)
from .causes_of_weights import copies_of_weights
from .facts import BETWEEN_STEPS, INPUTS, OF_A_TRAINING_STEP, READ_IN_PARTS, Facts, total
from .timeline import BY, STEP, TOTAL, Holder

OUTLIER = 2  # times the median of all steps
LARGER = 1.2  # times the median of what the steps are given; some layers need the cube of that
STEPS_TO_COMPARE = 4
MOST = 0.5  # of the peak: half of it


def waiting_data(facts: Facts) -> Cause | None:
    """A data set, a replay buffer or a row of batches on the device."""
    copied = {id(holder) for copy in copies_of_weights(facts) for holder in copy}
    kinds = defaultdict[tuple, list[Holder]](list)
    for holder in facts.at_peak:
        is_data = holder.category == "other" and holder.op and id(holder) not in copied
        if is_data and not facts.of_another_model(holder) and not is_copy_of_a_storage(holder):
            kinds[holder.line, holder.op, holder.shape, holder.dtype].append(holder)
    waiting: list[Holder] = []
    for kind in kinds.values():
        if _waits(kind, facts):
            waiting += kind
    nbytes = total(waiting)
    if nbytes < DOMINATES * facts.peak.total:
        return None
    words = list(dict.fromkeys(in_words(holder) for holder in waiting))
    evidence = (
        f"{format_bytes(nbytes)} at the peak are {len(waiting)} tensors from which batches are "
        f"taken, or which wait to be used: {'; '.join(words[:LINES])}."
    )
    remedy = (
        "keep the data set (or the replay buffer, or the prefetched batches) off the card, and move"
        " one batch at a time: data[indices].to(device)."
    )
    name = "Data waits on the device"
    lines = lines_of(waiting)
    stays = _one_batch(waiting, facts)
    condition = "If one batch at a time is on the device"
    return Cause(name, nbytes, evidence, remedy, lines, waiting, stays=stays, condition=condition)


def _waits(kind: list[Holder], facts: Facts) -> bool:
    """Whether tensors of one kind are data that waits: ``kind`` has one line, operation, shape and
    dtype.
    """
    if _were_made_together(kind, facts) or _are_batches_of_later_steps(kind, facts):
        # A list of pieces is no data if a loss joins them, and they are free during the step.
        return _is_there_all_through_the_step(kind, facts)
    is_taken_from = kind[0].op == READ_IN_PARTS
    newest = max(facts.time_of(holder) for holder in kind)
    filled_long_ago = kind[0].op in FILLED and newest < facts.peak_time - 1
    return is_taken_from or filled_long_ago


def _were_made_together(kind: list[Holder], facts: Facts) -> bool:
    """Whether these are many tensors of one earlier step."""
    times = {facts.time_of(holder) for holder in kind}
    return len(kind) > MANY and len(times) == 1 and max(times) < facts.peak_time


def _one_batch(waiting: list[Holder], facts: Facts) -> int:
    """The bytes of one batch of this data, at most.

    A batch has no more rows than the largest activation.
    """
    batch_rows = facts.batch_rows
    for holder in facts.activations:
        if holder.shape:
            batch_rows = max(batch_rows, holder.shape[0])
    one_of_each_kind = dict[tuple, int]()  # of several equal batches, one counts
    for holder in waiting:
        rows = holder.shape[0] if holder.shape else 1
        part = min(batch_rows / rows, 1)
        one_of_each_kind[holder.line, holder.shape, holder.dtype] = ceil(part * holder.nbytes)
    return sum(one_of_each_kind.values())


def _are_batches_of_later_steps(kind: list[Holder], facts: Facts) -> bool:
    """Whether a loader is several batches ahead: it makes one between any two steps."""
    times = [facts.time_of(holder) for holder in kind]
    one_a_step = len(set(times)) >= len(times) - 1  # the first step may have made two
    rows = kind[0].shape[:1]
    between = all(holder.made_in == BETWEEN_STEPS for holder in kind)
    return len(kind) > MANY and one_a_step and between and rows == (facts.batch_rows,)


def _is_there_all_through_the_step(kind: list[Holder], facts: Facts) -> bool:
    """Whether there were as many bytes of data in all of the peak's step, as far as it is known."""
    if facts.rows is None or facts.rows.shape[1] <= STEP:
        return True
    of_step = facts.rows[facts.rows[:, STEP] == facts.peak.step]
    data = of_step[:, BY][:, CATEGORIES.index("other")]
    return int(data.min(initial=total(kind))) >= total(kind) // 2


def one_tensor(facts: Facts) -> Cause | None:
    """A tensor that no layer has made, and that is most of the peak by itself."""
    largest = max(facts.at_peak, key=lambda holder: holder.nbytes, default=None)
    if largest is None or largest.category != "other" or largest.nbytes < MOST * facts.peak.total:
        return None
    evidence = f"{format_bytes(largest.nbytes)} at the peak are one tensor: {in_words(largest)}."
    remedy = (
        "store it in fewer bytes (a narrower dtype, or x.to_sparse() if most of it is zeros), or "
        "keep it off the card and move the rows that a step needs. If it is the batch, take a "
        "smaller one."
    )
    name = "One tensor is most of the peak"
    lines = lines_of([largest])
    stays = largest.nbytes // 2
    condition = "If this tensor has half as many bytes"
    return Cause(
        name, largest.nbytes, evidence, remedy, lines, [largest], stays=stays, condition=condition
    )


def one_line(facts: Facts) -> Cause | None:
    """Tensors that no layer has made, and one line has: together they are most of the peak."""
    by_line = defaultdict[tuple[str, int], list[Holder]](list)
    for holder in facts.at_peak:
        if holder.category == "other" and holder.line is not None:
            # a comprehension is a function of its own in some versions of Python
            by_line[holder.line.file, holder.line.line].append(holder)
    made = max(by_line.values(), key=total, default=[])
    nbytes = total(made)
    if not made or nbytes < MOST * facts.peak.total:
        return None
    words = list(dict.fromkeys(in_words(holder) for holder in made))
    evidence = (
        f"{format_bytes(nbytes)} at the peak are {len(made)} tensors of one line: "
        f"{'; '.join(words[:LINES])}."
    )
    remedy = (
        "make fewer of them at once, or store them in fewer bytes (a narrower dtype). torch.stack "
        "and torch.cat need the pieces and the result at the same time: make the result first, and "
        "write each piece into it (result[i] = piece). What is the same for all rows, such as a "
        "causal mask, is needed once (is_causal=True, or a mask of one row)."
    )
    name = "One line makes most of the peak"
    lines = lines_of(made)
    stays = nbytes // 2
    condition = "If half of these bytes are gone"
    return Cause(name, nbytes, evidence, remedy, lines, made, stays=stays, condition=condition)


def one_large_step(facts: Facts) -> Cause | None:
    """One step that needs much more than the others: its batch has longer rows."""
    if facts.samples is None or facts.rows.shape[1] <= STEP:
        return None  # the steps are not known
    if facts.peak.moment not in OF_A_TRAINING_STEP:
        return None
    steps, totals = facts.rows[:, STEP], facts.rows[:, TOTAL]
    numbers = sorted(set(steps.tolist()))
    peaks = [int(totals[steps == step].max()) for step in numbers]
    if len(peaks) < STEPS_TO_COMPARE or not facts.has_backward_in_step(facts.peak.step):
        return None
    usual = int(statistics.median(peaks))
    if facts.peak.total < OUTLIER * usual:
        return None
    nbytes = facts.peak.total - usual
    if _bytes_of_unused_graphs(facts) > WORTH * facts.peak.total:
        return None  # no batch makes these
    if _kept_from_earlier_steps(facts) > nbytes / 2 or _has_more_forwards(facts):
        return None  # it is not the batch that is larger
    if not _may_have_a_larger_batch(facts) or _has_larger_weights(facts):
        # It does something else, such as a penalty on gradients, or trains more layers, or another
        # model.
        return None
    of_step = dict(zip(numbers, peaks, strict=True))
    del of_step[facts.peak.step]
    next_step = max(of_step, key=lambda step: of_step[step])
    next_largest = of_step[next_step]
    rows_of_next = steps == next_step
    sample_of_next = facts.samples[rows_of_next][totals[rows_of_next].argmax()]
    came_later = _made_since(int(sample_of_next), facts)
    inputs = [holder for holder in facts.at_peak if holder.module == INPUTS]
    of_shape = f", with a batch of {in_words(inputs[0])}" if inputs else ""
    evidence = (
        f"step {facts.peak.step + 1} needs {format_bytes(facts.peak.total)}{of_shape}; half of the "
        f"{len(peaks)} steps need no more than {format_bytes(usual)}."
    )
    remedy = (
        "limit the length of a row (truncation=True, max_length=...), or make batches with a limit "
        "of tokens instead of rows, so that long rows come in small batches."
    )
    forwards = [done for done in facts.of_models if done.step == facts.peak.step]
    lines = lines_of_forwards(forwards)
    name = "One step needs much more than the others"
    condition = "If its rows are no longer than those of the next largest step"
    stays = min(next_largest + came_later - usual, nbytes)
    return Cause(name, nbytes, evidence, remedy, lines, stays=stays, condition=condition)


def _made_since(sample: int, facts: Facts) -> int:
    """The bytes at the peak that earlier steps have made, and that were not there at ``sample``:
    an optimizer's states, what is kept.
    """
    nbytes = 0
    for holder in facts.at_peak:
        was_there = holder.samples[0] <= sample < holder.samples[1]
        if holder.step < facts.peak.step and not was_there:
            nbytes += holder.nbytes
    return nbytes


def _kept_from_earlier_steps(facts: Facts) -> int:
    """The bytes at the peak that earlier steps have made, without what a training has anyway.

    A batch is made before its step begins, so the step before does not count.
    """
    nbytes = 0
    for holder in facts.at_peak:
        if 0 <= holder.step < facts.peak.step - 1 and not belongs_to_training(holder):
            nbytes += holder.nbytes
    return nbytes


def _has_more_forwards(facts: Facts) -> bool:
    """Whether the peak's step has more training forwards than any other step that is known."""
    forwards = Counter(done.step for done in facts.of_models if done.has_graph)
    of_the_peak = forwards.pop(facts.peak.step, 0)
    return bool(forwards) and of_the_peak > max(forwards.values())


def _may_have_a_larger_batch(facts: Facts) -> bool:
    """Whether a model was given more in the peak's step than in most others, or it is not known
    what it was given, or what it was given became more than in other steps.
    """
    largest = defaultdict[int, int](int)  # of each step
    for done in facts.of_models:
        if done.has_graph:
            largest[done.step] = max(largest[done.step], done.given)
    of_the_peak = largest.pop(facts.peak.step, 0)
    if not of_the_peak or not largest:
        return True
    given_more = of_the_peak >= LARGER * statistics.median(largest.values())
    return given_more or _has_larger_tensors(facts)


def _has_larger_weights(facts: Facts) -> bool:
    """Whether the weights in the peak's step are larger than in most other steps."""
    steps = facts.rows[:, STEP]
    weights = facts.rows[:, BY][:, CATEGORIES.index("parameters")]
    of_others = [int(weights[steps == step].max()) for step in set(steps.tolist())]
    return weights[steps == facts.peak.step].max() > LARGER * statistics.median(of_others)


def _has_larger_tensors(facts: Facts) -> bool:
    """Whether places in a model have made larger tensors in the peak's step than in other steps.

    A batch may hide in an object, and a graph may have more edges for as many nodes. A step that
    does something else makes tensors in other places, or more of them.
    """
    of_the_peak, of_others = defaultdict[tuple, int](int), defaultdict[tuple, int](int)
    for holder in (*facts.at_peak, *facts.others):
        if holder.category != "activations":
            continue
        largest = of_the_peak if holder.step == facts.peak.step else of_others
        place = (holder.module, holder.op, holder.line)
        largest[place] = max(largest[place], holder.nbytes)
    in_both = of_the_peak.keys() & of_others.keys()
    nbytes = sum(of_the_peak[place] for place in in_both)
    return nbytes > LARGER * sum(of_others[place] for place in in_both)


def _bytes_of_unused_graphs(facts: Facts) -> int:
    """The bytes at the peak of graphs that no backward has been through."""
    nbytes = 0
    for done in facts.forwards:
        a_backward_may_come = not facts.ended and done.step >= facts.peak.step
        if not done.used and not a_backward_may_come:
            nbytes += done.kept_at_peak
    return nbytes
