"""Why a run needs as much memory as it does: the causes, in the order in which they are looked for.

Rows that say why storages are there stand before those that only say what they are.
"""

from __future__ import annotations

from dataclasses import replace

from .cause import MUCH, Cause, largest_held, name_of
from .causes_of_data import DATA_WAITS, ONE_LARGE_STEP, ONE_LINE
from .causes_of_evaluation import EVALUATION_BATCH, GENERATION, RESULTS_IN_TRAINING
from .causes_of_gradients import COPIED_GRADIENTS, FOR_NO_OPTIMIZER, GRADIENTS_WAIT
from .causes_of_graphs import (
    FINISHED,
    IDLE_CHECKPOINTS,
    LEFT_OVER,
    SECOND_DERIVATIVES,
    UNUSED,
    UNUSED_SO_FAR,
)
from .causes_of_growth import FULL, GROWING_TENSOR, GROWTH, KEPT_BY_A_NAME
from .causes_of_holders import BUCKETS, CYCLES, EXCEPTION
from .causes_of_many_graphs import ADDED_UP
from .causes_of_tensors import DOUBLE, EMBEDDING, EXPANDED, LOGITS, SCORES
from .causes_of_weights import COPIES, FIRST_STATES, SECOND_MODEL, WIDE
from .facts import Facts, total
from .remedied_peak import limit_of
from .rows import Row, cause_of

ROWS: tuple[Row, ...] = (
    EXCEPTION,
    CYCLES,
    KEPT_BY_A_NAME,
    GROWING_TENSOR,
    RESULTS_IN_TRAINING,
    GENERATION,
    UNUSED,
    FINISHED,
    ADDED_UP,
    UNUSED_SO_FAR,
    SECOND_DERIVATIVES,
    FOR_NO_OPTIMIZER,
    COPIES,
    COPIED_GRADIENTS,
    GRADIENTS_WAIT,
    BUCKETS,
    DATA_WAITS,
    FULL,
    SECOND_MODEL,
    IDLE_CHECKPOINTS,
    ONE_LARGE_STEP,
    FIRST_STATES,
    WIDE,
    DOUBLE,
    EMBEDDING,
    SCORES,
    LOGITS,
    EXPANDED,
    LEFT_OVER,
    EVALUATION_BATCH,
)


def find_causes(facts: Facts) -> list[Cause]:
    """The causes that the facts show, in the order of ``ROWS``; small ones come last."""
    found = list[Cause]()
    free = list(facts.at_peak)  # to be claimed by a row
    for row in (*ROWS, ONE_LINE):
        if row is ONE_LINE and found:
            break  # it says the least
        cause = cause_of(row, free, facts)
        if cause is None:
            continue
        found.append(replace(cause, limit=limit_of(cause, facts), held=_holder_of(cause)))
        claimed = {id(holder) for holder in cause.holders if row.claims}
        free = [holder for holder in free if id(holder) not in claimed]
    return sorted(found, key=lambda cause: _is_small(cause, facts))


def _holder_of(cause: Cause) -> str:
    """What holds most of a cause's bytes, if the evidence does not say it."""
    held, nbytes = largest_held(cause.holders)
    if held is None or not held.path or 2 * nbytes <= total(cause.holders):
        return ""
    if f"`{name_of(held)}" in cause.evidence:
        return ""
    return str(held)


def _is_small(cause: Cause, facts: Facts) -> bool:
    """Whether it is a small part of the peak, and stays one: what grows does not stay small."""
    return cause.nbytes < MUCH * facts.peak.total and cause.name != GROWTH
