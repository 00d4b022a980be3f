"""The gradient of a model, and how far it is from another one."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def gradient(model: nn.Module) -> Tensor:
    """All gradients that are there, in one vector of float64."""
    found = [p.grad.double().flatten() for p in model.parameters() if p.grad is not None]
    return torch.cat(found)


def taken_gradient(model: nn.Module) -> Tensor:
    """The same, taken off the model."""
    found = gradient(model)
    model.zero_grad()
    return found


def error(found: Tensor, expected: Tensor) -> float:
    """The difference, relative to what is expected."""
    return ((found - expected).norm() / expected.norm()).item()
