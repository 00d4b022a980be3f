"""Which operation computes in which dtype: shows what autocast really does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ...compat.dispatch_modes import TorchDispatchMode
from ...compat.trees import tree_leaves


class _Dtypes(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        given = [t.dtype for t in tree_leaves(args) if isinstance(t, Tensor)]
        made = out[0] if isinstance(out, tuple) else out
        floats = [d for d in given if d.is_floating_point]
        if floats and isinstance(made, Tensor) and not func.is_view:
            names = [
                str(d).removeprefix("torch.")
                for d in (max(floats, key=lambda d: d.itemsize), made.dtype)
            ]
            self.seen[(func.overloadpacket.__name__.strip("_"), *names)] += 1
        return out


def operation_dtypes(run: Callable[[], Any]) -> dict[tuple[str, str, str], int]:
    """How often each operation ran in ``run()``: (its name, the widest dtype of its arguments, the
    dtype of its result).

    Casts are ``to_copy``. Views copy no numbers, and are left out.
    """
    with _Dtypes() as mode:
        run()
    return dict(mode.seen)
