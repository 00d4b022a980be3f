"""A batch is blamed for a large step only where the model was given more than in other steps."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gradmem_lib import MemoryTracker, diagnose

ONE_STEP = "One step needs much more than the others"


def mlp(width: int = 256, layers: int = 6) -> nn.Sequential:
    blocks = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers)]
    return nn.Sequential(*blocks, nn.Linear(width, 1))


def penalty_in_one_step():
    """A penalty on gradients that comes every few steps: it needs a graph of gradients."""
    critic = mlp()
    optimizer = torch.optim.SGD(critic.parameters(), lr=0.01)
    with MemoryTracker(critic, optimizer, live=False) as tracker:
        for step in range(8):
            x = torch.randn(512, 256, requires_grad=True)
            scores = critic(x)
            if step == 5:
                (gradient,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
                gradient.square().sum().backward()
                del gradient
            else:
                scores.mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            del x, scores
    return tracker


def layers_that_are_trained_later():
    """The layers in front of the last one are frozen in the first steps."""
    model = mlp()
    model[:-1].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with MemoryTracker(model, optimizer, live=False) as tracker:
        for step in range(9):
            if step == 6:
                model.requires_grad_(True)
            model(torch.randn(1024, 256)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return tracker


class Repeated(nn.Module):
    """Runs one layer as often as a number says, as a diffusion or an equilibrium may."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(256, 256)

    def forward(self, x, times):
        for _ in range(times):
            x = self.layer(x).tanh()
        return x


def step_that_repeats_a_layer_more_often():
    model = Repeated()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with MemoryTracker(model, optimizer, live=False) as tracker:
        for times in (2, 2, 2, 2, 16, 2):
            model(torch.randn(512, 256), times).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return tracker


@pytest.mark.parametrize(
    "program",
    [
        penalty_in_one_step,
        layers_that_are_trained_later,
        step_that_repeats_a_layer_more_often,
    ],
)
def test_a_step_that_does_something_else_has_no_long_rows(program):
    assert ONE_STEP not in [cause.name for cause in diagnose(program()).causes]


def steps_of(lengths, call):
    model = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with MemoryTracker(model, optimizer, live=False) as tracker:
        for length in lengths:
            call(model, torch.randn(8, length, 32)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return tracker


class Dictionary(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, batch):
        return self.layer(batch["x"])


class Example:
    """A batch as an object: what it holds is not known to the tracker."""

    def __init__(self, x):
        self.x = x


class OfExamples(Dictionary):
    def forward(self, batch):
        return self.layer(batch.x)


@pytest.mark.parametrize(
    "call",
    [
        lambda layer, x: layer(x),
        lambda layer, x: OfExamples(layer)(Example(x)),
    ],
    ids=["positional", "object"],
)
def test_long_rows_are_named_however_a_model_is_given_them(call):
    causes = diagnose(steps_of((16, 24, 16, 24, 128, 16), call)).causes
    assert ONE_STEP in [cause.name for cause in causes]


class Neighbours(nn.Module):
    """Computes for each pair of points that are near each other."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 64)

    def forward(self, points, radius):
        first, second = (torch.cdist(points, points) < radius).nonzero(as_tuple=True)
        pairs = torch.cat([points[first], points[second]], dim=1)
        return self.layer(pairs).relu().mean()


def step_with_more_neighbours():
    """As many points in each step, and in one of them they are nearer to each other."""
    model = Neighbours()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with MemoryTracker(model, optimizer, live=False) as tracker:
        for size in (4, 4, 4, 4, 1, 4):
            model(size * torch.rand(200, 3), 0.6).backward()
            optimizer.step()
            optimizer.zero_grad()
    return tracker


def test_a_larger_batch_is_named_where_arguments_do_not_show_it():
    causes = diagnose(step_with_more_neighbours()).causes
    assert ONE_STEP in [cause.name for cause in causes]
