"""What pictures of bytes consist of: stacks, areas over time, scales, peaks, limits, and strips."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from ..names import CATEGORIES
from ..units import format_bytes
from .style import ALARM, DARK, INK, LIGHT, PHASE_COLORS, look_of, nice_step, plate

DASHES = (0, (5, 3))
LETTER = 4.5  # points that a letter of a small name takes


def draw_stack(
    ax: Axes, y: float, height: float, parts: Mapping[str, int], factor: int, **more
) -> None:
    """Draw a bar from 0 on: the bytes of ``parts`` by category, one behind another. ``factor``: the
    bytes in the axis's unit.
    """
    left = 0.0
    for name in CATEGORIES:
        width = parts.get(name, 0) / factor
        if width:
            ax.barh(y, width, height, left=left, **look_of(name), **more)
            left += width


def draw_areas(ax: Axes, edges: np.ndarray, areas: Sequence[tuple[dict, np.ndarray]]) -> None:
    """Draw areas one upon another, each (look, values (n,)), and their outline.

    Values hold until the next sample, so the areas are steps: memory does not change between
    operations. ``edges`` (n + 1,): where samples begin, and where the last one ends.
    """
    dense = len(edges) > 150  # spikes this close would be covered by their own outline
    low = np.zeros(len(edges))
    for look, values in areas:
        if not values.any():
            continue
        high = low + np.append(values, values[-1])
        ax.fill_between(edges, low, high, step="post", zorder=2, **look)
        ax.step(edges, high, where="post", color=LIGHT, linewidth=0.2 if dense else 0.7, zorder=2.5)
        low = high
    outline = {"linewidth": 0.3, "alpha": 0.5} if dense else {"linewidth": 0.8}
    ax.step(edges, low, where="post", color=INK, zorder=3, **outline)
    ax.set_xlim(edges[0], edges[-1])


def draw_scale(ax: Axes, top: float, unit: str, parts: int = 4) -> None:
    """The axes of areas that reach ``top``, in ``unit``."""
    ax.set_ylim(0, top)
    ax.set_yticks(np.arange(0, top, nice_step(top, parts)))
    ax.set_ylabel(unit)
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    ax.xaxis.get_major_locator().set_params(integer=True)


def draw_byte_axis(ax: Axes, top: float, unit: str) -> None:
    """The axis below bars that reach ``top``, in ``unit``."""
    step = nice_step(top, 5)
    ax.set(xlim=(0, top), yticks=[], xticks=np.arange(0, top, step))
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:g} {unit}" if value else "0")


def draw_peak(ax: Axes, x: float, y: float, nbytes: int = 0, line: float | None = None) -> None:
    """A dot on the peak, drawn whole also at the picture's edge, and its ``nbytes``, if any, on the
    side that has room. ``line``: the height of a line that the words must not cover.
    """
    dot = {"color": DARK, "markeredgecolor": LIGHT, "zorder": 6, "clip_on": False}
    ax.plot([x], [y], marker="o", markersize=6, **dot)
    if not nbytes:
        return
    left, right = ax.get_xlim()
    side, align = 1, "left"
    if x > left + 0.72 * (right - left):
        side, align = -1, "right"
    foot = y
    if line is not None and 0 < line - y < 0.1 * ax.get_ylim()[1]:
        foot = line
    ax.annotate(
        f"peak {format_bytes(nbytes)}",
        (x, foot),
        xytext=(10 * side, 3),
        textcoords="offset points",
        ha=align,
        va="bottom",
        **plate(),
    )


def draw_limit(ax: Axes, x: float, label: str, *, ha: str, is_inside: bool = True) -> None:
    """Draw an upright line at ``x``, such as a card's bytes, and its label above the axes."""
    if is_inside:
        ax.axvline(x, color=ALARM, linewidth=1.4, linestyle=DASHES, zorder=5)
    ax.annotate(
        label,
        (x, 1),
        xycoords=("data", "axes fraction"),
        xytext=(0, 3),
        textcoords="offset points",
        ha=ha,
        va="bottom",
        color=ALARM,
        fontweight="bold",
        zorder=7,
    )


def points_per_unit(ax: Axes) -> float:
    """How wide one unit of the horizontal axis is drawn, in points."""
    left, right = ax.get_xlim()
    return ax.get_position().width * ax.figure.get_size_inches()[0] * 72 / (right - left)


def draw_strip(ax: Axes, start: float, stop: float, color: str, names: Sequence[str]) -> None:
    """A box above the axes for what lasts from ``start`` to ``stop``, with the first of its
    ``names``, from long to short, that fits.
    """
    above = ax.get_xaxis_transform()
    inch = 1 / (ax.get_position().height * ax.figure.get_size_inches()[1])
    box = Rectangle(
        (start, 1 + 0.035 * inch),
        stop - start,
        0.15 * inch,
        transform=above,
        facecolor=color,
        edgecolor=LIGHT,
        linewidth=0.6,
        clip_on=False,
    )
    ax.add_patch(box)
    width = (stop - start) * points_per_unit(ax)
    for name in names:
        if LETTER * len(name) + 4 < width:
            ax.text(
                (start + stop) / 2,
                1 + 0.105 * inch,
                name,
                transform=above,
                ha="center",
                va="center_baseline",
                fontsize=7.5,
                color=DARK if color == PHASE_COLORS["forward"] else LIGHT,
            )
            return
