"""Torch's operators: what an operator says of itself, and the operators that the library knows."""

from collections.abc import Callable
from functools import cache
from operator import attrgetter
from typing import Any

import torch

_aten = torch.ops.aten
_profiler = torch.ops.profiler

# What an operator says of itself.

# An operator's arguments and results, with what each aliases.
schema: Callable[[Any], Any] = attrgetter("_schema")
# the attribute with the function that an operator calls; a higher-order operator has none
KERNEL = "_op"


def returns(func) -> list:
    """The results in an operator's schema.

    A higher-order operator (torch.cond) has no schema: for it, the list is empty.
    """
    return getattr(getattr(func, "_schema", None), "returns", [])


def arguments_of(func) -> list:
    """The arguments in an operator's schema; empty for a higher-order operator."""
    return getattr(getattr(func, "_schema", None), "arguments", [])


# Operations that give a tensor another size or another storage.
_resizing = frozenset(
    {
        _aten.resize_,
        _aten.resize_as_,
        _aten.set_,
        _aten.resize_as_sparse_,
        _aten._resize_output_,
    }
)


def writes_first_argument(func) -> bool:
    """Whether an operator writes into its first argument, keeps its size, and returns it."""
    arguments = arguments_of(func)
    results = returns(func)
    if not arguments or not results or getattr(func, "overloadpacket", None) in _resizing:
        return False
    written = arguments[0].alias_info
    returned = results[0].alias_info
    if written is None or returned is None or not written.is_write:
        return False
    return written.before_set == returned.before_set


@cache
def reads_only_a_shape(func: Any) -> bool:
    """Whether an operation, such as ``aten.randn_like``, takes no number of its input."""
    name = str(func).removeprefix("aten.").partition(".")[0]
    return name.endswith("_like") or name.startswith("new_")


# Arithmetic.

add_tensors = _aten.add.Tensor
join = _aten.cat.default
log_softmax_backward = _aten._log_softmax_backward_data.default
# torch.distributions asks it of its arguments, and raises an error if it is not so.
all_are_true = _aten._is_all_true.default
# The softmax of scaled_dot_product_attention where it stores scores; a part of an operator's name.
SOFTMAX_OF_SDPA = "_safe_softmax"
grouped_mm = _aten._grouped_mm.default
# Products: no other tensor is among their arguments.
products = [
    _aten.mm.default,
    _aten.bmm.default,
    _aten.addmm.default,
    _aten.baddbmm.default,
    _aten.mv.default,
    _aten.convolution.default,
]
# Of their arguments, those with numbers that are not whole have one dtype; others are indices.
ops_of_one_dtype = [
    _aten.index_put.default,
    _aten.index_put_.default,
    _aten.index_add.default,
    _aten.index_add_.default,
    _aten._cdist_forward.default,
    _aten.huber_loss_backward.default,
]
try:
    _one = torch.ones(1, dtype=torch.float32, device="cpu")
    _aten.mse_loss_backward.default(_one, _one, _one.bfloat16(), 1)
except RuntimeError:  # torch 2.11
    ops_of_one_dtype.append(_aten.mse_loss_backward.default)

# Operations that make, join or divide tensors, or read what is in them.

# They make a tensor from nothing: states begin with them.
factories = frozenset(
    {
        _aten.empty,
        _aten.empty_like,
        _aten.full,
        _aten.full_like,
        _aten.new_zeros,
        _aten.ones_like,
        _aten.zeros,
        _aten.zeros_like,
    }
)
# They take some rows, columns or blocks of a tensor.
parts_of_a_tensor = frozenset(
    {
        _aten.index.Tensor,
        _aten.index_select.default,
        _aten.gather.default,
        _aten.select.int,
        _aten.slice.Tensor,
        _aten.split.Tensor,
        _aten.unbind.int,
    }
)
# torch.tensor(...) calls this operation with the tensor that it has made.
lift_fresh = _aten.lift_fresh.default
# The copy of a storage begins with this: a tensor of bytes takes the storage as its own.
take_storage = _aten.set_.source_Storage
set_storage = {_aten.set_.source_Storage, _aten.set_.source_Storage_storage_offset}
# the operation behind .item(), int() and bool() of a tensor
read_value = _aten._local_scalar_dense.default
# Autograd calls this operation on a fake tensor about ten times for each real operation.
read_device = torch.ops.prim.device.default

# Attention.

flash_attention = _aten._scaled_dot_product_flash_attention
flash_attention_backward = _aten._scaled_dot_product_flash_attention_backward
efficient_attention = _aten._scaled_dot_product_efficient_attention
softmax_backward = _aten._softmax_backward_data
math_attention = _aten._scaled_dot_product_attention_math

# Embeddings and recurrent layers.

embedding_bag = _aten._embedding_bag.default
lstm_layer = _aten.mkldnn_rnn_layer.default
# These mark the begin and the end of a stretch of code for the profiler. Each optimizer's step has
# them.
profiler_marks = {
    _profiler._record_function_enter_new.default,
    _profiler._record_function_exit._RecordFunction,
}

# What autograd's own formulas write into a tensor that they have just made, and put into a new one
# while a dispatch mode is active: those of ``gather``, ``take``, ``cummax``, ``max`` along a
# dimension, ``index_select``, ``masked_select`` and ``x[mask]``. Seen in torch 2.13:
# ``torch/csrc/autograd/FunctionsManual.cpp``, at ``areAnyTensorSubclassLike``.
written_in_place_by_formulas = frozenset(
    {
        _aten.scatter_add.default,
        _aten.scatter.src,
        _aten.index_put.default,
        _aten.index_add.default,
        _aten.masked_scatter.default,
        _aten.put.default,
    }
)
