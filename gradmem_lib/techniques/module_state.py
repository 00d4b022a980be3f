"""What modules keep from one forward to the next.

A forward may count its calls, keep a mask for the next one, fill a queue, average weights, or make
a module for short rows. A forward that is only a question must not leave any of this behind.
"""

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

# Exact types only: a subclass, such as a dict that is frozen, may refuse what `_refill` does.
_CONTAINERS = (list, dict, set, deque, OrderedDict, Counter, defaultdict)
# Copies may take so many times the bytes of the trained weights: about what gradients and one
# state of an optimizer will take.
_COPIED = 2


@contextmanager
def left_as_it_was(model: nn.Module) -> Iterator[None]:
    """After the block, put back what the modules of ``model`` have when it begins: their
    attributes, buffers, parameters, children and modes.

    Containers among the attributes get their items back, and tensors their memory. Numbers that
    were changed in place are put back, too, except those of trained weights, which no copy is made
    of. Copies take at most twice the bytes of the trained weights: beyond that, the largest tensors
    keep what was written into them.
    """
    classes = [(module, type(module)) for module in model.modules()]  # of lazy ones they change
    # Buffers, parameters and children are in containers among the attributes.
    attributes = [vars(module) for module in model.modules()]
    tensors = list(filter(_has_numbers, _reached_from(attributes)))
    old_items, old_tensors = Contents(attributes), _remembered(tensors, model)
    try:
        yield
    finally:
        old_items.put_back()
        for module, kind in classes:
            module.__class__ = kind
        for old in old_tensors:
            old.put_back()


class Contents:
    """The items that some containers have, those inside them too. The items are not copied."""

    def __init__(self, containers: Iterable[Any]):
        self.items = []
        for value in _reached_from(containers):
            if type(value) in _CONTAINERS:
                self.items.append((value, value.copy()))

    def put_back(self) -> None:
        for container, items in self.items:
            _refill(container, items)


def _reached_from(values: Iterable[Any]) -> Iterator[Any]:
    """The ``values``, and those in containers and dataclasses among them."""
    waiting = list(values)
    seen: set[int] = set()
    while waiting:
        value = waiting.pop()
        if is_dataclass(value):
            value = getattr(value, "__dict__", ())  # which has its fields, but for those in slots
        if id(value) in seen:
            continue
        seen.add(id(value))
        yield value
        if type(value) in (tuple, *_CONTAINERS):
            waiting += value.values() if isinstance(value, dict) else value


def _refill(container: Any, items: Any) -> None:
    container.clear()
    if isinstance(container, list | deque):
        container.extend(items)
    else:
        container.update(items)


class _OldTensor(NamedTuple):
    tensor: Tensor
    memory: Tensor  # which `tensor.data = …` replaces
    numbers: Tensor | None  # a copy

    def put_back(self) -> None:
        if self.tensor.data_ptr() != self.memory.data_ptr():
            self.tensor.data = self.memory
        # Compared, since a write through `.data` changes no version. Without a change nothing is
        # written: a graph may need the tensor as it is.
        if self.numbers is not None and not torch.equal(self.memory, self.numbers):
            self.memory.copy_(self.numbers)


def _remembered(tensors: Iterable[Tensor], model: nn.Module) -> list[_OldTensor]:
    """Each tensor with its memory and, from the smallest on, copies of those that no optimizer
    changes.
    """
    trained = {id(weight): weight for weight in model.parameters() if weight.requires_grad}
    left = _COPIED * sum(weight.nbytes for weight in trained.values())
    found = []
    for tensor in sorted(tensors, key=lambda tensor: tensor.nbytes):
        numbers = None
        if id(tensor) not in trained:
            left -= tensor.nbytes
            if left >= 0:
                numbers = tensor.detach().clone()
        found.append(_OldTensor(tensor, tensor.detach(), numbers))
    return found


def _has_numbers(value: Any) -> bool:
    """Whether ``value`` is a dense tensor with memory, of which no number lies upon another, as
    those of an expanded tensor do.
    """
    if type(value) not in (Tensor, nn.Parameter) or value.layout != torch.strided:
        return False
    return not value.is_meta and not value.is_inference() and 0 not in value.stride()
