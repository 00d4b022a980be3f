"""Stacked bars of bytes by category, against the bytes of cards."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.axes import Axes

from ..names import CATEGORIES
from ..units import format_bytes
from .marks import draw_limit, draw_stack
from .picture import Picture
from .style import COLORS, DARK, LIGHT, is_dark, listed, scale_of, style

Parts = Mapping[str, int]  # bytes by category
LETTER = 0.0085  # of the axes' width: a letter in a bar


@style()
def plot_bars(
    bars: Mapping[str, Parts], *, cards: Mapping[str, int] | None = None, title: str = ""
) -> Picture:
    """Draw horizontal stacked bars by category against the lines of one or more cards.

    Args:
        bars: label of a bar -> category -> bytes. Categories are those of the tracker.
        cards: name of a card -> bytes; drawn as dashed lines.
        title: a heading.

    Raises ``ValueError`` on categories that the palette does not know.
    """
    unknown = sorted({name for parts in bars.values() for name in parts} - set(CATEGORIES))
    if unknown:
        raise ValueError(
            f"no colour for {', '.join(unknown)}: the categories are {', '.join(CATEGORIES)}"
        )
    cards = dict(cards or {})
    totals = [sum(parts.values()) for parts in bars.values()]
    top = 1.13 * max([*totals, *cards.values(), 1])
    factor, unit = scale_of(round(top))
    head = 0.5 if title else 0.1
    foot = head + 0.3 + 0.72 * len(bars)
    picture = Picture(8.6, foot + 0.6, title, alt=_in_words(bars, cards))
    ax = picture.panel(0.012, 0.97, head + 0.3 * bool(cards), foot)
    ax.set(xlim=(0, top / factor), ylim=(0.42 - len(bars), 0.62), yticks=[])
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:g} {unit}" if value else "0")
    for row, (label, parts) in enumerate(bars.items()):
        draw_stack(ax, -row, 0.5, parts, factor, zorder=2)
        _label_parts(ax, -row, parts, factor)
        ax.text(0, 0.3 - row, label, va="bottom", zorder=6)
        size = format_bytes(totals[row])
        end = totals[row] / factor
        for limit in sorted(cards.values()):
            if end <= limit / factor < end + LETTER * len(size) * top / factor:
                end = limit / factor  # else the line would go through the words
        end += LETTER * top / factor
        ax.text(end, -row, size, va="center", fontweight="bold", zorder=6)
    for name, nbytes in cards.items():
        align = "center" if 0.2 < nbytes / top < 0.8 else "right"
        draw_limit(ax, nbytes / factor, name, ha="left" if nbytes < 0.2 * top else align)
    picture.categories(0.012, foot + 0.45)
    return picture


def _label_parts(ax: Axes, y: float, parts: Parts, factor: int) -> None:
    """Each part's name and size inside its box, as far as they fit."""
    width = ax.get_xlim()[1]
    left = 0.0
    for name in CATEGORIES:
        part = parts.get(name, 0) / factor
        size = format_bytes(parts.get(name, 0))
        for words in (f"{name}\n{size}", size):
            longest = max(map(len, words.split("\n")))
            if LETTER * (longest + 1) * width < part:
                ink = LIGHT if is_dark(COLORS[name]) else DARK
                box = {"boxstyle": "round,pad=0.1", "facecolor": COLORS[name], "alpha": 0.8}
                look = {"ha": "center", "va": "center", "fontsize": 7.5, "zorder": 6}
                ax.text(left + part / 2, y, words, color=ink, bbox=box, **look)
                break
        left += part


def _in_words(bars: Mapping[str, Parts], cards: Mapping[str, int]) -> str:
    """The picture for those who do not see it."""
    words = []
    for label, parts in bars.items():
        in_order = {name: parts.get(name, 0) for name in CATEGORIES}
        total = format_bytes(sum(parts.values()))
        words.append(f"{label}: {total} in all, of which {listed(in_order)}")
    lines = "".join(f" Line: {name}, {format_bytes(nbytes)}." for name, nbytes in cards.items())
    return f"{'; '.join(words)}.{lines}"
