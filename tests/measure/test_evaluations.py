"""What an evaluation collects, and what was there before it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gradmem_lib import MemoryTracker, diagnose
from gradmem_lib.measure.remedied_peak import peak_without
from gradmem_lib.units import format_bytes

COLLECTS = "An evaluation collects its results"
ROWS = 128


def mlp(width: int = 256, layers: int = 6) -> nn.Sequential:
    blocks = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers)]
    return nn.Sequential(*blocks, nn.Linear(width, 1))


def collected(remedied: bool) -> MemoryTracker:
    """The data set is made in the block as well, before the evaluation, and has as many tensors."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with MemoryTracker(model, optimizer, live=False) as tracker:
        data = [torch.randn(256, 256) for _ in range(16)]
        results = []
        with torch.no_grad():
            for x in data:
                features = model[:-1](x)
                results.append(features.mean(1) if remedied else features)
        del results, features
        for x in data[:2]:
            model(x).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return tracker


def test_data_that_was_there_before_an_evaluation_is_no_result_of_it():
    before = diagnose(collected(remedied=False))
    cause = before.causes[0]
    assert cause.name == COLLECTS
    # The peak is in the last forward, and the result of the one before it may be in use.
    assert cause.nbytes == 14 * 256 * 256 * 4
    promised, _ = peak_without(cause, before.facts)
    assert promised == collected(remedied=True).peak.total


@pytest.mark.parametrize("given", [True, False])
def test_an_optimizer_that_is_found_later_was_there_in_the_evaluation(given):
    """Its states are from before the block; a tracker that was not given it sees it step."""
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(2, 256)).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    with MemoryTracker(model, [optimizer] if given else [], live=False) as tracker:
        with torch.no_grad():
            model(torch.randn(16 * ROWS, 256))
        model(torch.randn(2, 256)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    (cause,) = diagnose(tracker).causes
    live_before = tracker.peak.total - cause.nbytes
    in_words = f"on top of the {format_bytes(live_before)} that were live before it"
    assert in_words in cause.evidence


class WithoutTorchFunction(torch.Tensor):
    """A tensor whose own code must not run because the tracker asks for its size."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func.__name__ in ("dim", "numel", "size", "element_size"):
            raise AssertionError(f"{func.__name__} was called")
        return super().__torch_function__(func, types, args, kwargs or {})


class TakesAnything(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, given):
        return self.linear(torch.ones(2, 4))


@pytest.mark.parametrize(
    ("given", "rows"),
    [
        (torch.ones(3, 4), 3),
        ({"ids": torch.ones(3, 4), "mask": torch.ones(7, 7)}, 3),
        (torch.ones(3, 4).to_sparse(), 3),
        (torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)]), 2),
        (torch.ones(3, 4).as_subclass(WithoutTorchFunction), 3),
        (torch.tensor(1.0), 0),
        ("a name", 0),
    ],
    ids=["tensor", "dict", "sparse", "nested", "subclass", "number", "string"],
)
def test_the_rows_of_a_batch_are_known_of_any_tensor(given, rows):
    model = TakesAnything()
    with MemoryTracker(model, live=False) as tracker:
        model(given).sum().backward()
    assert tracker.facts.batch_rows == rows
