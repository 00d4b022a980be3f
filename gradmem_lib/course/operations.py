"""How much a step computes: floating-point operations of matrix products and of fused attention."""

from collections.abc import Callable
from typing import Any

from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from ..compat import cpu_attention, cpu_attention_backward, dispatch_modes

# PyTorch's counter knows the kernels of CUDA, and passes over the CPU's without a word.
UNKNOWN = {
    cpu_attention: lambda query, key, value, *args, **kwargs: sdpa_flop_count(query, key, value),
    cpu_attention_backward: lambda out, query, key, value, *args, **kwargs: sdpa_backward_flop_count(
        out, query, key, value
    ),
}


def count_operations(step: Callable[[], Any]) -> int:
    """Operations of the matrix products, convolutions and fused attention in ``step()``; an addition and a multiplication are two.

    Elementwise operations count nothing, and attention counts all pairs of tokens, also where a causal mask spares half.
    Raises ``RuntimeError`` inside a ``MemoryTracker`` or another dispatch mode, from which the counter hides.
    """
    if dispatch_modes():
        raise RuntimeError(
            "count_operations would miss operations inside a MemoryTracker: count first, and track a second step"
        )
    with FlopCounterMode(display=False, custom_mapping=UNKNOWN) as counter:
        step()
    return counter.get_total_flops()
