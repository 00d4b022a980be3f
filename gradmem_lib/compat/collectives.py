"""Collectives: operations in which all ranks of a process group take part."""

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from .fake_tensors import FakeTensor
from .trees import tree_leaves

_c10d = torch.ops.c10d
all_reduce, all_gather = _c10d.allreduce_.default, _c10d._allgather_base_.default
collectives = (
    all_reduce,
    all_gather,
    _c10d._reduce_scatter_base_.default,
    _c10d.broadcast_.default,
)


def run_collective_synchronously(func: Callable, *args: Any, **kwargs: Any) -> Any:
    """Run the collective ``func``, and return its result when gloo has released the tensors.

    One of gloo's threads holds them for some time after the wait, so the live bytes would differ
    from run to run.
    """
    tensors = [t for t in tree_leaves(args) if isinstance(t, Tensor)]
    if any(type(t) is FakeTensor or t.device.type != "cpu" for t in tensors):
        return func(*args, **kwargs)
    use_counts = [t._use_count() for t in tensors]
    torch._C._distributed_c10d.Work.unbox(func(*args, **kwargs)[1]).wait()
    end = time.monotonic() + 1
    while (
        any(t._use_count() > n for t, n in zip(tensors, use_counts, strict=True))
        and time.monotonic() < end
    ):
        time.sleep(1e-5)
    results, work = finished_all_reduce(tree_leaves(args[0]))
    return results if isinstance(args[0], list) else results[0], work


def finished_all_reduce(tensors: Iterable[Tensor]) -> tuple[list[Tensor], Any]:
    """The result of a finished ``all_reduce``.

    It is the tensors, and a work object whose future holds them.
    """
    future: torch.futures.Future = torch.futures.Future()
    future.set_result(list(tensors))
    return list(tensors), torch._C._distributed_c10d._create_work_from_future(future).boxed()
