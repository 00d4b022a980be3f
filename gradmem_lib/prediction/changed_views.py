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

from ..compat.autograd import in_backward
from ..compat.tensors import base_of
from .question import CannotTrace

# Backwards of views, by autograd's names for them. These return a view of the gradient ...
_ALLOCATE_NOTHING = {
    "AliasBackward0",
    "PermuteBackward0",
    "SqueezeBackward0",
    "SqueezeBackward1",
    "SqueezeBackward2",
    "TBackward0",
    "TransposeBackward0",
    "UnsafeViewBackward0",
    "UnsqueezeBackward0",
    "ViewBackward0",
}
# ... and these write it into a new tensor of zeros, as large as what the view was made of.
_ALLOCATE_THE_WHOLE = {"AsStridedBackward0", "SelectBackward0", "SliceBackward0"}


class ChangedViews(TorchFunctionMode):
    """While it is active, the backwards of changed views allocate as those of real tensors.

    A recorder sees that an operator changes a view (``note``), at a time when autograd has not yet
    given the view its new backward. So the view waits until the function that called the operator
    returns (``__torch_function__``), and then its backward is corrected.
    """

    def __init__(self) -> None:
        super().__init__()
        self._pending: list[Tensor] = []  # changed views whose backwards are not corrected yet

    def note(self, view: Tensor) -> None:
        """``view`` is being changed, and autograd does not know it yet."""
        if not in_backward():
            self._pending.append(view)
        elif _is_in_reentrant_checkpoint():
            raise CannotTrace(
                f"a view of shape {tuple(view.shape)} is changed in place in a layer that is "
                "recomputed with use_reentrant=True: give use_reentrant=False, or change a copy "
                "(inplace=False)"
            )
        # Otherwise, as with use_reentrant=False, a layer runs again only to give the tensors that
        # its first forward did not keep. The graph is the first forward's, and corrected there.

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        # Now autograd knows of the change.
        while self._pending:
            _correct_backward(self._pending.pop())
        return out


def _is_in_reentrant_checkpoint() -> bool:
    """Whether the backward of a checkpoint with ``use_reentrant=True`` is among the callers.

    It runs the layer again as a forward with a graph of its own, and nothing else tells that.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is CheckpointFunction.backward.__code__:
            return True
        frame = frame.f_back
    return False


def _correct_backward(view: Tensor) -> None:
    """Make the backward of ``view`` allocate what it does on real tensors, or refuse to run."""
    if view.grad_fn is None:
        return
    base = base_of(view)
    nodes, reaches_base = _backwards_down_to(base, view)
    if not nodes:  # the view's gradient is the base's own: nothing lies between
        return
    names = [node.name() for node in nodes]
    whole = [name for name in names if name in _ALLOCATE_THE_WHOLE]
    is_known = reaches_base and set(names) <= _ALLOCATE_NOTHING | _ALLOCATE_THE_WHOLE
    # Both hooks are called only if the view was used afterwards: else its backward does not run.
    if not is_known or len(whole) > 1:
        nodes[0].register_prehook(_refuse)
    elif not whole:
        nodes[0].register_prehook(_WriteIntoBase(view, base))
    # A single one in ``whole`` allocates as much as as_strided's backward does: nothing is missing.


def _backwards_down_to(base: Tensor, view: Tensor) -> tuple[list[Any], bool]:
    """The nodes that pass the gradient of ``view`` to ``base``, and whether they reach it."""
    nodes: list[Any] = []
    node: Any = view.grad_fn
    while node is not None and node is not base.grad_fn:
        nodes.append(node)
        if not node.next_functions:  # the node of a leaf passes the gradient to nobody
            return nodes, False
        node = node.next_functions[0][0]
    return nodes, node is not None


def _refuse(gradients: tuple[Tensor]) -> None:
    raise CannotTrace(
        f"a view of shape {tuple(gradients[0].shape)} is changed in place and used afterwards, and "
        "what its backward allocates is not known: change a copy instead (x = x * 2, not x *= 2; "
        "inplace=False), or measure one real step with MemoryTracker"
    )


class _WriteIntoBase:
    """A hook that writes a view's gradient into a new tensor as large as the base.

    It returns the part of that tensor that the view shows. The part keeps all of it alive, as the
    result of as_strided's backward does.
    """

    def __init__(self, view: Tensor, base: Tensor):
        self.shape = view.shape
        self.stride = view.stride()
        self.offset = view.storage_offset() - base.storage_offset()
        self.size = 1  # numbers in memory from the first one of the base to its last one
        for length, stride in zip(base.shape, base.stride(), strict=True):
            self.size += (length - 1) * stride

    def __call__(self, gradients: tuple[Tensor]) -> tuple[Tensor]:
        whole = gradients[0].new_zeros(self.size)
        part = whole.as_strided(self.shape, self.stride, self.offset)
        part.copy_(gradients[0])
        return (part,)
