"""What no dispatch shows and is told to a meter while its block runs: calls of modules, and storages that are resized."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from .watch import Meter


@contextmanager
def module_calls(meter: Meter) -> Iterator[None]:
    """While the block runs, ``meter`` hears of every module's call.

    A hook on the model would be copied and pickled with it, and hooks on all modules cost twice as much as this.
    """
    call = nn.Module.__call__

    def __call__(self, *args, **kwargs):
        entered = meter.enter_module(self, args, kwargs)
        try:
            return call(self, *args, **kwargs)
        finally:
            if entered:
                meter.leave_module()

    nn.Module.__call__ = __call__
    try:
        yield
    finally:
        nn.Module.__call__ = call


@contextmanager
def resizes(meter: Meter) -> Iterator[None]:
    """While the block runs, ``meter`` hears of ``UntypedStorage.resize_``, by which FSDP frees memory: it does not dispatch."""
    own = "resize_" in vars(torch.UntypedStorage)
    resize = torch.UntypedStorage.resize_

    def resize_(self, size):
        out = resize(self, size)
        meter.resized(self)
        return out

    torch.UntypedStorage.resize_ = resize_
    try:
        yield
    finally:
        if own:
            torch.UntypedStorage.resize_ = resize
        else:
            del torch.UntypedStorage.resize_
