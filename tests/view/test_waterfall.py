"""The waterfall: what its bars are made of, what each is compared with, and an output that never
changes.
"""

from __future__ import annotations

import itertools

import pytest
from matplotlib.colors import to_hex

from gradmem_lib.measure.timeline import MemorySnapshot
from gradmem_lib.names import CATEGORIES
from gradmem_lib.units import MiB
from gradmem_lib.view import style
from gradmem_lib.view.waterfall import Waterfall


def snapshot(phase="backward", **mib: int) -> MemorySnapshot:
    parts = {name: mib.get(name, 0) * MiB for name in CATEGORIES}
    return MemorySnapshot(sum(parts.values()), parts, phase)


NAIVE = snapshot(parameters=100, optimizer=200, activations=700)
CUT = snapshot(parameters=100, gradients=100, optimizer=200, activations=50)
TRIED = snapshot("optimizer_step", parameters=100, gradients=100, optimizer=300)
HALF = snapshot(parameters=50, gradients=50, optimizer=100)


def ladder(**given) -> Waterfall:
    chart = Waterfall(**given).add("naive", NAIVE, seconds=2.0, tokens=1000).add("cut", CUT)
    return chart.add("tried", TRIED, aside=True).add("half", HALF, seconds=0.5, tokens=1000)


def texts(figure) -> list[str]:
    return [text.get_text() for text in figure.texts]


def test_every_bar_is_compared_with_the_one_that_it_builds_on():
    changes = [bar.change for bar in ladder().bars]
    assert changes == [None, -550 * MiB, 50 * MiB, -250 * MiB]


def test_the_figures_beside_the_bars():
    shown = texts(ladder().plot())
    assert [t for t in shown if t.startswith(("+", "−"))] == ["−550 MiB", "+50.0 MiB", "−250 MiB"]
    assert {"1000 MiB", "450 MiB", "500 MiB", "200 MiB", "2.0", "0.50", "ms/token"} <= set(shown)
    assert shown.count("peak in backward") == 3 and shown.count("peak in optimizer step") == 1
    assert "ms/token" not in texts(Waterfall().add("naive", NAIVE).plot())


def test_the_parts_are_stacked_in_order_and_have_the_course_s_colours_and_hatches():
    axes = ladder().plot().axes[0]
    rows = [
        [bar for bar in axes.patches if round(bar.get_y() + bar.get_height() / 2) == row]
        for row in range(4)
    ]
    for parts, bar in zip(rows, (NAIVE, CUT, TRIED, HALF), strict=True):
        wanted = [(name, n) for name, n in bar.by_category.items() if n]
        right = 0.0
        for patch, (name, nbytes) in zip(parts, wanted, strict=True):
            assert patch.get_x() == pytest.approx(right)
            assert patch.get_width() * MiB == pytest.approx(nbytes)
            assert (to_hex(patch.get_facecolor()), patch.get_hatch() or "") == (
                style.COLORS[name],
                style.HATCHES[name],
            )
            right += patch.get_width()
    assert rows[2][0].get_height() < rows[1][0].get_height()


def test_the_budget_is_a_line_and_marks_what_fits():
    figure = ladder(budget="460 MiB").plot()
    assert any(
        line.get_xdata()[0] == pytest.approx(460)
        for line in figure.axes[0].lines
        if line.get_linestyle() == "--"
    )
    assert texts(figure).count("✓") == 2
    colors = {text.get_text(): text.get_color() for text in figure.texts}
    assert colors["1000 MiB"] == colors["500 MiB"] == style.ALARM
    assert colors["450 MiB"] == colors["200 MiB"] == style.INK
    assert "✓" not in texts(ladder().plot())


def test_peaks_are_in_the_unit_of_the_axis_beside_them():
    chart = ladder().add("3 GiB", snapshot(parameters=3 * 1024))
    figure = chart.plot()
    assert figure.axes[0].get_xticklabels()[-1].get_text() == "3 GiB"
    assert {"0.98 GiB", "0.44 GiB", "3.00 GiB"} <= set(texts(figure))
    assert "1000 MiB" not in texts(figure)
    assert "MiB" in ladder().plot().axes[0].get_xticklabels()[-1].get_text()


def test_a_cell_that_runs_twice_replaces_its_bar():
    chart = ladder()
    chart.add("cut", HALF)
    assert [bar.name for bar in chart.bars] == ["naive", "cut", "tried", "half"]
    assert [bar.change for bar in chart.bars] == [None, -800 * MiB, 300 * MiB, 0]


def test_what_is_shown_has_words_and_a_constant_text():
    chart = ladder(budget="460 MiB", title="a ladder")
    data, metadata = chart._repr_mimebundle_()
    assert (
        data["text/plain"]
        == "Waterfall: a ladder"
        == Waterfall(title="a ladder")._repr_mimebundle_()[0]["text/plain"]
    )
    assert "image/png" not in Waterfall()._repr_mimebundle_()[0]
    words = metadata["image/png"]["alt"]
    assert "cut: 450.00 MiB in backward (parameters 100.00 MiB, gradients 100.00 MiB" in words
    assert "Budget: 460.00 MiB." in words
    assert len(data["image/png"]) < 80_000


@pytest.mark.parametrize("given", [{"seconds": 1.0}, {"tokens": 5}, {"seconds": 1.0, "tokens": 0}])
def test_a_time_needs_its_tokens(given):
    with pytest.raises(ValueError, match="give both"):
        Waterfall().add("naive", NAIVE, **given)


def test_a_chart_without_bars_says_what_to_do():
    with pytest.raises(ValueError, match="call add"):
        Waterfall().plot()


@pytest.mark.parametrize("budget", [200, 250, 310, 1000, 1450, 2950])
def test_the_numbers_of_the_axis_stand_apart(budget):
    figure = Waterfall(budget=budget * MiB).add("one", snapshot(parameters=budget - 40)).plot()
    figure.canvas.draw()
    boxes = [label.get_window_extent() for label in figure.axes[0].get_xticklabels()]
    assert all(left.x1 < right.x0 for left, right in itertools.pairwise(boxes))
    assert boxes[-1].x1 < figure.bbox.width * 0.82
