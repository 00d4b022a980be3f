"""A ladder of runs, each with one technique more: the bytes at each peak, what the technique
changed, and its time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from matplotlib.axes import Axes
from matplotlib.patheffects import withStroke

from ..measure.timeline import MemorySnapshot
from ..units import format_bytes, parse_bytes
from .marks import draw_byte_axis, draw_limit, draw_stack
from .picture import Picture
from .style import (
    ALARM,
    INK,
    LIGHT,
    PHASE_LABELS,
    listed,
    reach_of,
    scale_of,
    style,
)

WORDS = "Waterfall: "
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

    def plot(self) -> Picture:
        """The chart as a matplotlib ``Figure``. Raises ``ValueError`` if there is no bar yet."""
        if not self.bars:
            raise ValueError("there is no bar yet: call add(name, tracker.peak) first")
        return plot_waterfall(self)

    def _repr_mimebundle_(self, include=None, exclude=None, **kwargs):
        if not self.bars:
            return {"text/plain": WORDS + self.title}, {}
        return self.plot().bundle()


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


@style()
def plot_waterfall(chart: Waterfall) -> Picture:
    """The chart as a picture: a row for each of its bars."""
    bars = chart.bars
    foot = HEAD + ROW * len(bars)
    text = WORDS + chart.title
    picture = Picture(8.6, foot + FOOT, chart.title, alt=chart.describe(), text=text)
    picture.categories(0.012, 0.5)
    axes = picture.panel(LEFT, RIGHT, HEAD, foot)
    highest = max(bar.total for bar in bars)
    top = 1.03 * reach_of(highest, chart.budget)
    factor, unit = scale_of(highest)  # the largest figure's own unit
    draw_byte_axis(axes, top / factor, unit)
    axes.set_ylim(len(bars) - 0.5, -0.5)
    axes.grid(axis="x")
    axes.spines[:].set_visible(False)
    axes.spines["left"].set_visible(True)
    axes.tick_params(length=0)
    below = 0  # the row of the bar that the next one builds on
    for row, bar in enumerate(bars):
        draw_stack(axes, row, 0.34 if bar.aside else 0.62, bar.by_category, factor, zorder=2)
        if bar.change is not None:
            _draw_step(axes, below, bars[below].total / factor, row, bar.total / factor)
        if not bar.aside:
            below = row
        _write_row(picture, HEAD + ROW * (row + 0.5), bar, chart.budget, (factor, unit))
    if chart.budget is not None:
        _draw_budget(axes, chart.budget, top, (factor, unit))
    for column, right in COLUMNS.items():
        if column != "ms/token" or any(bar.seconds_per_token is not None for bar in bars):
            picture.write(right, HEAD - 0.12, column, ha="right", fontsize=8)
    return picture


def _draw_step(axes: Axes, from_row: int, start: float, row: int, end: float) -> None:
    """A line from the end of the bar before, down to this row, and an arrow along it to this bar's
    end. A small change has an arrow that points down at the bar.
    """
    tail, head = (start, from_row), (start, row - 0.31)
    arrow = {"arrowstyle": "-|>", "color": INK, "linewidth": 0.8, "shrinkA": 0, "shrinkB": 0.5}
    if abs(end - start) > 0.015 * axes.get_xlim()[1]:
        axes.plot([start, start], [from_row, row], color=INK, linewidth=0.8, zorder=1)
        tail, head = (start, row), (end, row)
        if end > start:  # it lies on the longer bar
            arrow["path_effects"] = [withStroke(linewidth=1.6, foreground=LIGHT)]
    axes.annotate("", head, tail, arrowprops=arrow, zorder=3).arrow_patch.set_zorder(3)


def _write_row(
    picture: Picture, y: float, bar: Bar, budget: int | None, scale: tuple[int, str]
) -> None:
    """The bar's name and phase to its left, its figures to its right."""
    x = 0.028 if bar.aside else 0.012
    size = min(8.5, 8.5 * 26 / max(len(bar.name), 1))  # a longer name would run into its bar
    weight = "normal" if bar.aside else "bold"
    picture.write(x, y - 0.085, bar.name, fontsize=size, fontweight=weight)
    if bar.phase in PHASE_LABELS:
        picture.write(x, y + 0.085, f"peak in {PHASE_LABELS[bar.phase]}", fontsize=7)
    fits = budget is not None and bar.total <= budget
    color = INK if fits or budget is None else ALARM
    right, peak = COLUMNS["peak"], short(bar.total, scale)
    picture.write(right, y, peak, ha="right", fontweight="bold", color=color)
    if fits:
        picture.write(right + 0.005, y, "✓")
    if bar.change is not None:
        picture.write(COLUMNS["change"], y, signed(bar.change, scale), ha="right")
    if bar.seconds_per_token is not None:
        time = milliseconds(bar.seconds_per_token)
        picture.write(COLUMNS["ms/token"], y, time, ha="right")


def _draw_budget(axes: Axes, budget: int, top: float, scale: tuple[int, str]) -> None:
    # In the axis's unit where it stands on the axis, so that the two can be compared.
    at, words = budget / scale[0], short(budget, scale)
    if budget > top:
        at, words = top / scale[0], f"{short(budget)} (beyond this picture)"
    align = "right" if budget > 0.75 * top else "left"
    draw_limit(axes, at, f"budget {words}", ha=align, is_inside=budget <= top)
