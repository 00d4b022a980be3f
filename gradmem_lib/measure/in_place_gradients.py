"""What autograd writes in place, and into a new tensor while any dispatch mode is active.

Where a tensor is used twice, autograd adds up its gradients. And a few of its formulas fill zeros
that they have just made. The recording shows the program as it is without the tracker, so the first
gradient's bytes, or those of the zeros, become the result's.
"""

from typing import Any

import torch
from torch import UntypedStorage

from .. import names
from ..compat.autograd import (
    current_node,
    gives_one_tensor_twice,
    runs_a_formula,
    sequence_nr,
    would_be_added_in_place,
)
from ..compat.tensors import storage_key
from .recording import Entry, Recording


class InPlaceGradients:
    """Which tensors of ``recording`` autograd would write into without a dispatch mode."""

    def __init__(self, recording: Recording):
        self.recording = recording
        self.freed: Entry | None = None  # by the latest operation; the tensor itself still exists
        # The node of autograd's graph that allocated last, by its number, and what it allocated.
        self._node, self._made_by_node = -1, set[int]()

    def note_allocation(self, storage: UntypedStorage) -> None:
        """Remember that the node that runs has allocated ``storage``."""
        number = sequence_nr(current_node())
        if number != self._node:
            self._node, self._made_by_node = number, set()
        self._made_by_node.add(storage_key(storage))

    def free_first(self, args: tuple) -> None:
        """Stop counting the first tensor of an addition, if it is one of autograd's own additions
        that would be in place.
        """
        if len(args) != 2 or torch.is_grad_enabled() or not all(map(torch.is_tensor, args)):
            return
        gradient = args[0]
        if not would_be_added_in_place(gradient):
            return
        node = current_node()
        # A node's own formula may add up what it has just computed, and that is never in place.
        if node is None or (self._made_by(node, gradient) and not gives_one_tensor_twice(node)):
            return
        self._free(gradient)

    def free_filled(self, args: tuple, out: torch.Tensor) -> None:
        """Stop counting the first tensor of an operation, if a formula of autograd has just made it
        and would write the result into it.
        """
        first, node = args[0], current_node()
        # Transforms of torch.func compute gradients with grad mode on, and never in place.
        if torch.is_grad_enabled() or not runs_a_formula(node):
            return
        if first.dtype != out.dtype or first.shape != out.shape:
            return
        if self._made_by(node, first):
            self._free(first)

    def _made_by(self, node: Any, tensor: torch.Tensor) -> bool:
        """Whether ``node``, which runs, has allocated the storage of ``tensor``."""
        if self._node != sequence_nr(node):
            return False
        return storage_key(tensor.untyped_storage()) in self._made_by_node

    def _free(self, tensor: torch.Tensor) -> None:
        """Stop counting ``tensor``, if it is a temporary."""
        entry = self.recording.live.get(storage_key(tensor.untyped_storage()))
        if entry is not None and entry.category == names.TEMPORARIES:
            self.recording.on_free(entry)
            self.freed = entry

    def check_freed(self) -> None:
        """Count a tensor again that should have been freed by now, and is still there."""
        entry, self.freed = self.freed, None
        if entry is None:
            return
        storage = entry()
        if storage is not None:
            owner, line = entry.module, entry.line
            self.recording.on_alloc(storage, entry.category, owner, entry.op, None, line)
