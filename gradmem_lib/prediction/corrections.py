"""Corrections where PyTorch's fake tensors differ from the kernels.

They return what the kernels return, with as many bytes.

The differences were found by running PyTorch's own samples of every operator (``torch.testing``) on
real and on fake tensors.
"""

from collections.abc import Callable

import torch

from ..compat import operators
from ..compat.collectives import all_reduce, finished_all_reduce
from ..compat.dispatch_modes import without_modes
from ..compat.trees import tree_leaves
from .question import CannotTrace

aten = torch.ops.aten


def _view(args, out):
    """For a dimension of one element, real views have other strides than fake ones.

    Convolutions choose their layout by these.
    """
    if 1 not in out.shape:
        return out
    with without_modes():
        real = (
            torch.empty_strided(args[0].shape, args[0].stride(), device="meta")
            .view(out.shape)
            .stride()
        )
    return out if real == out.stride() else out.as_strided(out.shape, real, out.storage_offset())


def _layer_norm_backward(args, out):
    """The gradient of ``layer_norm``'s input is contiguous, whatever strides the input has."""
    return (None if out[0] is None else out[0].contiguous(), *out[1:])


CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}  # by dimensions


def _in_the_layout_of(x: torch.Tensor, out: tuple) -> tuple:
    """The CPU's ``batch_norm`` and its gradient have channels last if the input ``x`` has, or is a
    part of a tensor that has. Whatever other strides ``x`` has, they are contiguous.
    """
    layout = CHANNELS_LAST.get(x.dim(), torch.contiguous_format)
    with without_modes():
        dense = torch.empty_like(torch.empty_strided(x.shape, x.stride(), device="meta"))
    if not dense.is_contiguous(memory_format=layout):
        layout = torch.contiguous_format
    first, *others = out
    if first is not None:
        first = first.contiguous(memory_format=layout)
    return (first, *others)


def _batch_norm(args, out):
    return _in_the_layout_of(args[0], _norm(1, _with_float32_statistics)(args, out))


def _group_norm_backward(args, out):
    """The gradient of ``group_norm``'s input has the input's dtype, whatever the weight's is."""
    gradient, *others = out
    if gradient is not None:
        gradient = gradient.to(args[1].dtype)
    return (gradient, *others)


def _masked_fill(args, out):
    """A value that the dtype cannot hold raises an error on a real tensor, not on a fake one."""
    with without_modes():
        one = torch.zeros(1, dtype=out.dtype, device="cpu")
        one.masked_fill_(torch.zeros(1, dtype=torch.bool, device="cpu"), args[2])
    return out


def _col2im(args, out):
    """``fold``, and the backward of ``unfold``, allocate a tensor like the columns and then shrink
    it. The storage keeps its size (ATen's Col2Im.cpp and Col2Im.cu).
    """
    return args[0].new_empty(max(args[0].numel(), out.numel())).as_strided(out.shape, out.stride())


def _tensors(args) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]


def _require_one_dtype(args, out):
    """Refuse two floating-point dtypes, as the kernel does where PyTorch's fake promotes them."""
    return _refuse_dtypes([t for t in _tensors(args) if t.is_floating_point()], out)


def _with_one_dtype(correct: Callable) -> Callable:
    return lambda args, out: correct(args, _require_one_dtype(args, out))


def _require_one_dtype_of_all(args, out):
    """The same for a product, where whole numbers too are refused beside other numbers."""
    return _refuse_dtypes(_tensors(args), out)


def _refuse_dtypes(tensors: list[torch.Tensor], out):
    dtypes = sorted({str(t.dtype) for t in tensors})
    if len(dtypes) > 1:
        raise RuntimeError(
            f"{' and '.join(dtypes)} meet in an operation that takes one dtype: give batch= in "
            "the weights' dtype"
        )
    return out


def _contiguous(args, out):
    """These kernels allocate what they return without a look at the strides of what they read."""
    return out.contiguous()


def _mean_loss_backward(args, out):
    """It has the input's dtype, where PyTorch's fake has the widest one."""
    return out.to(args[1].dtype).contiguous()


def _norm(position: int, mixed: Callable = lambda args, out: out) -> Callable:
    """A norm whose first tensor from ``position`` on has the input's dtype or float32.

    ``mixed`` corrects the float32 case.
    """

    def correct(args, out):
        weight = next((a for a in args[position:] if isinstance(a, torch.Tensor)), None)
        if weight is None or weight.dtype == args[0].dtype:
            return out
        return mixed(
            args,
            out if weight.dtype == torch.float32 else _require_one_dtype((args[0], weight), out),
        )

    return correct


def _with_float32_statistics(args, out):
    return out[0], out[1].to(torch.float32), out[2].to(torch.float32)


def _loss_reduced_in_place(position: int) -> Callable:
    """A loss that writes one number for each element, then reduces them in the same storage.

    The storage keeps its size. ``position``: the index of the ``reduction`` argument.
    """

    def correct(args, out):
        if args[position : position + 1] == (0,):  # none
            return out
        shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
        return out.new_empty(shape).as_strided((), ())

    return correct


def _embedding_bag(args, out):
    """``embedding_bag`` numbers its bags in tensors that it then shortens, and their storages keep
    their sizes.
    """
    bags, sizes = out[1].new_empty(out[1].numel() + 1), out[2].new_empty(args[2].numel())
    return out[0], bags[:-1] if out[1].numel() else out[1], sizes[: out[2].numel()], out[3]


def _refuse_lstm(args, out):
    raise CannotTrace(
        "nn.LSTM keeps a workspace for backward whose size only oneDNN, or cuDNN on a card, knows: "
        "measure one real step with MemoryTracker"
    )


_EVERYWHERE: dict[object, Callable] = {
    aten.view.default: _view,
    aten.masked_fill.Scalar: _masked_fill,
    aten.masked_fill_.Scalar: _masked_fill,
    aten.native_layer_norm_backward.default: _layer_norm_backward,
    aten.native_group_norm_backward.default: _group_norm_backward,
    aten.col2im.default: _col2im,
    # DDP waits for it: fake groups give none
    all_reduce: lambda args, out: finished_all_reduce(args[0]),
    aten.native_group_norm.default: _norm(1),
    aten.native_batch_norm.default: _norm(1),
    operators.log_softmax_backward: _contiguous,
    operators.lstm_layer: _refuse_lstm,
} | dict.fromkeys(operators.ops_of_one_dtype, _require_one_dtype)
_EVERYWHERE |= dict.fromkeys(operators.products, _require_one_dtype_of_all)
# Periodic windows, for spectrograms, are the longer symmetric ones without their last number.
_WINDOWS = [
    getattr(aten, f"{n}_window") for n in ("hann", "hamming", "blackman", "bartlett", "kaiser")
]
_EVERYWHERE |= {
    of.default: lambda _, w: w.new_empty(len(w) + (len(w) > 1))[: len(w)] for of in _WINDOWS
}
_ON_CPU = _EVERYWHERE | {
    aten.native_layer_norm.default: _norm(2, _with_float32_statistics),  # mean and 1/std
    aten.native_group_norm.default: _norm(1, _with_float32_statistics),
    aten.native_batch_norm.default: _batch_norm,
    aten.native_batch_norm_backward.default: lambda args, out: _in_the_layout_of(args[1], out),
    operators.embedding_bag: _embedding_bag,
    aten.log_sigmoid_forward.default: lambda args, out: tuple(_contiguous(args, t) for t in out),
    aten.mse_loss.default: _loss_reduced_in_place(2),
    aten.smooth_l1_loss.default: _loss_reduced_in_place(2),
    aten.soft_margin_loss.default: lambda args, out: _loss_reduced_in_place(2)(
        args, out.to(args[0].dtype)
    ),
    aten.binary_cross_entropy.default: lambda args, out: _loss_reduced_in_place(3)(
        args, _require_one_dtype(args, out)
    ),
    aten.mse_loss_backward.default: _mean_loss_backward,
    aten.smooth_l1_loss_backward.default: _mean_loss_backward,
    aten.huber_loss_backward.default: _mean_loss_backward,
    aten.soft_margin_loss_backward.default: lambda args, out: out.to(args[1].dtype),
}
for _op in operators.ops_of_one_dtype:
    _ON_CPU[_op] = _with_one_dtype(_ON_CPU[_op])
_ON_CARD = _EVERYWHERE | {
    aten.native_layer_norm.default: lambda args, out: _with_float32_statistics(
        args, _norm(2)(args, out)
    ),
}
# By target and operator: functions that take the arguments and PyTorch's fake result, and return
# the result of the target's kernel. They raise ``CannotTrace`` if it cannot be known.
BY_TARGET: dict[str, dict[object, Callable]] = {"cpu": _ON_CPU, "cuda": _ON_CARD}
