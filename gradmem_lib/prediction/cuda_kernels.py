"""Lets a trace without a card save for backward what CUDA's kernels save.

For some functions, the CPU's kernels save something else.

It follows PyTorch's sources (aten/src/ATen/native/transformers/cuda, autocast_mode.h). ``make gpu``
compares it with a card; that has not been done yet.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from ..compat import efficient_attention, flash_attention, flash_attention_backward, math_attention
from .allocator import rounded

# The part of CUDA's float32 list of autocast that is not on the CPU's list, by the places where
# modules look functions up.
_BOTH = "pow exp log rsqrt reciprocal norm sum prod cumsum softmax log_softmax"
_METHODS = "__pow__ __rpow__ __rtruediv__"
_FUNCTIONS = (
    "softmax log_softmax layer_norm group_norm cross_entropy nll_loss mse_loss normalize softplus"
)
IN_FLOAT32 = tuple(
    (home, name)
    for home, names in ((torch, _BOTH), (Tensor, f"{_BOTH} {_METHODS}"), (F, _FUNCTIONS))
    for name in names.split()
)


@contextmanager
def kernels(autocast: torch.dtype | None = None) -> Iterator[None]:
    """While the block runs, functions on (fake) CPU tensors save what CUDA's kernels save.

    ``autocast``: the dtype of ``torch.autocast`` if the step uses it. Then operations that CUDA's
    autocast runs in float32 run in float32 here too. The functions are replaced where modules look
    them up, and put back at the end. A function mode would not be active while checkpointing
    recomputes a layer.
    """
    with ExitStack() as undo:
        undo.enter_context(patch.object(F, "scaled_dot_product_attention", _attention))
        undo.enter_context(patch.object(F, "dropout", partial(_dropout, F.dropout)))
        for home, name in IN_FLOAT32 if autocast else ():
            undo.enter_context(patch.object(home, name, in_float32(getattr(home, name))))
        yield


def in_float32(function: Callable) -> Callable:
    """``function`` with float32 arguments, as autocast calls the functions on its float32 list."""

    @wraps(function)
    def wrapper(*args, **kwargs):
        if torch.is_autocast_enabled("cpu"):
            args = [_to_float32(a) for a in args]
            kwargs = {name: _to_float32(a) for name, a in kwargs.items()}
        return function(*args, **kwargs)

    return wrapper


def _to_float32(value):
    narrow = isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if narrow else value


def _dropout(original: Callable, input: Tensor, p=0.5, training=True, inplace=False) -> Tensor:
    """CUDA's dropout: one kernel that saves a mask of one byte a number.

    The CPU saves a mask in the input's dtype.
    """
    if not training or p == 0 or inplace:
        return original(input, p, training, inplace)
    return torch.native_dropout(input, p, True)[0]


def _attention(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
) -> Tensor:
    """The kernel that a card would choose: flash attention, else memory-efficient attention, else
    single operations.

    ``query`` (batch, heads, seq, head_dim). Flash attention takes half precision and heads in equal
    groups, but no mask. The memory-efficient kernel takes float32 and masks, but no grouped heads.
    """
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = (t.to(dtype) for t in (query, key, value))
    size, options = query.shape[-1], {"scale": scale}
    same_heads = query.shape[-1] == value.shape[-1] and query.shape[1] % key.shape[1] == 0
    if attn_mask is None and query.dtype != torch.float32 and size <= 256 and same_heads:
        if padding := -size % 8:
            options["scale"] = size**-0.5 if scale is None else scale
            query, key, value = (F.pad(t, (0, padding)) for t in (query, key, value))
        out = flash_attention(query, key, value, dropout_p, is_causal, False, **options)[0]
        return out[..., :size] if padding else out
    if query.shape[1] == key.shape[1]:
        bias = attn_mask
        if bias is not None and bias.dtype == torch.bool:
            bias = torch.zeros_like(bias, dtype=query.dtype).masked_fill_(
                bias.logical_not(), float("-inf")
            )
        if bias is not None:
            # The kernel reads rows of the bias 16 entries at a time, so it pads them to a multiple
            # of 16.
            seq = bias.shape[-1]
            bias = F.pad(bias, (0, -seq % 16))[..., :seq] if seq % 16 else bias
            bias = bias.expand(*query.shape[:3], key.shape[2])
        needs_grad = any(t.requires_grad for t in (query, key, value))
        return efficient_attention(
            query, key, value, bias, needs_grad, dropout_p, is_causal, **options
        )[0]
    options["enable_gqa"] = enable_gqa
    return math_attention(query, key, value, attn_mask, dropout_p, is_causal, **options)[0]


def scratch(func, args) -> int:
    """Bytes that ``func`` allocates and frees inside its kernel, if they are many."""
    if func is not flash_attention_backward.default:
        return 0
    # The gradient of the queries is added up in float32, with rows and head size rounded up. If
    # heads share keys, the gradients of keys and values first exist once for each head.
    query, key = args[1], args[2]
    batch, heads, seq, size = query.shape
    rows, width = -(-seq // 128) * 128, -(-size // 32) * 32
    total = rounded(4 * batch * heads * rows * width) + rounded(4 * batch * heads * rows)
    if key.shape[1] != heads:
        total += 2 * rounded(batch * heads * key.shape[2] * size * query.itemsize)
    return total
