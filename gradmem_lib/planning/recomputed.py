"""Which share of a model a recipe recomputes in backward, and which share it frees until then."""

import math

from ..names import CHECKPOINTING, SELECTIVE, check_choice
from ..techniques.schedules import first_layers
from ..training.recipe import Recipe
from .rows import LayerShare, Passed
from .work import Work


def recompute_fraction(work: Work, recipe: Recipe) -> float:
    """The share of the layers' products with weights that is recomputed."""
    if recipe.checkpointing in SELECTIVE:
        passed = work.passed(0)
        share = passed.attended / max(passed.products, 1)
        part = SELECTIVE[recipe.checkpointing]
        if part.keeps_products:
            return 0.0
        return (share if part.attention else 0.0) + (1 - share if part.mlp else 0.0)
    if work.row is not None:
        return math.fsum(share.products for share in _checkpointed_shares(work.row, recipe))
    return _checkpointed_part(work, recipe)


def freed_fraction(work: Work, recipe: Recipe) -> float:
    """The share of the linear layers' inputs and outputs that is freed until backward."""
    if recipe.checkpointing in SELECTIVE:
        return recompute_fraction(work, recipe)
    if work.row is not None:
        return math.fsum(share.linear_widths for share in _checkpointed_shares(work.row, recipe))
    return _checkpointed_part(work, recipe)


def _checkpointed_shares(row: Passed, recipe: Recipe) -> tuple[LayerShare, ...]:
    """The shares of the layers that ``recipe`` recomputes."""
    if not _checkpoints_layers(recipe):
        return ()
    first = first_layers(recipe.checkpointing)
    shares = row.layers
    if first is not None:
        shares = shares[:first]
    if recipe.every_n_layers:
        shares = shares[:: recipe.every_n_layers]
    return shares  # in segments of any lengths, every layer is recomputed


def _checkpointed_part(work: Work, recipe: Recipe) -> float:
    """The part of the layers that ``recipe`` recomputes, where all layers are alike."""
    if not _checkpoints_layers(recipe):
        return 0.0
    every, first = recipe.every_n_layers, first_layers(recipe.checkpointing)
    if every and work.layers:
        return -(-work.layers // every) / work.layers
    if first is not None and work.layers:
        return min(first / work.layers, 1.0)
    return 1.0


def _checkpoints_layers(recipe: Recipe) -> bool:
    """Whether whole layers run again. Raises ``ValueError`` for an unknown schedule."""
    schedule = recipe.checkpointing
    if schedule is None:
        return bool(recipe.every_n_layers)
    if isinstance(schedule, str) and first_layers(schedule) is None:
        check_choice("checkpointing", schedule, CHECKPOINTING)
    return True
