"""Lesson 04: the models, batches and cards of its exercises, made afresh on each call."""

from __future__ import annotations

import torch
from torch import nn

from ...material import models
from ..shared.settings import seeded

# the last layer is a head, whose logits are VOCAB times as wide as a boundary
DEPTH, KEEPS, VOCAB = 64, 5, 5
CHAIN_ROWS, CHAIN_WIDTH = 256, 32
CHAIN_BOUNDARY = CHAIN_ROWS * CHAIN_WIDTH * 4
CHAIN_CARD = 41.5  # boundaries beside the weights


def chain_setting() -> tuple[nn.Sequential, torch.Tensor]:
    """63 frozen layers that keep 5 boundaries each (their input is one), a frozen head, and the
    input, which is what is trained.
    """
    layers = models.chain(DEPTH - 1, width=CHAIN_WIDTH, keeps=KEEPS)
    with seeded(8):
        layers.append(nn.Linear(CHAIN_WIDTH, VOCAB * CHAIN_WIDTH, bias=False).requires_grad_(False))
        return layers, torch.randn(CHAIN_ROWS, CHAIN_WIDTH, requires_grad=True)


def chain_budget() -> int:
    """Bytes: the weights of ``chain_setting`` and ``CHAIN_CARD`` boundaries."""
    layers, _ = chain_setting()
    return sum(p.nbytes for p in layers.parameters()) + int(CHAIN_CARD * CHAIN_BOUNDARY)
