"""Lesson 01: the models, batches and cards of its exercises, made afresh on each call."""

from __future__ import annotations

import torch
from torch import nn

from ...material import models
from ..shared.settings import adamw, seeded


def train_setting() -> tuple[nn.Module, torch.optim.Optimizer, list[torch.Tensor]]:
    """The tiny Llama, its optimizer and three batches of exercise 1.6."""
    model = models.tiny_llama(layers=2, hidden=64, heads=4, intermediate=172, vocab=2048)
    with seeded(1):
        ids = torch.randint(2048, (3, 4, 64))
    return model, adamw(model, lr=0.01), list(ids)
