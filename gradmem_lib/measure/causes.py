"""Why a run needs as much memory as it does: the causes, in the order in which they are looked for.

Each function reads the facts of a run, and returns a ``Cause`` with its evidence, or ``None``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from .cause import Cause, largest_held, name_of
from .causes_of_data import one_large_step, one_line, one_tensor, waiting_data
from .causes_of_evaluation import (
    evaluation_batch,
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
from .causes_of_growth import GROWTH, growing_tensor
from .causes_of_holders import in_a_cycle, in_an_exception, in_buckets, kept_by_a_name
from .causes_of_many_graphs import chained_forwards, graphs_of_gradients, several_graphs
from .causes_of_settings import gradients_for_no_optimizer, idle_checkpoints
from .causes_of_tensors import (
    dense_embedding_gradient,
    eager_scores,
    expanded_tensors,
    large_logits,
    repeated_rows,
    scores_of_positions,
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
from .facts import Facts, total
from .remedied_peak import limit_of

SMALL = 0.1  # of the peak

CAUSES: tuple[Callable[[Facts], Cause | None], ...] = (
    in_an_exception,
    in_a_cycle,
    kept_by_a_name,
    growing_tensor,
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
    in_buckets,
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
    scores_of_positions,
    expanded_tensors,
    leftovers,
    evaluation_batch,
)

# They say that a kind of tensor is large; another cause may say of the same ones why they stay.
OF_SIZE = (
    wide_weights,
    double_tensors,
    repeated_rows,
    dense_embedding_gradient,
    eager_scores,
    large_logits,
    scores_of_positions,
    expanded_tensors,
)

# They give only another remedy for storages whose holder is named.
SAYS_LITTLE = (growing_tensor, waiting_data, leftovers)

# They say the least: they are looked for where nothing else was found.
LAST_RESORTS = (one_tensor, one_line)


def find_causes(facts: Facts) -> list[Cause]:
    """The causes that the facts show, in the order of ``CAUSES``; small ones come last."""
    if not facts.peak.total:
        return []
    found: list[Cause] = []
    kept: list[Cause] = []  # those that say why tensors are there
    for find in CAUSES:
        cause = find(facts)
        says_little = find in SAYS_LITTLE
        if cause is None or (says_little and _are_named_already(cause, kept)):
            continue  # it would only give another remedy for the same tensors
        found.append(cause)
        if find not in OF_SIZE:
            kept.append(cause)
    for find in LAST_RESORTS:
        cause = find(facts)
        if cause is not None and not found:
            found.append(cause)
    limited = []
    for cause in found:
        held, nbytes = largest_held(cause.holders)
        words = ""
        if held is not None and held.path and 2 * nbytes > total(cause.holders):
            is_said = f"`{name_of(held)}" in cause.evidence
            words = "" if is_said else str(held)
        limited.append(replace(cause, limit=limit_of(cause, facts), held=words))
    return sorted(limited, key=lambda cause: _is_small(cause, facts))


def _are_named_already(cause: Cause, found: list[Cause]) -> bool:
    """Whether the causes ``found`` have named most of the bytes of ``cause``."""
    named = {id(holder) for other in found for holder in other.holders}
    new = [holder for holder in cause.holders if id(holder) not in named]
    return 2 * total(new) < cause.nbytes


def _is_small(cause: Cause, facts: Facts) -> bool:
    """Whether it is a small part of the peak, and stays one: what grows does not stay small."""
    return cause.nbytes < SMALL * facts.peak.total and cause.name != GROWTH
