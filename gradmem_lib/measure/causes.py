"""Why a run needs as much memory as it does: the causes, in the order in which they are looked for.

Each function reads the facts of a run, and returns a ``Cause`` with its evidence, or ``None``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ..names import CATEGORIES, MOMENTS
from ..units import format_bytes
from .cause import WORTH, Cause
from .causes_of_data import one_large_step, one_line, one_tensor, waiting_data
from .causes_of_evaluation import (
    evaluation_batch,
    evaluation_results,
    generation_cache,
    results_in_training,
)
from .causes_of_gradients import (
    copied_gradients,
    gradients_of_rows,
    gradients_of_the_step_before,
    gradients_set_to_zero,
    kept_directions,
)
from .causes_of_graphs import finished_forwards, kept_graph, leftovers, unused_forward
from .causes_of_growth import GROWTH, growing_bytes, growing_tensor
from .causes_of_many_graphs import chained_forwards, graphs_of_gradients, several_graphs
from .causes_of_settings import gradients_for_no_optimizer, idle_checkpoints
from .causes_of_tensors import (
    dense_embedding_gradient,
    eager_scores,
    expanded_tensors,
    large_logits,
    repeated_rows,
)
from .causes_of_weights import (
    copy_in_another_module,
    copy_made_here,
    double_tensors,
    first_optimizer_step,
    loaded_copy,
    second_model,
    wide_weights,
)
from .facts import Facts
from .timeline import BY, MOMENT, TOTAL, Holder

SMALL = 0.1  # of the peak

CAUSES: tuple[Callable[[Facts], Cause | None], ...] = (
    growing_bytes,
    growing_tensor,
    evaluation_results,
    results_in_training,
    generation_cache,
    unused_forward,
    finished_forwards,
    several_graphs,
    chained_forwards,
    gradients_of_rows,
    graphs_of_gradients,
    kept_graph,
    gradients_for_no_optimizer,
    copy_in_another_module,
    loaded_copy,
    copy_made_here,
    kept_directions,
    copied_gradients,
    gradients_of_the_step_before,
    gradients_set_to_zero,
    second_model,
    waiting_data,
    idle_checkpoints,
    one_large_step,
    first_optimizer_step,
    wide_weights,
    double_tensors,
    repeated_rows,
    dense_embedding_gradient,
    eager_scores,
    large_logits,
    expanded_tensors,
    leftovers,
    evaluation_batch,
)

# They say the least: they are looked for where nothing else was found.
LAST_RESORTS = (one_tensor, one_line)


def find_causes(facts: Facts) -> list[Cause]:
    """The causes that the facts show, in the order of ``CAUSES``; small ones come last."""
    if not facts.peak.total:
        return []
    found = []
    for find in CAUSES:
        cause = find(facts)
        if cause is not None:
            found.append(cause)
    for find in LAST_RESORTS:
        cause = find(facts)
        if cause is not None and not found:
            found.append(cause)
    limited = [replace(cause, limit=limit_of(cause, facts)) for cause in found]
    return sorted(limited, key=lambda cause: _is_small(cause, facts))


def limit_of(cause: Cause, facts: Facts) -> str:
    """A sentence on the peak that is left, unless it is the same moment without these bytes.

    Nothing is promised of a remedy of which it is not known how much it needs itself.
    """
    if cause.stays is None:
        return ""
    peak, moment = peak_without(cause, facts)
    if peak <= facts.peak.total - cause.nbytes + WORTH * facts.peak.total:
        return ""
    so_far = "" if facts.ended else " so far"
    if peak > (1 - WORTH) * facts.peak.total:
        return f"{cause.condition}, the peak{so_far} may be almost as high, in {moment}."
    return f"{cause.condition}, the peak{so_far} is {format_bytes(peak)} at most, in {moment}."


def peak_without(cause: Cause, facts: Facts) -> tuple[int, str]:
    """The peak in bytes when the remedy of ``cause`` is applied, and the moment it is in.

    In each moment, the remedy takes away at most as many bytes as at the peak, of the categories
    that it can touch. What was there at the peak, and is not of the cause, does not go; neither
    does what this turn's backward needs when the cause's bytes are free.
    """
    goes = cause.nbytes - (cause.stays or 0)
    left, moment = facts.peak.total - goes, facts.peak.moment
    if facts.samples is None or not cause.holders:
        return left, moment
    categories = {holder.category for holder in cause.holders}
    if any(_has_a_gradient(holder) for holder in cause.holders):
        # Where an activation goes, its gradient and what is computed from it go as well.
        categories |= {"activations", "temporaries", "other"}
    columns = [CATEGORIES.index(category) for category in categories]
    of_the_cause = {id(holder) for holder in cause.holders}
    others = []
    for holder in facts.at_peak:
        if holder.category in categories and id(holder) not in of_the_cause:
            others.append(holder)
    can_go = facts.rows[:, BY][:, columns].sum(axis=1) - facts.bytes_of(others)
    can_go[facts.in_backward_of_peak() & (facts.bytes_of(cause.holders) == 0)] = 0
    remaining = facts.rows[:, TOTAL] - np.clip(can_go, 0, goes)
    highest = int(remaining.argmax())
    if remaining[highest] > left:
        left, moment = int(remaining[highest]), MOMENTS[facts.rows[highest, MOMENT]]
    return left, moment


def _has_a_gradient(holder: Holder) -> bool:
    """Whether a backward may make a gradient of this tensor."""
    if holder.category not in ("activations", "temporaries"):
        return False
    return holder.dtype is None or holder.dtype.is_floating_point


def _is_small(cause: Cause, facts: Facts) -> bool:
    """Whether it is a small part of the peak, and stays one: what grows does not stay small."""
    return cause.nbytes < SMALL * facts.peak.total and cause.name != GROWTH
