"""A ladder of runs, each with one technique more: the bytes at each peak, what the technique
changed, and its time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..measure.timeline import MemorySnapshot
from ..names import CATEGORIES
from ..units import format_bytes, parse_bytes
from .style import (
    ALARM,
    GRID,
    INK,
    LIGHT,
    draw_entry,
    draw_stack,
    listed,
    new_figure,
    nice_step,
    picture_bundle,
    reach_of,
    scale_of,
    style,
)
from .timeline import PHASE_LABELS

if TYPE_CHECKING:
    from matplotlib.figure import Figure


LEFT, RIGHT = 0.245, 0.735  # where the bars begin and end; names stand before, figures behind
COLUMNS = {"peak": 0.82, "change": 0.915, "ms/token": 0.99}  # right edges
ROW, HEAD, FOOT = 0.42, 0.96, 0.3  # inches


@dataclass(frozen=True)
class Bar:
    """One run. ``total``, ``by_category`` and ``change`` are bytes. ``change`` is the difference
    from the bar that this one builds on (``None`` for the first). ``seconds_per_token`` is ``None``
    if no time was given.
    """

    name: str
    total: int
    by_category: Mapping[str, int]
    phase: str
    change: int | None
    seconds_per_token: float | None
    aside: bool


class Waterfall:
    """A chart with one more bar for every technique: ``Waterfall(budget="2 GiB").add("naive",
    tracker.peak)``

    Args:
        budget: bytes (an int or text such as ``"2 GiB"``), drawn as a line; ``None`` for no line.
        title: a heading.

    A notebook shows the chart if it is the last expression of a cell. Its ``text/plain`` never
    changes, since tests compare it.
    """

    def __init__(
        self, *, budget: int | str | None = None, title: str = "Peak, one technique at a time"
    ):
        self.budget = None if budget is None else parse_bytes(budget)
        self.title = title
        self.bars: list[Bar] = []

    def add(
        self,
        name: str,
        snapshot: MemorySnapshot,
        *,
        seconds: float | None = None,
        tokens: int | None = None,
        aside: bool = False,
    ) -> Waterfall:
        """Add a run's peak. Returns the chart, so that a cell can end with it.

        ``seconds`` and ``tokens`` of one step give its time per token. ``aside``: an experiment
        that the next bar does not build on. It is compared with the bar before it like any other,
        and drawn thinner. A bar with the same name is replaced, so that a cell can be run again.
        Raises ``ValueError`` for a time without its tokens, or the reverse.
        """
        if (seconds is None) != (tokens is None) or (tokens is not None and tokens < 1):
            raise ValueError(
                f"seconds={seconds} and tokens={tokens}: give both, of the same step, for a "
                "time per token, or neither"
            )
        bar = Bar(
            name=name,
            total=snapshot.total,
            by_category=dict(snapshot.by_category),
            phase=snapshot.phase,
            change=None,
            seconds_per_token=None if seconds is None else seconds / tokens,
            aside=aside,
        )
        names = [each.name for each in self.bars]
        at = names.index(name) if name in names else len(names)
        self.bars[at : at + 1] = [bar]
        below = None
        for i, each in enumerate(self.bars):
            self.bars[i] = replace(each, change=None if below is None else each.total - below)
            below = below if each.aside else each.total
        return self

    def describe(self) -> str:
        """The chart in words, for those who do not see it."""
        if not self.bars:
            return f"{self.title}: no bar yet."
        limit = "" if self.budget is None else f" Budget: {format_bytes(self.budget)}."
        rows = []
        for bar in self.bars:
            where = PHASE_LABELS.get(bar.phase, bar.phase)
            parts = listed(bar.by_category)
            rows.append(f"{bar.name}: {format_bytes(bar.total)} in {where} ({parts})")
        return f"{self.title}, stacked by category.{limit} {'; '.join(rows)}."

    def plot(self) -> Figure:
        """The chart as a matplotlib ``Figure``. Raises ``ValueError`` if there is no bar yet."""
        if not self.bars:
            raise ValueError("there is no bar yet: call add(name, tracker.peak) first")
        with style():
            return _draw(self)

    def _repr_mimebundle_(self, include=None, exclude=None, **kwargs):
        text = "Waterfall: " + self.title
        if not self.bars:
            return {"text/plain": text}, {}
        return picture_bundle(self.plot(), self.describe(), text)


def short(nbytes: int, scale: tuple[int, str] | None = None) -> str:
    """Bytes in three digits: "3.35 GiB", "46.4 MiB", "595 MiB".

    ``scale``: the unit of the chart's axis (see ``scale_of``), for figures that stand beside it.
    """
    factor, unit = scale or scale_of(nbytes)
    value = nbytes / factor
    digits = 0
    if factor > 1 and value < 9.995:
        digits = 2
    elif factor > 1 and value < 99.95:
        digits = 1
    if scale and round(value, 2) == 0:
        return short(nbytes)  # too small for the axis's unit
    return f"{value:.{digits}f} {unit}"


def signed(change: int, scale: tuple[int, str] | None = None) -> str:
    """ "-1.03 GiB", "+32.0 KiB"; below 1 KiB "0", since the number of a trainer's own scalars
    varies.
    """
    if abs(change) < 1024:
        return "0"
    return ("+" if change > 0 else "\N{MINUS SIGN}") + short(abs(change), scale)


def milliseconds(seconds: float) -> str:
    """A time with few digits, since it is not exact: two from 10 on."""
    ms = 1000 * seconds
    if ms >= 10:
        return f"{ms:.0f}"
    return f"{ms:.1f}" if ms >= 1 else f"{ms:.2f}"


def _draw(chart: Waterfall) -> Figure:
    bars = chart.bars
    height = HEAD + FOOT + ROW * len(bars)
    figure = new_figure(8.6, height)
    axes = figure.add_axes((LEFT, FOOT / height, RIGHT - LEFT, ROW * len(bars) / height))
    highest = max(bar.total for bar in bars)
    top = 1.03 * reach_of(highest, chart.budget)
    factor, unit = scale_of(highest)  # the largest figure's own unit
    axes.set_xlim(0, top / factor)
    axes.set_ylim(len(bars) - 0.5, -0.5)
    below = 0  # the row of the bar that the next one builds on
    for row, bar in enumerate(bars):
        draw_stack(axes, row, 0.34 if bar.aside else 0.62, bar.by_category, factor, zorder=2)
        if bar.change is not None:
            _step(axes, below, bars[below].total / factor, row, bar.total / factor)
        if not bar.aside:
            below = row
        _words(
            figure,
            (FOOT + ROW * (len(bars) - row - 0.5)) / height,
            height,
            bar,
            chart.budget,
            (factor, unit),
        )
    _axis(axes, top, factor, unit)
    if chart.budget is not None:
        _budget_line(axes, chart.budget, top, (factor, unit))
    _head(figure, height, chart.title, any(bar.seconds_per_token is not None for bar in bars))
    return figure


def _step(axes, from_row: int, start: float, row: int, end: float) -> None:
    """A line from the end of the bar before, down to this row, and an arrow along it to this bar's
    end. A small change has an arrow that points down at the bar.
    """
    large = abs(end - start) > 0.015 * axes.get_xlim()[1]
    tail, head = (start, from_row), (start, row - 0.31)
    if large:
        axes.plot([start, start], [from_row, row], color=INK, linewidth=0.8, zorder=1)
        tail, head = (start, row), (end, row)
    # An arrow to a longer bar lies on that bar, so it is drawn over it, with a halo.
    from matplotlib import patheffects

    outline = [patheffects.withStroke(linewidth=1.6, foreground=LIGHT)]
    arrow = axes.annotate(
        "",
        head,
        tail,
        arrowprops={
            "arrowstyle": "-|>",
            "color": INK,
            "linewidth": 0.8,
            "shrinkA": 0,
            "shrinkB": 0.5,
            "path_effects": outline if end > start and large else [],
        },
        zorder=3,
    )
    arrow.arrow_patch.set_zorder(3)


def _words(
    figure: Figure, y: float, height: float, bar: Bar, budget: int | None, scale: tuple[int, str]
) -> None:
    """The bar's name and phase to its left, its figures to its right."""
    line = 0.085 / height
    x = 0.028 if bar.aside else 0.012
    size = min(8.5, 8.5 * 26 / max(len(bar.name), 1))  # a longer name would run into its bar
    weight = None if bar.aside else "bold"
    figure.text(x, y + line, bar.name, va="center_baseline", fontsize=size, fontweight=weight)
    if bar.phase in PHASE_LABELS:
        figure.text(
            x,
            y - line,
            f"peak in {PHASE_LABELS[bar.phase]}",
            va="center_baseline",
            fontsize=7,
            color=INK,
        )
    fits = budget is not None and bar.total <= budget
    figure.text(
        COLUMNS["peak"],
        y,
        short(bar.total, scale),
        va="center_baseline",
        ha="right",
        fontsize=8.5,
        fontweight="bold",
        color=INK if fits or budget is None else ALARM,
    )
    cells = {"change": "" if bar.change is None else signed(bar.change, scale)}
    cells["ms/token"] = "" if bar.seconds_per_token is None else milliseconds(bar.seconds_per_token)
    for column, text in cells.items():
        figure.text(COLUMNS[column], y, text, va="center_baseline", ha="right", fontsize=8.5)
    if fits:
        figure.text(COLUMNS["peak"] + 0.005, y, "✓", va="center_baseline", fontsize=8.5)


def _axis(axes, top: float, factor: int, unit: str) -> None:
    axes.set_yticks([])
    axes.grid(axis="x", color=GRID, linewidth=0.7, zorder=0)
    axes.set_axisbelow(True)
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)
    axes.spines["left"].set_color(INK)
    step = nice_step(top / factor)
    axes.set_xticks([step * i for i in range(int(top / factor / step) + 1)])
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.tick_params(colors=INK, length=0, labelsize=8)
    axes.set_xlabel(unit, color=INK, fontsize=8.5, loc="right", labelpad=-9)
    if axes.get_xticks()[-1] * factor > 0.89 * top:  # the last number is where the unit would be
        axes.xaxis.label.set_x(1.11)


def _budget_line(axes, budget: int, top: float, scale: tuple[int, str]) -> None:
    factor, _ = scale
    inside = budget <= top
    at = budget / factor if inside else axes.get_xlim()[1]
    if inside:
        axes.axvline(at, color=ALARM, linewidth=1.4, linestyle=(0, (5, 3)), zorder=5)
    late = at > 0.75 * axes.get_xlim()[1]
    # In the axis's unit where it stands on the axis, so that the two can be compared.
    label = short(budget, scale) if inside else f"{short(budget)} (beyond this picture)"
    axes.annotate(
        f"budget {label}",
        (at, 1),
        xycoords=("data", "axes fraction"),
        xytext=(3 if late else -3, 3),
        textcoords="offset points",
        ha="right" if late else "left",
        va="bottom",
        color=ALARM,
        fontsize=8.5,
        fontweight="bold",
        zorder=7,
    )


def _head(figure: Figure, height: float, title: str, timed: bool) -> None:
    """Title, the categories' colours, and a heading for each column of figures."""
    figure.text(
        0.012, 1 - 0.2 / height, title, fontsize=11, fontweight="bold", va="center_baseline"
    )
    x, y = 0.012, 1 - 0.47 / height
    for name in CATEGORIES:
        draw_entry(figure, name, (x, y), (0.018, 0.12 / height), 0.024)
        x += 0.052 + 0.0088 * len(name)
    for column, right in COLUMNS.items():
        if timed or column != "ms/token":
            figure.text(
                right,
                1 - 0.84 / height,
                column,
                fontsize=8,
                color=INK,
                ha="right",
                va="center_baseline",
            )
