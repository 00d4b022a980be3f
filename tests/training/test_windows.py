"""What a trainer's windows and evaluations are worth: streamed epochs, windows without labels,
``eval_loss``, losses of one's own; against a plain loop in float64.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from support.gradients import error, gradient, own_loss
from support.refusals import refusal
from support.trainers import LastGradient, trainer_for
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import default_collate

from gradmem_lib import Recipe, accumulate_gradients, next_token_loss
from gradmem_lib.course import models, run_ranks

pytestmark = pytest.mark.usefixtures("interruptible")
LENGTHS = (3, 12, 5, 9, 7, 4, 12)
RATE = 0.1


def tiny(dtype=torch.float32):
    sizes = {"layers": 1, "hidden": 16, "heads": 2, "intermediate": 32, "vocab": 31}
    return models.tiny_llama(**sizes).to(dtype)  # the same weights in each dtype


def row(i):
    ids = torch.arange(1, 13) * (i + 3) % 31
    return {"input_ids": ids, "labels": ids.masked_fill(torch.arange(12) >= LENGTHS[i], -100)}


def batch(indices):
    return default_collate([row(i) for i in indices])


def plain(windows):
    """The gradients and the losses of a plain loop over windows of rows."""
    model = tiny(torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    found = []
    for indices in windows:
        loss = own_loss(model, batch(indices))
        loss.backward()
        found.append((gradient(model), loss))
        optimizer.step()
        optimizer.zero_grad()
    return found


def trainer_of(folder, recipe, model=None, **given):
    """A trainer of rows in their order, and the gradients of its steps."""
    look = LastGradient()
    settings = {"learning_rate": RATE, "callbacks": [look], "in_order": True} | given
    return trainer_for(model or tiny(), recipe, folder, **settings), look


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return (row(i) for i in range(self.rows))


def test_a_streamed_window_ends_with_its_epoch(tmp_path):
    epoch = [[0, 1, 2], [3, 4, 5], [6]]
    recipe, given = Recipe(accumulation=3, optimizer="sgd"), {"batch_size": 3, "max_steps": 6}
    trainer, look = trainer_of(tmp_path, recipe, train_dataset=Stream(7), **given)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    for found, logged, (right, loss) in zip(look.all, losses, plain(2 * epoch), strict=True):
        assert error(found, right) <= 1e-5
        assert logged == pytest.approx(loss.item(), rel=1e-5)


def rows(n, unlabelled=()):
    found = [row(i) for i in range(n)]
    for i in unlabelled:
        found[i]["labels"].fill_(-100)
    return found


@pytest.mark.parametrize("empty", [(4, 5), (0, 1, 2, 3)])
def test_a_window_without_a_label_changes_nothing_and_is_counted(empty, tmp_path):
    windows = [(0, 1), (2, 3), (4, 5)]
    expected = plain([window for window in windows if window[0] not in empty])
    given = {"batch_size": 2, "train_dataset": rows(6, empty), "max_steps": 3}
    trainer, look = trainer_of(tmp_path, Recipe(accumulation=2, optimizer="sgd"), **given)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer.train()
    assert sum("has a label" in str(each.message) for each in said) == 1
    assert trainer.empty_windows == len(empty) // 2 and trainer.state.global_step == 3
    found = [each for each in look.all if each is not None]
    for ours, (theirs, _) in zip(found, expected, strict=True):
        assert error(ours, theirs) <= 1e-5


@pytest.mark.parametrize(("accumulation", "chunked"), [(2, False), (7, True)])
def test_eval_loss_is_one_number(accumulation, chunked, tmp_path):
    expected = own_loss(tiny(torch.float64), batch([0, 2, 3, 4, 5, 6])).item()
    recipe = Recipe(accumulation=accumulation, chunked_loss=chunked)
    given = {"batch_size": 7 * accumulation, "eval_dataset": rows(7, [1])}
    given["per_device_eval_batch_size"] = {2: 3, 7: 1}[accumulation]
    trainer, _ = trainer_of(tmp_path, recipe, **given)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-5)


def as_trainer_wants_it(outputs, labels, num_items_in_batch=None):
    logits, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    reduction = "mean" if num_items_in_batch is None else "sum"
    loss = F.cross_entropy(logits, targets, label_smoothing=0.2, reduction=reduction)
    return loss if num_items_in_batch is None else loss / num_items_in_batch


def of_items(outputs, labels, num_items_in_batch):
    return as_trainer_wants_it(outputs, labels, num_items_in_batch * 1.0)


@pytest.mark.parametrize(
    "given",
    [
        {"compute_loss_func": as_trainer_wants_it},
        {"compute_loss_func": of_items},
        {"label_smoothing_factor": 0.2},
    ],
)
def test_losses_of_ones_own_that_are_means_are_taken(given, tmp_path):
    exact, four = tiny(torch.float64), batch(range(4))
    as_trainer_wants_it(exact(input_ids=four["input_ids"]), four["labels"]).backward()
    expected = gradient(exact)
    given |= {"batch_size": 4, "train_dataset": rows(4), "max_steps": 1}
    trainer, look = trainer_of(tmp_path, Recipe(accumulation=4, optimizer="sgd"), **given)
    trainer.train()
    assert error(look.found, expected) <= 1e-5


def in_two_processes(folder):
    model = tiny(torch.float64)
    ddp = DistributedDataParallel(model, static_graph=True)
    found = {
        "static graph": refusal(
            accumulate_gradients, [batch([0])], lambda m: next_token_loss(ddp, m), model=ddp
        )
    }
    recipe = Recipe(accumulation=2, optimizer="sgd", sharding="ddp")
    given = {"batch_size": 2, "train_dataset": rows(7), "eval_dataset": rows(7), "max_steps": 1}
    trainer, look = trainer_of(Path(folder), recipe, **given)
    trainer.train()
    assert type(trainer.model_wrapped) is DistributedDataParallel
    found["gradient"] = look.found
    found["eval_loss"] = trainer.evaluate()["eval_loss"]
    return found


def test_in_two_processes(tmp_path):
    (expected, _), *_ = plain([[0, 1, 2, 3]])
    model = tiny(torch.float64)
    with torch.no_grad():
        for parameter, step in zip(
            model.parameters(),
            expected.split([p.numel() for p in model.parameters()]),
            strict=True,
        ):
            parameter -= RATE * step.view_as(parameter)
        loss = own_loss(model, batch(range(7))).item()
    for found in run_ranks(in_two_processes, str(tmp_path)):
        assert "without static_graph" in found["static graph"]
        assert error(found["gradient"], expected) <= 1e-5
        assert found["eval_loss"] == pytest.approx(loss, rel=1e-5)
