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


def validation_with_gradients(remedied: bool) -> MemoryTracker:
    """The steps after a validation need two thirds of what its graph needs."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with MemoryTracker(model, optimizer, live=False) as tracker:
        for _ in range(2):
            train(model, optimizer, rows=1024)
            with torch.no_grad() if remedied else nullcontext():
                score = model(torch.randn(1536, 256)).mean()
            del score
        train(model, optimizer, rows=1024)
    return tracker


def logits_of_one_batch(remedied: bool) -> MemoryTracker:
    """Beside one large loss over a vocabulary, the steps of another head have large activations."""
    model = nn.ModuleDict({"words": nn.Linear(64, 4096), "body": mlp()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    pieces = 8 if remedied else 1
    with MemoryTracker(model, optimizer, live=False) as tracker:
        train(model["body"], optimizer, rows=768)
        x, y = torch.randn(512, 64), torch.randint(0, 4096, (512,))
        for piece, labels in zip(x.chunk(pieces), y.chunk(pieces), strict=True):
            loss = nn.functional.cross_entropy(model["words"](piece), labels) / pieces
            loss.backward()
            del loss
        optimizer.step()
        optimizer.zero_grad()
        train(model["body"], optimizer, rows=768)
    return tracker


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


@pytest.mark.parametrize(
    "program",
    [
        validation_with_gradients,
        logits_of_one_batch,
        losses_kept_before_a_large_step,
        data_beside_an_evaluation,
    ],
    ids=lambda program: program.__name__,
)
def test_the_promised_peak_holds_beside_other_moments(program):
    before = diagnose(program(remedied=False))
    cause = before.causes[0]
    promised, _ = peak_without(cause, before.facts)
    measured = program(remedied=True).peak.total
    assert measured <= promised <= before.peak.total, before
