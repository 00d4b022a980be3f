"""Frozen layers without values, as bitsandbytes and PEFT made them in 2023 and 2024; the replays of
published peaks share them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BLOCK, SCALES = 64, 256  # weights to a scale, and scales to a scale of scales


@contextmanager
def on_meta(dtype: torch.dtype) -> Iterator[None]:
    """Inside it, modules are made in ``dtype`` and without memory."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(before)


class FourBits(nn.Module):
    """bitsandbytes' NF4 layer: two weights a byte, and for every 64 of them a float32, or if these
    are quantized too (``double``), a byte and a float32 for every 256 of those. Until 2024 its
    product kept its input for backward, with no use for it.

    A weight is written out in the dtype that it had when it was quantized (``was``), and then cast
    to the input's.
    """

    was = torch.float16

    def __init__(self, columns: int, rows: int, bias: bool = True, *, double: bool = False):
        super().__init__()
        self.rows, self.double, blocks = rows, double, rows * columns // BLOCK
        self.packed = frozen(rows * columns // 2, torch.uint8)
        self.scales = frozen(blocks, torch.uint8 if double else torch.float32)
        if double:
            self.scales_of_scales = frozen(blocks // SCALES, torch.float32)
        self.bias = nn.Parameter(torch.empty(rows)) if bias else None

    def written_out(self, x: Tensor) -> Tensor:
        scales = self.scales.float() if self.double else self.scales
        return scales.new_empty(self.rows, x.shape[-1], dtype=self.was).to(x.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return _KeepsInput.apply(x, self.packed, self)


class _KeepsInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, packed, layer):
        ctx.layer = layer
        ctx.save_for_backward(x, packed)
        return F.linear(x, layer.written_out(x), layer.bias)

    @staticmethod
    def backward(ctx, d_y):
        return d_y @ ctx.layer.written_out(ctx.saved_tensors[0]), None, None


def frozen(size: int, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(size, dtype=dtype), requires_grad=False)
