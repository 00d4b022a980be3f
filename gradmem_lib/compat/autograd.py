"""Autograd's graph and backward: tasks, nodes, and the sums of gradients."""

import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.utils.checkpoint
from torch import Tensor

from .fake_tensors import FakeTensor

# Autograd's graph: the task that runs (-1: no backward), the node that runs, and the number that
# the next node gets.
graph_task: Callable[[], int] = torch._C._current_graph_task_id
current_node: Callable[[], Any] = torch._C._current_autograd_node
next_sequence_nr: Callable[[], int] = torch.autograd._get_sequence_nr


def in_backward() -> bool:
    """Whether a backward runs in this thread."""
    return graph_task() != -1


NO_NUMBER = 2**64 - 1


def sequence_nr(node) -> int:
    """A node's position in the order in which nodes were created.

    ``NO_NUMBER`` for ``None`` and for nodes without a number.
    """
    return NO_NUMBER if node is None else node._sequence_nr()


# A Function that is defined inside a function has types of its own, which must not be kept.
_NAMES_OF_SAVED: WeakKeyDictionary[type, list[str]] = WeakKeyDictionary()


def kept_by_node(node) -> list:
    """What a node keeps for its backward, as it was packed: nothing is unpacked or computed. A node
    of a ``torch.autograd.Function`` has attributes as well, and the last node before a tensor that
    needs a gradient has this tensor.
    """
    kind = type(node)
    if kind not in _NAMES_OF_SAVED:
        _NAMES_OF_SAVED[kind] = [name for name in dir(kind) if name.startswith("_raw_saved")]
    kept = list(getattr(node, "__dict__", {}).values())
    kept.append(getattr(node, "variable", None))
    for name in _NAMES_OF_SAVED[kind]:
        try:
            saved = getattr(node, name)
        except RuntimeError:
            continue  # a backward has freed it
        for each in saved if isinstance(saved, (tuple, list)) else (saved,):
            with suppress(RuntimeError):
                kept.append(each.data)
    return kept


def gives_one_tensor_twice(node) -> bool:
    """Whether two of a node's gradients belong to the same tensor, as in ``x * x``."""
    targets = [target for target in node.next_functions if target[0] is not None]
    return len(set(targets)) < len(targets)


# What a dispatch mode sees of a gradient that nothing but autograd's buffer holds: the buffer, the
# call and Python's tensor refer to it, and it and Python's storage refer to its storage.
_HELD_BY_BUFFER, _STORAGE_HELD_ONCE = 4, 2


def would_be_added_in_place(gradient: Tensor) -> bool:
    """Whether autograd, without a dispatch mode, would write a sum of gradients into ``gradient``.

    It does so if nobody else refers to the gradient. To be asked about the first argument of the
    addition, by a dispatch mode, while the addition runs. Seen in torch 2.13:
    ``torch/csrc/autograd/input_buffer.cpp``, ``can_accumulate_inplace``.
    """
    plain = type(gradient) in (Tensor, FakeTensor)
    if not plain or gradient._use_count() != _HELD_BY_BUFFER:
        return False
    references = torch._C._storage_Use_Count(gradient.untyped_storage()._cdata)
    dense = torch.ops.aten.is_non_overlapping_and_dense.default(gradient)
    return references == _STORAGE_HELD_ONCE and dense


def runs_a_formula(node) -> bool:
    """Whether ``node`` has one of autograd's own formulas, and no Python code of a
    ``torch.autograd.Function``.
    """
    return node is not None and not isinstance(node, torch.autograd.function.FunctionCtx)


def saved_by_checkpoint() -> bool:
    """In a saved-tensors hook: whether a checkpoint saves its arguments.

    It shows in the file of the caller, two calls out.
    """
    frame: Any = sys._getframe(3)
    # older torch saves by a Function
    while frame.f_code.co_filename == torch.autograd.function.__file__:
        frame = frame.f_back
    return frame.f_code.co_filename == torch.utils.checkpoint.__file__


def determinism_check(described: Callable[[Tensor], Any]) -> str:
    """The name with which ``checkpoint(..., determinism_check=name)`` compares what ``described``
    returns for each tensor that its two runs save.
    """
    name = described.__qualname__
    torch.utils.checkpoint._allowed_determinism_checks_to_fns[name] = described
    return name
