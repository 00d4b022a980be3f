"""Finds by prediction how few layers have to be recomputed within a budget."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from ..measure.timeline import BY, PHASE, TOTAL
from ..model.layers import find_layers, layers_in
from ..names import ACTIVATIONS, OPTIMIZER_STEP
from ..techniques import checkpointing
from ..training.recipe import Recipe
from ..units import format_bytes, parse_bytes
from .predict import predict, source_of


def fit(
    model_or_config: Any, budget: int | str, *, recipe: Recipe | None = None, **predict_args: Any
) -> Recipe:
    """``recipe`` with as few recomputed layers as ``budget`` allows.

    Its ``checkpointing`` is ``None`` or ``"first-k"``.

    Its predicted peak is at most ``budget`` (bytes, or text such as ``"800 MiB"``); with one layer
    less, it would be above. Only live tensors are counted (``plan`` adds what else a card holds).
    The first layers are the ones to recompute, since backward reaches them when the others are
    freed. ``predict_args``: other arguments of ``predict``. Raises ``ValueError`` if no number of
    layers is enough; it says the lowest peak, or the bytes that no checkpoint removes if these
    alone are too many.
    """
    recipe, limit = Recipe() if recipe is None else recipe, parse_bytes(budget)
    if recipe.checkpointing is not None or recipe.every_n_layers is not None:
        raise ValueError(
            "fit chooses checkpoints: give a recipe without checkpointing and every_n_layers"
        )
    source = source_of(model_or_config)
    n = len(layers_in(find_layers(source.skeleton, recipe.layers)))
    recipes = [replace(recipe, checkpointing=f"first-{k}" if k else None) for k in range(n + 1)]
    peaks: dict[int, int] = {}
    fixed = 0  # bytes that no checkpoint removes

    def fits(k: int) -> bool:
        nonlocal fixed
        if k not in peaks:
            found = predict(source, recipe=recipes[k], **predict_args)
            peaks[k], rows = found.peak.total, found.timeline.rows
            in_step = rows[rows[:, PHASE] == OPTIMIZER_STEP, TOTAL]
            fixed = int(
                max(fixed, rows[:, BY][:, :ACTIVATIONS].sum(axis=1).max(), in_step.max(initial=0))
            )
        return peaks[k] <= limit

    enough = 0 if fits(0) else None
    # Try all layers first, then a few less, since a checkpoint also adds some bytes. Once one layer
    # less needs more, every smaller number does too.
    for k in range(n, 0, -1) if enough is None else ():
        if fits(k):
            enough = k
        if enough is not None or fixed > limit or peaks[k] > peaks.get(k + 1, peaks[k]):
            break
    if enough is None:
        lowest, what = min(peaks.values()), "this step needs at least"
        if fixed > limit:
            lowest, what = fixed, "weights, gradients, states and the optimizer's step alone need"
        raise ValueError(
            f"budget={budget!r} is not enough, however many layers run again: {what} {lowest:,} "
            f"bytes ({format_bytes(lowest)}). Take a smaller batch, accumulation, chunked_loss, or "
            "another precision or optimizer"
        )
    return recipes[bisect_left(range(enough), True, key=fits)]


def checkpoint_layers(
    layers_or_model: nn.Module,
    every: str | int | Sequence,
    *,
    keep_last: bool | None = None,
    budget: int | str | None = None,
    layers: tuple = (),
    **predict_args: Any,
) -> checkpointing.CheckpointedLayers:
    """Run layers in checkpointed segments while they train, until ``.remove()`` or the end of a
    ``with`` block.

    ``every="fit"``: as few layers as ``budget`` allows, by ``fit``, which gets ``predict_args``.
    Without a ``recipe`` in them, the model stays as it is, with AdamW. All else, ``keep_last`` and
    ``layers``, is as in ``techniques.checkpointing.checkpoint_layers``.
    """
    if every == "fit" and budget is not None:
        if "recipe" not in predict_args:
            recipe = Recipe(precision=None, attention=None)  # the model as it is
        else:
            recipe = predict_args["recipe"] or Recipe()  # None is the default one, as in predict
        predict_args["recipe"] = replace(recipe, layers=layers or recipe.layers)
        every = fit(layers_or_model, budget, **predict_args).checkpointing or "first-0"
    elif every == "fit" or budget is not None or predict_args:
        raise ValueError(
            'every="fit" needs a budget; that, batch_size, seq_len and batch are for it alone'
        )
    return checkpointing.checkpoint_layers(
        layers_or_model, every, keep_last=keep_last, layers=layers
    )
