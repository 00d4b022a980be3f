"""What a measurement hands out, against lists and loops."""

import numpy as np
import pytest

from gradmem_lib.measure.timeline import MemorySnapshot, Timeline
from gradmem_lib.names import CATEGORIES, PHASES


def run_of(n: int) -> Timeline:
    """A timeline of ``n`` samples: operations counted in sevens, phases in turn, bytes by category
    at random.
    """
    parts = np.random.default_rng(n).integers(0, 1000, (n, len(CATEGORIES)))
    rows = [[7 * i, i % len(PHASES), sum(row), *row] for i, row in enumerate(parts.tolist())]
    return Timeline(np.array(rows, dtype=np.int64).reshape(n, 3 + len(CATEGORIES)))


def test_every_list_has_one_entry_a_sample():
    run = run_of(9)
    assert len(run) == 9 and run.events == [7 * i for i in range(9)]
    assert run.phases == [PHASES[i % len(PHASES)] for i in range(9)]
    assert list(run.by_category) == list(CATEGORIES)
    assert run.totals == [sum(parts) for parts in zip(*run.by_category.values(), strict=True)]
    assert run.peak_index == run.totals.index(max(run.totals))


def test_the_peak_is_the_first_of_equals():
    rows = np.zeros((4, 3 + len(CATEGORIES)), dtype=np.int64)
    rows[:, 2] = [1, 5, 5, 2]
    assert Timeline(rows).peak_index == 1
    with pytest.raises(ValueError, match="empty"):
        _ = Timeline(rows[:0]).peak_index


@pytest.mark.parametrize(
    ("n", "most"), [(5, 5), (5, 9), (6, 5), (10, 3), (101, 10), (16, 4), (7, 1), (0, 3)]
)
def test_a_thinned_run_keeps_the_largest_of_each_window(n, most):
    run = run_of(n)
    window = max(1, -(-n // most))
    kept = [
        max(range(a, min(a + window, n)), key=lambda i: run.totals[i]) for a in range(0, n, window)
    ]
    thin = run.decimate(most)
    assert len(thin) <= most and thin.rows.tolist() == [run.rows[i].tolist() for i in kept]
    assert max(thin.totals, default=0) == max(run.totals, default=0)


def test_a_window_of_nothing_but_zeros_keeps_a_real_sample():
    rows = np.zeros((3, 3 + len(CATEGORIES)), dtype=np.int64)
    rows[:, 0] = [1, 2, 3]
    assert Timeline(rows).decimate(2).events == [1, 3]


def test_a_moment_in_words():
    parts = dict.fromkeys(CATEGORIES, 0)
    assert str(MemorySnapshot(0, parts, "idle")) == "0 bytes in idle"
    moment = MemorySnapshot(1500, parts | {"parameters": 1000, "other": 500}, "backward")
    assert str(moment) == "1,500 bytes in backward (parameters 1,000, other 500)"
