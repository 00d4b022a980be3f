"""The tracker against the CPU allocator, for training steps that people write."""

from __future__ import annotations

import gc
from contextlib import nullcontext

import pytest
import torch
from support import programs_layers, programs_loops, programs_methods, programs_swaps
from support.nightly import each
from support.oracle import allocator_peak, without_collections
from support.programs import PROGRAMS
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from gradmem_lib import MemoryTracker

FILES = (programs_methods, programs_layers, programs_loops, programs_swaps)  # they fill PROGRAMS

# Bytes that a program takes only under a dispatch mode, whichever, and the tracker is one
# (isTensorSubclassLike in torch 2.13). Autograd adds gradients up in place unless a mode is on: the
# tracker shows the program as it is without. What it shows is that autograd copies a sparse
# gradient, that the backward of a matrix exponential joins its blocks with `cat`, and that the
# backwards of the last five programs make other temporaries.
UNDER_A_MODE = {
    "bidirectional_lstm_on_packed_rows": 49_152,
    "orthogonal": 16_384,
    "sparse_embedding": 512,
    "product_of_a_row": 30_464,
    "products_along_a_row": 37_504,
    "binary_loss_with_pos_weight": 24_576,
    "orthogonal_by_householder": -260,
    "householder_product": -2_056,
}
SHOWN = set(UNDER_A_MODE) - {"bidirectional_lstm_on_packed_rows"}
# Its other backward also rounds otherwise: how far its weights may be off, after three steps.
ROUNDED = {"product_of_a_row": 1e-6}
# Every third program, and those that differ under a mode: each difference is a figure of its own.
CHOSEN = dict.fromkeys([*each(3, PROGRAMS), *UNDER_A_MODE])
# An operation makes a tensor of a Python number, outside of every dispatch.
NUMBERS = 16


class Looking(TorchDispatchMode):
    """Changes nothing."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def there_already(but: dict[int, int]) -> list[torch.Tensor]:
    """Tensors that live now, such as batches, masks, and what a hook has put away, except those in
    the storages of ``but``.
    """
    gc.collect()
    found = []
    for tensor in gc.get_objects():
        is_tensor = issubclass(type(tensor), torch.Tensor) and type(tensor) is not FakeTensor
        if not is_tensor or tensor.device.type != "cpu":
            continue
        parts = [tensor]
        if tensor.layout != torch.strided:
            parts = [tensor._indices(), tensor._values()]
        found += [part for part in parts if part.untyped_storage()._cdata not in but]
    return found


def storages(tensors) -> dict[int, int]:
    return {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}


def tracked(name: str) -> tuple[MemoryTracker, int]:
    """A tracker over the third step of a program, and its bytes above the start at the peak."""
    torch.manual_seed(0)
    model, optimizers, step = PROGRAMS[name]()
    step()
    step()
    own = storages([*model.parameters(), *model.buffers()])
    with without_collections(), MemoryTracker(model, optimizers, live=False) as tracker:
        tracker.watch(there_already(own), "other")
        start = tracker.current.total
        step()
    return tracker, tracker.peak.total - start


def allocated(name: str, mode=None) -> int:
    """The same step's bytes, as the CPU's allocator gave them out."""
    torch.manual_seed(0)
    *_, step = PROGRAMS[name]()
    with mode or nullcontext():
        return allocator_peak(step, before=2)


every_program = pytest.mark.parametrize("name", CHOSEN)


@every_program
def test_the_peak_is_the_allocators(name):
    (tracker, found), expected = tracked(name), allocated(name)
    if name in UNDER_A_MODE:
        assert allocated(name, Looking()) - expected == UNDER_A_MODE[name]
    if name in SHOWN:
        expected += UNDER_A_MODE[name]
    assert 0 <= expected - found <= NUMBERS
    assert sum(tracker.peak.by_category.values()) == tracker.peak.total
    assert min(tracker.peak.by_category.values()) >= 0


def states(value):
    """The tensors in an optimizer's state, however deep they lie."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from states(inner)


@every_program
def test_what_stays_after_a_step_is_parameters_states_and_the_rest(name):
    torch.manual_seed(0)
    model, optimizers, step = PROGRAMS[name]()
    with MemoryTracker(model, optimizers, live=False) as tracker:
        step()
        step()
    if not isinstance(optimizers, list):
        optimizers = [optimizers]
    tensors = {
        "parameters": model.parameters(),
        "optimizer": states([dict(optimizer.state) for optimizer in optimizers]),
        "gradients": [p.grad for p in model.parameters() if p.grad is not None],
    }
    kept = {kind: sum(storages(of_kind).values()) for kind, of_kind in tensors.items()}
    assert {kind: tracker.current.by_category[kind] for kind in kept} == kept
    assert tracker.current.by_category["temporaries"] == 0


def weights_after(name: str, track: bool) -> list[torch.Tensor]:
    """All parameters and buffers after three steps."""
    torch.manual_seed(0)
    model, optimizers, step = PROGRAMS[name]()
    with MemoryTracker(model, optimizers, live=False) if track else nullcontext():
        for _ in range(3):
            step()
    return [t.detach().clone() for t in (*model.parameters(), *model.buffers())]


@every_program
def test_the_results_are_the_same_to_the_bit(name):
    alone, under_a_tracker = weights_after(name, track=False), weights_after(name, track=True)
    assert len(alone) == len(under_a_tracker) > 0
    off = ROUNDED.get(name, 0)
    for expected, found in zip(alone, under_a_tracker, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=off, equal_nan=True)
