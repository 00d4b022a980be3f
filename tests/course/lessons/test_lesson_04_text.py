"""What lesson 04 says in orders and optima, measured on its chains or found by trying all."""

from __future__ import annotations

import re
from math import sqrt

import pytest
import torch
from support.lesson_text import lesson
from torch import nn
from torch.utils.checkpoint import checkpoint

from gradmem_lib import (
    MemoryTracker,
    accounting,
    best_segments,
    checkpoint_layers,
    record_schedule,
    schedule_peak,
    uniform_segments,
)
from gradmem_lib.course import models
from gradmem_lib.course.lessons.lesson_04 import settings

SMOLLM2 = 134_515_008  # parameters


def kept_at_peak(lengths, a, x):
    """Exercise 4.5."""
    return max(i * x + m * a for i, m in enumerate(lengths))


def chain_inputs(rows: int = 256) -> torch.Tensor:
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()


def measured(layers, every) -> float:
    """The peak of one step on a chain, in boundaries."""
    x = chain_inputs()
    with checkpoint_layers(layers, every):
        record = record_schedule(layers, lambda: layers(x).square().sum().backward())
    return record.peak / x.nbytes


def test_a_layer_keeps_five_boundaries_and_most_of_them_could_be_computed_again():
    said = lesson("04")
    [[alive]] = said.figures(r"^alive after forward: (\d+) boundaries$")
    assert said.says("each layer keeps five times the bytes of its input: the input itself, and")
    assert said.says("These are 16 × 5 boundaries, and the last output.") and alive == 16 * 5 + 1
    assert said.says("most of it could be computed again, from much less")
    assert said.answer("4.a") < alive / 4


def test_the_root_of_n_is_wrong_for_each_model_that_the_course_knows():
    assert lesson("04").says("is wrong for most models that people train")
    assert lesson("04").says(
        "Trained Transformers have a ≈ 20 x or more: one layer a segment, or two."
    )
    for shape in accounting.SHAPES.values():
        a = sum(accounting.block_activations(shape, 1, 1024).values())
        n, x = shape.layers, 2 * 1024 * shape.hidden
        peaks = [kept_at_peak(uniform_segments(n, k), a, x) for k in range(1, n + 1)]
        root = peaks[round(sqrt(n)) - 1]
        assert root > 1.5 * min(peaks), shape.name
        assert a > 20 * x and peaks.index(min(peaks)) + 1 in (1, 2), shape.name


def test_one_checkpoint_a_layer_is_at_most_a_fifth_above_the_best_length():
    said = lesson("04")
    assert said.says("is at most a fifth above the best k for them")
    names = re.findall(r"^(\S+) +\d+ layers +[\d.]+ +\d+: ", said.printed, re.MULTILINE)
    assert len(names) == 3
    above = []
    for name in names:
        shape = accounting.SHAPES[name]
        a = sum(accounting.block_activations(shape, 1, 1024).values())
        n, x = shape.layers, 2 * 1024 * shape.hidden
        peaks = [kept_at_peak(uniform_segments(n, k), a, x) for k in range(1, n + 1)]
        above.append(peaks[0] / min(peaks) - 1)
    assert 0.15 < max(above) <= 0.2 and min(above) == 0


def test_batch_norm_is_updated_twice_and_other_values_go_unnoticed():
    said = lesson("04")
    assert said.says("updates its running statistics twice a step, and a second run that computes")
    norm, x = nn.BatchNorm1d(64), chain_inputs()
    checkpoint(norm, x, use_reentrant=False).square().sum().backward()
    assert norm.num_batches_tracked == 2
    calls = []

    def another_factor(x):
        calls.append(x)
        return (x * len(calls)).sin()

    x.grad = None
    checkpoint(another_factor, x, use_reentrant=False).sum().backward()
    assert len(calls) == 2
    # the first run computed sin(x), and its gradient is cos(x)
    assert not torch.allclose(x.grad, x.detach().cos())


def test_three_segments_run_again_one_after_another_from_the_last():
    said = lesson("04")
    assert said.says("Three times, a segment runs forward again, is in memory in full")
    layers, x, ran = models.chain(9, width=64, keeps=5), chain_inputs(), []
    for number, layer in enumerate(layers):
        layer.register_forward_pre_hook(lambda *_, number=number: ran.append(number))
    with checkpoint_layers(layers, every=3):
        layers(x).sum().backward()
    assert ran == [*range(9), 6, 7, 8, 3, 4, 5, 0, 1, 2]


def test_more_checkpoints_are_more_memory_on_the_left_arm_alone():
    said = lesson("04")
    assert said.says("The first is true only on the left arm, where segments are shorter than")
    rows = said.figures(r"^ +(\d+) +([\d,]+) +([\d,]+)  █")
    peaks = {int(k): peak for k, _, peak in rows}
    best = min(peaks, key=peaks.get)
    left = [peaks[k] for k in sorted(peaks) if k <= best]
    right = [peaks[k] for k in sorted(peaks) if k >= best]
    assert len(left) > 1 and left == sorted(left, reverse=True)
    assert len(right) > 1 and right == sorted(right)


def test_the_two_terms_are_equal_where_their_sum_is_lowest():
    assert lesson("04").says("n/k · x + k · a is lowest where its two terms are equal.")
    n, a, x = 64, 5.0, 1.0
    k = torch.linspace(1, 64, 100_001, dtype=torch.float64)
    best = k[(n / k * x + k * a).argmin()].item()
    assert n / best * x == pytest.approx(best * a, rel=1e-3)
    assert best == pytest.approx(sqrt(n * x / a), rel=1e-3)


def test_no_activation_is_left_at_the_end_of_backward():
    said = lesson("04")
    assert said.says("gradients grow by 4 bytes a parameter")
    assert said.says("is the highest point, and no activation is left there to save")
    peak = said.figures(r"^most activations +[\d,]+, peak +([\d,]+)$")[0][0]
    weights_and_gradients = (4 + 4) * SMOLLM2
    table = 4 * 49_152 * 576
    # at the end, the tied embedding's second gradient and the sum of both are there too
    assert 0 <= peak - weights_and_gradients - 2 * table < 1000


def test_a_shallow_network_wins_less():
    assert lesson("04").says(
        "Shallow networks win less too: with 4 layers, one segment is a quarter"
    )
    left = []
    for depth in (4, 16, 64):
        layers = models.chain(depth, width=64, keeps=5)
        left.append(measured(layers, 1) / measured(layers, [depth]))
    assert left == sorted(left, reverse=True) and left[0] > 1.5 * left[1]


def test_long_segments_first_in_a_long_chain():
    said = lesson("04")
    a, x = 5, 1

    def staircase(longest: int) -> list[int]:
        return [length for length in range(longest, 0, -1) for _ in range(a // x)]

    assert said.says("Each segment is x/a layers shorter than the one before.")
    lengths = staircase(24)
    assert best_segments(sum(lengths), internal=a - x, boundary=x) == lengths
    lengths = staircase(200)
    n = sum(lengths)
    unequal = kept_at_peak(lengths, a, x)
    equal = min(kept_at_peak(uniform_segments(n, k), a, x) for k in range(100, 200))
    assert unequal == pytest.approx(sqrt(2 * a * x * n), rel=0.01)
    assert equal == pytest.approx(2 * sqrt(a * x * n), rel=0.01)
    assert said.says("Equal segments need 2·√(a·x·n), √2 times as much")
    assert said.says("you save 29 % where the chain is long")
    assert round(100 * (1 - unequal / equal)) == 29


def test_segments_of_4_are_the_best_equal_ones():
    assert lesson("04").says("Segments of 4 are the best equal ones")
    peaks = {k: schedule_peak([k] * (64 // k), 4, 1) for k in range(1, 65) if 64 % k == 0}
    assert min(peaks, key=peaks.get) == 4 and sorted(peaks.values())[1] > peaks[4]


@pytest.mark.parametrize("depth, wide", [(4, 1), (4, 60), (12, 5), (32, 40)])
def test_best_never_peaks_higher_than_one_checkpoint_a_layer(depth, wide):
    assert lesson("04").says(
        "It never peaks higher than one checkpoint a layer, and here it is not"
    )
    head = nn.Linear(64, 64 * wide, bias=False).requires_grad_(False)
    layers, x, peaks = models.chain(depth, width=64, keeps=5), chain_inputs(), {}
    for every in (1, "best"):
        with checkpoint_layers(layers, every):
            for _ in range(2):  # the first step of "best" measures
                with MemoryTracker(layers, live=False) as tracker:
                    head(layers(x)).square().sum().backward()
                x.grad = None
        peaks[every] = tracker.peak.total
    assert peaks["best"] <= peaks[1]


def test_here_best_is_not_the_lowest():
    said = lesson("04")
    assert said.says("one checkpoint a layer, and here it is not the lowest")
    [(one, two, five, best)] = said.figures(
        r"^boundaries: \{1: (2[\d.]+), 2: ([\d.]+), 5: ([\d.]+), 'best': ([\d.]+)\}$"
    )
    assert min(two, five) < best <= one


def test_the_head_of_exercise_4_7():
    assert lesson("04").says("a head, whose logits are five times as wide as a boundary")
    layers, x = settings.chain_setting()
    assert layers[-1](x).numel() == 5 * x.numel() and len(layers) == 64
