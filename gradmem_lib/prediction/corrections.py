"""Corrections where PyTorch's fake tensors differ from the kernels.

They return what the kernels return, with as many bytes.

The differences were found by running PyTorch's own samples of every operator (``torch.testing``) on
real and on fake tensors.
"""

from collections.abc import Callable
from functools import cache

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


def _in_the_layout_of(position: int) -> Callable:
    """The CPU's ``batch_norm`` and its gradient have channels last if the input x has, or is a part
    of a tensor that has. Whatever other strides x has, they are contiguous. ``position``: that of x
    among the arguments.
    """

    def correct(args, out):
        x = args[position]
        layout = CHANNELS_LAST.get(x.dim(), torch.contiguous_format)
        with without_modes():
            dense = torch.empty_like(torch.empty_strided(x.shape, x.stride(), device="meta"))
        if not dense.is_contiguous(memory_format=layout):
            layout = torch.contiguous_format
        first, *others = out
        if first is not None:
            first = first.contiguous(memory_format=layout)
        return (first, *others)

    return correct


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


def _all_contiguous(args, out):
    return tuple([part.contiguous() for part in out])


def _in_the_dtype_of(position: int) -> Callable:
    """The result has the dtype of this argument, where PyTorch's fake has the widest one."""
    return lambda args, out: out.to(args[position].dtype)


def _norm(position: int, *mixed: Callable) -> Callable:
    """A norm whose first tensor from ``position`` on has the input's dtype or float32. ``mixed``
    corrects what it returns where the two dtypes differ.
    """

    def correct(args, out):
        weight = next((a for a in args[position:] if isinstance(a, torch.Tensor)), None)
        if weight is None or weight.dtype == args[0].dtype:
            return out
        if weight.dtype != torch.float32:
            _require_one_dtype((args[0], weight), out)
        for correction in mixed:
            out = correction(args, out)
        return out

    return correct


def _with_float32_statistics(args, out):
    """Mean and 1/std."""
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
    if not torch.is_grad_enabled():
        return out
    raise CannotTrace(
        "nn.LSTM keeps a workspace for backward whose size only oneDNN, or cuDNN on a card, knows: "
        "measure one real step with MemoryTracker"
    )


def _window(args, out):
    """A periodic window, for spectrograms, is a longer symmetric one without its last number."""
    return out.new_empty(len(out) + (len(out) > 1))[: len(out)]


CPU, CARD = ("cpu",), ("cuda",)
BOTH = CPU + CARD
_WINDOWS = ("hann", "hamming", "blackman", "bartlett", "kaiser")
# An operator, the targets whose kernels differ from PyTorch's fake, and what corrects its result,
# one after the other: each takes the operator's arguments and the result so far, and returns the
# kernel's, or raises ``CannotTrace`` if it cannot be known. An operator may have several rows.
ROWS: list[tuple] = [
    *[(op, BOTH, _require_one_dtype) for op in operators.ops_of_one_dtype],
    *[(op, BOTH, _require_one_dtype_of_all) for op in operators.products],
    *[(getattr(aten, f"{name}_window").default, BOTH, _window) for name in _WINDOWS],
    (aten.view.default, BOTH, _view),
    (aten.masked_fill.Scalar, BOTH, _masked_fill),
    (aten.masked_fill_.Scalar, BOTH, _masked_fill),
    (aten.col2im.default, BOTH, _col2im),
    # DDP waits for it: fake groups give none
    (all_reduce, BOTH, lambda args, out: finished_all_reduce(args[0])),
    (operators.lstm_layer, BOTH, _refuse_lstm),
    (operators.embedding_bag, CPU, _embedding_bag),
    (aten.native_layer_norm.default, CPU, _norm(2, _with_float32_statistics)),
    (aten.native_layer_norm.default, CARD, _norm(2), _with_float32_statistics),
    (aten.native_layer_norm_backward.default, BOTH, _layer_norm_backward),
    (aten.native_group_norm.default, CPU, _norm(1, _with_float32_statistics)),
    (aten.native_group_norm.default, CARD, _norm(1)),
    (aten.native_group_norm_backward.default, BOTH, _group_norm_backward),
    (aten.native_batch_norm.default, CPU, _norm(1, _with_float32_statistics), _in_the_layout_of(0)),
    (aten.native_batch_norm.default, CARD, _norm(1)),
    (aten.native_batch_norm_backward.default, CPU, _in_the_layout_of(1)),
    (operators.log_softmax_backward, BOTH, _contiguous),
    (aten.log_sigmoid_forward.default, CPU, _all_contiguous),
    (aten.mse_loss.default, CPU, _loss_reduced_in_place(2)),
    (aten.smooth_l1_loss.default, CPU, _loss_reduced_in_place(2)),
    (aten.soft_margin_loss.default, CPU, _in_the_dtype_of(0), _loss_reduced_in_place(2)),
    (aten.binary_cross_entropy.default, CPU, _require_one_dtype, _loss_reduced_in_place(3)),
    (aten.mse_loss_backward.default, CPU, _in_the_dtype_of(1), _contiguous),
    (aten.smooth_l1_loss_backward.default, CPU, _in_the_dtype_of(1), _contiguous),
    (aten.huber_loss_backward.default, CPU, _in_the_dtype_of(1), _contiguous),
    (aten.soft_margin_loss_backward.default, CPU, _in_the_dtype_of(1)),
]


@cache
def by_target(target: str | None) -> dict[object, list[Callable]]:
    """The corrections for a target, by operator; none for ``None``."""
    found: dict[object, list[Callable]] = {}
    for operator, targets, *corrections in ROWS:
        if target in targets:
            found.setdefault(operator, []).extend(corrections)
    return found
