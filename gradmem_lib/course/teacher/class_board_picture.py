"""The picture of a class's guesses: how many learners guessed how much, as an SVG."""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import median

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, MultipleLocator

from ...units import format_bytes
from ...view.picture import Picture
from ...view.style import ALARM, COLORS, nice_step, scale_of, style

BINS = 25  # bars side by side
SPAN_FOR_LOG = 20  # from here on, most guesses would share a linear axis's first bars
MOST_DECADES = 6  # of a logarithmic axis to each side of its centre
MOST_TICKS = 6


@lru_cache(500)  # a board is written every few seconds, and most of its pictures stay as they are
def picture(
    id: str, unit: str, guesses: tuple[float, ...], line: float | None, words: str
) -> tuple[str, int]:
    """An SVG of how many learners made which guesses, and how many guesses are beyond its axis.

    Args:
        id: of the prediction, such as "1.a".
        unit: of the guesses and the line.
        guesses: at least one.
        line: the measured value, which gets an upright line, or ``None``.
        words: what is read out to those who do not see the picture.
    """
    lines = [] if line is None else [line]
    is_log = _needs_logarithms(unit, [*guesses, *lines], line)
    drawn = _near(guesses, line) if is_log else list(guesses)
    low, high = _ends([*drawn, *lines], is_log)
    sheet = Picture(4.6, 1.9, alt=words)
    with style():
        axes = sheet.panel(0.04, 0.96, 0.32, 1.6, xlim=(low, high), yticks=[])
        axes.spines.left.set_visible(False)
        _put_ticks(axes, unit, is_log)
        edges = (np.geomspace if is_log else np.linspace)(low, high, BINS + 1)
        counts, _, bars = axes.hist(drawn, edges, color=COLORS["parameters"], rwidth=0.9)
        axes.set_ylim(0, 1.2 * max(*counts, 1))  # with room for the numbers
        axes.bar_label(bars, [f"{count:.0f}" if count else "" for count in counts])
        for value in lines:
            axes.axvline(value, color=ALARM)
            share = axes.transLimits.transform(axes.transScale.transform((value, 0)))[0]
            side = "center"
            if not 0.3 < share < 0.7:  # where the words have room
                side = "left" if share < 0.5 else "right"
            name = f"measured {in_words(value, unit)}"
            axes.text(share, 1.04, name, transform=axes.transAxes, ha=side, fontweight="bold")
    return sheet.svg(f"Guesses of prediction {id}"), len(guesses) - len(drawn)


def in_words(value: float, unit: str) -> str:
    if unit == "bytes":
        return format_bytes(round(value))
    return f"{value:,.4g} {unit}".strip()


def _needs_logarithms(unit: str, known: list[float], line: float | None) -> bool:
    """Whether the guesses and the line span decades. Shares never do, and what is not above 0 has
    no logarithm.
    """
    if unit in ("%", "percent"):
        return False
    if line is not None and line <= 0:
        return False
    above = [value for value in known if value > 0]
    if len(above) <= len(known) / 2:
        return False
    return max(above) / min(above) >= SPAN_FOR_LOG


def _near(guesses: tuple[float, ...], line: float | None) -> list[float]:
    """The guesses that have a place on a logarithmic axis, not many decades from its centre."""
    above = [guess for guess in guesses if guess > 0]
    centre = median(above) if line is None else line
    return [guess for guess in above if abs(math.log10(guess / centre)) <= MOST_DECADES]


def _ends(values: list[float], is_log: bool) -> tuple[float, float]:
    """Of an axis on which these values have room."""
    low, high = min(values), max(values)
    if is_log:
        room = (high / low) ** 0.06 if high > low else 3
        return low / room, high * room
    room = (high - low) * 0.06 or abs(low) / 2 or 1
    return low - room, high + room


def _put_ticks(axes: Axes, unit: str, is_log: bool) -> None:
    """At round numbers; for bytes, of KiB, MiB and so on."""
    in_bytes = unit == "bytes"

    def name(value: float, _) -> str:
        factor, scale = scale_of(round(value)) if in_bytes else (1, "")
        return f"{value / factor:,g} {scale}".strip()

    if is_log:
        base = 2 if in_bytes else 10
        axes.set_xscale("log", base=base)
        axes.xaxis.set_major_locator(LogLocator(base, numticks=MOST_TICKS))
        axes.minorticks_off()
    else:
        low, high = axes.get_xlim()
        factor = scale_of(round(high))[0] if in_bytes else 1
        axes.xaxis.set_major_locator(MultipleLocator(nice_step((high - low) / factor) * factor))
    axes.xaxis.set_major_formatter(name)
