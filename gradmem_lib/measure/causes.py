"""Why a run needs as much memory as it does: the causes, in the order in which they are looked for.

Rows that say why storages are there stand before those that only say what they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from os.path import commonprefix

from . import causes_of_data as data
from . import causes_of_evaluation as evaluation
from . import causes_of_gradients as gradients
from . import causes_of_graphs as graphs
from . import causes_of_growth as growth
from . import causes_of_holders as holders
from . import causes_of_tensors as tensors
from . import causes_of_weights as weights
from .cause import MUCH, Cause, Row, cause_of, holder_of_most, total
from .facts import Facts
from .paths import NOBODY, Held
from .remedied_peak import limit_of
from .timeline import Holder

ROWS: tuple[Row, ...] = (
    holders.EXCEPTION,
    holders.CYCLES,
    growth.KEPT_BY_A_NAME,
    growth.GROWING_TENSOR,
    evaluation.RESULTS_IN_TRAINING,
    evaluation.GENERATION,
    graphs.UNUSED,
    graphs.FINISHED,
    graphs.ADDED_UP,
    graphs.UNUSED_SO_FAR,
    graphs.SECOND_DERIVATIVES,
    gradients.FOR_NO_OPTIMIZER,
    weights.COPIES,
    gradients.COPIED_GRADIENTS,
    gradients.GRADIENTS_WAIT,
    holders.BUCKETS,
    data.DATA_WAITS,
    growth.FULL,
    weights.SECOND_MODEL,
    graphs.IDLE_CHECKPOINTS,
    data.ONE_LARGE_STEP,
    weights.FIRST_STATES,
    weights.WIDE,
    tensors.DOUBLE,
    tensors.EMBEDDING,
    tensors.SCORES,
    tensors.LOGITS,
    tensors.EXPANDED,
    graphs.LEFT_OVER,
    evaluation.EVALUATION_BATCH,
    data.ONE_LINE,
)


def find_causes(facts: Facts) -> list[Cause]:
    """The causes that the facts show, in the order of ``ROWS``; small ones come last."""
    if facts.holders is None:
        return []
    found = list[Cause]()
    free = list(facts.at_peak)  # to be claimed by a row
    enough = facts.excess
    for row in ROWS:
        if row.alone and found:
            continue
        cause = cause_of(row, free, facts, enough)
        if cause is None:
            continue
        found.append(replace(cause, limit=limit_of(cause, facts), held=_holder_of(cause)))
        if row.claims:
            free = _not_claimed(free, cause)
        if cause.growing:
            enough = None  # there would be too much a step later
    return sorted(found, key=lambda cause: _is_small(cause, facts))


def _not_claimed(free: list[Holder], cause: Cause) -> list[Holder]:
    """The storages that are left for later rows: neither the cause's, nor what the same name keeps
    of the newest step, except for what is trained.
    """
    claimed = {id(holder) for holder in cause.holders}
    boxes = set[tuple]()
    for holder in cause.holders:
        if cause.name == growth.GROWTH and holder.keeper.box:
            boxes.add((holder.keeper.where, holder.keeper.box))
    left = []
    for holder in free:
        keeper = holder.keeper
        of_the_name = (keeper.where, keeper.box) in boxes and not holder.is_of_training
        if id(holder) not in claimed and not of_the_name:
            left.append(holder)
    return left


def _holder_of(cause: Cause) -> str:
    """What holds most of a cause's bytes, if the evidence does not say it; or the object, such as a
    second model, that has all of those whose holder is known.
    """
    held = holder_of_most(cause.holders)
    if not held.path:
        held = _object_of_all(cause.holders)
    said = cause.evidence.split("`")[1::2]
    if not held.path or any(map(held.path.startswith, said)):
        return ""
    return str(held)


def _object_of_all(kept: Sequence[Holder]) -> Held:
    """The object that the paths of a third of the bytes or more begin with; ``NOBODY`` if there is
    none.
    """
    known = []
    for holder in kept:
        if holder.keeper.path and not holder.is_of_training:
            known.append(holder)
    if 3 * total(known) < total(kept) or len({holder.keeper.where for holder in known}) != 1:
        return NOBODY
    paths = [holder.keeper.path for holder in known]
    path = commonprefix(paths).rpartition(".")[0]  # noqa: RUF071 (no paths of files)
    if path.count("[") != path.count("]"):  # a key of a dict has a point
        return NOBODY
    return known[0].keeper._replace(path=path, graph=False)


def _is_small(cause: Cause, facts: Facts) -> bool:
    """Whether it is a small part of the peak, and stays one: what grows does not stay small."""
    return cause.nbytes < MUCH * facts.peak.total and cause.name != growth.GROWTH
