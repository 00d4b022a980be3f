"""A frozen linear layer in 4 bits, as QLoRA keeps its base (Dettmers et al. 2023, sections 3 and
"Double Quantization").

A weight is one of 16 values (quantiles of a normal distribution) times the largest magnitude of its
block of 64. Each of these magnitudes is stored in one byte, with a float32 scale for every 256 of
them. That is 0.5 + 1/64 + 4/(64 x 256) bytes a weight, the layout that bitsandbytes documents. To
multiply, the layer dequantizes the whole matrix to 16 bits, once in forward and once in backward,
and frees it again: weights are stored in 4 bits, but not multiplied in 4 bits.
"""

from functools import cache
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .lora import linear_layers, linear_sizes, replace_module
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


class Linear4bit(nn.Module):
    """A frozen linear layer (``nn.Linear`` or GPT-2's ``Conv1D``) whose weight is stored in 4 bits.

    Maps ``x`` (..., in) to (..., out) in the dtype of ``x``. Under autocast it multiplies in
    autocast's dtype, and the result has the dtype of ``x`` nevertheless, as in bitsandbytes: a
    float32 ``x`` gets a float32 result.

    Frozen parameters: ``packed``, two weights a byte; ``magnitudes``, a byte for every 64 weights;
    ``scales``, a float32 for every 256 magnitudes; ``offset``, their mean. The bias does not
    change.
    """

    def __init__(self, base: nn.Module):
        super().__init__()
        self.in_features, self.out_features = linear_sizes(base)
        weight = base.weight if isinstance(base, nn.Linear) else base.weight.T
        parts = _operators().quantize(weight.detach().contiguous())
        for name, tensor in zip(("packed", "magnitudes", "scales", "offset"), parts, strict=True):
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
        self.bias, self.dtype = base.bias, weight.dtype

    @property
    def weight(self) -> Tensor:
        """The dequantized weight in its first dtype, for models that read it themselves (Mamba's
        mixers, T5).
        """
        return self.dequantized(self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        multiplied = x
        if torch.is_autocast_enabled(x.device.type):
            # Autocast does not see into _Multiply, so that its cast is made here.
            multiplied = x.to(torch.get_autocast_dtype(x.device.type))
        y = _Multiply.apply(multiplied, self)
        if self.bias is not None:
            y = y + self.bias.to(y.dtype)
        return y.to(x.dtype)

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight (out, in) that the layer multiplies by."""
        magnitudes = _operators().magnitudes(self.magnitudes, self.scales, self.offset)
        return _operators().dequantize(
            self.packed, magnitudes, self.out_features, self.in_features, dtype
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


def quantize_base(model: nn.Module) -> int:
    """Replace ``model``'s frozen linear layers by ``Linear4bit`` in place, also those inside LoRA
    layers. Returns their number. The output layer, the embedding and the norms stay, and so do a
    mixture's experts: their weights are one tensor for all of them and no linear layers, so they
    keep 16 bits, without LoRA. Raises ``ValueError`` if no linear layer is frozen.
    """
    if not (
        frozen := {
            name: m for name, m in linear_layers(model).items() if not m.weight.requires_grad
        }
    ):
        raise ValueError(
            "there is no frozen linear layer to keep in 4 bits: add LoRA first (add_lora freezes "
            "the model), since 4-bit weights cannot be trained"
        )
    for name, module in frozen.items():
        replace_module(model, name, Linear4bit(module))
    return len(frozen)


@cache
def _operators() -> SimpleNamespace:
    """The three kernels, each as a single operator: a tracker sees one kernel for each, as with
    bitsandbytes.
    """

    @torch.library.custom_op("gradmem::nf4_quantize", mutates_args=())
    def quantize(weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        flat = weight.reshape(-1).float()
        blocks = F.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
        absmax = blocks.abs().amax(dim=1)
        offset, code = absmax.mean().reshape(1), code_table(True, weight.device)
        magnitudes, scales = quantized_blocks(absmax - offset, code)
        stored_absmax = dequantized_blocks(magnitudes, scales, code) + offset
        scaled = blocks / stored_absmax.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
        nibbles = nearest(scaled.view(-1)[: len(flat)], nf4_values(weight.device))
        pairs = F.pad(nibbles, (0, len(flat) % 2)).view(-1, 2)
        return pairs[:, 0] * 16 + pairs[:, 1], magnitudes, scales, offset

    @quantize.register_fake
    def _(weight):
        new, blocks = weight.new_empty, -(-weight.numel() // BLOCK)
        packed, magnitudes = (new(n, dtype=torch.uint8) for n in (-(-weight.numel() // 2), blocks))
        scales, offset = (
            new(size, dtype=torch.float32) for size in (-(-blocks // SCALES_BLOCK), 1)
        )
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
        packed: Tensor, absmax: Tensor, rows: int, columns: int, dtype: torch.dtype
    ) -> Tensor:
        values, out = nf4_values(packed.device), packed.new_empty(rows * columns, dtype=dtype)
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
    def _(packed, absmax, rows, columns, dtype):
        return packed.new_empty(rows, columns, dtype=dtype)

    return SimpleNamespace(quantize=quantize, magnitudes=magnitudes, dequantize=dequantize)
