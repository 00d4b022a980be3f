"""Observers of a training loop: which losses a gradient went back through, how many graphs were
alive, and what each update was made of. They change nothing and explain nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from .settings import gradients_of


class _Mark:
    """Alive as long as a graph has what it saved."""


class Graphs:
    """``loss_and_count`` that also notes its calls.

    ``backwards``: the number of items of each loss that a gradient went back through, in order.
    ``kept``: graphs that were alive beside the newest one, at most; 0 for a loop that lets go of
    each graph before the next forward.
    """

    def __init__(self, loss_and_count: Callable):
        self.loss_and_count = loss_and_count
        self.backwards: list[int] = []
        self.kept = 0
        self._marks: list[weakref.ref] = []

    def __call__(self, micro):
        alive = sum(mark() is not None for mark in self._marks)
        self.kept = max(self.kept, alive - 1)  # the last one may still have its name in a loop
        mark = _Mark()

        def pack(tensor):
            # The graph holds the mark; backward lets go of it, and so does the end of the graph.
            return mark, tensor.detach()

        with saved_tensors_hooks(pack, lambda packed: packed[1]):
            loss, count = self.loss_and_count(micro)
        self._marks.append(weakref.ref(mark))
        if loss.requires_grad:
            loss.register_hook(lambda _: self.backwards.append(int(count)))
        return loss, count


class Updates:
    """What is given to an optimizer: for each update, the ``gradients`` of all weights in a row,
    and the items of each loss that a gradient ``went_back`` through since the update before.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, graphs: Graphs):
        self.gradients: list[torch.Tensor] = []
        self.went_back: list[list[int]] = []

        def look() -> None:
            self.gradients.append(gradients_of(model))
            self.went_back.append(sorted(set(graphs.backwards)))
            graphs.backwards.clear()

        before_each_update(optimizer, look)


def before_each_update(optimizer: torch.optim.Optimizer, look: Callable[[], None]):
    """``look()`` before the optimizer changes the weights, and after the closure that ``step()``
    may have been given, which is where some answers compute their gradients. Returns the handle of
    the hook.
    """

    def hook(optimizer, args, kwargs):
        closure = kwargs.get("closure") or (args[1] if len(args) > 1 else None)
        if closure is None:
            look()
            return None

        def closure_and_look():
            loss = closure()
            look()
            return loss

        return (optimizer, closure_and_look), {}

    return optimizer.register_step_pre_hook(hook)
