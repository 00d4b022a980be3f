"""A stacked bar of bytes by category, against a card's bytes."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes

from ..names import CATEGORIES
from ..units import format_bytes
from .marks import draw_byte_axis, draw_limit, draw_stack
from .picture import Picture
from .style import COLORS, LIGHT, is_dark, joined, listed, scale_of, style

LETTER = 0.0085  # of the axes' width: a letter in a bar
LINE = 108  # characters of a sentence that fit below it


@style()
def plot_bar(
    label: str, parts: Mapping[str, int], card: str, limit: int, more: Sequence[str] = ()
) -> Picture:
    """Draw ``parts`` (category -> bytes) as one horizontal bar, and a line at ``limit``, the bytes
    of ``card``. ``more``: sentences, which stand below it.

    Raises ``ValueError`` on categories that the palette does not know.
    """
    unknown = sorted(set(parts) - set(CATEGORIES))
    if unknown:
        raise ValueError(
            f"no colour for {', '.join(unknown)}: the categories are {', '.join(CATEGORIES)}"
        )
    total = sum(parts.values())
    size = format_bytes(total)
    words = joined(label, f"{size} in all, of which {listed(parts)}.")
    words += f" Line: {card}, {format_bytes(limit)}."
    lines = [line for sentence in more for line in textwrap.wrap(sentence, LINE)]
    picture = Picture(8.6, 1.8 + 0.21 * len(lines), alt=joined(words, *more, by=" "))
    picture.categories(0.012, 1.6)
    for number, line in enumerate(lines, 1):
        picture.write(0.012, 1.69 + 0.21 * number, line, fontsize=9.5)
    picture.write(0.012, 0.14, label)  # where no line crosses it
    ax = picture.panel(0.012, 0.97, 0.5, 1.15)
    top = 1.13 * max(total, limit, 1)
    factor, unit = scale_of(round(top))
    draw_byte_axis(ax, top / factor, unit)
    ax.set_ylim(-0.3, 0.3)
    draw_stack(ax, 0, 0.5, parts, factor, zorder=2)
    _label_parts(ax, parts, factor)
    end = total
    if end <= limit < end + LETTER * len(size) * top:
        end = limit  # else the line would go through the words
    ax.text(end / factor, 0, f"\N{NO-BREAK SPACE}{size}", va="center", fontweight="bold", zorder=6)
    draw_limit(ax, limit / factor, card, ha="left" if limit < 0.5 * top else "right")
    return picture


def _label_parts(ax: Axes, parts: Mapping[str, int], factor: int) -> None:
    """Each part's name and size inside its box, as far as they fit."""
    letter = LETTER * ax.get_xlim()[1]
    left = 0.0
    for name in CATEGORIES:
        part = parts.get(name, 0) / factor
        size = format_bytes(parts.get(name, 0))
        words = f"{name}\n{size}"
        if letter * (len(name) + 1) > part:
            words = size
        if letter * (len(size) + 1) < part:
            ink = LIGHT if is_dark(COLORS[name]) else "black"
            box = {"boxstyle": "round,pad=0.1", "facecolor": COLORS[name], "alpha": 0.95}
            look = {"ha": "center", "va": "center", "fontsize": 7.5, "zorder": 6}
            ax.text(left + part / 2, 0, words, color=ink, bbox=box, **look)
        left += part
