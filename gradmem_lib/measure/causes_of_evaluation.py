"""Causes: forwards without gradients: results that stay, what a generation keeps, large batches.

Whether such a forward is a part of the training step, such as a teacher's, a frozen encoder's or a
target network's, or an evaluation beside it, a script does not say. What is known is how often they
run: a part of the step runs between each two calls of the same training forward, and once or twice.
A validation each few steps does not, and a teacher that is given the whole batch at once does not
run between two micro-batches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ..units import format_bytes
from .cause import DOMINATES, MUCH, WORTH, Group, Row, lines_of_forwards, those
from .facts import EVALUATION, OF_A_TRAINING_STEP, Facts, total
from .made_by_forwards import lines_of_results
from .timeline import ForwardPass, Holder

FORWARDS_IN_A_ROW = 3
OF_THE_STEP = 2  # in a row, at most; more may be a generation or a validation's loop


def _is_result(holder: Holder, facts: Facts) -> bool:
    return holder.made_in == EVALUATION and holder.category == "temporaries"


def _made_by_calls(left: list[Holder], facts: Facts) -> Group:
    return Group(left, changes={"lines": lines_of_results(left, facts)})


RESULTS_IN_TRAINING = Row(
    "Results of an evaluation stay during the training",
    "{size} at the peak are {count} results of forwards without gradients: {kinds}.",
    "keep less of each: outputs.argmax(-1), or of log-probabilities those of the chosen tokens "
    "alone; and `del` the rest before the training goes on. What a loss needs later can wait off "
    "the card (outputs.cpu()), or be computed for one micro-batch at a time.",
    those(_is_result, _made_by_calls),
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
        since = holder.first_sample >= passes[0].first_sample  # a data set may have come before
        if since and holder.step == facts.peak.step and not holder.is_of_training:
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
        if not done.has_weights:
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
    if peak_may_be_of_the_step(facts):
        changes["name"] = "A forward without gradients is the peak"
        changes["remedy"] = (
            "give it fewer rows at a time. If each step has it (a teacher, a frozen encoder), "
            "smaller micro-batches do that; or compute its outputs once, before the training. If "
            "it is an evaluation: per_device_eval_batch_size in a Trainer."
        )
    made = [holder for holder in free if holder.first_sample >= largest.first_sample]
    return Group(made, {"before": format_bytes(largest.live_before)}, changes)


EVALUATION_BATCH = Row(
    "An evaluation is the peak",
    "one forward without gradients needs {size}, on top of the {before} that were live before it.",
    "give the evaluation a smaller batch: per_device_eval_batch_size in a Trainer. The training's "
    "micro-batches do not change this.",
    _large_forward,
    least=MUCH,
    stays=None,  # half of the rows do not need half of the masks and tables
)


def largest_evaluation(facts: Facts) -> ForwardPass | None:
    """The forward without gradients in which the peak is, if it is in one."""
    if facts.peak.moment != EVALUATION:
        return None
    largest = max(facts.evaluations, key=lambda done: done.peak, default=None)
    if largest is None or largest.peak < facts.peak.total:
        return None
    return largest


def peak_may_be_of_the_step(facts: Facts) -> bool:
    """Whether the peak is in a forward without gradients that the training may run with each batch:
    as far as is known, it was called between all pairs of the same training forward, and no more
    than twice in a row.
    """
    largest = largest_evaluation(facts)
    if largest is None:
        return False
    in_a_row = calls = 0
    calls_at_last = dict[tuple, int]()  # for each training forward: ``calls`` at its last call
    between = dict[tuple, list[int]]()  # for each: the calls between each two of its own
    for done in facts.forwards:
        if not done.with_grad and done.call == largest.call:
            calls, in_a_row = calls + 1, in_a_row + 1
            if in_a_row > OF_THE_STEP:
                return False
        if done.used and done.has_weights:
            in_a_row = 0
            counts = between.setdefault(done.call, [])
            if done.call in calls_at_last:
                counts.append(calls - calls_at_last[done.call])
            calls_at_last[done.call] = calls
    return not between or any(min(counts, default=1) > 0 for counts in between.values())
