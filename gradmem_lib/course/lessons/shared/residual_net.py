"""A small classifier in plain PyTorch, with dropout and drop path, for exercises on a model that
transformers did not make.
"""

from collections import OrderedDict

import torch
from torch import Tensor, nn

from .settings import seeded


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


class Residual(nn.Sequential):
    """x + branch(x)."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


def block(width: int, *noise: nn.Module) -> Residual:
    """(rows, width) -> (rows, width), with ``noise`` at the end of the branch."""
    up, down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
    return Residual(nn.LayerNorm(width), up, nn.GELU(), down, *noise)


def residual_net(
    blocks: int = 4, width: int = 16, dtype: torch.dtype = torch.float32
) -> nn.Sequential:
    """``blocks`` with dropout and drop path, and a ``head`` with 5 outputs, in training mode and
    with the same weights each time.
    """
    with seeded():
        layers = [block(width, nn.Dropout(0.1), DropPath(0.2)) for _ in range(blocks)]
        parts = OrderedDict(blocks=nn.Sequential(*layers), head=nn.Linear(width, 5))
        return nn.Sequential(parts).to(dtype)


def labelled_rows(
    rows: int, width: int = 16, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Random rows ``x`` (rows, width) and their classes ``labels`` (rows,)."""
    with seeded(1):
        x = torch.randn(rows, width, dtype=dtype)
        return {"x": x, "labels": torch.randint(5, (rows,))}
