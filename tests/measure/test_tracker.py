"""MemoryTracker against independent counters: PyTorch's own MemTracker, and the CPU allocator's
events.
"""

import itertools
import sys
import threading

import numpy as np
import pytest
import torch
from support.nightly import ALL, each
from support.oracle import allocator_peak
from support.steps import MODELS, OPTIMIZERS, build
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.checkpoint import checkpoint

from gradmem_lib import MemoryTracker
from gradmem_lib.measure.storages import has_memory
from gradmem_lib.measure.watch import Watch
from gradmem_lib.names import CATEGORIES, PHASES


def both_peaks(model, opt, batch, step):
    """Peaks of the tracker and of PyTorch's MemTracker over one and the same step.

    The same, because MemTracker's own hooks keep some gradients a little longer: alone, it is 8192
    bytes above the allocator's events on the checkpointed BERT, and the tracker is not.
    """
    oracle = MemTracker()
    oracle.track_external(model, opt, *batch)
    with oracle, MemoryTracker(model, opt) as tracker:
        tracker.watch(batch, "other")
        step()
    return tracker, oracle.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]


# Each model in each precision, with and without checkpoints: with one of the optimizers in turn,
# half of them each time, and at night with all.
CASES = [
    (name, precision, optimizer, checkpointed)
    for i, (name, precision, checkpointed) in enumerate(
        itertools.product(MODELS, ["float32", "bf16", "autocast"], [False, True])
    )
    for optimizer in (OPTIMIZERS if ALL else [list(OPTIMIZERS)[(i + i // 3) % 3]])
]


@pytest.mark.parametrize(("name", "precision", "optimizer", "checkpointed"), each(2, CASES))
def test_peak_equals_pytorchs_memtracker(name, precision, optimizer, checkpointed):
    model, opt, batch, step = build(
        name, precision=precision, checkpointed=checkpointed, optimizer=optimizer
    )
    step()
    tracker, expected = both_peaks(model, opt, batch, step)
    assert tracker.peak.total == expected
    assert sum(tracker.peak.by_category.values()) == tracker.peak.total
    assert sum(h.nbytes for h in tracker.largest_at_peak(10**6)) == tracker.peak.total
    assert all(n >= 0 for n in tracker.peak.by_category.values())


@pytest.mark.parametrize(
    ("name", "checkpointed"), each(3, itertools.product(MODELS, [False, True]))
)
def test_peak_is_the_cpu_allocators_within_a_thousandth(name, checkpointed):
    # Large enough that the random-number states (5056 bytes a checkpoint), which the tracker cannot
    # see, are small.
    model, opt, batch, step = build(name, checkpointed=checkpointed, seq_len=64, hidden=512)
    step()
    with MemoryTracker(model, opt) as tracker:
        tracker.watch(batch, "other")
        start = tracker.current.total
        step()
    assert tracker.peak.total - start == pytest.approx(allocator_peak(step), rel=1e-3)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_activations_are_activations(reentrant):
    """A checkpointed block's internals come back in the backward pass, under their own name."""
    block = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    x = torch.randn(32, 64, requires_grad=True)
    with MemoryTracker(block) as tracker:
        y = checkpoint(block, x, use_reentrant=reentrant)
        after_forward = tracker.current.by_category["activations"]
        y.sum().backward()
    timeline = tracker.timeline
    in_backward = [
        n
        for n, phase in zip(timeline.by_category["activations"], timeline.phases, strict=True)
        if phase == "backward"
    ]
    internals = 2 * 32 * 256 * 4
    assert after_forward < internals <= max(in_backward)


def test_a_learners_own_step_is_counted_as_it_says():
    weight = torch.randn(64, 64, requires_grad=True)
    with MemoryTracker() as tracker:
        tracker.watch(weight, "parameters")
        (weight * 2).sum().backward()
        tracker.watch(weight.grad, "gradients")
        with torch.no_grad():
            moment = torch.zeros_like(weight)
            tracker.watch(moment, "optimizer")
            weight -= 0.1 * weight.grad
    by_category = tracker.current.by_category
    assert (
        by_category["parameters"]
        == by_category["gradients"]
        == by_category["optimizer"]
        == weight.nbytes
    )
    assert tracker.peak_by_phase["idle"] == 4 * weight.nbytes
    assert max(tracker.timeline.by_category["activations"]) > 0, (
        "a forward pass written without modules"
    )


def test_an_address_that_is_in_use_again_is_another_storage():
    with MemoryTracker() as tracker:
        reused = 0
        for _ in range(100):
            x = torch.zeros(64)
            address = x.untyped_storage()._cdata
            del x
            y = torch.from_dlpack(np.zeros(16, dtype=np.float32))  # does not dispatch
            reused += y.untyped_storage()._cdata == address
            tracker.watch(y, "other")
            assert tracker.current.total == 64
            del y
    assert reused, "the allocator gave no address twice, so this test showed nothing"


def test_repr_is_exact():
    model, opt, _, step = build("llama")
    with MemoryTracker(model, opt) as tracker:
        step()
    assert repr(tracker).startswith(f"MemoryTracker(peak {tracker.peak.total:,} bytes in ")
    assert tracker.allocator is None
    assert set(tracker.peak.by_category) == set(CATEGORIES) and tracker.peak.phase in PHASES


def test_the_watch_sees_backward_threads_too():
    """Where autograd runs on its own threads (as on CUDA), counts from several threads must not be
    lost.
    """
    done = []

    def work():
        with Watch(tracker._meter.observe):
            for _ in range(500):
                torch.zeros(64)
            done.append(torch.zeros(64))

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    with MemoryTracker() as tracker:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        sys.setswitchinterval(before)
        assert tracker.current.total == 4 * 256


def test_a_fake_tensors_address_is_not_asked_for():
    """PyTorch warns where it is, once a process, in the middle of whatever a learner runs."""

    class Fake:
        device, nbytes = torch.device("meta"), lambda self: 4

        def data_ptr(self):
            raise AssertionError("asked")

    assert has_memory(Fake())
