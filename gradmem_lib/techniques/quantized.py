"""A frozen linear layer in 4 bits, as QLoRA keeps its base (Dettmers et al. 2023, sections 3 and
"Double Quantization").

A weight is one of 16 values (quantiles of a normal distribution) times the largest magnitude of its
block of 64. Each of these magnitudes is stored in one byte, with a float32 scale for every 256 of
them. That is 0.5 + 1/64 + 4/(64 x 256) bytes a weight, the layout that bitsandbytes documents.
Without the double quantization, each magnitude is a float32: 0.5 + 4/64 bytes. To multiply, the
layer dequantizes the whole matrix to the dtype that computes, once in forward and once in backward,
and frees it again: weights are stored in 4 bits, but not multiplied in 4 bits.
"""

from functools import cache
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..model.linear import linear_layers, linear_sizes
from ..names import QUANTIZED
from .optimizers import BLOCK as SCALES_BLOCK
from .optimizers import code_table, dequantized_blocks, nearest, quantized_blocks

BLOCK = 64
SLICE = 2**20  # weights dequantized at a time
_OUTERMOST = 0.9677083  # the quantile of the largest value, as bitsandbytes sets it


@cache
def nf4_values(device: torch.device | None = None) -> Tensor:
    """The 16 values of NF4, increasing from -1 to 1: 7 below 0, 0 itself, and 8 above it (the
    paper's appendix E).
    """
    above = torch.special.ndtri(torch.linspace(0.5, _OUTERMOST, 9, dtype=torch.float64))
    below = -torch.special.ndtri(torch.linspace(0.5, _OUTERMOST, 8, dtype=torch.float64))[1:]
    return (torch.cat([below.flip(0), above]) / above[-1]).float().to(device)


@cache
def fp4_values(device: torch.device | None = None) -> Tensor:
    """The 16 values of bitsandbytes' FP4, increasing from -1 to 1: a sign, two bits of exponent and
    one of mantissa. One of the two zeros is never chosen.
    """
    above = torch.tensor([0, 1 / 16, 2, 3, 4, 6, 8, 12]) / 12
    return torch.cat([-above.flip(0), above]).to(device)


def _values(storage: str, device: torch.device) -> Tensor:
    return fp4_values(device) if QUANTIZED[storage].floating_point else nf4_values(device)


class Linear4bit(nn.Module):
    """A frozen linear layer (``nn.Linear`` or GPT-2's ``Conv1D``) whose weight is stored in 4 bits.

    Maps ``x`` (..., in) to (..., out) in the dtype of ``x``. It multiplies in ``compute_dtype``, or
    without one in autocast's dtype, or that of ``x``. The result has the dtype of ``x``
    nevertheless, as in bitsandbytes: a float32 ``x`` gets a float32 result.

    Frozen parameters: ``packed``, two weights a byte; ``magnitudes``, for every 64 weights a
    float32, or with double quantization a byte. ``scales``, a float32 for every 256 magnitudes, and
    ``offset``, their mean, exist only with double quantization. The bias does not change.
    """

    def __init__(
        self,
        base: nn.Module,
        storage: str = "nf4-double",
        compute_dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.in_features, self.out_features = linear_sizes(base)
        weight = base.weight if isinstance(base, nn.Linear) else base.weight.T
        parts = _operators().quantize(weight.detach().contiguous(), storage)
        for name, tensor in zip(("packed", "magnitudes", "scales", "offset"), parts, strict=True):
            kept = nn.Parameter(tensor, requires_grad=False) if tensor.numel() else None
            self.register_parameter(name, kept)
        self.bias, self.dtype = base.bias, weight.dtype
        self.storage, self.compute_dtype = storage, compute_dtype

    @property
    def weight(self) -> Tensor:
        """The dequantized weight in its first dtype, for models that read it themselves (Mamba's
        mixers, T5).
        """
        return self.dequantized(self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        multiplied = x
        if self.compute_dtype is not None:
            multiplied = x.to(self.compute_dtype)
        elif torch.is_autocast_enabled(x.device.type):
            # Autocast does not see into _Multiply, so that its cast is made here.
            multiplied = x.to(torch.get_autocast_dtype(x.device.type))
        y = _Multiply.apply(multiplied, self)
        if self.bias is not None:
            y = y + self.bias.to(y.dtype)
        return y.to(x.dtype)

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight (out, in) that the layer multiplies by."""
        magnitudes = self.magnitudes
        if QUANTIZED[self.storage].double:
            magnitudes = _operators().magnitudes(magnitudes, self.scales, self.offset)
        return _operators().dequantize(
            self.packed, magnitudes, self.out_features, self.in_features, dtype, self.storage
        )


class _Multiply(torch.autograd.Function):
    """``x @ W.T`` of a 4-bit layer.

    Backward dequantizes the frozen weight again, so forward saves nothing for it.
    """

    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        return F.linear(x, layer.dequantized(x.dtype))

    @staticmethod
    def backward(ctx, d_y):
        return d_y @ ctx.layer.dequantized(d_y.dtype), None


def quantize_base(
    model: nn.Module,
    storage: str = "nf4-double",
    compute_dtype: torch.dtype | None = None,
) -> int:
    """Replace ``model``'s frozen linear layers by ``Linear4bit`` in place, also those inside LoRA
    layers. Returns their number. The output layer, the embedding and the norms stay, and so do a
    mixture's experts: their weights are one tensor for all of them and no linear layers, so they
    keep 16 bits, without LoRA. Raises ``ValueError`` if no linear layer is frozen.
    """
    layers = linear_layers(model)
    frozen = {name: layer for name, layer in layers.items() if not layer.weight.requires_grad}
    if not frozen:
        raise ValueError(
            "there is no frozen linear layer to keep in 4 bits: add LoRA first (add_lora freezes "
            "the model), since 4-bit weights cannot be trained"
        )
    for name, module in frozen.items():
        model.set_submodule(name, Linear4bit(module, storage, compute_dtype))
    return len(frozen)


@cache
def _operators() -> SimpleNamespace:
    """The three kernels, each as a single operator: a tracker sees one kernel for each, as with
    bitsandbytes.
    """

    @torch.library.custom_op("gradmem::nf4_quantize", mutates_args=())
    def quantize(weight: Tensor, storage: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        flat = weight.reshape(-1).float()
        blocks = F.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
        absmax = blocks.abs().amax(dim=1)
        magnitudes, scales, offset = absmax.clone(), absmax.new_empty(0), absmax.new_empty(0)
        if QUANTIZED[storage].double:
            offset, code = absmax.mean().reshape(1), code_table(True, weight.device)
            magnitudes, scales = quantized_blocks(absmax - offset, code)
            absmax = dequantized_blocks(magnitudes, scales, code) + offset
        scaled = blocks / absmax.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
        nibbles = nearest(scaled.view(-1)[: len(flat)], _values(storage, weight.device))
        pairs = F.pad(nibbles, (0, len(flat) % 2)).view(-1, 2)
        return pairs[:, 0] * 16 + pairs[:, 1], magnitudes, scales, offset

    @quantize.register_fake
    def _(weight, storage):
        blocks = -(-weight.numel() // BLOCK)
        packed = weight.new_empty(-(-weight.numel() // 2), dtype=torch.uint8)
        magnitudes = weight.new_empty(blocks, dtype=torch.float32)
        scales, offset = magnitudes.new_empty(0), magnitudes.new_empty(0)
        if QUANTIZED[storage].double:
            magnitudes = magnitudes.to(torch.uint8)
            scales = weight.new_empty(-(-blocks // SCALES_BLOCK), dtype=torch.float32)
            offset = weight.new_empty(1, dtype=torch.float32)
        return packed, magnitudes, scales, offset

    @torch.library.custom_op("gradmem::nf4_magnitudes", mutates_args=())
    def magnitudes(codes: Tensor, scales: Tensor, offset: Tensor) -> Tensor:
        return dequantized_blocks(codes, scales, code_table(True, codes.device)) + offset

    @magnitudes.register_fake
    def _(codes, scales, offset):
        return codes.new_empty(codes.shape, dtype=torch.float32)

    # In slices, so that it takes no more than 14 MB beside its result; bitsandbytes' kernel takes
    # none.
    @torch.library.custom_op("gradmem::nf4_dequantize", mutates_args=())
    def dequantize(
        packed: Tensor,
        absmax: Tensor,
        rows: int,
        columns: int,
        dtype: torch.dtype,
        storage: str,
    ) -> Tensor:
        values = _values(storage, packed.device)
        out = packed.new_empty(rows * columns, dtype=dtype)
        for start in range(0, rows * columns, SLICE):
            part = out[start : start + SLICE]
            pairs = packed[start // 2 : (start + SLICE) // 2]
            nibbles = torch.stack([pairs >> 4, pairs & 15], dim=1).view(-1)[: len(part)]
            scale = absmax[start // BLOCK : (start + SLICE) // BLOCK].repeat_interleave(BLOCK)[
                : len(part)
            ]
            part.copy_(values.index_select(0, nibbles.int()) * scale)
        return out.view(rows, columns)

    @dequantize.register_fake
    def _(packed, absmax, rows, columns, dtype, storage):
        return packed.new_empty(rows, columns, dtype=dtype)

    return SimpleNamespace(quantize=quantize, magnitudes=magnitudes, dequantize=dequantize)
