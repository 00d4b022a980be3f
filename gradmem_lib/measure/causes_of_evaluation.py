"""Causes: forwards without gradients: results that stay, what a generation keeps, large batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ..units import format_bytes
from .cause import DOMINATES, WORTH, belongs_to_training, lines_of_forwards
from .facts import EVALUATION, OF_A_TRAINING_STEP, Facts, total
from .made_by_forwards import lines_of_results
from .parts_of_the_step import largest_evaluation, may_be_part_of_the_step
from .rows import Group, Row
from .timeline import ForwardPass, Holder

FORWARDS_IN_A_ROW = 3


def _results(free: Sequence[Holder], facts: Facts) -> Group:
    left = []
    for holder in free:
        if holder.made_in == EVALUATION and holder.category == "temporaries":
            left.append(holder)
    return Group(left, changes={"lines": lines_of_results(left, facts)})


RESULTS_IN_TRAINING = Row(
    "Results of an evaluation stay during the training",
    "{size} at the peak are {count} results of forwards without gradients: {kinds}.",
    "keep less of each: outputs.argmax(-1), or of log-probabilities those of the chosen tokens "
    "alone; and `del` the rest before the training goes on. What a loss needs later can wait off "
    "the card (outputs.cpu()), or be computed for one micro-batch at a time.",
    _results,
    least=DOMINATES,
    moments=OF_A_TRAINING_STEP,
    stays=None,  # the last one of each kind may be in use
)


def _keys_and_values(free: Sequence[Holder], facts: Facts) -> Group | None:
    """What the layers keep from one forward to the next, and longer ones replace. So there are few
    of a kind; a list of results has one of a kind from each forward.
    """
    passes = _growing_evaluation(facts)
    if not passes:
        return None
    # What one forward leaves (a variable that the next one overwrites) is there from the second on.
    growth = passes[-1].live_before - passes[1].live_before
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
    # Most of what one forward needs for itself is gone when the next one begins.
    is_most = 2 * total(cache) > total(made) and 4 * growth >= total(cache)
    if not is_most or growth < WORTH * facts.peak.total:
        return None
    return Group(cache, changes={"lines": lines_of_forwards(passes[-1:])})


def _growing_evaluation(facts: Facts) -> list[ForwardPass]:
    """Forwards without gradients, one after another, where after each of them more was live: those
    of the peak's step that came nearest to the peak. Empty if the peak is not theirs.
    """
    row, highest = list[ForwardPass](), list[ForwardPass]()
    if not facts.outside_of_training:
        return []
    for done in facts.evaluations:
        if done.step != facts.peak.step or not done.has_weights:
            continue
        grows = row and done.live_before > row[-1].live_before and done.number == row[-1].number
        if not grows:
            row = []
        row = [*row, done]
        if len(row) >= FORWARDS_IN_A_ROW and (not highest or done.peak > highest[-1].peak):
            highest = row
    return highest


GENERATION = Row(
    "Generation keeps keys and values",
    "{size} at the peak were made in the layers, by forwards without gradients, and they grow with "
    "each forward.",
    "generate for fewer rows at a time, or fewer tokens (max_new_tokens): the bytes are "
    "proportional to both.",
    _keys_and_values,
    least=0,
    stays=0.5,
    condition="If half as many rows are generated at a time",
)


def _kind(holder: Holder) -> tuple:
    return holder.module, holder.op, holder.shape, holder.dtype


def _large_forward(free: Sequence[Holder], facts: Facts) -> Group | None:
    """A forward without gradients is the peak by itself, and nothing grows."""
    largest = largest_evaluation(facts)
    if largest is None:
        return None
    changes = {
        "nbytes": largest.peak - largest.live_before,
        "lines": lines_of_forwards([largest]),
    }
    if may_be_part_of_the_step(largest, facts):
        changes["name"] = "A forward without gradients is the peak"
        changes["remedy"] = (
            "give it fewer rows at a time. If each step has it (a teacher, a frozen encoder), "
            "smaller micro-batches do that; or compute its outputs once, before the training. If "
            "it is an evaluation: per_device_eval_batch_size in a Trainer."
        )
    made = [holder for holder in free if holder.samples[0] >= largest.samples[0]]
    return Group(made, {"before": format_bytes(largest.live_before)}, changes)


EVALUATION_BATCH = Row(
    "An evaluation is the peak",
    "one forward without gradients needs {size}, on top of the {before} that were live before it.",
    "give the evaluation a smaller batch: per_device_eval_batch_size in a Trainer. The training's "
    "micro-batches do not change this.",
    _large_forward,
    stays=None,  # half of the rows do not need half of the masks and tables
)
