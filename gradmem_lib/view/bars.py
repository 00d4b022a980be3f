"""Stacked bars of bytes by category, for print and as SVG."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from ..names import CATEGORIES
from ..units import format_bytes
from .style import (
    ALARM,
    INK,
    draw_entry,
    draw_stack,
    listed,
    new_figure,
    nice_step,
    scale_of,
    style,
)
from .svg import ALARM_BOTH, frame, svg_halo, svg_label, svg_pattern

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def plot_bars(
    bars: Mapping[str, Mapping[str, int]],
    *,
    cards: Mapping[str, int] | None = None,
    title: str = "",
    note: str = "",
) -> Figure:
    """``bar_svg`` for print: ``bars`` maps a label to bytes by category, ``cards`` a name
    to bytes.
    """
    cards = dict(cards or {})
    top = _bars_top(bars, cards)
    factor, unit = scale_of(top)
    with style():
        height = 1.55 + 0.62 * len(bars)
        figure = new_figure(8.6, height)
        ax = figure.add_axes((0.02, 0.92 / height, 0.96, (height - 1.62) / height))
        for row, (label, parts) in enumerate(bars.items()):
            _draw_bar(ax, -row, label, parts, factor)
        for name, nbytes in cards.items():
            _draw_card(ax, name, nbytes / factor)
        ax.set_xlim(0, top / factor)
        ax.set_ylim(0.55 - len(bars), 0.62)
        ax.set_yticks([])
        for side in ("top", "right", "left"):
            ax.spines[side].set_visible(False)
        ax.tick_params(colors=INK, length=3, labelsize=8)
        ax.set_xlabel(unit, color=INK, fontsize=8.5)
        figure.text(0.02, 1 - 0.28 / height, title, fontsize=11, fontweight="bold", va="baseline")
        figure.text(0.98, 1 - 0.28 / height, note, fontsize=9, ha="right", va="baseline")
        _draw_legend_row(figure, height)
    return figure


def _draw_bar(ax: Axes, y: float, label: str, parts: Mapping[str, int], factor: float) -> None:
    draw_stack(ax, y, 0.5, parts, factor)
    on_top = {"zorder": 6}
    ax.text(0, 0.30 + y, label, ha="left", va="bottom", fontsize=8.5, **on_top)
    total = sum(parts.values())
    ax.text(total / factor, y, f"  {format_bytes(total)}", va="center", fontweight="bold", **on_top)


def _draw_card(ax: Axes, name: str, x: float) -> None:
    ax.axvline(x, color=ALARM, linewidth=1.4, linestyle=(0, (5, 3)), zorder=5)
    ax.annotate(
        name,
        (x, 1),
        xycoords=("data", "axes fraction"),
        xytext=(0, 2),
        textcoords="offset points",
        ha="center",
        va="bottom",
        color=ALARM,
        fontsize=8.5,
        fontweight="bold",
    )


def _draw_legend_row(figure: Figure, height: float) -> None:
    for i, name in enumerate(CATEGORIES):
        at = (0.02 + i * 0.163, 0.2 / height)
        draw_entry(figure, name, at, (0.021, 0.18 / height), 0.028)


def _bars_top(bars: Mapping[str, Mapping[str, int]], cards: Mapping[str, int]) -> int:
    return round(
        1.13 * max([sum(parts.values()) for parts in bars.values()] + list(cards.values()) + [1])
    )


def bar_svg(
    bars: Mapping[str, Mapping[str, int]],
    *,
    cards: Mapping[str, int] | None = None,
    title: str = "Memory",
    width: int = 760,
) -> str:
    """Horizontal stacked bars by category against the lines of one or more cards, as one inline
    ``<svg>``.

    Args:
        bars: label of a bar -> category -> bytes. Categories are those of the tracker.
        cards: name of a card -> bytes; drawn as dashed lines.
        title: what the picture shows, read out by screen readers.
        width: CSS pixels at most; narrower places shrink it.

    Text takes the colour of its surroundings, so the picture follows light and dark themes. Raises
    ``ValueError`` on categories that the palette does not know.
    """
    unknown = sorted({name for parts in bars.values() for name in parts} - set(CATEGORIES))
    if unknown:
        raise ValueError(
            f"no colour for {', '.join(unknown)}: the categories are {', '.join(CATEGORIES)}"
        )
    cards = dict(cards or {})
    sums = []
    for label, parts in bars.items():
        in_order = {name: parts.get(name, 0) for name in CATEGORIES}
        total = format_bytes(sum(parts.values()))
        sums.append(f"{label}: {total} in all, of which {listed(in_order)}")
    card_lines = "".join(f" Line: {name}, {format_bytes(n)}." for name, n in cards.items())
    # The names of patterns must differ between two pictures of one page, and must be the same in
    # every run.
    key = "gm" + hashlib.sha1(repr((bars, cards, title, width)).encode()).hexdigest()[:8]
    layout = _Layout(key, width, _bars_top(bars, cards), head=22 if cards else 4, rows=len(bars))
    patterns = "".join(svg_pattern(key, name) for name in CATEGORIES)
    shapes, labels = [], []
    for i, parts in enumerate(bars.values()):
        if cards:
            shapes.append(layout.card_area(i, max(cards.values())))
        for shape, label in layout.parts(i, parts):
            shapes.append(shape)
            labels.append(label)
    shapes += [layout.card(name, nbytes) for name, nbytes in cards.items()]
    shapes += labels  # after the lines, which would run through the words
    shapes += [
        layout.words(i, label, sum(parts.values()), cards.values())
        for i, (label, parts) in enumerate(bars.items())
    ]
    shapes += [layout.axis(), layout.legend()]
    words = f"{'; '.join(sums)}.{card_lines}"
    start = frame(key, width, layout.foot + 50, 13, title=title, words=words, defs=patterns)
    return f"{start}{''.join(shapes)}</svg>"


@dataclass(frozen=True)
class _Layout:
    """The layout of a ``bar_svg`` in CSS pixels; ``top`` is the number of bytes at its
    right edge.
    """

    key: str
    width: int
    top: int
    head: int
    rows: int
    pad = 2
    bar = 40
    row = 70

    @property
    def foot(self) -> int:
        return self.head + self.row * self.rows

    def px(self, nbytes: float) -> float:
        return round(self.pad + nbytes / self.top * (self.width - 2 * self.pad), 1)

    def y(self, i: int) -> int:
        return self.head + i * self.row + 22

    def card_area(self, i: int, nbytes: int) -> str:
        width = self.px(nbytes) - self.pad
        return (
            f'<rect x="{self.pad}" y="{self.y(i)}" width="{width:.1f}" height="{self.bar}" '
            'fill="currentColor" opacity=".07"/>'
        )

    def parts(self, i: int, parts: Mapping[str, int]) -> Iterator[tuple[str, str]]:
        """Each part of a bar and the words in it."""
        left, y = 0, self.y(i)
        for name in CATEGORIES:
            nbytes = parts.get(name, 0)
            if not nbytes:
                continue
            x, w = self.px(left), self.px(left + nbytes) - self.px(left)
            yield (
                f'<rect class="gm-part" data-category="{name}" data-bytes="{nbytes}" x="{x}" '
                f'y="{y}" width="{max(w, 0.5):.1f}" '
                f'height="{self.bar}" fill="url(#{self.key}{name})"><title>{name}: '
                f"{format_bytes(nbytes)} ({nbytes:,} bytes)</title></rect>",
                svg_label(name, nbytes, x, y, w, self.bar),
            )
            left += nbytes

    def card(self, name: str, nbytes: int) -> str:
        x = self.px(nbytes)
        anchor = "middle"
        if x > self.width * 0.8:
            anchor = "end"
        elif x < self.width * 0.2:
            anchor = "start"
        return (
            f'<line class="gm-card" data-bytes="{nbytes}" x1="{x}" x2="{x}" y1="{self.head - 4}" '
            f'y2="{self.foot + 2}" '
            f'stroke="{ALARM_BOTH}" stroke-width="2" stroke-dasharray="6 4"/>'
            f'<text x="{x}" y="{self.head - 8}" text-anchor="{anchor}" fill="{ALARM_BOTH}" '
            f'font-weight="700">{escape(name)}</text>'
        )

    def words(self, i: int, label: str, total: int, cards: Iterable[int]) -> str:
        y, look = self.y(i), f'fill="currentColor" {svg_halo(7)}'
        bold = look.replace('"currentColor"', '"currentColor" font-weight="700"')
        x, size = self.px(total) + 7, format_bytes(total)
        for line in sorted(map(self.px, cards)):
            if x - 7 <= line < x + 8 * len(size):  # else the line would go through the words
                x = line + 7
        return (
            f'<text x="{self.pad}" y="{y - 8}" {look}>{escape(label)}</text>'
            f'<text x="{x:g}" y="{y + self.bar / 2 + 5}" {bold}>{size}</text>'
        )

    def axis(self) -> str:
        factor, unit = scale_of(self.top)
        step, tick = nice_step(self.top / factor, 6), 0.0
        out = (
            f'<line x1="{self.pad}" x2="{self.width - self.pad}" y1="{self.foot}" '
            f'y2="{self.foot}" stroke="currentColor" opacity=".35"/>'
        )
        while tick * factor < self.top * 0.97:
            words, anchor = (f"{tick:g} {unit}", "middle") if tick else ("0", "start")
            out += (
                f'<text x="{self.px(tick * factor)}" y="{self.foot + 15}" text-anchor="{anchor}" '
                f'font-size="11" fill="currentColor" opacity=".75">{words}</text>'
            )
            tick += step
        return out

    def legend(self) -> str:
        step, y = (self.width - 2 * self.pad) / len(CATEGORIES), self.foot + 34
        at = {name: self.pad + i * step for i, name in enumerate(CATEGORIES)}
        return "".join(
            f'<rect x="{x:.1f}" y="{y - 1}" width="16" height="12" fill="url(#{self.key}{name})"/>'
            f'<text x="{x + 22:.1f}" y="{y + 9}" font-size="12" fill="currentColor">{name}</text>'
            for name, x in at.items()
        )
