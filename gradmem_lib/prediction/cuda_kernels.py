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

from ..compat.operators import (
    efficient_attention,
    flash_attention,
    flash_attention_backward,
    math_attention,
    softmax_backward,
)
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
    query: Tensor,  # (batch, heads, seq, head_dim)
    key: Tensor,  # (batch, key heads, key seq, head_dim)
    value: Tensor,  # (batch, key heads, key seq, value's head_dim)
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The kernel that a card would choose: flash attention, else memory-efficient attention, else
    single operations. The arguments are those of ``F.scaled_dot_product_attention``.

    Flash attention takes half precision and heads in equal groups, but no mask. The
    memory-efficient kernel takes float32 and masks, but no grouped heads.
    """
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = (t.to(dtype) for t in (query, key, value))
    size, heads, key_heads = query.shape[-1], query.shape[1], key.shape[1]
    equal_groups = size == value.shape[-1] and heads % key_heads == 0
    if attn_mask is None and query.dtype != torch.float32 and size <= 256 and equal_groups:
        return _flash(query, key, value, dropout_p, is_causal, scale)
    if heads == key_heads:
        bias = _bias(attn_mask, query, key)
        needs_grad = any(t.requires_grad for t in (query, key, value))
        return efficient_attention(
            query, key, value, bias, needs_grad, dropout_p, is_causal, scale=scale
        )[0]
    return math_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    """Flash attention, whose kernels have head sizes in multiples of 8: others are padded."""
    size = query.shape[-1]
    padding = -size % 8
    if padding:
        if scale is None:
            scale = size**-0.5  # of the size before padding
        query, key, value = (F.pad(t, (0, padding)) for t in (query, key, value))
    out = flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
    return out[..., :size] if padding else out


def _bias(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """What the memory-efficient kernel adds to the scores for ``mask``: (batch, heads, seq,
    key seq).
    """
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        hidden = mask.logical_not()
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(hidden, float("-inf"))
    seq = mask.shape[-1]
    if seq % 16:  # the kernel reads rows of the bias 16 entries at a time, so they are padded
        mask = F.pad(mask, (0, -seq % 16))[..., :seq]
    return mask.expand(*query.shape[:3], key.shape[2])


def scratch(func, args) -> int:
    """Bytes that ``func`` allocates and frees inside its kernel, if they are many."""
    if func is softmax_backward.default:
        grad, output = args[:2]  # their product (SoftMax.cu)
        dtype = torch.promote_types(grad.dtype, output.dtype)
        return rounded(grad.numel() * dtype.itemsize)
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
