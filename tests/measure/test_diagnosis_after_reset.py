"""After ``reset_peak()``, a diagnosis is about the new peak."""

from pathlib import Path

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


def test_the_lowest_peaks_are_those_since_the_reset():
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters())
    with MemoryTracker(model, optimizer, live=False) as tracker:
        train(model, optimizer, rows=2048)
        tracker.reset_peak()
        train(model, optimizer, rows=4)
    diagnosis = Diagnosis(tracker.facts)
    assert max(tracker.timeline.totals) > 10 * tracker.peak.total  # the timeline has all
    assert max(tracker.facts.rows[:, 2]) == tracker.peak.total
    assert max(diagnosis.lowest.values()) <= tracker.peak.total
    # states that live from before the reset are a part of the new peak
    states = 2 * 4 * sum(p.numel() for p in model.parameters())
    assert tracker.peak.by_category["optimizer"] >= states
    assert diagnosis.lowest["8-bit or factored states"] <= tracker.peak.total - states


def test_an_evaluation_before_the_reset_is_not_the_peak():
    model = small_model()
    with MemoryTracker(model, live=False) as tracker, torch.no_grad():
        model(torch.randn(2048, 32))
        tracker.reset_peak()
        model(torch.randn(256, 32))  # this one
    [cause] = Diagnosis(tracker.facts).causes
    assert cause.name == "A forward without gradients is the peak"
    assert cause.nbytes < tracker.peak.total
    source = Path(__file__).read_text().splitlines()
    assert source[cause.lines[0].line - 1].endswith("# this one")


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
