"""What modules keep from one forward to the next, besides their weights.

A forward may count its calls, keep a mask for the next one, fill a queue, or make a module for
short rows. A forward that is only a question must not leave any of this behind.
"""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..compat.tensors import version

# Of some of these types there are subclasses that cannot be changed.
CONTAINERS = (list, dict, set, OrderedDict)


@contextmanager
def left_as_it_was(model: nn.Module) -> Iterator[None]:
    """At the end, give the modules of ``model`` the attributes, buffers, children and modes back
    that they have now.

    Lists, dicts and sets among the attributes get their items back, and tensors their numbers if
    those were changed in place. Copies of such numbers take at most as many bytes as the trained
    weights, as gradients will: beyond that, the largest tensors keep what was written into them.
    """
    attributes = {module: vars(module).copy() for module in model.modules()}
    items = {}  # buffers, parameters and children are in such dicts, too
    for values in attributes.values():
        for value in values.values():
            if type(value) in CONTAINERS:
                items[id(value)] = value, value.copy()
    numbers = [(tensor, version(tensor), tensor.clone()) for tensor in _tensors_to_copy(model)]
    try:
        yield
    finally:
        for module, values in attributes.items():
            vars(module).clear()
            vars(module).update(values)
        for value, held in items.values():
            _refill(value, held)
        for tensor, old_version, before in numbers:
            if version(tensor) != old_version:
                tensor.copy_(before)


def _refill(container: Any, items: Any) -> None:
    container.clear()
    if isinstance(container, list):
        container.extend(items)
    else:
        container.update(items)


def _tensors_to_copy(model: nn.Module) -> list[Tensor]:
    """The buffers, and tensors among the attributes, from the smallest on, as long as they take no
    more bytes than the trained weights.
    """
    found: dict[int, Tensor] = {}
    for module in model.modules():
        for value in [*vars(module).values(), *module.buffers(recurse=False)]:
            if type(value) is Tensor and _can_be_copied(value):
                found[id(value)] = value.detach()
    left = sum(weight.nbytes for weight in model.parameters() if weight.requires_grad)
    chosen = []
    for tensor in sorted(found.values(), key=lambda tensor: tensor.nbytes):
        left -= tensor.nbytes
        if left < 0:
            break
        chosen.append(tensor)
    return chosen


def _can_be_copied(tensor: Tensor) -> bool:
    """Whether ``tensor`` has numbers, and each of them a place of its own."""
    dense = tensor.layout == torch.strided and not tensor.is_meta
    return dense and not tensor.is_inference() and 0 not in tensor.stride()
