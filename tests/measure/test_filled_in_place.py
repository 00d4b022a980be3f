"""Backwards that fill their own zeros: in place, or into a new tensor while a dispatch mode is on.

The tracker shows the program without it: the allocator's bytes.
"""

from __future__ import annotations

import pytest
import torch
from support.oracle import allocator_peak
from torch import nn
from torch.utils.checkpoint import checkpoint

from gradmem_lib.measure.tracker import MemoryTracker
from gradmem_lib.prediction.predict import predict
from gradmem_lib.training.recipe import Recipe

SIZE = 64
FIRST = torch.zeros(SIZE, 5, dtype=torch.long)
ROW = torch.tensor([1, 1, 3])


class OwnBackward(torch.autograd.Function):
    """Its backward really has the zeros and the result at once, with and without a tracker."""

    @staticmethod
    def forward(ctx, weight):
        return weight[:, :5].clone()

    @staticmethod
    def backward(ctx, grad):
        return grad.new_zeros(SIZE, SIZE).scatter_add(1, FIRST, grad)


def gradient_inside(row, index):
    return torch.func.grad(lambda values: values.gather(0, index).square().sum())(row)


LOSSES = {
    "gather": lambda w: w.gather(1, FIRST).sum(),
    "log_probabilities": lambda w: w.log_softmax(-1).gather(1, FIRST).sum(),
    "take_along": lambda w: torch.take_along_dim(w, FIRST, 1).sum(),
    "take": lambda w: w.take(ROW).sum(),
    "mask": lambda w: w[w > 0].sum(),
    "masked_select": lambda w: w.masked_select(w > 0).sum(),
    "rows": lambda w: w[ROW].sum(),
    "index_select": lambda w: w.index_select(0, ROW).sum(),
    "largest": lambda w: w.max(-1).values.sum(),
    "topk": lambda w: w.topk(3).values.sum(),
    "sort": lambda w: w.sort(-1).values.sum(),
    "cummax": lambda w: w.cummax(-1).values.sum(),
    "own_backward": lambda w: OwnBackward.apply(w).sum(),
    "per_row": lambda w: torch.vmap(lambda row, i: row.gather(0, i))(w, FIRST).sum(),
    "inside_a_transform": lambda w: torch.vmap(gradient_inside)(w, FIRST).sum(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_the_peak_is_the_allocators(name):
    torch.manual_seed(0)
    model = nn.Linear(SIZE, SIZE, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=False)

    def step():
        LOSSES[name](model.weight).backward()
        optimizer.step()
        optimizer.zero_grad()

    check_peak(step, model, optimizer, [FIRST, ROW])


def check_peak(step, model, optimizer, there_before) -> int:
    """Compare a second step with the allocator. Returns the bytes of its backward's peak that were
    not there before.
    """
    step()
    with MemoryTracker(model, optimizer, live=False) as tracker:
        tracker.watch(there_before, "other")
        before = tracker.current.total
        step()
        assert tracker.current.total == before
    assert tracker.peak.total - before == allocator_peak(step, before=1)
    return tracker.peak_by_phase["backward"] - before


class CountsTokens(nn.Module):
    """As a router does. Under ``no_grad``, zeros and their sums exist at once, and so they do in
    the second forward of a checkpoint.
    """

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        with torch.no_grad():
            counted = torch.zeros(SIZE * SIZE).scatter_add(0, ROW, torch.ones(3))
        return x * self.weight * counted[1]


def test_a_second_forward_is_no_formula():
    model = CountsTokens()
    x = torch.ones(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=False)

    def step():
        out = checkpoint(model, x, use_reentrant=False, preserve_rng_state=False)
        out.sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    in_backward = check_peak(step, model, optimizer, [x, ROW])
    assert in_backward > 2 * 4 * SIZE * SIZE  # float32: zeros and sums


class Chosen(nn.Module):
    """As in a policy's loss: the score of each token that was sampled."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, SIZE)

    def forward(self, x, tokens):
        return self.head(x).gather(-1, tokens[:, None]).mean()


def test_a_prediction_has_the_allocators_bytes():
    model = Chosen()
    batch = {"x": torch.randn(SIZE, 8), "tokens": torch.randint(SIZE, (SIZE,))}
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, foreach=False)

    def step():
        model(**batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    recipe = Recipe(precision=None, attention=None, optimizer="sgd")
    predicted = predict(model, batch=batch, recipe=recipe, target="cpu")
    there_before = sum(tensor.nbytes for tensor in [*model.parameters(), *batch.values()])
    assert predicted.peak.total - there_before == allocator_peak(step, before=1)
