"""Copies of gradients: which bytes are named, and the peak that is promised without them, against
runs that follow the advice.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gradmem_lib import MemoryTracker, diagnose
from gradmem_lib.measure.remedied_peak import peak_without

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


def flat_in_float32(gradients, kept):
    torch.cat([g.flatten() for g in gradients]).norm().item()


def each_in_float64(gradients, kept):
    copies = [g.double().clone() for g in gradients]
    sum(copy.square().sum() for copy in copies).sqrt().item()


def each_in_float32(gradients, kept):
    copies = [g.float().clone() for g in gradients]
    sum(copy.square().sum() for copy in copies).sqrt().item()


def one_at_a_time(gradients, kept):
    for g in gradients:
        g.double().square().sum().item()


def norms(gradients, kept):
    kept.append([g.norm().item() for g in gradients])


def squares_of_each_backward(gradients, kept):
    kept.append([g.double() ** 2 for g in gradients])


def squares_in_float32(gradients, kept):
    kept.append([g**2 for g in gradients])


def sum_of_squares(gradients, kept):
    squares = [g.double() ** 2 for g in gradients]
    if kept:
        torch._foreach_add_(kept, squares)
    else:
        kept += squares


FOLLOWED = [
    (flat_in_float64, 1, COPIES, [one_at_a_time, norms], 12),
    (flat_in_float64, 1, DOUBLE, [flat_in_float32], 8),
    (each_in_float64, 1, COPIES, [one_at_a_time, norms], 8),
    (each_in_float64, 1, DOUBLE, [each_in_float32], 8),
    (squares_of_each_backward, 4, COPIES, [sum_of_squares, norms], 8 * 4),
    (squares_of_each_backward, 4, DOUBLE, [squares_in_float32], 8 * 4),
]


@pytest.mark.parametrize(
    ("program", "backwards", "name", "remedies", "bytes_of_a_weight"),
    FOLLOWED,
    ids=[f"{program.__name__}-{name.split()[-1]}" for program, _, name, _, _ in FOLLOWED],
)
def test_copies_are_named_whole_and_the_peak_without_them_is_promised(
    program, backwards, name, remedies, bytes_of_a_weight
):
    before = diagnose(run(program, backwards))
    cause = next(cause for cause in before.causes if cause.name == name)
    assert cause.nbytes >= bytes_of_a_weight * NUMBERS
    assert "numpy" not in cause.remedy  # it has no part in them
    promised = peak_without(cause, before.facts)[0]
    assert promised < before.peak.total
    for remedy in remedies:
        assert run(remedy, backwards).peak.total <= promised
    if name == COPIES:
        assert before.causes[0] is cause  # the largest ones are said first


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
    assert cause.remedy.startswith("look for .double()")
