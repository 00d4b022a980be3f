"""Losses whose first rows look like a mean over rows, and whose later rows show that they are none.

Each batch has eight rows that are alike, and four that are not: in a mask, a flag, a class with a
weight, or a label that is ignored.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from gradmem_lib import Recipe, prepare, step
from gradmem_lib.course import run_ranks

ROWS, TOKENS = 12, 6


def words() -> Tensor:
    return torch.randn(ROWS, TOKENS, 3, generator=torch.Generator().manual_seed(0)).double()


def classes(n: int = 4) -> Tensor:
    return torch.arange(ROWS) % n


def hidden_words():
    mask = torch.ones(ROWS, TOKENS).double()
    mask[9, 2:] = 0
    mask[11, 1:] = 0

    def loss(model, batch):
        errors = model(batch["x"]).pow(2).mean(-1)
        return (errors * batch["mask"]).sum() / batch["mask"].sum()

    return {"x": words(), "mask": mask}, loss


def weighted_class_in_the_middle():
    """Its label is neither the smallest nor the largest."""
    target = torch.tensor([0, 3, 0, 3, 1, 3, 1, 3, 2, 2, 0, 3])
    weights = torch.tensor([1.0, 1.0, 7.0, 1.0]).double()

    def loss(model, batch):
        x, target = batch
        return F.cross_entropy(model(x).mean(1), target, weight=weights)

    return (words(), target), loss


def missing_targets():
    target = words()[:, 0, 0].clone()
    target[8:10] = torch.nan

    def loss(model, batch):
        known = ~batch["target"].isnan()
        return F.huber_loss(model(batch["x"]).mean((1, 2))[known], batch["target"][known])

    return {"x": words(), "target": target}, loss


NO_MEANS = [hidden_words, weighted_class_in_the_middle, missing_targets]
RECIPE = Recipe(precision=None, attention=None, optimizer="sgd", accumulation=3)


def model_of_words() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 4).double()


@pytest.mark.parametrize("kind", NO_MEANS)
def test_what_later_rows_show_is_refused(kind):
    batch, loss = kind()
    run = prepare(model_of_words(), RECIPE)
    with pytest.raises(ValueError, match="no mean over labels or rows"):
        step(run.model, run.optimizer, batch, RECIPE, loss=loss)


def test_flags_that_only_weigh_rows_are_the_full_batchs():
    """The first rows have a loss of 0, so only later ones show what it is a mean of."""
    batch = {"x": words(), "target": classes(), "counts": torch.arange(ROWS) > 8}

    def loss(model, batch):
        scores = model(batch["x"]).mean(1)
        losses = F.cross_entropy(scores, batch["target"], reduction="none")
        return (losses * batch["counts"]).mean()

    expected = model_of_words()
    loss(expected, batch).backward()
    run = prepare(model_of_words(), RECIPE, lr=0.0)
    step(run.model, run.optimizer, batch, RECIPE, loss=loss, keep_gradients=True)
    torch.testing.assert_close(run.model.weight.grad, expected.weight.grad)


def breaks(model, batch):
    value = model(batch["x"]).sum()
    if dist.get_rank() == 1:
        raise KeyError("no such column")
    return value


def refused_on_a_rank() -> list[str]:
    """What is said where the rows of the second process alone show that the loss is no mean over
    rows, and where its loss alone raises an error.
    """
    batch, loss = hidden_words()
    if dist.get_rank() == 0:
        batch["mask"] = torch.ones(ROWS, TOKENS)
    recipe = replace(RECIPE, sharding="fsdp")
    torch.manual_seed(0)
    run = prepare(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 4)).double(), recipe)
    said = []
    for asked in (loss, breaks):
        with pytest.raises(ValueError) as raised:
            step(run.model, run.optimizer, batch, recipe, loss=asked)
        said.append(str(raised.value))
    return said


def test_processes_that_compute_together_ask_equally_often():
    first, second = run_ranks(refused_on_a_rank)
    assert "another process found it" in first[0] and "mean of their losses alone" in second[0]
    assert "is a sum" in first[1] and "no such column" in second[1]
