"""What the benchmark of published peaks found, and its replay of an emptied cache."""

from __future__ import annotations

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from gradmem_lib.course import published
from gradmem_lib.prediction.allocator import Allocator
from gradmem_lib.view.peaks import off_by

MiB = 2**20


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


@pytest.mark.parametrize("what, most", [("allocated", 0.02), ("reserved", 0.05), ("held", 0.01)])
def test_what_was_predicted_is_near_what_was_published(what, most):
    found = [row for row in published.rows() if row.what.startswith(what)]
    assert found and all(abs(row.predicted / row.published - 1) <= most for row in found)


def test_the_recorded_rows_are_those_of_the_benchmark(load):
    recorded = {
        (row.run, row.what): row.published for row in published.rows() if row.source.startswith("PEFT")
    }
    wanted = {}
    for method, row in load("published").PEFT.items():
        wanted[method, "allocated after a step, mean"] = row.allocated
        wanted[method, "reserved, 99th percentile"] = row.reserved
    assert recorded == wanted


def test_the_picture_has_every_figure_in_digits_and_in_words(monkeypatch):
    import IPython.display

    shown = []
    monkeypatch.setattr(IPython.display, "display", shown.append)
    published.show()
    (figure,) = shown
    _, metadata = figure._repr_mimebundle_()
    rows = published.rows()
    words = metadata["image/png"]["alt"]
    assert len(figure.axes[0].patches) == 2 * len(rows)
    for row in rows:
        assert (
            f"{row.run}: {row.what}: {row.published / 1e9:.2f} GB measured, {row.predicted / 1e9:.2f}"
            in words
        )
        assert (
            f"| {row.run} | {row.what} | {row.published / 1e9:.2f} | {row.predicted / 1e9:.2f} |"
            in published.table()
        )
    renderer = FigureCanvasAgg(figure).get_renderer()
    for text in (*figure.axes[0].texts, *figure.texts):  # nothing is cut off
        box = text.get_window_extent(renderer)
        assert box.x0 >= 0 and box.x1 <= figure.bbox.x1, text.get_text()


@pytest.mark.parametrize(
    "predicted, words", [(1023, "+2.3%"), (970, "-3.0%"), (1000, "0.0%"), (9996, "+899.6%")]
)
def test_a_difference_in_per_cent(predicted, words):
    assert off_by(1000, predicted) == words
    assert off_by(100_000, 99_999) == "0.0%"
