"""What modules keep from one forward to the next.

A forward may count its calls, keep a mask for the next one, fill a queue, average weights, or make
a module for short rows. A forward that is only a question must not leave any of this behind.
"""

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
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
    old_attributes = {module: vars(module).copy() for module in model.modules()}
    old_items = []  # buffers, parameters and children are in such containers, too
    tensors: dict[int, Tensor] = {}
    for value in _reached_from(old_attributes.values()):
        if type(value) in _CONTAINERS:
            old_items.append((value, value.copy()))
        elif _has_numbers(value):
            tensors[id(value)] = value
    old_tensors = _remembered(tensors.values(), model)
    try:
        yield
    finally:
        for module, attributes in old_attributes.items():
            vars(module).clear()
            vars(module).update(attributes)
        for container, items in old_items:
            _refill(container, items)
        for old in old_tensors:
            old.put_back()


def _reached_from(tables: Iterable[dict]) -> Iterator[Any]:
    """The values of ``tables``, and those in containers among them."""
    waiting: list[Any] = [value for table in tables for value in table.values()]
    seen: set[int] = set()
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        yield value
        if type(value) in _CONTAINERS:
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
