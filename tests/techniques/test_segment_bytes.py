"""Predicted and measured bytes of checkpointed layers, and of one layer alone."""

import itertools
from contextlib import nullcontext

import pytest
import torch
from support.checkpointed import ROWS, WEIGHTS, WIDTH, X, weighted
from support.nightly import each
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from gradmem_lib import MemoryTracker, best_segments, schedule_peak
from gradmem_lib.course import models
from gradmem_lib.techniques.checkpointing import checkpoint_layers
from gradmem_lib.techniques.layer_bytes import layer_bytes


def peak_of_chain(n, every, keeps, keep_last=None, loss=weighted):
    """Measured peak beyond the weights and what the loss reads, in bytes: the input included."""
    net = models.chain(n, width=WIDTH, keeps=keeps)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    handle = None if every is None else checkpoint_layers(net, every, keep_last=keep_last)
    with MemoryTracker(net, live=False) as tracker:
        loss(net(x)).sum().backward()
    read = WEIGHTS.nbytes if loss is weighted else 0
    return tracker.peak.total - sum(p.nbytes for p in net.parameters()) - read, handle


def temporaries(keeps):
    """One layer's backward: the gradient that comes in, and two of the size of the larger GELU's
    input (the gradient before and after it). Beside them live the loss and its gradient, 4 bytes
    each.
    """
    return X + 2 * max(1, keeps - 1) * X + 8


@pytest.mark.parametrize(("n", "keeps"), each(4, itertools.product([16, 33, 64], [1, 2, 5]), 1))
def test_the_predicted_peak_is_the_measured_one_to_the_byte(n, keeps):
    a = (keeps - 1) * X
    schedules = ["sqrt", "best", 1, 7, [n - 3, 3], [3, n - 3], best_segments(n, a, X, 0.5)]
    for i, every in enumerate(schedules):
        keep_last = i % 2 == 0
        measured, handle = peak_of_chain(n, every, keeps, keep_last)
        predicted = schedule_peak(
            handle.segments, a, X, keep_last=keep_last, temporaries=temporaries(keeps)
        )
        assert predicted == measured, (every, keep_last)
    assert (
        schedule_peak([n], a, X, temporaries=temporaries(keeps)) == peak_of_chain(n, None, keeps)[0]
    )


def test_layers_of_unequal_size_are_measured_and_predicted():
    widths = [1, 8, 2, 6, 1, 1, 4, 3, 2]
    net = nn.Sequential(*(models.chain(1, width=WIDTH, keeps=1 + w)[0] for w in widths))
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    with checkpoint_layers(net, "best") as handle, MemoryTracker(net, live=False) as tracker:
        weighted(net(x)).sum().backward()
    assert handle.internal == [w * X for w in widths] and handle.boundary == [X] * 9
    needs = [X + 2 * w * X + 8 for w in widths]
    measured = tracker.peak.total - sum(p.nbytes for p in net.parameters()) - WEIGHTS.nbytes
    assert measured == schedule_peak(
        handle.segments, handle.internal, handle.boundary, temporaries=needs
    )
    lowest = best_segments(9, handle.internal, handle.boundary, temporaries=needs)
    assert measured == schedule_peak(lowest, handle.internal, handle.boundary, temporaries=needs)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.wide, self.narrow = nn.BatchNorm1d(8), nn.Linear(8, 24), nn.Linear(24, 8)

    def forward(self, x, mask=None):
        y = self.narrow(nn.functional.gelu(self.wide(self.norm(x))))
        return x + (y if mask is None else y * mask)


@pytest.mark.parametrize("autocast", [False, True])
def test_a_layers_bytes_are_those_of_saved_tensors_and_of_the_tracker(autocast):
    layer, x, mask = Block(), torch.randn(6, 8, requires_grad=True), torch.rand(8)
    state = {name: value.clone() for name, value in layer.state_dict().items()}
    low = torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext()
    with low:
        found, out = layer_bytes(layer, (x,), {"mask": mask}, x, lambda out: out)
    assert all(torch.equal(value, layer.state_dict()[name]) for name, value in state.items())
    assert all(p.grad is None for p in layer.parameters()) and out.is_leaf and out.requires_grad
    saved = []
    low = torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext()
    with low, saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = layer(x, mask)
    there = {
        t.untyped_storage().data_ptr() for t in (x, mask, y, *layer.parameters(), *layer.buffers())
    }
    kept = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}
    assert found.internal == sum(n for key, n in kept.items() if key not in there)
    assert found.boundary == x.nbytes and found.gradients == sum(
        p.nbytes for p in layer.parameters()
    )
    with MemoryTracker(layer, live=False) as tracker:
        y = layer(x, mask)
        gradient, y = torch.ones_like(y), torch.autograd.graph.get_gradient_edge(y)
        before = tracker.current.total - gradient.nbytes
        tracker.reset_peak()
        torch.autograd.backward(y, gradient)
    if not autocast:
        assert found.temporaries == tracker.peak.total - before
    layer.requires_grad_(False)
    assert layer_bytes(layer, (x.detach(),), {}, x, lambda out: out)[0] == (
        x.nbytes,
        0,
        0,
        0,
        False,
    )


def test_a_layer_with_a_weight_and_an_argument_that_it_does_not_use_is_measured():
    class Wide(nn.Linear):
        def __init__(self):
            super().__init__(8, 8, bias=False)
            self.unused = nn.Parameter(torch.ones(3))

        def forward(self, x, other):
            return super().forward(x)

    layer, x = Wide(), torch.ones(2, 8, requires_grad=True)
    found, _ = layer_bytes(layer, (x, torch.ones(2, requires_grad=True)), {}, x, lambda out: out)
    assert found.trained and found.gradients == layer.weight.nbytes + layer.unused.nbytes
    assert layer.weight.grad is layer.unused.grad is x.grad is None
