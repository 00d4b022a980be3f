"""Lesson 03: the models, batches and cards of its exercises, made afresh on each call."""

from __future__ import annotations

import torch
from torch import nn

from ...material import models
from ..shared.settings import adamw, text_batch

CARD = "8 MiB"


def batch_setting() -> tuple[nn.Module, torch.optim.Optimizer, dict[str, torch.Tensor]]:
    """Exercise 3.7's tiny Llama, its optimizer and a batch of 64 sequences of unequal lengths."""
    model = models.tiny_llama(layers=1, hidden=64, heads=4, intermediate=172, vocab=1024)
    lengths = [2 + i * i % 31 for i in range(64)]
    return model, adamw(model, lr=0.01), text_batch(*lengths, vocab=1024)
