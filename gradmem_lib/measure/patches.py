"""What no dispatch shows and is told to a meter while its block runs: calls of modules, and storages that are resized."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def module_calls(enter: Callable[..., bool], leave: Callable[[], None]) -> Iterator[None]:
    """While the block runs, every module's call begins with ``enter(module, args, kwargs)``; ``leave()`` ends it if that was true.

    A hook on the model would be copied and pickled with it, and hooks on all modules cost twice as much as this.
    """
    call = nn.Module.__call__

    def __call__(self, *args, **kwargs):
        entered = enter(self, args, kwargs)
        try:
            return call(self, *args, **kwargs)
        finally:
            if entered:
                leave()

    nn.Module.__call__ = __call__
    try:
        yield
    finally:
        nn.Module.__call__ = call


@contextmanager
def resizes(resized: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """While the block runs, ``resized(storage)`` is told of ``UntypedStorage.resize_``, by which FSDP frees memory: it does not dispatch."""
    own = "resize_" in vars(torch.UntypedStorage)
    resize = torch.UntypedStorage.resize_

    def resize_(self, size):
        out = resize(self, size)
        resized(self)
        return out

    torch.UntypedStorage.resize_ = resize_
    try:
        yield
    finally:
        if own:
            torch.UntypedStorage.resize_ = resize
        else:
            del torch.UntypedStorage.resize_
