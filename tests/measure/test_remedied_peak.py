"""The peak that is promised with a remedy holds when the remedy is applied, whatever other moments
of the run need.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from gradmem_lib import MemoryTracker, diagnose
from gradmem_lib.measure.remedied_peak import peak_without


def mlp(width: int = 256, layers: int = 6) -> nn.Sequential:
    blocks = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers)]
    return nn.Sequential(*blocks, nn.Linear(width, 1))


def train(model, optimizer, rows: int) -> None:
    model(torch.randn(rows, 256)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def losses_kept_before_a_large_step(remedied: bool) -> MemoryTracker:
    """Losses of one step are added up, and an ordinary step of many rows comes later."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with MemoryTracker(model, optimizer, live=False) as tracker:
        total = 0
        for _ in range(4):
            loss = model(torch.randn(512, 256)).pow(2).mean()
            if remedied:
                loss.backward()
                del loss
            else:
                total = total + loss
        if not remedied:
            total.backward()
            del total, loss
        optimizer.step()
        optimizer.zero_grad()
        train(model, optimizer, rows=1280)
    return tracker


def data_beside_an_evaluation(remedied: bool) -> MemoryTracker:
    """All rows are on the device during the steps; an evaluation without them comes first."""
    model = mlp(layers=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with MemoryTracker(model, optimizer, live=False) as tracker:
        with torch.no_grad():
            model(torch.randn(4096, 256))
        if remedied:
            for _ in range(4):
                train(model, optimizer, rows=64)
            return tracker
        data = torch.zeros(16384, 256)
        for first in range(0, 256, 64):
            model(data[first : first + 64]).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return tracker


def outputs_of_uneven_batches(remedied: bool) -> MemoryTracker:
    """Outputs are kept; the largest of them belongs to a step that needs it."""
    model = nn.Linear(256, 512)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    kept = []
    with MemoryTracker(model, optimizer, live=False) as tracker:
        for rows in (512, 512, 1280, *([512] * 8), 768):
            outputs = model(torch.randn(rows, 256))
            outputs.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            kept.append(outputs.mean().item() if remedied else outputs.detach())
            del outputs
    return tracker


def rollouts_before_updates(remedied: bool) -> MemoryTracker:
    """A policy acts for some time, with gradients, before it is trained on what it has seen."""
    policy = mlp(layers=3)
    optimizer = torch.optim.Adam(policy.parameters())
    with MemoryTracker(policy, optimizer, live=False) as tracker:
        for _ in range(3):
            scores = []
            for _ in range(24):
                with torch.no_grad() if remedied else nullcontext():
                    scores.append(policy(torch.randn(128, 256)))
            for _ in range(2):
                train(policy, optimizer, rows=256)
    return tracker


@pytest.mark.parametrize(
    "program",
    [
        losses_kept_before_a_large_step,
        data_beside_an_evaluation,
        outputs_of_uneven_batches,
        rollouts_before_updates,
    ],
    ids=lambda program: program.__name__,
)
def test_the_promised_peak_holds_beside_other_moments(program):
    before = diagnose(program(remedied=False))
    cause = before.causes[0]
    promised, _ = peak_without(cause, before.facts)
    measured = program(remedied=True).peak.total
    assert measured <= promised <= before.peak.total, before


def test_much_is_promised_of_many_forwards():
    before = diagnose(rollouts_before_updates(remedied=False))
    promised, _ = peak_without(before.causes[0], before.facts)
    assert promised < 0.7 * before.peak.total, before


def test_a_batch_that_a_kept_graph_needs_is_no_data_that_waits():
    model = mlp(layers=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    penalty = 0
    with MemoryTracker(model, optimizer, live=False) as tracker:
        for _ in range(10):
            x = torch.randn(256, 256)
            loss = model(x).square().mean()
            penalty = penalty + model(x[:64]).abs().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            del loss
    names = [cause.name for cause in diagnose(tracker).causes]
    assert names[0] == "Bytes grow from step to step"
    assert "Data waits on the device" not in names
