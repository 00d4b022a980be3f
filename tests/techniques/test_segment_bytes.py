"""Predicted and measured bytes of checkpointed layers, and of one layer alone."""

import itertools

import pytest
import torch
from support.checkpointed import ROWS, WEIGHTS, WIDTH, X, weighted
from support.nightly import each
from torch import nn

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
