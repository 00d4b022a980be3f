"""What the benchmark of published peaks found, and its replay of an emptied cache."""

from __future__ import annotations

import json

import pytest
from benchmark_runs import FOLDER

from gradmem_lib.prediction.allocator import Allocator

MiB = 2**20
FOUND = json.loads((FOLDER / "results" / "published.json").read_text())
ROWS = {row["method"]: row for row in FOUND["rows"]}


def test_an_emptied_cache_keeps_the_segments_in_use():
    allocator = Allocator()
    small, large, other = (allocator.allocate(n) for n in (512, 9 * MiB, 30 * MiB))
    half = allocator.allocate(9 * MiB)
    assert allocator.reserved == (2 + 20 + 30) * MiB
    for address in (small, large, other):
        allocator.free(address)
    allocator.empty_cache()
    assert allocator.reserved == 20 * MiB  # the other half of it is in use
    assert allocator.allocate(9 * MiB) == large and allocator.reserved == 20 * MiB
    allocator.free(half)
    allocator.free(large)
    allocator.empty_cache()
    assert allocator.reserved == 0 and not allocator._segments


def test_gradients_wait_for_the_next_step(load):
    """Two weights, an activation, two gradients, a temporary for each of them, and the loss."""
    module = load("published")
    requests = (2 * MiB, 3 * MiB, MiB, 2 * MiB, 3 * MiB, -3, 4 * MiB, 5 * MiB, -6, -7, -4, -5, 512, -8)
    assert module.Step(None, requests).gradients == {3, 4}


def test_a_long_step_after_an_emptied_cache(load):
    """Blocks of gradients are still held when the cache is emptied, and serve the long step's activations."""
    module, own = load("published"), 2 * 20 * MiB  # two workspaces
    short = module.Step(None, (40 * MiB, 12 * MiB, 40 * MiB, -2, 1024, -4, -3))
    long = module.Step(None, (40 * MiB, 30 * MiB, 40 * MiB, -2, 1024, -4, -3))
    assert short.gradients == long.gradients == {2}
    assert module.reserved_by(short, long) == own // 2 + (40 + 40 + 40 + 2) * MiB


@pytest.mark.parametrize("what, most", [("allocated", 0.02), ("reserved", 0.05)])
def test_what_was_predicted_is_near_what_was_published(what, most):
    for method, row in ROWS.items():
        off = row["predicted"][what] / row["published"][what] - 1
        assert row["off"][what] == pytest.approx(off, abs=1e-4) and abs(off) <= most, method


def test_the_recorded_rows_are_those_of_the_benchmark(load):
    module = load("published")
    for method, row in module.PEFT.items():
        recorded = ROWS[method]
        assert recorded["trained"] == row.trained
        assert recorded["published"] == {"allocated": row.allocated, "reserved": row.reserved}
