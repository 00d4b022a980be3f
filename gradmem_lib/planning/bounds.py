"""Lower bounds for the live bytes of a recipe that was not predicted."""

import numpy as np

from ..measure.timeline import BY, PHASE
from ..names import (
    ACTIVATIONS,
    FORWARD,
    GRADIENTS,
    OPTIMIZER,
    OPTIMIZER_STEP,
    PARAMETERS,
    SELECTIVE,
)
from ..techniques.schedules import first_layers
from ..training.recipe import Recipe
from .held import copied_bytes, saved_by_forward_per_token, saved_bytes_per_token
from .options import Option
from .question import Question


def bound_by_sizes(question: Question, recipe: Recipe) -> float:
    """A lower bound for the live bytes of ``recipe``, by the sizes of the model."""
    held = question.residents(recipe)
    tokens = question.units * question.micro_batch(recipe)
    # In one piece, gradients are made while activations are freed.
    gradients = held["gradients"] if recipe.accumulation > 1 else 0
    before = held["parameters"] + held["optimizer"] + gradients
    saved = tokens * saved_bytes_per_token(question.work, recipe)
    saved_by_forward = tokens * saved_by_forward_per_token(question.work, recipe)
    end_of_forward = before + saved_by_forward + copied_bytes(question.work, recipe)
    in_forward_or_backward = max(before + saved, end_of_forward)
    after_backward = sum(held.values())
    return max(in_forward_or_backward, after_backward)


def bound_by_known(question: Question, recipe: Recipe, known: Option) -> float:
    """A lower bound from the timeline of ``known``, which saves as much memory as ``recipe``, or
    more; 0 if ``known`` says nothing of ``recipe``.

    At each moment, bytes other than parameters, gradients and states are assumed to shrink with the
    micro-batch. For a larger micro-batch they are assumed to stay, and where a forward ends, there
    is what it saves for the additional rows. If the optimizers differ, the optimizer's step is left
    out.
    """
    if not _comparable(known.recipe, recipe):
        return 0
    rows = known.prediction.timeline.rows  # one for each moment
    other_states = (known.recipe.optimizer, known.recipe.sharding) != (
        recipe.optimizer,
        recipe.sharding,
    )
    if other_states:
        rows = rows[rows[:, PHASE] != OPTIMIZER_STEP]
    trains_head = not question.work.adapts(recipe)
    if trains_head and known.recipe.chunked_loss and not recipe.chunked_loss:
        # A chunk's products for the head's gradient may be more than all logits are.
        rows = rows[rows[:, PHASE] != FORWARD]
    by = rows[:, BY]
    states, gradients = by[:, OPTIMIZER], by[:, GRADIENTS]
    if other_states:
        # Those of the known one say nothing: they may be far above their count by sizes, since
        # 8-bit AdamW keeps small tensors' states in float32.
        states = question.residents(recipe)["optimizer"]
    if recipe.accumulation > 1:
        # From the second micro-batch on, all gradients exist from the beginning, except those
        # that are about to be sharded.
        gradients = min(gradients.max(), question.residents(recipe)["gradients"])
    elif known.recipe.accumulation > 1:
        gradients = 0  # in one piece, there may be none before backward makes them
    smaller = min(1, known.recipe.accumulation / recipe.accumulation)
    scaled = smaller * by[:, ACTIVATIONS:].sum(axis=1)  # activations, and all that come after
    needed = by[:, PARAMETERS] + states + gradients + scaled
    in_forward = np.flatnonzero(rows[:, PHASE] == FORWARD)
    more_rows = question.micro_batch(recipe) - known.micro_batch
    if len(in_forward) and more_rows > 0:
        # A forward ends where most is saved.
        end = in_forward[by[in_forward, ACTIVATIONS].argmax()]
        saved = saved_by_forward_per_token(question.work, recipe)
        needed[end] += more_rows * question.units * saved
    return needed.max()


def _comparable(known: Recipe, recipe: Recipe) -> bool:
    """Whether the bytes of ``known`` give a lower bound for those of ``recipe``.

    The two may differ in the micro-batch, in the optimizer (if it steps after backward), and in
    that ``known`` saves more memory.
    """
    # these differ only in states
    states = known.sharding == "ddp" and recipe.sharding == "zero1"
    kinds = [
        (
            r.precision,
            r.lora_rank,
            r.storage,
            r.compute_dtype,
            r.in_backward and r.optimizer,
            states or r.sharding,
            r.offload,
        )
        for r in (known, recipe)
    ]
    if kinds[0] != kinds[1]:
        return False
    if recipe.chunked_loss and not known.chunked_loss:
        return False  # the known one has logits that the other does not
    return _keeps_no_more(known, recipe)


def _keeps_no_more(known: Recipe, recipe: Recipe) -> bool:
    """Whether ``known`` runs again all that ``recipe`` does, and holds nothing else for it."""
    way_of_known = (known.checkpointing, known.every_n_layers)
    way_of_recipe = (recipe.checkpointing, recipe.every_n_layers)
    if way_of_known == way_of_recipe:
        return True
    if recipe.checkpointing in SELECTIVE:
        return False  # a part that runs again may take less than a whole layer that does
    # k of "first-k", or None for another way
    k_of_known = first_layers(known.checkpointing)
    k_of_recipe = first_layers(recipe.checkpointing)
    if known.checkpointing == "per-layer":
        # transformers' checkpoints of all layers hold a little more than ours of the first ones
        return k_of_recipe is None
    if k_of_known is None:
        return False
    if k_of_recipe is not None:
        return k_of_recipe <= k_of_known
    runs_nothing_again = way_of_recipe == (None, None)
    return runs_nothing_again
