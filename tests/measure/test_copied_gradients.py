"""Copies of gradients: which bytes are named, and that runs which follow the advice need less."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gradmem_lib import MemoryTracker, diagnose

COPIES = "The gradients are there more than once"
DOUBLE = "Tensors are in float64"
WIDTH, LAYERS = 128, 8
NUMBERS = LAYERS * (WIDTH * WIDTH + WIDTH)  # of all weights


def run(after_backward, backwards: int = 1) -> MemoryTracker:
    """Training steps, each of several backwards. ``after_backward(gradients, kept)`` is called
    after each of them with the gradients of all weights, and with a list of the step.
    """
    torch.manual_seed(0)
    layers = []
    for _ in range(LAYERS):
        layers += [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with MemoryTracker(model, optimizer, live=False) as tracker:
        for _ in range(3):
            kept = []
            for _ in range(backwards):
                optimizer.zero_grad()
                model(torch.randn(4, WIDTH)).square().mean().backward()
                after_backward([p.grad for p in model.parameters()], kept)
            optimizer.step()
            optimizer.zero_grad()
            del kept
    return tracker


def flat_in_float64(gradients, kept):
    torch.cat([g.flatten() for g in gradients]).double().norm().item()


def each_in_float64(gradients, kept):
    copies = [g.double().clone() for g in gradients]
    sum(copy.square().sum() for copy in copies).sqrt().item()


def one_at_a_time(gradients, kept):
    for g in gradients:
        g.double().square().sum().item()


def norms(gradients, kept):
    kept.append([g.norm().item() for g in gradients])


def squares_of_each_backward(gradients, kept):
    kept.append([g.double() ** 2 for g in gradients])


def sum_of_squares(gradients, kept):
    squares = [g.double() ** 2 for g in gradients]
    if kept:
        torch._foreach_add_(kept, squares)
    else:
        kept += squares


FOLLOWED = [
    (flat_in_float64, 1, [one_at_a_time, norms], 12),
    (each_in_float64, 1, [one_at_a_time, norms], 8),
    (squares_of_each_backward, 4, [sum_of_squares, norms], 8 * 4),
]


@pytest.mark.parametrize(
    ("program", "backwards", "remedies", "bytes_of_a_weight"),
    FOLLOWED,
    ids=[program.__name__ for program, *_ in FOLLOWED],
)
def test_copies_are_named_whole_and_a_run_without_them_needs_less(
    program, backwards, remedies, bytes_of_a_weight
):
    before = diagnose(run(program, backwards))
    cause = before.causes[0]
    assert cause.name == COPIES
    assert cause.nbytes >= bytes_of_a_weight * NUMBERS
    assert "numpy" not in cause.remedy  # it has no part in them
    for remedy in remedies:
        assert run(remedy, backwards).peak.total < before.peak.total


def test_numpy_is_named_where_float64_came_with_the_data():
    torch.manual_seed(0)
    model = nn.Linear(256, 256)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with MemoryTracker(model, optimizer, live=False) as tracker:
        for _ in range(3):
            targets = torch.rand(512, 256, dtype=torch.float64)
            (model(torch.randn(512, 256)) - targets).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    cause = next(cause for cause in diagnose(tracker).causes if cause.name == DOUBLE)
    assert "numpy's numbers" in cause.remedy


def test_double_in_a_model_is_not_blamed_on_numpy_alone():
    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.outer = nn.Linear(256, 256), nn.Linear(256, 8)

        def forward(self, x):
            return self.outer(self.inner(x).double().tanh().exp().float())

    torch.manual_seed(0)
    model = Wide()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with MemoryTracker(model, optimizer, live=False) as tracker:
        for _ in range(3):
            model(torch.randn(512, 256)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    cause = next(cause for cause in diagnose(tracker).causes if cause.name == DOUBLE)
    assert ".double()" in cause.remedy
