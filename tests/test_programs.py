"""The tracker against the CPU allocator, for training steps that people write.

The allocator's events come from PyTorch's profiler, which knows nothing of the tracker: every block taken and given back.
Blocks that one operation takes and gives back before it returns are left out, since no dispatch mode can see them.
"""

from __future__ import annotations

import gc
import os
from functools import cache
from types import FunctionType

import programs_layers
import programs_loops
import programs_methods
import pytest
import torch
from programs import PROGRAMS
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader

from gradmem_lib import MemoryTracker

assert programs_methods and programs_layers and programs_loops  # they fill PROGRAMS
CHOSEN = list(PROGRAMS) if os.environ.get("GRADMEM_ALL") else list(PROGRAMS)[::4]

# Bytes that the tracker counts and the program takes only under a tracker. Autograd adds gradients up in place unless a
# dispatch mode is on (isTensorSubclassLike in torch 2.13), and the tracker is one.
OBSERVED = {"bidirectional_lstm_on_packed_rows": 49_152, "orthogonal": 16_384, "sparse_embedding": 512}
# An operation makes a tensor of a Python number, outside of every dispatch.
NUMBERS = 16
WRONG: dict[str, str] = {"lbfgs": "the profiler does not see that states of before its start are freed"}


@cache
def composite(name: str) -> bool:
    """Whether an operation is made of others: what it takes and gives back between two of them can be seen."""
    namespace, _, base = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), base, None) if base.isidentifier() else None
    for overload in getattr(packet, "overloads", list)():
        whole = f"{name}.{overload}".removesuffix(".default")
        if torch._C._dispatch_has_kernel(whole):
            return torch._C._dispatch_has_kernel_for_dispatch_key(whole, "CompositeImplicitAutograd")
    return True


def blocks(nodes, inside=None):
    """(time, bytes, address, the operation that it is inside of) of every block taken or given back."""
    for node in nodes:
        if node.tag == _EventType.Allocation:
            yield node.start_time_ns, node.extra_fields.alloc_size, node.extra_fields.ptr, inside
        own = inside
        if own is None and node.tag == _EventType.TorchOp and not composite(node.name):
            own = node.id
        yield from blocks(node.children, own)


def allocator_peak(step) -> int:
    """The most bytes above those at the start, from the CPU allocator's events of one step."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
        step()
    events = sorted(blocks(run.profiler.kineto_results.experimental_event_tree()))
    taken, scratch = {}, set()
    for n, (_, nbytes, address, inside) in enumerate(events):
        if nbytes > 0:
            taken[address] = n, inside
        elif address in taken:
            first, by = taken.pop(address)
            if inside is not None and inside == by:
                scratch |= {first, n}
    now = peak = 0
    for n, (_, nbytes, _, _) in enumerate(events):
        now += 0 if n in scratch else nbytes
        peak = max(peak, now)
    return peak


def held(value):
    """The tensors that a step brings along: batches, masks, queues."""
    if isinstance(value, torch.Tensor):
        yield from [value] if value.layout == torch.strided else [value._indices(), value._values()]
    elif isinstance(value, DataLoader):
        yield from value.dataset.tensors
    elif isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            yield from held(each)
    elif isinstance(value, FunctionType):
        for cell in value.__closure__ or ():
            yield from held(cell.cell_contents)


def storages(tensors) -> dict[int, int]:
    return {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}


def measured(name: str):
    """A tracker over the third step of a program, its bytes above the start at the peak, and the allocator's of the fourth."""
    torch.manual_seed(0)
    model, optimizers, step = PROGRAMS[name]()
    step()
    step()
    gc.collect()
    own = storages([*model.parameters(), *model.buffers()])
    with MemoryTracker(model, optimizers, live=False) as tracker:
        tracker.watch([t for t in held(step) if t.is_leaf and t.untyped_storage()._cdata not in own], "other")
        start = tracker.current.total
        step()
    return tracker, tracker.peak.total - start, allocator_peak(step)


def every_program(**more: str):
    """A test for each program; those of ``WRONG`` and ``more`` (name=reason) fail, until they no longer do."""
    wrong = WRONG | more
    marks = {name: pytest.mark.xfail(reason=reason, strict=True) for name, reason in wrong.items()}
    return pytest.mark.parametrize(
        "name", [pytest.param(name, marks=marks[name]) if name in marks else name for name in CHOSEN]
    )


def test_there_are_as_many_as_we_say():
    assert len(PROGRAMS) >= 60


@every_program()
def test_the_peak_is_the_allocators(name):
    tracker, found, expected = measured(name)
    assert 0 <= expected - (found - OBSERVED.get(name, 0)) <= NUMBERS
    assert sum(tracker.peak.by_category.values()) == tracker.peak.total
    assert min(tracker.peak.by_category.values()) >= 0


def states(value):
    """The tensors in an optimizer's state, however deep they lie."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            yield from states(each)


@every_program(lbfgs="states in lists")
def test_what_stays_after_a_step_is_parameters_states_and_the_rest(name):
    torch.manual_seed(0)
    model, optimizers, step = PROGRAMS[name]()
    with MemoryTracker(model, optimizers, live=False) as tracker:
        step()
        step()
    optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
    kept = {
        kind: sum(sizes.values())
        for kind, sizes in {
            "parameters": storages(model.parameters()),
            "optimizer": storages(t for o in optimizers for t in states(dict(o.state))),
            "gradients": storages(p.grad for p in model.parameters() if p.grad is not None),
        }.items()
    }
    assert {kind: tracker.current.by_category[kind] for kind in kept} == kept
    assert tracker.current.by_category["temporaries"] == 0
