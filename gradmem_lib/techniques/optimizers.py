"""AdamW with one byte for each number of its states."""

import math
from collections.abc import Iterable
from functools import cache, lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from ..optimizers import BLOCK
from .adam import adam_step
from .precision import KeepsStateDtypes

SMALLEST_8BIT = 4096


class AdamW8bit(KeepsStateDtypes):
    """AdamW whose moments take one byte a number (Dettmers et al. 2022, "8-bit optimizers via
    block-wise quantization").

    The layout is that of bitsandbytes: blocks of 256 numbers share one float32, their largest
    magnitude; tensors with fewer than 4,096 numbers stay in float32; all parameters share two
    float32 tables of 256 values. The update is one operator, as in bitsandbytes, and a tracker sees
    nothing inside it. Unlike bitsandbytes' kernel, it takes up to 35 MB for a moment.

    The arguments are those of ``AdamW``.
    """

    def __init__(
        self,
        params: Iterable,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ):
        super().__init__(params, lr, betas, eps, weight_decay)
        self._codes: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def load_state_dict(self, state_dict: dict) -> None:
        super().load_state_dict(state_dict)
        for p, state in self.state.items():
            if "code" in state:  # let all parameters share the tables again
                state["code"], state["code_sq"] = self._tables(p.device)

    def _tables(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if device not in self._codes:
            self._codes[device] = (code_table(True, device), code_table(False, device))
        return self._codes[device]

    def _update(self, p: Tensor, state: dict, group: dict) -> None:
        none = None if "code" in state else p.grad.new_empty(0)
        weight, grad = (torch.view_as_real(t) if t.is_complex() else t for t in (p, p.grad))
        _adamw_8bit()(
            weight,
            grad,
            state["exp_avg"],
            state["exp_avg_sq"],
            *(state.get(name, none) for name in ("absmax", "absmax_sq", "code", "code_sq")),
            state["step"],
            group["lr"],
            *group["betas"],
            group["eps"],
            group["weight_decay"],
        )

    def _init_state(self, p: Tensor, state: dict) -> None:
        state["step"], p = 0, torch.view_as_real(p) if p.is_complex() else p
        small = p.numel() < SMALLEST_8BIT
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = torch.zeros(
                p.shape, dtype=torch.float32 if small else torch.uint8, device=p.device
            )
        if not small:
            for name in ("absmax", "absmax_sq"):
                state[name] = torch.zeros(-(-p.numel() // BLOCK), device=p.device)
            state["code"], state["code_sq"] = self._tables(p.device)


def code_table(signed: bool, device: torch.device | None) -> Tensor:
    """256 increasing values from -1 (or 0) to 1, 0 among them (Dettmers et al. 2022, section 1.3,
    "dynamic tree quantization").

    Each decade from 1e-7 on has twice as many values as the decade below it: the midpoints of equal
    intervals of the decade.
    """
    decades = []
    for exponent in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (exponent + (not signed)) + 1, device=device)
        decades.append(10.0 ** (exponent - 6) * (edges[1:] + edges[:-1]) / 2)
    half = torch.cat(decades)
    zero, one = half.new_zeros(1), half.new_ones(1)
    return torch.cat([-half.flip(0), zero, half, one] if signed else [zero, half, one])


@cache
def _adamw_8bit():
    """The 8-bit update as a single operator: a tracker sees one kernel, as with bitsandbytes."""

    @torch.library.custom_op(
        "gradmem::adamw_8bit", mutates_args=("p", "exp_avg", "exp_avg_sq", "absmax", "absmax_sq")
    )
    def adamw_8bit(
        p: Tensor,
        grad: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        absmax: Tensor,
        absmax_sq: Tensor,
        code: Tensor,
        code_sq: Tensor,
        step: int,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
    ) -> None:
        flat_p, flat_grad = p.reshape(-1), grad.reshape(-1)
        flat_m, flat_v = exp_avg.view(-1), exp_avg_sq.view(-1)
        slice_size = BLOCK * 4096
        group = {"lr": lr, "betas": (beta1, beta2), "eps": eps}
        group |= {"weight_decay": weight_decay, "decoupled_weight_decay": True}
        for start in range(0, flat_p.numel(), slice_size):
            part = slice(start, start + slice_size)
            blocks = slice(start // BLOCK, (start + slice_size) // BLOCK)
            g = flat_grad[part].float()
            if code.numel():
                m = dequantized_blocks(flat_m[part], absmax[blocks], code)
                v = dequantized_blocks(flat_v[part], absmax_sq[blocks], code_sq)
            else:
                m, v = flat_m[part], flat_v[part]
            w = flat_p[part].float()
            adam_step(w, g, m, v, step, group)
            flat_p[part] = w
            if code.numel():
                flat_m[part], absmax[blocks] = quantized_blocks(m, code)
                flat_v[part], absmax_sq[blocks] = quantized_blocks(v, code_sq)
        if not p.is_contiguous():
            p.copy_(flat_p.view(p.shape))

    return adamw_8bit


def dequantized_blocks(codes: Tensor, absmax: Tensor, code: Tensor) -> Tensor:
    return code.index_select(0, codes.int()) * absmax.repeat_interleave(BLOCK)[: codes.numel()]


def quantized_blocks(values: Tensor, code: Tensor) -> tuple[Tensor, Tensor]:
    """(uint8 indices into ``code``, largest magnitude of each block) of a flat tensor."""
    padded = F.pad(values, (0, -values.numel() % BLOCK)).view(-1, BLOCK)
    absmax = padded.abs().amax(dim=1)
    scaled = padded / absmax.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
    return nearest(scaled.view(-1)[: values.numel()], code), absmax


def nearest(values: Tensor, code: Tensor) -> Tensor:
    """uint8 indices of the values in ``code`` (increasing) that are nearest to ``values`` (float32,
    flat, from -1 to 1).

    On the CPU, a binary search takes eight times as long as all the rest of an update. There, a
    table replaces it.
    """
    if values.device.type != "cpu":
        return torch.bucketize(values, _midpoints(code)).to(torch.uint8)
    first, midpoints = _by_upper_half(tuple(code.tolist()))
    at = first.index_select(0, (values.view(torch.int32) >> 16).bitwise_and_(0xFFFF))
    return at.add_(values > midpoints.index_select(0, at)).to(torch.uint8)


def _midpoints(code: Tensor) -> Tensor:
    return (code[1:] + code[:-1]) / 2


@lru_cache(maxsize=8)
def _by_upper_half(code: tuple[float, ...]) -> tuple[Tensor, Tensor]:
    """A table for ``nearest``, indexed by the upper 16 bits of a float32.

    For each value of these bits, it has the number of midpoints of ``code`` that are below all
    numbers with these bits. At most one more midpoint, the next one, is below some of them. Also
    returns the midpoints themselves, with infinity at the end.
    """
    midpoints = _midpoints(torch.tensor(code))
    upper = torch.arange(2**16, dtype=torch.int32) << 16
    least = torch.bucketize((upper | (upper >> 31 & 0xFFFF)).view(torch.float32), midpoints)
    return least.int(), torch.cat([midpoints, midpoints.new_tensor([math.inf])])
