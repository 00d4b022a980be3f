"""What fake tensors say of single operators, against what the CPU's kernels return: shape, strides,
dtype, bytes, errors.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from gradmem_lib.compat.fake_tensors import FakeTensor
from gradmem_lib.compat.trees import tree_leaves, tree_map_only
from gradmem_lib.prediction.fakes import QuickFakeMode, answers_by_settings

aten = torch.ops.aten
bf16, half, double = torch.bfloat16, torch.float16, torch.float64


def said(op, *args, target: str | None) -> list:
    """What ``op`` returns: for real, or by the fakes for ``target``; ``"error"`` where it
    raises.
    """
    try:
        if target is None:
            out = op(*args)
        else:
            answers_by_settings.clear()
            with QuickFakeMode(target) as mode:
                faked = tree_map_only(torch.Tensor, mode.from_tensor, args)
                out = op(*faked)
    except (RuntimeError, OverflowError):
        return ["error"]
    tensors = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
    assert all(type(t) is (torch.Tensor if target is None else FakeTensor) for t in tensors)
    return [
        (tuple(t.shape), t.stride() if t.numel() else (), t.dtype, t.untyped_storage().nbytes())
        for t in tensors
    ]


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.rand(shape, dtype=dtype)


def layer_norm(x, weight) -> tuple:
    return aten.native_layer_norm, x, [4], weight, weight, 1e-5


def group_norm(x, weight) -> tuple:
    return aten.native_group_norm, x, weight, weight, 2, 4, 3, 2, 1e-5


def batch_norm(x, weight, running) -> tuple:
    return aten.native_batch_norm, x, weight, weight, running, running, True, 0.1, 1e-5


NORMS = {
    "batch, without running statistics": batch_norm(rand(2, 4, 3, dtype=bf16), None, None),
}
for _x in (torch.float32, bf16, half):
    for _w in (None, torch.float32, bf16, half):
        _weight = None if _w is None else rand(4, dtype=_w)
        _running = rand(4) if _w is None else _weight
        _rows, _channels = rand(2, 4, dtype=_x), rand(2, 4, 3, dtype=_x)
        NORMS[f"layer, {_x}, {_w}"] = layer_norm(_rows, _weight)
        NORMS[f"group, {_x}, {_w}"] = group_norm(_channels, _weight)
        NORMS[f"batch, {_x}, {_w}"] = batch_norm(_channels, _weight, _running)

LOSSES = (
    {
        f"{op} {shape} {reduction}": (getattr(aten, op), rand(5, 4), rand(*shape), *reduction)
        for op in ("mse_loss", "smooth_l1_loss", "soft_margin_loss")
        for shape in ((5, 4), (4,), (3, 5, 4))
        for reduction in ((), (0,), (1,), (2,))
        if op != "soft_margin_loss" or shape == (5, 4)
    }
    | {"smooth_l1_loss of another beta": (aten.smooth_l1_loss, rand(5, 4), rand(4), 0, 0.5)}
    | {
        f"binary_cross_entropy {weight is not None} {reduction}": (
            aten.binary_cross_entropy,
            rand(5, 4),
            rand(5, 4),
            weight,
            *reduction,
        )
        for weight in (None, rand(5, 4))
        for reduction in ((), (0,), (1,), (2,))
    }
)

MIXED = {
    "mm": (aten.mm, rand(3, 4), rand(4, 5, dtype=bf16)),
    "mm of one": (aten.mm, rand(3, 4, dtype=bf16), rand(4, 5, dtype=bf16)),
    "addmm": (aten.addmm, rand(5, dtype=bf16), rand(3, 4), rand(4, 5)),
    "mm of whole numbers": (aten.mm, torch.ones(3, 4).long(), rand(4, 5)),
    "mm of whole numbers alone": (aten.mm, torch.ones(3, 4).long(), torch.ones(4, 5).long()),
    "addmm of whole numbers": (aten.addmm, rand(5), torch.ones(3, 4).long(), rand(4, 5)),
    "bmm": (aten.bmm, rand(1, 3, 4), rand(1, 4, 5, dtype=bf16)),
    "baddbmm": (aten.baddbmm, rand(1, 3, 5), rand(1, 3, 4, dtype=bf16), rand(1, 4, 5, dtype=bf16)),
    "mv": (aten.mv, rand(3, 4), rand(4, dtype=double)),
    "convolution": (F.conv1d, rand(1, 2, 5), rand(3, 2, 3, dtype=bf16)),
    "convolution of whole numbers": (F.conv1d, torch.ones(1, 2, 5).long(), rand(3, 2, 3)),
    "index_add": (aten.index_add, rand(3, 4), 0, torch.tensor([1]), rand(1, 4, dtype=half)),
    "index_add of one": (aten.index_add, rand(3, 4), 0, torch.tensor([1]), rand(1, 4)),
    "binary_cross_entropy": (aten.binary_cross_entropy, rand(3), rand(3, dtype=bf16)),
}

FILLED = {
    f"masked_fill {dtype} {value}": (
        aten.masked_fill,
        torch.zeros(3, dtype=dtype),
        torch.ones(3, dtype=torch.bool),
        value,
    )
    for dtype in (half, bf16, torch.float32, torch.int8)
    for value in (
        0.0,
        -65504.0,
        65520.0,
        -1e30,
        3.4e38,
        1e39,
        float("-inf"),
        float("inf"),
        5,
        300,
        -100_000,
    )
}

LAYOUTS = {
    "a transposed input": rand(2, 3, 4).transpose(1, 2),
    "rows in columns": rand(4, 6).t(),
    "channels last": rand(2, 3, 5, 4).permute(0, 3, 1, 2),
    "half of the channels, last": rand(2, 3, 5, 8).permute(0, 3, 1, 2)[:, :4],
    "channels last in 3d": rand(2, 3, 5, 2, 4).permute(0, 4, 1, 2, 3),
}


def layer_norm_backward(gradient, x, *wanted: bool) -> tuple:
    statistics, weight = rand(3, 1), rand(4)
    given = gradient, x, [4], statistics, statistics, weight, weight
    return aten.native_layer_norm_backward, *given, [*wanted]


def group_norm_backward(dtype) -> tuple:
    x, statistics = rand(2, 4, 3, dtype=dtype), rand(2, 2)
    given = x, x, statistics, statistics, rand(4)
    return aten.native_group_norm_backward, *given, 2, 4, 3, 2, [True] * 3


def batch_norm_backward(x) -> tuple:
    gradient = torch.rand_like(x, memory_format=torch.contiguous_format)
    return aten.native_batch_norm_backward, gradient, x, *[rand(4)] * 5, True, 1e-5, [True] * 3


NARROW, COLUMNS = rand(5, dtype=bf16), rand(4, 3).t()
MSE_BACKWARD = aten.mse_loss_backward
OTHERS = {
    "view of one row": (
        aten.view,
        rand(1, 6, 4).transpose(1, 2).contiguous().transpose(1, 2),
        [1, 6, 4, 1],
    ),
    "view of two": (aten.view, rand(2, 6, 4), [2, 24]),
    "view of a slice": (aten.view, rand(4, 1, 6)[2:3], [1, 1, 6]),
    "layer_norm_backward": layer_norm_backward(COLUMNS, rand(4, 3).t(), True, True, True),
    "layer_norm_backward of weights": layer_norm_backward(
        rand(3, 4), rand(3, 4), False, True, True
    ),
    "log_softmax_backward": (
        aten._log_softmax_backward_data,
        LAYOUTS["a transposed input"],
        LAYOUTS["a transposed input"],
        1,
        torch.float32,
    ),
    "logsigmoid": (aten.log_sigmoid_forward, LAYOUTS["channels last"]),
    "huber_loss_backward": (aten.huber_loss_backward, rand(), COLUMNS, rand(3, 4), 1, 1.0),
    "fold": (aten.col2im, rand(2, 18, 12), [6, 4], [3, 3], [1, 1], [1, 1], [2, 1]),
    "fold to more": (aten.col2im, rand(1, 3, 2), [9, 9], [1, 1], [1, 1], [0, 0], [8, 9]),
    "mse_loss_backward of columns": (MSE_BACKWARD, rand(), COLUMNS, rand(3, 4), 1),
    "mse_loss_backward": (MSE_BACKWARD, rand(1), NARROW, NARROW, 1),
    "mse_loss_backward, wide gradient": (MSE_BACKWARD, rand(5), NARROW, NARROW, 0),
}
for _name, _input in LAYOUTS.items():
    OTHERS[f"batch_norm of {_name}"] = batch_norm(_input, rand(4), rand(4))
    OTHERS[f"batch_norm_backward of {_name}"] = batch_norm_backward(_input)
for _dtype in (torch.float32, bf16, half):
    OTHERS[f"group_norm_backward of {_dtype}"] = group_norm_backward(_dtype)

CASES = NORMS | LOSSES | MIXED | FILLED | OTHERS


@pytest.mark.parametrize("name", CASES)
def test_a_fake_says_what_the_kernel_returns(name):
    op, *args = CASES[name]
    assert said(op, *args, target="cpu") == said(op, *args, target=None)


@pytest.mark.parametrize("name", ["hann", "hamming", "blackman", "bartlett", "kaiser"])
@pytest.mark.parametrize("numbers", [0, 1, 2, 9])
def test_a_periodic_window_is_a_longer_one_without_its_last_number(name, numbers):
    window = getattr(aten, f"{name}_window")
    for op, *more in ((window.default,), (window.periodic, False)):
        for target in ("cpu", "cuda"):
            expected = said(op, numbers, *more, target=None)
            assert said(op, numbers, *more, target=target) == expected
