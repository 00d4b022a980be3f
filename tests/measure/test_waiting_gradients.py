"""Gradients that an optimizer has used, and that stay, whichever layers the model has."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gradmem_lib import MemoryTracker, diagnose

WAIT = "Gradients wait during the next forward"


def deep(activation, width=256, layers=8) -> nn.Module:
    parts = []
    for _ in range(layers):
        parts += [nn.Linear(width, width), activation]
    return nn.Sequential(*parts)


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = deep(nn.ReLU(), layers=4), deep(nn.Tanh(), layers=4)

    def forward(self, x):
        return self.left(x) * self.right(x)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(deep(nn.ReLU(), layers=2) for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


MODELS = {
    "ReLU": lambda: deep(nn.ReLU()),
    "ReLU in place": lambda: deep(nn.ReLU(inplace=True)),
    "Tanh": lambda: deep(nn.Tanh()),
    "Sigmoid": lambda: deep(nn.Sigmoid()),
    "GELU": lambda: deep(nn.GELU()),
    "two towers": TwoTowers,
    "residual": Residual,
}


def steps(model, zero_grad, rows, late=False, n=3, keep=None) -> MemoryTracker:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(rows, 256)
    with MemoryTracker(model, optimizer, live=False) as tracker:
        for _ in range(n):
            out = model(x)
            loss = out.square().mean()
            if late:
                zero_grad(optimizer)
            loss.backward()
            optimizer.step()
            if not late:
                zero_grad(optimizer)
            del out, loss
    return tracker


def to_none(optimizer):
    optimizer.zero_grad()


@pytest.mark.parametrize("name", MODELS)
def test_gradients_that_are_made_anew_do_not_wait(name):
    found = diagnose(steps(MODELS[name](), to_none, rows=256))
    assert WAIT not in {cause.name for cause in found.causes}


@pytest.mark.parametrize("name", ["ReLU", "Tanh", "GELU", "residual"])
def test_gradients_that_wait_for_a_late_zero_grad_are_named(name):
    late = steps(MODELS[name](), to_none, rows=256, late=True)
    early = steps(MODELS[name](), to_none, rows=256)
    found = {cause.name: cause for cause in diagnose(late).causes}
    if late.peak.total - early.peak.total > 0.1 * late.peak.total:
        assert found[WAIT].nbytes <= late.peak.total - early.peak.total
    else:
        assert WAIT not in found
