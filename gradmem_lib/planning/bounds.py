"""Lower bounds for the live bytes of a recipe that was not predicted."""

import numpy as np

from ..measure.timeline import BY, PHASE
from ..names import (
    ACTIVATIONS,
    BACKWARD,
    FORWARD,
    GRADIENTS,
    OPTIMIZER,
    OPTIMIZER_STEP,
    PARAMETERS,
    SELECTIVE,
)
from ..techniques.schedules import first_layers
from ..training.recipe import Recipe
from .held import (
    FLOAT32,
    copied_bytes,
    moves_all_saved,
    saved_by_forward_per_token,
    saved_bytes_per_token,
)
from .options import Option
from .question import Question
from .recomputed import freed_fraction

# So much of what a forward saves may be shared by all rows, as masks and positions: T5's biases are
# 11 % of what it saves for a row of 512 tokens.
SHARED = 0.15
# Where layers are unlike one another, those that run again may free so many times their share.
UNLIKE = 1.5


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
    micro-batch. For a larger micro-batch they are assumed to stay. If the optimizers differ, the
    optimizer's step is left out.
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
    return (by[:, PARAMETERS] + states + gradients + scaled).max()


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


def bound_by_saved(question: Question, recipe: Recipe, known: Option) -> float:
    """What is taken as a lower bound for the bytes at the end of a forward, from what that of
    ``known`` saves; 0 if ``known`` says nothing of ``recipe``.

    What is saved grows with the rows, except for copies of weights, the head's gradient and what
    all rows share. If ``known`` runs no layer again, ``recipe`` saves the share of the layers that
    it does not run again either.
    """
    work = question.work
    share = _share_saved(question, recipe, known.recipe)
    rows = known.prediction.timeline.rows
    phases = rows[:, PHASE]
    if not share or BACKWARD not in phases:
        return 0
    end = np.flatnonzero(phases == BACKWARD)[0] - 1  # of the first forward
    by_known = rows[end, BY][ACTIVATIONS]
    fixed = SHARED * by_known  # the most bytes of it that do not grow
    if known.recipe.autocast_dtype is not None:
        fixed += known.recipe.autocast_dtype.itemsize * work.parameters
    if known.recipe.chunked_loss and not work.adapts(recipe):
        gradient_of_head = FLOAT32 * work.passed(0).head
        if recipe.chunked_loss:
            fixed += gradient_of_head
        else:
            by_known = max(by_known - gradient_of_head, 0)
    # It saves fixed + times * (by_known - fixed): the least for the most fixed bytes if it saves
    # more than the known one, and otherwise for none.
    times = share * question.micro_batch(recipe) / known.micro_batch
    saved = times * by_known
    if times > 1:
        saved -= (times - 1) * fixed
    if known.recipe.chunked_loss and not recipe.chunked_loss:
        # In float32: the logarithms of the probabilities, and then the gradient of each.
        tokens = question.units * question.micro_batch(recipe)
        saved += 2 * FLOAT32 * work.passed(0).logits * tokens
    if known.recipe.autocast_dtype is None:
        saved += copied_bytes(work, recipe)
    held = question.residents(recipe)
    gradients = held["gradients"] if recipe.accumulation > 1 else 0
    return held["parameters"] + held["optimizer"] + gradients + saved


def _share_saved(question: Question, recipe: Recipe, known: Recipe) -> float:
    """The least share of what ``known`` saves that ``recipe`` saves too; 0 if that is unknown."""
    if recipe.sharding or known.sharding or known.offload or moves_all_saved(recipe):
        return 0
    may_save_weights = question.work.source.is_user_module or question.has_adapters
    if may_save_weights and recipe.accumulation != known.accumulation:
        return 0  # of weight norm or DoRA, what is saved may not grow with the rows
    if recipe.chunked_loss and not known.chunked_loss:
        return 0  # the known one has logits that the other does not
    if _adapters(recipe) != _adapters(known):
        return 0
    # Autocast saves what bf16 saves, some of it in float32.
    if known.precision not in (recipe.precision, "bf16"):
        return 0
    way = recipe.checkpointing, recipe.every_n_layers
    way_of_known = known.checkpointing, known.every_n_layers
    if way == way_of_known:
        return 1
    if way_of_known != (None, None) or recipe.checkpointing in SELECTIVE:
        return 0
    freed = freed_fraction(question.work, recipe)
    if [several.period for several in question.work.source.lists] != [1]:
        freed *= UNLIKE
    return max(1 - freed, 0)


def _adapters(recipe: Recipe) -> tuple:
    return recipe.lora_rank, recipe.lora_targets, recipe.storage, recipe.compute_dtype
