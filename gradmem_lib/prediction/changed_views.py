"""Views that a step changes in place, and what their backward allocates.

``F.relu(x.view(...), inplace=True)`` changes a view. On real tensors, autograd then forgets how the
view was made, and knows it by its strides: the backward of ``as_strided`` writes the gradient into
a new tensor as large as the view's base (``as_strided_backward`` in PyTorch's
torch/csrc/autograd/FunctionsManual.cpp). On fake tensors, autograd makes the view again by the same
operation, whose backward allocates nothing. Here this new tensor is made on fake tensors too.
"""

import inspect
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from ..compat import base_of, graph_task
from .question import CannotTrace

# The backwards of views that return a view of the gradient.
_RETURN_VIEWS = {
    f"{name}Backward0"
    for name in ("View", "Permute", "Transpose", "T", "Unsqueeze", "Alias", "UnsafeView")
} | {"SqueezeBackward0", "SqueezeBackward1", "SqueezeBackward2"}
# Those that write the gradient into a new tensor as large as what the view was made of.
_FILL_ZEROS = {"SelectBackward0", "SliceBackward0", "AsStridedBackward0"}


class ChangedViews(TorchFunctionMode):
    """While it is active, the backwards of changed views allocate as those of real tensors."""

    def __init__(self) -> None:
        super().__init__()
        self._pending: list[Tensor] = []

    def note(self, view: Tensor) -> None:
        """``view`` is being changed, and autograd does not know it yet."""
        if graph_task() == -1:
            self._pending.append(view)
        elif _is_in_reentrant_checkpoint():
            raise CannotTrace(
                f"a view of shape {tuple(view.shape)} is changed in place in a layer that is "
                "recomputed with use_reentrant=True: give use_reentrant=False, or change a copy "
                "(inplace=False)"
            )
        # Otherwise the layer is computed again only for what its first forward did not keep.

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        while self._pending:
            _correct_backward(self._pending.pop())
        return out


def _is_in_reentrant_checkpoint() -> bool:
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not CheckpointFunction.backward.__code__:
        frame = frame.f_back
    return frame is not None


def _correct_backward(view: Tensor) -> None:
    base, node = base_of(view), view.grad_fn
    if node is None:
        return
    nodes: list[Any] = []
    while node is not None and node is not base.grad_fn:
        nodes.append(node)
        node = node.next_functions[0][0]
    names = [node.name() for node in nodes]
    filling = [name for name in names if name in _FILL_ZEROS]
    known = _RETURN_VIEWS | _FILL_ZEROS
    if node is None or not known.issuperset(names) or len(filling) > 1:
        nodes[0].register_prehook(_refuse)  # it is called only if the view was used afterwards
    elif not filling:
        nodes[0].register_prehook(_Written(view, base))


def _refuse(gradients: tuple[Tensor]) -> None:
    raise CannotTrace(
        f"a view of shape {tuple(gradients[0].shape)} is changed in place and used afterwards, and "
        "what its backward allocates is not known: change a copy instead (x = x * 2, not x *= 2; "
        "inplace=False), or measure one real step with MemoryTracker"
    )


class _Written:
    """Writes a view's gradient into a new tensor as large as the base."""

    def __init__(self, view: Tensor, base: Tensor):
        self.shape, self.stride = view.shape, view.stride()
        self.offset = view.storage_offset() - base.storage_offset()
        self.size = 1  # numbers from the first one of the base to its last one
        for length, stride in zip(base.shape, base.stride(), strict=True):
            self.size += (length - 1) * stride

    def __call__(self, gradients: tuple[Tensor]) -> tuple[Tensor]:
        whole = gradients[0].new_zeros(self.size)
        part = whole.as_strided(self.shape, self.stride, self.offset)
        part.copy_(gradients[0])
        return (part,)
