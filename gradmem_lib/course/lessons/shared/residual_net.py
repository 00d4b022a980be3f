"""A small classifier in plain PyTorch, with dropout and drop path, for exercises on a model that
transformers did not make.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class DropPath(nn.Module):
    """In training, leaves out a branch for a row with probability ``p``, and scales up the others
    (stochastic depth, Huang et al. 2016).
    """

    def __init__(self, p: float):
        super().__init__()
        self.p = p

    def forward(self, branch: Tensor) -> Tensor:  # (rows, width)
        if not self.training:
            return branch
        kept = torch.rand(len(branch), 1) >= self.p  # one number a row
        return branch * kept / (1 - self.p)


class Block(nn.Module):
    """x + branch(x), with dropout inside the branch and drop path around it."""

    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)
        self.drop_path = DropPath(0.2)

    def forward(self, x: Tensor) -> Tensor:  # (rows, width)
        inner = F.gelu(self.up(self.norm(x)))
        return x + self.drop_path(self.dropout(self.down(inner)))


class ResidualNet(nn.Module):
    """``blocks``, one after the other, and a head with ``classes`` outputs."""

    def __init__(self, blocks: int = 4, width: int = 16, classes: int = 5):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:  # (rows, width) -> (rows, classes)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def residual_net(
    blocks: int = 4, width: int = 16, classes: int = 5, dtype: torch.dtype = torch.float32
) -> ResidualNet:
    """The classifier in training mode, with the same weights each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return ResidualNet(blocks, width, classes).to(dtype)


def labelled_rows(
    rows: int, width: int = 16, classes: int = 5, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Random rows ``x`` (rows, width) and their classes ``labels`` (rows,)."""
    draw = torch.Generator().manual_seed(1)
    return {
        "x": torch.randn(rows, width, generator=draw, dtype=dtype),
        "labels": torch.randint(0, classes, (rows,), generator=draw),
    }
