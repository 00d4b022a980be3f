"""The operations that run inside a block."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class Operations(TorchDispatchMode):
    """Each function, with its arguments and its result."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.seen.append((func, args, kwargs, result))
        return result
