"""What a CUDA card does otherwise than the CPU, as far as memory goes, told to a trace that runs without one.

Kernels save other tensors for backward, autocast has another list of operations that stay in float32, the allocator hands out
blocks of 512 bytes and takes segments from the driver. All of it follows PyTorch's sources (aten/src/ATen/native/transformers/
cuda, autocast_mode.h, c10/cuda/CUDACachingAllocator.cpp). ``make gpu`` compares it with a card; that has not been done yet.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps

import torch
import torch.nn.functional as F
from torch import Tensor

from .units import MiB

BLOCK = 512


def rounded(nbytes: int) -> int:
    """``nbytes`` in whole blocks of the allocator, which are 512 bytes."""
    return -(-nbytes // BLOCK) * BLOCK


# --- kernels ----------------------------------------------------------------------------------------


@contextmanager
def kernels(autocast: torch.dtype | None = None) -> Iterator[None]:
    """Inside it, functions on (fake) CPU tensors keep for backward what CUDA's kernels keep.

    ``autocast``: the dtype of ``torch.autocast`` if the step uses it, so that the operations that CUDA's autocast runs in
    float32 do so here. The functions are replaced where modules look them up, and put back at the end: a function mode would
    not be on when checkpointing runs a layer again.
    """
    with ExitStack() as undo:
        dropout = F.dropout
        undo.enter_context(_replaced(F, "scaled_dot_product_attention", _attention))
        undo.enter_context(
            _replaced(F, "dropout", lambda *args, **kwargs: _dropout(dropout, *args, **kwargs))
        )
        for home, name in _autocast_functions() if autocast else ():
            undo.enter_context(_replaced(home, name, _in_float32(getattr(home, name))))
        yield


@contextmanager
def _replaced(home, name: str, function: Callable) -> Iterator[None]:
    own = vars(home).get(name)
    setattr(home, name, function)
    try:
        yield
    finally:
        if own is None:
            delattr(home, name)  # a method that Tensor has from its base class
        else:
            setattr(home, name, own)


def _in_float32(function: Callable) -> Callable:
    @wraps(function)
    def wider(*args, **kwargs):
        if torch.is_autocast_enabled("cpu"):
            args = [_to_float32(a) for a in args]
            kwargs = {name: _to_float32(a) for name, a in kwargs.items()}
        return function(*args, **kwargs)

    return wider


def _to_float32(value):
    narrow = isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if narrow else value


def _autocast_functions() -> list[tuple]:
    """Functions of autocast's float32 list on CUDA that are not on the CPU's, where modules find them."""
    both = (
        "pow",
        "exp",
        "log",
        "rsqrt",
        "reciprocal",
        "norm",
        "sum",
        "prod",
        "cumsum",
        "softmax",
        "log_softmax",
    )
    losses = ("layer_norm", "group_norm", "cross_entropy", "nll_loss", "mse_loss", "normalize", "softplus")
    found = [(home, name) for home in (torch, Tensor) for name in both]
    found += [
        (Tensor, "__pow__"),
        (Tensor, "__rpow__"),
        (Tensor, "__rtruediv__"),
        (F, "softmax"),
        (F, "log_softmax"),
    ]
    return found + [(F, name) for name in losses]


def _dropout(
    plain: Callable, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    """One kernel that keeps a mask of one byte a number, where the CPU keeps one of the input's dtype."""
    if not training or p == 0 or inplace:
        return plain(input, p, training, inplace)
    return torch.native_dropout(input, p, True)[0]


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The kernel that a card would choose: flash attention, else memory-efficient attention, else single operations.

    ``query`` (batch, heads, seq, head_dim). Flash attention takes half precision and no mask; the memory-efficient kernel
    takes float32 and masks, and no grouped heads.
    """
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = (t.to(dtype) for t in (query, key, value))
    size, options = query.shape[-1], {"scale": scale}
    even = query.shape[-1] == value.shape[-1]
    if attn_mask is None and query.dtype != torch.float32 and size <= 256 and even:
        padding = -size % 8
        if padding:
            options["scale"] = size**-0.5 if scale is None else scale
            query, key, value = (F.pad(t, (0, padding)) for t in (query, key, value))
        out = torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, False, **options
        )[0]
        return out[..., :size] if padding else out
    if query.shape[1] == key.shape[1]:
        bias = attn_mask
        if bias is not None and bias.dtype == torch.bool:
            bias = torch.zeros_like(bias, dtype=query.dtype).masked_fill_(bias.logical_not(), float("-inf"))
        if bias is not None:
            bias = _aligned(bias).expand(*query.shape[:3], key.shape[2])
        keeps = any(t.requires_grad for t in (query, key, value))
        return torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, keeps, dropout_p, is_causal, **options
        )[0]
    return torch.ops.aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, enable_gqa=enable_gqa, **options
    )[0]


def _aligned(bias: Tensor) -> Tensor:
    """The kernel reads rows of the bias 16 entries at a time, and pads them to that."""
    seq = bias.shape[-1]
    return F.pad(bias, (0, -seq % 16))[..., :seq] if seq % 16 else bias


def scratch(func, args) -> int:
    """Bytes that ``func`` takes inside its kernel and gives back at its end, where they are many."""
    if func is torch.ops.aten._scaled_dot_product_flash_attention_backward.default:
        # The gradient of the queries is added up in float32, with rows and head size rounded up; and when heads share
        # keys, the gradients of keys and values exist once for each head first.
        query, key = args[1], args[2]
        batch, heads, seq, size = query.shape
        rows, width = -(-seq // 128) * 128, -(-size // 32) * 32
        total = rounded(4 * batch * heads * rows * width) + rounded(4 * batch * heads * rows)
        if key.shape[1] != heads:
            total += 2 * rounded(batch * heads * key.shape[2] * size * query.itemsize)
        return total
    return 0


# --- beside the tensors -----------------------------------------------------------------------------

# Estimates. cuBLAS takes a workspace for each thread that multiplies matrices, forward and backward each their own;
# it comes from PyTorch's allocator. The context is the driver's, outside of any allocator's figure.
WORKSPACE_HOPPER, WORKSPACE = 32 * MiB, 4 * 2 * MiB + 8 * 16 * 1024
CONTEXT = 500 * MiB


def workspace(compute_capability: tuple[int, int] = (8, 0)) -> int:
    """Bytes of cuBLAS workspace that a training step ends up with: one for forward, one for autograd's thread."""
    return 2 * (WORKSPACE_HOPPER if compute_capability[0] >= 9 else WORKSPACE)


SMALL, SMALL_SEGMENT, LARGE_SEGMENT, LARGE, ROUND_LARGE = 1 * MiB, 2 * MiB, 20 * MiB, 10 * MiB, 2 * MiB


class Allocator:
    """The caching allocator's rules on addresses that stand for memory (expandable segments off, one stream).

    Requests up to 1 MiB come from segments of 2 MiB; up to 10 MiB from segments of 20 MiB; larger ones get a segment of their
    own, in whole 2 MiB. The smallest free block that fits is taken, and split if enough is left; neighbours that are free
    merge again. ``reserved`` is what has been taken from the driver, which nothing gives back.
    """

    def __init__(self):
        self.reserved = 0
        self._free: dict[bool, list[tuple[int, int]]] = {
            True: [],
            False: [],
        }  # by pool: sorted (bytes, address)
        self._blocks: dict[int, list] = {}  # address: [bytes, small, used, previous address, next address]
        self._next = 0

    def allocate(self, nbytes: int) -> int:
        """The address of a block for ``nbytes``, taking a new segment where no free block fits."""
        size = max(rounded(nbytes), BLOCK)
        small = size <= SMALL
        free = self._free[small]
        i = bisect_left(free, (size, -1))
        if i < len(free):
            total, address = free.pop(i)
        else:
            total = (
                SMALL_SEGMENT
                if small
                else LARGE_SEGMENT
                if size < LARGE
                else -(-size // ROUND_LARGE) * ROUND_LARGE
            )
            address = self._next
            self._next += 2 * total  # segments never touch, so that they never merge
            self._blocks[address] = [total, small, False, None, None]
            self.reserved += total
        block = self._blocks[address]
        rest = total - size
        if rest >= BLOCK if small else rest > SMALL:
            after = block[4]
            self._blocks[address + size] = [rest, small, False, address, after]
            if after is not None:
                self._blocks[after][3] = address + size
            block[0], block[4] = size, address + size
            insort(free, (rest, address + size))
        block[2] = True
        return address

    def free(self, address: int) -> None:
        """Give the block at ``address`` back, merged with free neighbours."""
        block = self._blocks[address]
        block[2] = False
        free = self._free[block[1]]
        before, after = block[3], block[4]
        if after is not None and not self._blocks[after][2]:
            free.remove((self._blocks[after][0], after))
            self._join(address, after)
        if before is not None and not self._blocks[before][2]:
            free.remove((self._blocks[before][0], before))
            self._join(before, address)
            address = before
        insort(free, (self._blocks[address][0], address))

    def _join(self, first: int, second: int) -> None:
        gone = self._blocks.pop(second)
        self._blocks[first][0] += gone[0]
        self._blocks[first][4] = gone[4]
        if gone[4] is not None:
            self._blocks[gone[4]][3] = first


def replayed(requests: Iterable[int]) -> int:
    """Bytes reserved after ``requests``: a number of bytes asks for a block, ``-1 - n`` gives the nth one back."""
    allocator, addresses = Allocator(), []
    for request in requests:
        if request >= 0:
            addresses.append(allocator.allocate(request))
        else:
            allocator.free(addresses[-1 - request])
    return allocator.reserved
