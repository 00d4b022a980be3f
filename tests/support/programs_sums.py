"""Programs whose backward adds gradients up, or fills its own zeros: in place, or into a new tensor
while a dispatch mode is on. The tracker shows the program without it.
"""

from __future__ import annotations

import torch
from support.programs import batch, program, usual
from torch import nn
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

SIZE = 64
FIRST = torch.zeros(SIZE, 5, dtype=torch.long)
ROW = torch.tensor([1, 1, 3])


def plain(layer: nn.Module, loss):
    """With an optimizer that takes nothing itself, so that the peak is in backward."""
    return usual(layer, loss, SGD(layer.parameters(), lr=1e-3, foreach=False))


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


FILLED = {
    "gather": lambda w: w.gather(1, FIRST),
    "log_probabilities": lambda w: w.log_softmax(-1).gather(1, FIRST),
    "take_along": lambda w: torch.take_along_dim(w, FIRST, 1),
    "take": lambda w: w.take(ROW),
    "mask": lambda w: w[w > 0],
    "masked_select": lambda w: w.masked_select(w > 0),
    "rows": lambda w: w[ROW],
    "index_select": lambda w: w.index_select(0, ROW),
    "largest": lambda w: w.max(-1).values,
    "topk": lambda w: w.topk(3).values,
    "sort": lambda w: w.sort(-1).values,
    "cummax": lambda w: w.cummax(-1).values,
    "own_backward": OwnBackward.apply,
    "per_row": lambda w: torch.vmap(lambda row, i: row.gather(0, i))(w, FIRST),
    "inside_a_transform": lambda w: torch.vmap(gradient_inside)(w, FIRST),
}
for name, part_of in FILLED.items():

    def filled(part_of=part_of):
        layer = nn.Linear(SIZE, SIZE, bias=False)
        return plain(layer, lambda: part_of(layer.weight).sum())

    program(filled, name=f"zeros_for_{name}")


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


@program
def zeros_in_a_second_forward():
    model, x = CountsTokens(), torch.ones(4)
    options = {"use_reentrant": False, "preserve_rng_state": False}
    return plain(model, lambda: checkpoint(model, x, **options).sum())


@program
def layer_called_four_times():
    layer, x = nn.Conv2d(32, 32, 3, padding=1, bias=False), batch(1, 32, 4, 4)

    def loss():
        y = x
        for _ in range(4):
            y = layer(y).tanh()
        return y.mean()

    return plain(layer, loss)


@program
def two_towers():
    tower, left, right = nn.Linear(128, 128), batch(2, 128), batch(2, 128)
    return plain(tower, lambda: (tower(left) - tower(right)).square().mean())


@program
def product_with_itself():
    """Both gradients come from one node."""
    layer, x = nn.Linear(8, 2048), batch(16, 8)

    def loss():
        y = layer(x)
        return (y * y).mean()

    return plain(layer, loss)


@program
def gradient_that_a_hook_keeps():
    """Autograd may not write into a gradient that somebody holds."""
    layer, x = nn.Linear(8, 2048), batch(16, 8)

    def loss():
        y, kept = layer(x), []
        first = y.tanh()
        view = first.view_as(first)
        view.register_hook(kept.append)
        return (view + y.sigmoid()).sum()

    return plain(layer, loss)


class AddsItsOwn(torch.autograd.Function):
    """Its backward adds up two of its own temporaries, out of place."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2 + grad * 3


@program
def formula_with_temporaries():
    layer, x = nn.Linear(8, 2048), batch(16, 8)
    return plain(layer, lambda: AddsItsOwn.apply(layer(x)).sum())
