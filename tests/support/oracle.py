"""The CPU allocator's own account of a step: every block taken and given back, as PyTorch's
profiler saw it.

It knows nothing of the tracker. Blocks that one operation takes and gives back before it returns
are left out, since no dispatch mode can see them; and those that gloo takes for a collective (it
copies what it gathers and scatters).
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import torch
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function

MEASURED = "the step that is measured"


@cache
def composite(name: str) -> bool:
    """Whether an operation is made of others: what it takes and gives back between two of them can
    be seen.
    """
    namespace, _, base = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), base, None) if base.isidentifier() else None
    for overload in getattr(packet, "overloads", list)():
        whole = f"{name}.{overload}".removesuffix(".default")
        if torch._C._dispatch_has_kernel(whole):
            return torch._C._dispatch_has_kernel_for_dispatch_key(
                whole, "CompositeImplicitAutograd"
            )
    return True


def walk(nodes, inside=None):
    """(node, the operation that it is inside of) of everything that was profiled."""
    for node in nodes:
        yield node, inside
        own = inside
        by_gloo = node.name.startswith(("c10d::", "gloo:"))
        if by_gloo or (own is None and node.tag == _EventType.TorchOp and not composite(node.name)):
            own = node.id, by_gloo
        yield from walk(node.children, own)


@contextmanager
def without_collections():
    """Tensors in a circle of references go when Python happens to collect it, which is no part of a
    step.
    """
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def allocator_peak(step, before: int = 0) -> int:
    """The most bytes above those at its start that ``step()`` takes.

    ``before``: so many steps are run and profiled before it. A block's end is seen where its
    beginning was.
    """
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
        for _ in range(before):
            step()
        with without_collections(), record_function(MEASURED):
            step()
    nodes = list(walk(run.profiler.kineto_results.experimental_event_tree()))
    start = next(node.start_time_ns for node, _ in nodes if node.name == MEASURED)
    events = sorted(
        (node.start_time_ns, node.extra_fields.alloc_size, node.extra_fields.ptr, inside)
        for node, inside in nodes
        if node.tag == _EventType.Allocation
    )
    taken, scratch = {}, set()
    for n, (_, nbytes, address, inside) in enumerate(events):
        if nbytes > 0:
            taken[address] = n, inside
            if inside is not None and inside[1]:
                scratch.add(n)  # gloo's thread may give it back, which is not profiled
        elif address in taken:
            first, by = taken.pop(address)
            if first in scratch or (inside is not None and inside == by):
                scratch |= {first, n}
    live = np.cumsum([0, *(0 if n in scratch else event[1] for n, event in enumerate(events))])
    begun = sum(time < start for time, *_ in events)
    return int(live[begun:].max() - live[begun])


def storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """The bytes of each storage behind ``tensors``, by its address."""
    return {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}


def nbytes(tensors: Iterable[torch.Tensor]) -> int:
    """The bytes of the different storages behind ``tensors``."""
    return sum(storages(tensors).values())


def states(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in an optimizer's state, however deep they lie."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from states(inner)
