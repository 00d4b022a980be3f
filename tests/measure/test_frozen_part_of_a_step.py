"""A frozen model that may run in each training step: micro-batches lower its peak. An evaluation is
told that they do not.
"""

import pytest
import torch
from torch import nn

from gradmem_lib.measure.diagnosis import Diagnosis
from gradmem_lib.measure.tracker import MemoryTracker

MICRO_BATCHES = "smaller micro-batches, or shorter rows"
FROZEN = "A forward without gradients is the peak"
EVALUATION = "An evaluation is the peak"
ROWS = 256


def networks() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    small = nn.Linear(16, 16)
    wide = nn.Sequential(nn.Linear(16, 2048), nn.ReLU(), nn.Linear(2048, 16)).requires_grad_(False)
    return small, wide


def measured(run, steps: int = 3, **settings) -> MemoryTracker:
    small, wide = networks()
    optimizer = torch.optim.SGD(small.parameters(), lr=0.1)
    with MemoryTracker(small, optimizer, live=False) as tracker:
        run(small, wide, optimizer, steps, **settings)
    return tracker


def teacher_first(small, wide, optimizer, steps, pieces=1):
    for _ in range(steps):
        for x in torch.randn(ROWS, 16).chunk(pieces):
            with torch.no_grad():
                target = wide(x)
            (small(x) - target).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def validation_each_two_steps(small, wide, optimizer, steps):
    for step in range(steps):
        small(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 2:
            with torch.no_grad():
                wide(torch.randn(ROWS, 16))


def teacher_of_the_whole_batch(small, wide, optimizer, steps):
    for _ in range(steps):
        batch = torch.randn(ROWS, 16)
        with torch.no_grad():
            targets = wide(batch)
        for x, target in zip(batch.chunk(4), targets.chunk(4), strict=True):
            (small(x) - target).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def generation_after_each_step(small, wide, optimizer, steps):
    for _ in range(steps):
        small(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            x = torch.randn(50_000, 16)
            for _ in range(3):
                x = small(x)


def test_micro_batches_lower_what_a_frozen_part_needs():
    tracker = measured(teacher_first)
    diagnosis = Diagnosis(tracker.facts)
    [cause] = [cause for cause in diagnosis.causes if cause.name in (FROZEN, EVALUATION)]
    assert cause.name == FROZEN
    assert MICRO_BATCHES in diagnosis.helps
    halved = measured(teacher_first, pieces=2)
    assert halved.peak.total < tracker.peak.total
    saved = tracker.peak.total - halved.peak.total
    assert saved >= 0.4 * cause.nbytes
    assert halved.peak.total >= diagnosis.lowest[MICRO_BATCHES]


@pytest.mark.parametrize(
    "run",
    [
        validation_each_two_steps,
        teacher_of_the_whole_batch,
        generation_after_each_step,
    ],
)
def test_what_does_not_run_with_each_batch_is_an_evaluation(run):
    diagnosis = Diagnosis(measured(run, steps=6).facts)
    [cause] = [cause for cause in diagnosis.causes if cause.name in (FROZEN, EVALUATION)]
    assert cause.name == EVALUATION
    assert MICRO_BATCHES in diagnosis.cannot_help
