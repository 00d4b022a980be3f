"""Losses whose first rows look like a mean over rows, and whose later rows show that they are none.

Each batch has eight rows that are alike, and four that are not: in a mask, a flag, a class with a
weight, or a label that is ignored.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradmem_lib.training.prepare import prepare
from gradmem_lib.training.recipe import Recipe
from gradmem_lib.training.step import step

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


def lengths_of_rows():
    lengths = torch.full((ROWS,), TOKENS)
    lengths[9], lengths[11] = 2, 3

    def loss(model, batch):
        shown = torch.arange(TOKENS) < batch["length"][:, None]
        return model(batch["x"])[shown].pow(2).mean()

    return {"x": words(), "length": lengths}, loss


def ignored_pixels():
    target = classes()[:, None].repeat(1, TOKENS)
    target[9, 2:] = 255

    def loss(model, batch):
        scores = model(batch["x"]).flatten(0, 1)
        return F.cross_entropy(scores, batch["target"].flatten(), ignore_index=255)

    return {"x": words(), "target": target}, loss


def negative_labels():
    target = classes()[:, None].repeat(1, TOKENS)
    target[10, 1:] = -1

    def loss(model, batch):
        scores = model(batch["x"]).flatten(0, 1)
        return F.cross_entropy(scores, batch["target"].flatten(), ignore_index=-1)

    return {"x": words(), "target": target}, loss


def weighted_class():
    target = classes(3)
    target[9] = 3
    weights = torch.tensor([1.0, 1.0, 1.0, 7.0]).double()

    def loss(model, batch):
        x, target = batch
        return F.cross_entropy(model(x).mean(1), target, weight=weights)

    return (words(), target), loss


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


def part_for_hard_rows():
    hard = torch.zeros(ROWS, dtype=torch.bool)
    hard[[9, 10]] = True

    def loss(model, batch):
        scores = model(batch["x"]).mean(1)
        total = F.cross_entropy(scores, batch["target"])
        if batch["hard"].any():
            total = total + scores[batch["hard"]].pow(2).mean()
        return total

    return {"x": words(), "target": classes(), "hard": hard}, loss


NO_MEANS = [
    hidden_words,
    lengths_of_rows,
    ignored_pixels,
    negative_labels,
    weighted_class,
    weighted_class_in_the_middle,
    missing_targets,
    part_for_hard_rows,
]
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
