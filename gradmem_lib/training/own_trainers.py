"""Whether a ``Trainer`` with a loss of its own trains the same loss with accumulation as without.

``Trainer`` adds up the losses of a step's micro-batches, or averages them. Whether that is the loss
of all their rows together depends on ``compute_loss``, so it is asked: once for a few rows
together, and once for each of them alone.
"""

import copy
import math
from collections.abc import Iterable
from functools import partial
from itertools import islice
from typing import Any

from transformers import Trainer

from ..compat.transformers_models import prepared_inputs
from ..techniques.data_parallel import Processes
from ..techniques.pieces import (
    DRAWS_RANDOM_NUMBERS,
    as_in_evaluation,
    first_line,
    other_weights,
    rounding,
    with_graph_if_needed,
)
from .probe_rows import MOST_ROWS


def check_accumulation(trainer: Trainer) -> None:
    """Raise ``ValueError`` if the loss of ``trainer`` is another one in pieces.

    The first four rows of its training data go through its collator and its ``compute_loss``,
    together and each alone: five forwards in eval mode, without gradients, with a few other numbers
    in the trained weights. Afterwards the weights, the random numbers and the model's mode are as
    before; what ``compute_loss`` keeps besides, such as metrics, has seen these rows. Nothing is
    asked where nothing is cut: in one process with ``gradient_accumulation_steps=1``.
    """
    args = trainer.args
    if args.gradient_accumulation_steps == 1 and args.world_size == 1:
        return
    model = trainer.model
    loader = trainer.get_train_dataloader()
    with as_in_evaluation(model) as autocasts:
        rows = _first_rows(loader.dataset, MOST_ROWS)
        with other_weights(model, Processes()):
            together, in_pieces = _losses(trainer, loader.collate_fn, rows)
            again, _ = _losses(trainer, loader.collate_fn, rows)
        limit = rounding(model, autocasts)
    if math.isclose(together, in_pieces, rel_tol=limit):
        return
    name = f"{type(trainer).__name__}"
    if not math.isclose(together, again, rel_tol=limit):
        raise ValueError(
            f"it cannot be seen whether the loss of {name} may be cut: {DRAWS_RANDOM_NUMBERS}"
        )
    raise ValueError(
        f"gradient_accumulation_steps={args.gradient_accumulation_steps} trains another loss with "
        f"{name}: with a few other numbers in the weights, {len(rows)} rows have the loss "
        f"{together:.6g} in one micro-batch, and {in_pieces:.6g} as {name} puts it together from "
        "single rows. A loss that adds several means, or means of unequally many tokens, is such a "
        "loss. Use gradient_accumulation_steps=1 with checkpointing to save memory; or write the "
        "loop with accumulate_gradients, where loss_and_count returns a sum and a count for each "
        "mean"
    )


def _first_rows(dataset: Any, count: int) -> list[Any]:
    """The first rows of a data set, which may have no length."""
    rows: Iterable[Any] = dataset
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        rows = (dataset[i] for i in range(min(count, len(dataset))))
    return list(islice(rows, count))


def _losses(trainer: Trainer, collate: Any, rows: list[Any]) -> tuple[float, float]:
    """The loss of all ``rows`` in one micro-batch, and as the trainer puts it together from one
    micro-batch for each row.
    """
    try:
        together = _loss_of_a_step(trainer, [collate(copy.deepcopy(rows))])
        alone = [collate([copy.deepcopy(row)]) for row in rows]
        return together, _loss_of_a_step(trainer, alone)
    except Exception as error:  # the trainer's own code may raise anything
        raise ValueError(
            f"it cannot be seen whether the loss of {type(trainer).__name__} may be cut: its "
            f"loss for a few rows raised {first_line(error)}. Use gradient_accumulation_steps=1"
        ) from error


def _loss_of_a_step(trainer: Trainer, micro_batches: list[Any]) -> float:
    """The loss whose gradient ``Trainer`` steps with, as its ``training_step`` makes it."""
    device = trainer.args.device
    batches, items = trainer.get_batch_samples(iter(micro_batches), len(micro_batches), device)
    total = 0.0
    for batch in batches:
        with trainer.compute_loss_context_manager():
            total += with_graph_if_needed(partial(_loss_of_one, trainer, batch, items))
    if _is_divided_by_items(trainer, items):
        return total
    return total / len(batches)


def _loss_of_one(trainer: Trainer, batch: Any, items: Any) -> float:
    inputs = dict(prepared_inputs(trainer, batch))
    return float(trainer.compute_loss(trainer.model, inputs, num_items_in_batch=items))


def _is_divided_by_items(trainer: Trainer, items: Any) -> bool:
    """Whether ``compute_loss`` divides by the items of the step, and not of its micro-batch."""
    said = getattr(trainer, "loss_is_scaled_for_ga", None)  # since transformers 5
    if said is not None:
        return said
    takes_items = trainer.model_accepts_loss_kwargs and items is not None
    return takes_items or trainer.compute_loss_func is not None
