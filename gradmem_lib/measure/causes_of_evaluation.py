"""Causes: forwards without gradients: results that stay, what a generation keeps, large batches."""

from __future__ import annotations

from collections import Counter, defaultdict

from ..units import format_bytes
from .cause import (
    DOMINATES,
    LINES,
    MANY,
    WORTH,
    Cause,
    belongs_to_training,
    in_words,
    lines_of_forwards,
)
from .facts import EVALUATION, IN_BACKWARD, IN_OPTIMIZER_STEP, LOSS, TRAINING_FORWARD, Facts, total
from .half_the_rows import bytes_with_rows
from .made_by_forwards import lines_of_results
from .parts_of_the_step import largest_evaluation, may_be_part_of_the_step
from .timeline import ForwardPass, Holder

FORWARDS_IN_A_ROW = 3


def results_in_training(facts: Facts) -> Cause | None:
    """Results of forwards without gradients that are still there in the training's own peak."""
    if facts.peak.moment not in (TRAINING_FORWARD, LOSS, IN_BACKWARD, IN_OPTIMIZER_STEP):
        return None
    kinds = defaultdict[tuple, list[Holder]](list)
    for holder in facts.at_peak:
        if holder.made_in == EVALUATION and holder.category == "temporaries":
            kinds[_kind(holder)].append(holder)
    left, in_use = [], 0
    for kind in kinds.values():
        left += kind
        if len(kind) >= MANY:
            in_use += kind[0].nbytes  # the last one may be; all of a kind are equally large
    nbytes = total(left)
    if nbytes - in_use < DOMINATES * facts.peak.total:
        return None
    words = list(dict.fromkeys(in_words(holder) for holder in left))
    evidence = (
        f"{format_bytes(nbytes)} at the peak are {len(left)} results of forwards without gradients:"
        f" {'; '.join(words[:LINES])}."
    )
    remedy = (
        "keep less of each: outputs.argmax(-1), or of log-probabilities those of the chosen tokens "
        "alone; and `del` the rest before the training goes on. What a loss needs later can wait "
        "off the card (outputs.cpu()), or be computed for one micro-batch at a time."
    )
    return Cause(
        "Results of an evaluation stay during the training",
        nbytes,
        evidence,
        remedy,
        lines_of_results(left, facts),
        left,
        stays=in_use,
        condition="If only the last one of each kind is kept",
    )


def generation_cache(facts: Facts) -> Cause | None:
    """Keys and values that a generation keeps for each token."""
    passes = _growing_evaluation(facts)
    cache = _kept_in_layers(passes, facts)
    nbytes = total(cache)
    if not cache:
        return None
    evidence = (
        f"{format_bytes(nbytes)} at the peak were made in the layers, by forwards without "
        "gradients, and they grow with each forward."
    )
    remedy = (
        "generate for fewer rows at a time, or fewer tokens (max_new_tokens): the bytes are "
        "proportional to both."
    )
    lines = lines_of_forwards(passes[-1:])
    return Cause(
        "Generation keeps keys and values",
        nbytes,
        evidence,
        remedy,
        lines,
        cache,
        stays=nbytes // 2,
        condition="If half as many rows are generated at a time",
    )


def evaluation_batch(facts: Facts) -> Cause | None:
    """A forward without gradients is the peak by itself, and nothing grows."""
    largest = largest_evaluation(facts)
    if largest is None:
        return None
    nbytes = largest.peak - largest.live_before
    if nbytes < WORTH * facts.peak.total:
        return None
    evidence = (
        f"one forward without gradients needs {format_bytes(nbytes)}, on top of the "
        f"{format_bytes(largest.live_before)} that were live before it."
    )
    if may_be_part_of_the_step(largest, facts):
        name = "A forward without gradients is the peak"
        remedy = (
            "give it fewer rows at a time. If each step has it (a teacher, a frozen encoder), "
            "smaller micro-batches do that; or compute its outputs once, before the training. If "
            "it is an evaluation: per_device_eval_batch_size in a Trainer."
        )
    else:
        name = "An evaluation is the peak"
        remedy = (
            "give the evaluation a smaller batch: per_device_eval_batch_size in a Trainer. The "
            "training's micro-batches do not change this."
        )
    rows = min(largest.row_counts, default=1)
    stays = None  # a row has no half, and what was given as an object may have any
    if rows > 1:
        stays = nbytes - bytes_with_rows(largest, facts) // 2
    return Cause(
        name,
        nbytes,
        evidence,
        remedy,
        lines_of_forwards([largest]),
        stays=stays,
        condition="If the batch has half as many rows",
    )


def _growing_evaluation(facts: Facts) -> list[ForwardPass]:
    """Forwards without gradients, one after another, where after each of them more was live: those
    of the peak's step that came nearest to the peak.

    Empty if the peak is not theirs.
    """
    if not facts.outside_of_training:
        return []
    passes = [p for p in facts.evaluations if p.has_weights and p.step == facts.peak.step]
    rows: list[list[ForwardPass]] = []
    for done in passes:
        previous = rows[-1][-1] if rows else None
        grows = previous is not None and done.live_before > previous.live_before
        if previous is not None and grows and done.number == previous.number:
            rows[-1].append(done)
        else:
            rows.append([done])
    long_rows = [row for row in rows if len(row) >= FORWARDS_IN_A_ROW]
    return max(long_rows, key=lambda row: row[-1].peak, default=[])


def _growth(passes: list[ForwardPass]) -> int:
    """How many bytes more were live before the last forward than before the second one.

    What one forward leaves (a variable that the next one overwrites) is there from the second on.
    """
    return passes[-1].live_before - passes[1].live_before


def _kept_in_layers(passes: list[ForwardPass], facts: Facts) -> list[Holder]:
    """What the layers keep from one forward to the next: keys and values, which longer ones
    replace. So there are few of a kind; a list of results has one of a kind from each forward.

    Empty if results are the larger part, or if it does not matter.
    """
    if not passes or _growth(passes) < WORTH * facts.peak.total:
        return []
    made, of_a_kind = [], Counter[tuple]()
    for holder in facts.at_peak:
        since = holder.samples[0] >= passes[0].samples[0]  # a data set may have come before
        if since and holder.step == facts.peak.step and not belongs_to_training(holder):
            made.append(holder)
            of_a_kind[_kind(holder)] += 1
    cache = []
    for holder in made:
        if holder.module and of_a_kind[_kind(holder)] < FORWARDS_IN_A_ROW:
            cache.append(holder)
    nbytes = total(cache)
    # Most of what one forward needs for itself is gone when the next one begins.
    if 2 * nbytes <= total(made) or _growth(passes) < nbytes // 4:
        return []
    return cache


def _kind(holder: Holder) -> tuple:
    return holder.module, holder.op, holder.shape, holder.dtype
