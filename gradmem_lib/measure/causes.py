"""Why a run needs as much memory as it does: the causes, in the order in which they are looked for.

Each function reads the facts of a run, and returns a ``Cause`` with its evidence, or ``None``.
"""

from __future__ import annotations

from collections.abc import Callable

from .cause import Cause
from .causes_of_graphs import (
    gradients_for_no_optimizer,
    graph_of_a_sum,
    idle_checkpoints,
    kept_graph,
    several_graphs,
    unused_forward,
)
from .causes_of_growth import (
    evaluation_results,
    generation_cache,
    growing_bytes,
    growing_tensor,
    waiting_data,
)
from .causes_of_tensors import (
    dense_embedding_gradient,
    eager_scores,
    evaluation_batch,
    expanded_tensors,
    large_logits,
    one_large_step,
)
from .causes_of_weights import (
    copy_in_another_module,
    copy_made_here,
    first_optimizer_step,
    loaded_copy,
    second_model,
    wide_weights,
)
from .facts import Facts

CAUSES: tuple[Callable[[Facts], Cause | None], ...] = (
    growing_bytes,
    growing_tensor,
    evaluation_results,
    generation_cache,
    unused_forward,
    graph_of_a_sum,
    several_graphs,
    kept_graph,
    gradients_for_no_optimizer,
    copy_in_another_module,
    loaded_copy,
    copy_made_here,
    second_model,
    waiting_data,
    idle_checkpoints,
    one_large_step,
    first_optimizer_step,
    wide_weights,
    dense_embedding_gradient,
    eager_scores,
    large_logits,
    expanded_tensors,
    evaluation_batch,
)


def find_causes(facts: Facts) -> list[Cause]:
    """The causes that the facts show, in the order of ``CAUSES``."""
    if not facts.peak.total:
        return []
    found = []
    for find in CAUSES:
        cause = find(facts)
        if cause is not None:
            found.append(cause)
    return found
