"""Schedules against brute force: their peaks, their extra forwards, the best of them, and the one
that is always safe; and against the measured bytes of checkpointed layers, and of one alone.
"""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpointed import ROWS, WEIGHTS, WIDTH, X, weighted
from support.nightly import ALL, each
from torch import nn

from gradmem_lib import (
    MemoryTracker,
    Recipe,
    best_segments,
    extra_forwards,
    schedule_peak,
    uniform_segments,
)
from gradmem_lib.course import models
from gradmem_lib.techniques.checkpointing import checkpoint_layers
from gradmem_lib.techniques.layer_bytes import LayerBytes, layer_bytes
from gradmem_lib.techniques.schedules import safe_segments, segments_for


def all_flat(n):
    """Every way to cut n layers into segments, by deciding at each of the n - 1 joints."""
    for cuts in itertools.product((False, True), repeat=n - 1):
        ends = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), n]
        yield [stop - start for start, stop in itertools.pairwise(ends)]


def moments(segments, internal, boundary, temporaries, tail=0, keep_last=True):
    """The bytes at each layer's backward and after the last layer, added up from what is there."""
    starts = list(itertools.accumulate([0, *segments[:-1]]))
    found, held = [], 0
    for start, length in zip(starts, segments, strict=True):
        for j in range(start, start + length):
            found.append(held + sum(internal[start : j + 1]) + sum(boundary[start : j + 1]))
            found[-1] += temporaries[j]
        held += boundary[start]
    last = starts[-1]
    kept = sum(internal[last:]) + sum(boundary[last + 1 :]) if keep_last else 0
    return [*found, tail + held + kept]


def test_a_peak_in_real_bytes_is_exact_and_does_not_overflow():
    x = 4096 * 4096 * 2
    a = 23 * x + 12_345
    found = best_segments(96, a, x)
    assert schedule_peak(found, a, x) == max(moments(found, [a] * 96, [x] * 96, [0] * 96))
    assert extra_forwards(best_segments(512, 4, 1)) <= 512


@pytest.mark.parametrize(
    "call",
    [
        lambda: uniform_segments(0, 3),
        lambda: uniform_segments(9, 0),
        lambda: best_segments(0, 1, 1),
        lambda: best_segments(4, [1, 1], 1),
        lambda: best_segments(4, -1, 1),
        lambda: best_segments(9, 0.4, 0.1),
        lambda: best_segments(4, math.nan, 1),
        lambda: best_segments(4, 1, 1, -0.5),
        lambda: best_segments(4, 1, 1, "all"),
        lambda: best_segments(4, 1, 1, 0.5, keep_last=False),
        lambda: best_segments(4, 1, 1, tail=-1),
        lambda: schedule_peak([2, 0], 1, 1),
        lambda: schedule_peak([2, []], 1, 1),
        lambda: extra_forwards([2, "3"]),
    ],
)
def test_numbers_that_are_no_schedule_are_refused_with_a_sentence(call):
    with pytest.raises(ValueError, match=r"\w+ .* \w+"):
        call()


EXAMPLES = 200 if ALL else 40
sizes = st.integers(0, 30) | st.integers(0, 400)


@settings(max_examples=EXAMPLES, deadline=None, derandomize=True)
@given(
    st.data(),
    st.integers(1, 8),
    st.booleans(),
    st.sampled_from([0, 0.4, 1.0]),
    st.integers(0, 300),
)
def test_the_best_schedule_is_the_best_of_all(data, n, keep_last, fraction, tail):
    """And the peak and the extra forwards of each are what is added up here."""
    a, x, t = (data.draw(st.lists(sizes, min_size=n, max_size=n)) for _ in range(3))
    fraction = fraction if keep_last else 1.0
    found = best_segments(n, a, x, fraction, temporaries=t, tail=tail, keep_last=keep_last)
    keys = {}
    for segments in all_flat(n):
        peak = max(moments(segments, a, x, t, tail, keep_last))
        more = {"temporaries": t, "tail": tail, "keep_last": keep_last}
        assert schedule_peak(segments, a, x, **more) == peak
        again = sum(segments[:-1]) if keep_last else n
        assert extra_forwards(segments, keep_last) == again
        if again <= fraction * n + 1e-9:
            starts = itertools.accumulate([0, *segments[:-1]])
            boundaries = sum(x[start] for start in list(starts)[:-1]) if keep_last else 0
            keys[tuple(segments)] = peak, again, boundaries
    assert keys[tuple(found)] == min(keys.values())


@settings(max_examples=EXAMPLES, deadline=None, derandomize=True)
@given(st.lists(st.tuples(sizes, sizes, sizes, sizes), min_size=1, max_size=9), st.integers(0, 400))
def test_safe_segments_are_never_above_one_a_layer_in_any_moment(given, tail):
    layers = [LayerBytes(*four, True) for four in given]
    boundary, internal, temporaries, gradients = zip(*given, strict=True)
    segments, kept = safe_segments(layers)
    growing = [t + sum(gradients[j + 1 :]) for j, t in enumerate(temporaries)]
    for needs, after in ((growing, 0), (temporaries, 0), (growing, tail), (temporaries, 9999)):
        best, single = (
            schedule_peak(s, internal, boundary, temporaries=needs, tail=after, keep_last=k)
            for s, k in ((segments, kept), ([1] * len(layers), False))
        )
        assert best <= single, (segments, kept)


def test_layers_before_the_first_trained_one_are_not_run_again():
    layers = [LayerBytes(8, 0, 0, 0, False)] * 3 + [LayerBytes(8, 1, 1, 0, True)] * 5
    segments, _ = safe_segments(layers)
    assert segments[:3] == [1, 1, 1] and sum(segments) == 8
    assert sum(safe_segments([LayerBytes(8, 0, 0, 0, False)] * 2)[0]) == 2


def test_recipes_and_checkpoint_layers_spell_schedules_alike():
    for every in ("per-layer", "sqrt", "best", 3, [4, 3, 1]):
        recipe = Recipe(checkpointing=every)
        assert segments_for(recipe.checkpointing, 8) == segments_for(every, 8)
        hash(recipe)
    assert segments_for("per-layer", 3) == [1, 1, 1] and segments_for("sqrt", 9) == [3, 3, 3]
    assert [segments_for(f"first-{k}", 5) for k in (0, 2, 5)] == [[5], [1, 1, 3], [1] * 5]
    no_schedule = ["first-", "first--1", "root", "7", 0, True, 2.0, [], [2, [1]], {2: 1}, ["best"]]
    for every in no_schedule:
        for take in (lambda e: Recipe(checkpointing=e), lambda e: segments_for(e, 8)):
            with pytest.raises(ValueError, match=r"at least 1|did you mean '(best|per-layer)'"):
                take(every)


# Predicted and measured bytes.


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
