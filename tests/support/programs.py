"""Training steps that people write, small: what ``test_programs.py`` runs under the tracker and
beside an independent counter.

A program is a function that builds everything and returns ``(model, optimizers, step)``. A step
leaves no gradient behind, so that every step after the first takes the same memory.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import AdamW

PROGRAMS = {}


def program(function, name: str = ""):
    """Put ``function`` down under its own name, or under ``name``."""
    name = name or function.__name__
    if name in PROGRAMS:
        raise ValueError(f"there are two programs {name!r}: give each a name of its own")
    PROGRAMS[name] = function
    return function


def mlp(*sizes: int, last: nn.Module | None = None) -> nn.Sequential:
    layers = []
    for n, m in pairwise(sizes):
        layers += [nn.Linear(n, m), nn.GELU()]
    return nn.Sequential(*layers[:-1], *([last] if last else []))


def adamw(*models: nn.Module) -> AdamW:
    return AdamW([p for m in models for p in m.parameters() if p.requires_grad], foreach=False)


def batch(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


def labels(n: int, classes: int = 10) -> torch.Tensor:
    return torch.randint(0, classes, (n,))


def usual(model: nn.Module, loss, optimizer=None):
    """The plain loop: ``loss()`` backward, a step, gradients set to None."""
    optimizer = optimizer or adamw(model)

    def step():
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def classifier(model: nn.Module, x: torch.Tensor, optimizer=None):
    y = labels(len(x))
    return usual(model, lambda: F.cross_entropy(model(x), y), optimizer)
