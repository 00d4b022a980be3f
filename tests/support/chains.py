"""Chains of small layers that write down when they run, and steps through them in checkpointed
segments.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

X = 4 * 32 * 8  # bytes of a batch


class Layer(nn.Module):
    """Keeps ``ratio`` batches for backward, and writes down when it runs."""

    def __init__(self, index: int, calls: list[int], ratio: int = 3):
        super().__init__()
        self.index = index
        self.write_down = calls.append  # a list of its own would be put back after a second run
        self.inside = nn.Sequential(
            nn.Linear(8, 8 * ratio), nn.ReLU(inplace=True), nn.Linear(8 * ratio, 8)
        )
        self.requires_grad_(False)

    def forward(self, x):
        self.write_down(self.index)
        return x + self.inside(x)


def chain(n: int, ratio: int = 3):
    calls: list[int] = []
    return nn.Sequential(*(Layer(i, calls, ratio) for i in range(n))), calls


def in_segments(layers, segments, x, *, reentrant=False, keep_last=True):
    """A schedule by hand: the last segment runs without a checkpoint."""
    start = 0
    for i, length in enumerate(segments):
        part = layers[start : start + length]
        kept = keep_last and i == len(segments) - 1
        x = part(x) if kept else checkpoint(part, x, use_reentrant=reentrant)
        start += length
    return x


def batch():
    return torch.randn(32, 8, requires_grad=True)


def step_of(layers, segments, **options):
    x = batch()
    return lambda: torch.autograd.grad(in_segments(layers, segments, x, **options).sum(), x)
