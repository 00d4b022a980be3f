"""Whether a ``Trainer`` with a loss of its own trains the same loss with accumulation as without.

``Trainer`` adds up the losses of a step's micro-batches, or averages them. Whether that is the loss
of all their rows together depends on ``compute_loss`` and ``training_step``, so it is asked: once
for a few rows in one micro-batch of one process, and once for the same rows as they are cut, over
all processes.
"""

import copy
import math
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from accelerate.data_loader import IterableDatasetShard
from torch import Tensor
from transformers import Trainer

from ..compat.transformers_models import prepared_inputs
from ..techniques.asking import RANDOM, SAME_ROWS, asking, first_line
from ..techniques.data_parallel import Processes
from .probe_rows import MOST_ROWS


class _NotFinite(ValueError):
    pass


class _Step(NamedTuple):
    """Rows to be trained on in one step, and how they are cut."""

    micro_batches: list[list[Any]]  # of this process
    processes: int


def check_accumulation(trainer: Trainer) -> None:
    """Raise ``ValueError`` if the loss of ``trainer`` is another one in pieces.

    The first four rows of its training data (of several processes, at least one for each) go
    through its collator and its ``compute_loss``, or a ``training_step`` of its own: together, as
    the step of one process without accumulation, and in pieces, as a step of all processes whose
    micro-batches have one row each. These are forwards in eval mode, without gradients, with a few
    other numbers in the trained weights. Afterwards the weights, the random numbers and the model's
    mode are as before; what these methods change besides, such as metrics, has seen these rows. All
    processes call this together. Nothing is asked where nothing is cut: in one process with
    ``gradient_accumulation_steps=1``.
    """
    args = trainer.args
    if args.gradient_accumulation_steps == 1 and args.world_size == 1:
        return
    name = f"{type(trainer).__name__}"
    loader = trainer.get_train_dataloader()
    groups = [dist.group.WORLD] if args.world_size > 1 else []
    processes = Processes(trainer.model, groups)

    def loss_of(step: _Step) -> float:
        batches = list(map(loader.collate_fn, copy.deepcopy(step.micro_batches)))
        with _in_processes(trainer, step.processes):
            return _loss_of_a_step(trainer, batches)

    with asking(trainer.model, loss_of, processes) as question:
        rows = _first_rows(loader.dataset, args.world_size)
        whole, cut = _Step([rows], processes=1), _cut(trainer, rows)
        [((in_pieces, together), error)], with_others = question.observe_with_other_weights(
            [cut, whole], shows=lambda found: all(map(math.isfinite, found[0].values))
        )
        # Also after an error: other processes must not wait for this one.
        failed, added_up = processes.sums(error is not None, in_pieces)
        if failed:
            raise _could_not_be_asked(name, error)
        in_pieces = added_up / args.world_size
        if not processes.sums(question.differ(together, in_pieces))[0]:
            return
        if question.changes(whole):
            raise ValueError(
                f"{RANDOM}: it cannot be seen whether the loss of {name} may be cut, since it "
                f"{SAME_ROWS}"
            )
    context = "with a few other numbers in the weights, " if with_others else ""
    how = f"gradient_accumulation_steps={args.gradient_accumulation_steps}"
    if args.world_size > 1:
        how += f" over {args.world_size} processes"
    raise ValueError(
        f"{_advice(together, in_pieces, trainer)}: {how} trains another loss with {name}; {context}"
        f"{len(rows)} rows have the loss {together:.6g} in one micro-batch, and {in_pieces:.6g} as "
        f"{name} puts it together from pieces"
    )


def _could_not_be_asked(name: str, error: Exception | None) -> ValueError:
    if isinstance(error, _NotFinite):
        return error
    found = "an error in another process"
    if error is not None:
        found = first_line(error)
    refusal = ValueError(
        "use gradient_accumulation_steps=1 and one process: it cannot be seen whether the loss of "
        f"{name} may be cut, since its loss for a few rows raised {found}"
    )
    refusal.__cause__ = error
    return refusal


def _advice(together: float, in_pieces: float, trainer: Trainer) -> str:
    """What to do, by how many times the loss is too large."""
    processes = trainer.args.world_size
    pieces = math.ceil(MOST_ROWS / processes)  # of each process
    if trainer.args.gradient_accumulation_steps == 1:
        pieces = 1
    ratio = in_pieces / together if together else 0.0
    # By how much a mistake changes the loss, and what to do about it.
    by_pieces: tuple[float, str] = (
        pieces,
        "set loss_is_scaled_for_ga = False in the class if compute_loss returns the mean of its "
        "micro-batch, since nobody divides",
    )
    if _divides(trainer, items=True):
        by_pieces = (
            1 / pieces,
            "set loss_is_scaled_for_ga = True in the class, or leave the division to Trainer, "
            "since compute_loss and Trainer both divide",
        )
    by_processes = (
        1 / processes,
        "return loss * self.accelerator.num_processes from compute_loss, since the processes' "
        "gradients are averaged, and this loss is divided by the items of all of them "
        "(num_items_in_batch)",
    )
    for factor, advice in (by_pieces, by_processes):
        # A factor of 1 is no cause.
        if factor != 1 and math.isclose(ratio, factor, rel_tol=1e-3):
            return advice
    return (
        "return a sum divided by num_items_in_batch from compute_loss; or, for a loss that adds "
        "several means, write the loop with accumulate_gradients, where loss_and_count returns a "
        "sum and a count for each mean; or use gradient_accumulation_steps=1 with checkpointing to "
        "save memory"
    )


def _first_rows(dataset: Any, processes: int) -> list[Any]:
    """The first rows of a data set, which may have no length: as many for each process."""
    most = processes * math.ceil(MOST_ROWS / processes)
    if isinstance(dataset, IterableDatasetShard):  # of one process
        dataset = dataset.dataset
    rows: Iterable[Any] = dataset
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        rows = (dataset[i] for i in range(min(most, len(dataset))))
    found = list(islice(rows, most))
    return found[: len(found) // processes * processes]


def _cut(trainer: Trainer, rows: list[Any]) -> _Step:
    """Each process has every so many-th row, in a micro-batch of its own where the batch is cut."""
    own_rows = rows[trainer.args.process_index :: trainer.args.world_size]
    pieces = [own_rows]
    if trainer.args.gradient_accumulation_steps > 1:
        pieces = [[row] for row in own_rows]
    return _Step(pieces, trainer.args.world_size)


@contextmanager
def _in_processes(trainer: Trainer, processes: int) -> Iterator[None]:
    """In the block, the trainer takes itself for one of so many processes."""
    with ExitStack() as undo:
        undo.enter_context(patch.object(type(trainer.args), "world_size", processes))
        undo.enter_context(patch.object(type(trainer.accelerator), "num_processes", processes))
        yield


def _loss_of_a_step(trainer: Trainer, micro_batches: list[Any]) -> float:
    """The loss whose gradient ``trainer`` steps with, as its ``training_step`` makes it."""
    device, steps = trainer.args.device, len(micro_batches)
    losses_of = _losses_of_trainer
    if type(trainer).training_step is not Trainer.training_step:
        losses_of = _losses_of_own_step
    losses: list[float] = []
    with ExitStack() as undo:
        for owner, name in (
            (trainer, "current_gradient_accumulation_steps"),
            (trainer.args, "gradient_accumulation_steps"),
        ):
            undo.enter_context(patch.object(owner, name, steps, create=True))
        batches, items = trainer.get_batch_samples(iter(micro_batches), steps, device)
        for number, batch in enumerate(batches, 1):
            losses += losses_of(trainer, batch, items)
            if not math.isfinite(sum(losses)):
                wrong = next(loss for loss in losses if not math.isfinite(loss))
                raise _NotFinite(
                    "look for very large or missing numbers: of the first rows of the training "
                    f"data, micro-batch {number} of {steps} has the loss {wrong}"
                )
    if not losses:
        raise ValueError("no call of backward() in training_step")
    return sum(losses)


def _losses_of_trainer(trainer: Trainer, batch: Any, items: Any) -> list[float]:
    """What ``Trainer``'s own step calls ``backward`` of."""
    inputs = dict(prepared_inputs(trainer, batch))
    with trainer.compute_loss_context_manager():
        loss = trainer.compute_loss(trainer.model, inputs, num_items_in_batch=items)
    pieces = 1
    if _divides(trainer, items):
        pieces = trainer.current_gradient_accumulation_steps
    return [loss.item() / pieces]


def _losses_of_own_step(trainer: Trainer, batch: Any, items: Any) -> list[float]:
    """What a ``training_step`` of the class's own calls ``backward`` of."""
    losses: list[float] = []
    model = trainer.model

    def backward(loss: Tensor, *args: Any, **kwargs: Any) -> None:
        losses.append(loss.item())

    with ExitStack() as undo:
        for owner, name, value in (
            (model, "train", lambda mode=True: model),  # no dropout
            (trainer.accelerator, "scaler", None),
            (torch.autograd, "backward", backward),  # which Tensor.backward calls
        ):
            undo.enter_context(patch.object(owner, name, value, create=True))
        trainer.training_step(model, batch, items)
    return losses


def _divides(trainer: Trainer, items: Any) -> bool:
    """Whether ``Trainer`` divides the loss by the micro-batches. ``items``: those of the step;
    ``None`` if the rows have no labels.
    """
    said = getattr(trainer, "loss_is_scaled_for_ga", None)  # since transformers 5
    if said is not None:
        return not said
    takes_items = trainer.model_accepts_loss_kwargs and items is not None
    return not takes_items and trainer.compute_loss_func is None
