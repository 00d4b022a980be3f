"""A frozen linear layer in 4 bits, as QLoRA keeps its base (Dettmers et al. 2023, sections 3 and "Double Quantization").

A weight is one of 16 values (quantiles of a normal distribution) times the largest magnitude of its block of 64; these
magnitudes are bytes themselves, with a float32 scale for every 256 of them. That is 0.5 + 1/64 + 4/(64 x 256) bytes a
weight, the layout that bitsandbytes documents. To multiply, the whole matrix is written out in 16 bits, once in forward
and once more in backward, and thrown away again: 4 bits is how it is kept, not how it is computed with.
"""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .lora import linear_sizes
from .optimizers import BLOCK as SCALES_BLOCK
from .optimizers import code_table, dequantized_blocks, quantized_blocks

BLOCK = 64
SLICE = 2**20  # weights written out at a time
_OUTERMOST = 0.9677083  # the quantile of the largest value, as bitsandbytes sets it


def nf4_values(device: torch.device | None = None) -> Tensor:
    """The 16 values of NF4, increasing from -1 to 1, 0 among them: 8 below 0 and 8 from 0 on (the paper's appendix E)."""
    above = torch.special.ndtri(torch.linspace(0.5, _OUTERMOST, 9, dtype=torch.float64))
    below = -torch.special.ndtri(torch.linspace(0.5, _OUTERMOST, 8, dtype=torch.float64))[1:]
    values = torch.cat([below.flip(0), above]) / above[-1]
    return (values / values.abs().max()).float().to(device)


class Linear4bit(nn.Module):
    """What is left of a frozen linear layer (``nn.Linear`` or GPT-2's ``Conv1D``) when its weight is kept in 4 bits.

    Takes ``x`` (..., in) to (..., out) in ``x``'s dtype. Frozen parameters: ``packed``, two weights a byte; ``magnitudes``, a byte for
    every 64 weights; ``scales``, a float32 for every 256 magnitudes; ``offset``, their mean. The bias stays as it was.
    """

    def __init__(self, base: nn.Module):
        super().__init__()
        self.in_features, self.out_features = linear_sizes(base)
        weight = base.weight if isinstance(base, nn.Linear) else base.weight.T
        parts = _operators().quantize(weight.detach().contiguous())
        for name, tensor in zip(("packed", "magnitudes", "scales", "offset"), parts, strict=True):
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
        self.bias = base.bias

    def forward(self, x: Tensor) -> Tensor:
        shape = (self.out_features, self.in_features)
        y = _Multiply.apply(x, self.packed, self.magnitudes, self.scales, self.offset, shape)
        return y if self.bias is None else y + self.bias

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight (out, in) that the layer multiplies with."""
        shape = (self.out_features, self.in_features)
        return _written_out(self.packed, self.magnitudes, self.scales, self.offset, shape, dtype)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        )


def quantize_base(model: nn.Module) -> int:
    """Replace ``model``'s frozen linear layers by ``Linear4bit`` in place, those inside LoRA layers included; returns how many.

    The output layer, the embedding and the norms stay as they are. ``ValueError`` where no linear layer is frozen.
    """
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    chosen = [
        name
        for name, module in model.named_modules()
        if module is not head and linear_sizes(module) and not module.weight.requires_grad
    ]
    if not chosen:
        raise ValueError(
            "there is no frozen linear layer to keep in 4 bits: add LoRA first (add_lora freezes the model), since 4-bit weights "
            "cannot be trained"
        )
    for name in chosen:
        parent, _, own = name.rpartition(".")
        owner = model.get_submodule(parent)
        setattr(owner, own, Linear4bit(getattr(owner, own)))
    return len(chosen)


class _Multiply(torch.autograd.Function):
    """``x @ W.T``, keeping the packed weight for backward rather than the matrix that was written out."""

    @staticmethod
    def forward(ctx, x, packed, magnitudes, scales, offset, shape):
        ctx.save_for_backward(packed, magnitudes, scales, offset)
        ctx.shape = shape
        return F.linear(x, _written_out(packed, magnitudes, scales, offset, shape, x.dtype))

    @staticmethod
    def backward(ctx, d_y):
        return d_y @ _written_out(*ctx.saved_tensors, ctx.shape, d_y.dtype), None, None, None, None, None  # type: ignore[call-arg]


def _written_out(packed, magnitudes, scales, offset, shape, dtype) -> Tensor:
    operators = _operators()
    return operators.dequantize(packed, operators.magnitudes(magnitudes, scales, offset), *shape, dtype)


@cache
def _operators() -> SimpleNamespace:
    """The three kernels as operators of their own: one each to whoever watches, as bitsandbytes' are."""

    @torch.library.custom_op("gradmem::nf4_quantize", mutates_args=())
    def quantize(weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        flat = weight.reshape(-1).float()
        blocks = F.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
        absmax = blocks.abs().amax(dim=1)
        offset = absmax.mean()
        magnitudes, scales = quantized_blocks(absmax - offset, code_table(True, weight.device))
        kept = dequantized_blocks(magnitudes, scales, code_table(True, weight.device)) + offset
        values = nf4_values(weight.device)
        scaled = blocks / kept.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
        nearest = (
            torch.bucketize(scaled, (values[1:] + values[:-1]) / 2).view(-1)[: len(flat)].to(torch.uint8)
        )
        pairs = F.pad(nearest, (0, len(flat) % 2)).view(-1, 2)
        return pairs[:, 0] * 16 + pairs[:, 1], magnitudes, scales, offset

    @quantize.register_fake
    def _(weight):
        n = weight.numel()
        blocks = -(-n // BLOCK)
        new = weight.new_empty
        return (
            new(-(-n // 2), dtype=torch.uint8),
            new(blocks, dtype=torch.uint8),
            new(-(-blocks // SCALES_BLOCK), dtype=torch.float32),
            new((), dtype=torch.float32),
        )

    @torch.library.custom_op("gradmem::nf4_magnitudes", mutates_args=())
    def magnitudes(codes: Tensor, scales: Tensor, offset: Tensor) -> Tensor:
        return dequantized_blocks(codes, scales, code_table(True, codes.device)) + offset

    @magnitudes.register_fake
    def _(codes, scales, offset):
        return codes.new_empty(codes.shape, dtype=torch.float32)

    tables: dict[torch.device, Tensor] = {}

    # In slices, so that it needs no memory beside its result that an allocator would notice.
    @torch.library.custom_op("gradmem::nf4_dequantize", mutates_args=())
    def dequantize(packed: Tensor, absmax: Tensor, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        if packed.device not in tables:
            tables[packed.device] = nf4_values(packed.device)
        values, out = tables[packed.device], packed.new_empty(rows * columns, dtype=dtype)
        for start in range(0, rows * columns, SLICE):
            part = out[start : start + SLICE]
            pairs = packed[start // 2 : (start + SLICE) // 2]
            nibbles = torch.stack([pairs >> 4, pairs & 15], dim=1).view(-1)[: len(part)]
            scale = absmax[start // BLOCK : (start + SLICE) // BLOCK].repeat_interleave(BLOCK)[: len(part)]
            part.copy_(values[nibbles.int()] * scale)
        return out.view(rows, columns)

    @dequantize.register_fake
    def _(packed, absmax, rows, columns, dtype):
        return packed.new_empty(rows, columns, dtype=dtype)

    return SimpleNamespace(quantize=quantize, magnitudes=magnitudes, dequantize=dequantize)
