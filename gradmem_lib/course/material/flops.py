"""Counts what a step computes: floating-point operations of matrix products and of fused
attention.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from ...compat.operators import grouped_mm
from ..machine.compat import (
    cpu_attention,
    cpu_attention_backward,
    dispatch_modes,
    products_inside,
    products_uncounted,
)


def _grouped(a, b, *args, **kwargs) -> int:
    """The operations of (rows, in) by (experts, in, out), with rows divided among experts; or those
    of its backward.
    """
    return 2 * math.prod(a) * b[-1]


def _product(first: int, *args, **kwargs) -> int:
    """The operations of the argument at ``first`` (..., in) by the next one, (..., in, out) or a
    vector.
    """
    a, b = args[first], args[first + 1]
    return 2 * math.prod(a) * (b[-1] if len(b) > 1 else 1)


def _shared(query, key, value) -> list[tuple]:
    """The shapes of ``key`` and ``value`` for each head of ``query``; several may share one, which
    PyTorch 2.11 cannot count.
    """
    return [(shape[0], query[1], *shape[2:]) for shape in (key, value)]


def _refused(name: str) -> Callable[..., int]:
    def refuse(*args, **kwargs) -> int:
        raise RuntimeError(
            f"{name} multiplies matrices inside one kernel, and their operations are not known "
            "here: leave it out of the step"
        )

    return refuse


# PyTorch's counter knows CUDA's kernels. It silently ignores the CPU's, and products with a vector.
UNKNOWN = {
    cpu_attention: lambda query, *given, **kwargs: sdpa_flop_count(
        query, *_shared(query, *given[:2])
    ),
    cpu_attention_backward: lambda out, query, *given, **kwargs: sdpa_backward_flop_count(
        out, query, *_shared(query, *given[:2])
    ),
    grouped_mm.overloadpacket: _grouped,
    **{op: partial(_product, first) for op, first in products_uncounted.items()},
    **{op: _refused(str(op)) for op in products_inside},
}


def count_operations(step: Callable[[], Any]) -> int:
    """Operations of the matrix products, convolutions and fused attention in ``step()``. A
    multiply-add counts as two.

    Elementwise operations do not count. Attention counts all pairs of tokens, even if a causal mask
    needs only half of them. Raises ``RuntimeError`` inside a ``MemoryTracker`` or another dispatch
    mode, where it would miss operations, and for a kernel whose products are not known (an LSTM on
    the CPU, a whole encoder layer in eval mode).
    """
    if dispatch_modes():
        raise RuntimeError(
            "count_operations would miss operations inside a MemoryTracker: count first, and "
            "track a second step"
        )
    with FlopCounterMode(display=False, custom_mapping=UNKNOWN) as counter:
        step()
    return counter.get_total_flops()
