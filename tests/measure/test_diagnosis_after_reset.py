"""After ``reset_peak()``, a diagnosis is about the new peak."""

import torch
from torch import nn

from gradmem_lib.measure.diagnosis import Diagnosis
from gradmem_lib.measure.tracker import MemoryTracker


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))


def train(model, optimizer, rows: int) -> None:
    model(torch.randn(rows, 32)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_reset_inside_a_forward_forgets_what_was_before_it():
    class Resets(nn.Module):
        def forward(self, x):
            (x + 1).sum()
            big = torch.zeros(100_000)
            del big
            tracker.reset_peak()
            return (x * 2).sum()

    with MemoryTracker(live=False) as tracker, torch.no_grad():
        Resets()(torch.randn(1000))
    assert tracker.forwards[0].peak < 100_000 * 4


def test_a_graph_from_before_the_reset_still_has_its_forward():
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters())
    with MemoryTracker(model, optimizer, live=False) as tracker:
        for _ in range(3):
            train(model, optimizer, rows=64)
        kept = model(torch.randn(2048, 32))  # a graph that nothing uses
        tracker.reset_peak()
        train(model, optimizer, rows=64)
        train(model, optimizer, rows=64)
        del kept
    names = [cause.name for cause in Diagnosis(tracker.facts).causes]
    assert "A forward's graph is never used" in names
