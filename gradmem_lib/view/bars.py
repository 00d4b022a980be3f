"""Stacked bars of bytes by category, for print and as SVG."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from html import escape
from typing import TYPE_CHECKING

from ..names import CATEGORIES
from ..units import format_bytes
from .style import (
    ALARM,
    ALARM_BOTH,
    COLORS,
    HATCHES,
    MUTED,
    PAPER,
    halo,
    hatch_ink,
    new_figure,
    nice_step,
    scale_of,
    style,
    svg_label,
    svg_pattern,
    swatch,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_bars(
    bars: Mapping[str, Mapping[str, int]], *, cards: Mapping[str, int] | None = None, title: str = "",
    note: str = "",
) -> Figure:  # fmt: skip
    """``bar_svg`` for print: ``bars`` maps a label to bytes by category, ``cards`` a name to bytes."""
    cards = dict(cards or {})
    top = _bars_top(bars, cards)
    factor, unit = scale_of(top)
    with style():
        height = 1.55 + 0.62 * len(bars)
        figure = new_figure(8.6, height)
        ax = figure.add_axes((0.02, 0.92 / height, 0.96, (height - 1.62) / height))
        for row, parts in enumerate(bars.values()):
            left = 0.0
            for name in CATEGORIES:
                width = parts.get(name, 0) / factor
                if not width:
                    continue
                ax.barh(
                    -row,
                    width,
                    0.5,
                    left=left,
                    color=COLORS[name],
                    hatch=HATCHES[name],
                    edgecolor=hatch_ink(COLORS[name]),
                    linewidth=0,
                )
                left += width
        for row, (label, parts) in enumerate(bars.items()):
            ax.text(
                0, 0.30 - row, label, ha="left", va="bottom", fontsize=8.5, path_effects=halo(5), zorder=6
            )
            total = sum(parts.values())
            ax.text(
                total / factor,
                -row,
                f"  {format_bytes(total)}",
                va="center",
                fontweight="bold",
                path_effects=halo(5),
                zorder=6,
            )
        for name, nbytes in cards.items():
            ax.axvline(nbytes / factor, color=ALARM, linewidth=1.4, linestyle=(0, (5, 3)), zorder=5)
            ax.annotate(
                name,
                (nbytes / factor, 1),
                xycoords=("data", "axes fraction"),
                xytext=(0, 2),
                textcoords="offset points",
                ha="center",
                va="bottom",
                color=ALARM,
                fontsize=8.5,
                fontweight="bold",
            )
        ax.set_xlim(0, top / factor)
        ax.set_ylim(0.55 - len(bars), 0.62)
        ax.set_yticks([])
        ax.set_facecolor(PAPER)
        for side in ("top", "right", "left"):
            ax.spines[side].set_visible(False)
        ax.tick_params(colors=MUTED, length=3, labelsize=8)
        ax.set_xlabel(unit, color=MUTED, fontsize=8.5)
        figure.text(0.02, 1 - 0.28 / height, title, fontsize=11, fontweight="bold", va="baseline")
        figure.text(0.98, 1 - 0.28 / height, note, fontsize=9, ha="right", va="baseline")
        _draw_legend_row(figure, height)
    return figure


def _draw_legend_row(figure: Figure, height: float) -> None:
    for i, name in enumerate(CATEGORIES):
        x, y = 0.02 + i * 0.163, 0.2 / height
        swatch(figure, name, (x, y), (0.021, 0.18 / height))
        figure.text(x + 0.028, y, name, va="center_baseline", fontsize=8.5)


def _bars_top(bars: Mapping[str, Mapping[str, int]], cards: Mapping[str, int]) -> int:
    return round(1.13 * max([sum(parts.values()) for parts in bars.values()] + list(cards.values()) + [1]))


def bar_svg(
    bars: Mapping[str, Mapping[str, int]], *, cards: Mapping[str, int] | None = None, title: str = "Memory",
    width: int = 760,
) -> str:  # fmt: skip
    """Horizontal stacked bars by category against the lines of one or more cards, as one inline ``<svg>``.

    Args:
        bars: label of a bar -> category -> bytes. Categories are those of the tracker.
        cards: name of a card -> bytes; drawn as dashed lines.
        title: what the picture shows, read out by screen readers.
        width: CSS pixels at most; narrower places shrink it.

    Text takes the colour of its surroundings, so the picture follows light and dark themes. Raises ``ValueError`` on
    categories that the palette does not know.
    """
    unknown = sorted({name for parts in bars.values() for name in parts} - set(CATEGORIES))
    if unknown:
        raise ValueError(f"no colour for {', '.join(unknown)}: the categories are {', '.join(CATEGORIES)}")
    cards = dict(cards or {})
    top, pad, bar, row = _bars_top(bars, cards), 2, 40, 70
    head = 22 if cards else 4
    foot = head + row * len(bars)
    legend_y, height = foot + 34, foot + 50
    inner = width - 2 * pad

    def px(nbytes: float) -> float:
        return round(pad + nbytes / top * inner, 1)

    words = "; ".join(
        f"{label}: {format_bytes(sum(parts.values()))} in all, of which "
        + ", ".join(f"{name} {format_bytes(parts[name])}" for name in CATEGORIES if parts.get(name))
        for label, parts in bars.items()
    )
    against = "".join(f" Line: {name}, {format_bytes(n)}." for name, n in cards.items())
    # Pattern names must differ between two pictures of one page, and be the same in every run.
    key = "gm" + hashlib.sha1(repr((bars, cards, title, width)).encode()).hexdigest()[:8]
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-labelledby="{key}t {key}d" viewBox="0 0 {width} {height}" '
        f'style="width:100%;max-width:{width}px;height:auto;display:block;color:inherit;'
        f'font:13px var(--jp-ui-font-family,system-ui,sans-serif)">',
        f'<title id="{key}t">{escape(title)}</title><desc id="{key}d">{escape(words)}.{escape(against)}</desc>',
        f"<defs>{''.join(svg_pattern(key, name) for name in CATEGORIES)}</defs>",
    ]
    labels = []
    for i, parts in enumerate(bars.values()):
        y, left = head + i * row, 0
        y += 22
        if cards:
            room = px(max(cards.values())) - pad
            out.append(
                f'<rect x="{pad}" y="{y}" width="{room:.1f}" height="{bar}" fill="currentColor" opacity=".07"/>'
            )
        for name in CATEGORIES:
            nbytes = parts.get(name, 0)
            if not nbytes:
                continue
            x, w = px(left), px(left + nbytes) - px(left)
            out.append(
                f'<rect class="gm-part" data-category="{name}" data-bytes="{nbytes}" x="{x}" y="{y}" width="{max(w, 0.5):.1f}" '
                f'height="{bar}" fill="url(#{key}{name})"><title>{name}: {format_bytes(nbytes)} ({nbytes:,} bytes)</title></rect>'
            )
            labels.append(svg_label(name, nbytes, x, y, w, bar))
            left += nbytes
    for name, nbytes in cards.items():
        x = px(nbytes)
        anchor = "end" if x > width * 0.8 else "start" if x < width * 0.2 else "middle"
        out.append(
            f'<line class="gm-card" data-bytes="{nbytes}" x1="{x}" x2="{x}" y1="{head - 4}" y2="{foot + 2}" '
            f'stroke="{ALARM_BOTH}" stroke-width="2" stroke-dasharray="6 4"/>'
            f'<text x="{x}" y="{head - 8}" text-anchor="{anchor}" fill="{ALARM_BOTH}" font-weight="700">{escape(name)}</text>'
        )
    halo = 'style="paint-order:stroke;stroke:var(--jp-layout-color0,transparent);stroke-width:7px"'
    out += labels  # after the lines, which would run through the words
    for i, (label, parts) in enumerate(bars.items()):
        y, total = head + i * row, sum(parts.values())
        out.append(
            f'<text x="{pad}" y="{y + 14}" fill="currentColor" {halo}>{escape(label)}</text>'
            f'<text x="{px(total) + 7}" y="{y + 22 + bar / 2 + 5}" fill="currentColor" font-weight="700" {halo}>'
            f"{format_bytes(total)}</text>"
        )
    factor, unit = scale_of(top)
    step = nice_step(top / factor, 6)
    out.append(
        f'<line x1="{pad}" x2="{width - pad}" y1="{foot}" y2="{foot}" stroke="currentColor" opacity=".35"/>'
    )
    tick = 0.0
    while tick * factor < top * 0.97:
        words = f"{tick:g} {unit}" if tick else "0"
        anchor = "middle" if tick else "start"
        out.append(
            f'<text x="{px(tick * factor)}" y="{foot + 15}" text-anchor="{anchor}" font-size="11" fill="currentColor" '
            f'opacity=".75">{words}</text>'
        )
        tick += step
    for i, name in enumerate(CATEGORIES):
        x = pad + i * inner / len(CATEGORIES)
        out.append(
            f'<rect x="{x:.1f}" y="{legend_y - 1}" width="16" height="12" fill="url(#{key}{name})"/>'
            f'<text x="{x + 22:.1f}" y="{legend_y + 9}" font-size="12" fill="currentColor">{name}</text>'
        )
    return "".join(out) + "</svg>"
