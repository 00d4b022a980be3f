"""The picture of a class's guesses: how many learners guessed how much, as an SVG."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from statistics import median

from ...units import KiB, format_bytes
from ...view.style import COLORS, nice_step, scale_of
from ...view.svg import ALARM_BOTH, frame, svg_halo, svg_text

# Pixels.
_WIDTH, _HEIGHT = 460, 190
_LEFT = 16  # the axis begins here, and ends as far from the right
_FLOOR = _HEIGHT - 26  # the axis, below the bars and above the ticks' names
_CEILING = 42  # the top of the tallest bar, below the words at the measured value
_AXIS_LENGTH = _WIDTH - 2 * _LEFT
_BINS = 24  # bars side by side
_BAR_STEP = _AXIS_LENGTH / _BINS

_SPAN_FOR_LOG = 20  # from here on, most guesses would share a linear axis's first bars
_MOST_DECADES = 6  # of a logarithmic axis to each side of its centre
_MOST_TICKS = 8


def picture(
    id: str, unit: str, guesses: list[float], line: float | None, words: str
) -> tuple[str, int]:
    """An SVG of how many learners made which guesses, and how many guesses are beyond its axis.

    Args:
        id: of the prediction, such as "1.a".
        unit: of the guesses and the line.
        guesses: at least one.
        line: the measured value, which gets an upright line, or ``None``.
        words: what is read out to those who do not see the picture.
    """
    axis, drawn = _axis(unit, guesses, line)
    key = "g" + id.replace(".", "")
    title = f"Guesses of prediction {id}"
    parts = [frame(key, _WIDTH, _HEIGHT, 13, title=title, words=words)]
    if line is not None:
        parts.append(_measured_line(axis.x(axis.place(line)), f"measured {in_words(line, unit)}"))
    parts += _bars(axis, drawn)
    parts.append(f'<path d="M{_LEFT} {_FLOOR}H{_WIDTH - _LEFT}" stroke="currentColor"/>')
    for place, name in _ticks(axis, unit):
        x = axis.x(place)
        parts.append(f'<path d="M{x:.1f} {_FLOOR}v5" stroke="currentColor"/>')
        parts.append(svg_text(x, _FLOOR + 20, name, anchor="middle", size=13))
    parts.append("</svg>")
    return "".join(parts), len(guesses) - len(drawn)


def in_words(value: float, unit: str) -> str:
    if unit == "bytes":
        return format_bytes(round(value))
    return f"{value:,.4g} {unit}".strip()


@dataclass(frozen=True)
class _Axis:
    """From ``low`` to ``high``. Places on it are values; if ``log``, their logarithms to base
    10.
    """

    low: float
    high: float
    log: bool

    def place(self, value: float) -> float:
        return _place(value, self.log)

    def share(self, place: float) -> float:
        """0 at the axis's begin, 1 at its end."""
        return (place - self.low) / (self.high - self.low)

    def x(self, place: float) -> float:
        """In pixels."""
        return _LEFT + self.share(place) * _AXIS_LENGTH


def _place(value: float, log: bool) -> float:
    return math.log10(value) if log else float(value)


def _axis(unit: str, guesses: list[float], line: float | None) -> tuple[_Axis, list[float]]:
    """An axis for these guesses and the line, and the places of the guesses that are on it."""
    known = list(guesses)
    if line is not None:
        known.append(line)
    log = _needs_logarithms(unit, known, line)
    if log:
        centre = median(v for v in known if v > 0) if line is None else line
        drawn = _places_near(centre, guesses)
    else:
        drawn = [_place(guess, log) for guess in guesses]
    ends = list(drawn)
    if line is not None:
        ends.append(_place(line, log))
    low, high = min(ends), max(ends)
    margin = (high - low) * 0.06
    if margin == 0:  # all have the same place
        margin = 0.5 if log else abs(low) * 0.5 or 1.0
    return _Axis(low - margin, high + margin, log), drawn


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
    return max(above) / min(above) >= _SPAN_FOR_LOG


def _places_near(centre: float, guesses: list[float]) -> list[float]:
    """Logarithms of the guesses that are not many decades from ``centre``."""
    places = [math.log10(guess) for guess in guesses if guess > 0]
    return [place for place in places if abs(place - math.log10(centre)) <= _MOST_DECADES]


def _bars(axis: _Axis, drawn: list[float]) -> list[str]:
    """A bar with its number for each bin that has guesses."""
    # The last bin has the end of the axis too.
    counts = Counter(min(int(axis.share(place) * _BINS), _BINS - 1) for place in drawn)
    per_guess = (_FLOOR - _CEILING) / max(counts.values(), default=1)  # pixels
    parts = []
    for bin, n in counts.items():
        left = _LEFT + bin * _BAR_STEP
        height = n * per_guess
        top = _FLOOR - height
        parts.append(
            f'<rect x="{left + 1:.1f}" y="{top:.1f}" width="{_BAR_STEP - 2:.1f}" '
            f'height="{height:.1f}" fill="{COLORS["parameters"]}"/>'
        )
        middle = left + _BAR_STEP / 2
        number = svg_text(middle, top - 4, str(n), anchor="middle", size=12, opacity=1)
        parts.append(f"<g {svg_halo(4)}>{number}</g>")
    return parts


def _measured_line(x: float, words: str) -> str:
    """The line of the measured value, with ``words`` on the side where they have room."""
    anchor = "middle"
    if x < _WIDTH * 0.3:
        anchor = "start"
    elif x > _WIDTH * 0.7:
        anchor = "end"
    line = f'<path d="M{x:.1f} 22V{_FLOOR}" stroke="{ALARM_BOTH}" stroke-width="3"/>'
    return line + svg_text(x, 15, words, anchor=anchor, size=13, weight=700)


def _ticks(axis: _Axis, unit: str) -> list[tuple[float, str]]:
    """Places and names of the ticks, which are at round numbers; for bytes, at round numbers of
    KiB, MiB and so on.
    """
    if axis.log:
        return _ticks_of_decades(axis.low, axis.high, unit)
    factor, name = 1, ""
    if unit == "bytes":
        factor, name = scale_of(round(axis.high))
    step = nice_step((axis.high - axis.low) / factor)
    first = math.ceil(axis.low / factor / step)
    last = math.floor(axis.high / factor / step)
    marks = [n * step for n in range(first, last + 1)]
    return [(mark * factor, f"{mark:g} {name}".strip()) for mark in marks[:_MOST_TICKS]]


def _ticks_of_decades(low: float, high: float, unit: str) -> list[tuple[float, str]]:
    """``low`` and ``high``: the axis's ends, as logarithms."""
    if unit == "bytes":
        tens = [KiB**k * 10.0**j for k in range(11) for j in range(3)]  # 1, 10 and 100 of each
    else:
        tens = [10.0**n for n in range(math.floor(low), math.ceil(high) + 1)]
    digits = (1, 2, 5) if high - low < 2.2 else (1,)
    marks = [ten * digit for ten in tens for digit in digits]
    marks = [mark for mark in marks if low <= math.log10(mark) <= high]
    every = math.ceil(len(marks) / (_MOST_TICKS - 1))
    if every > 1:
        marks = marks[::every]
    return [(math.log10(mark), _tick_name(mark, unit)) for mark in marks]


def _tick_name(value: float, unit: str) -> str:
    if unit == "bytes":
        factor, name = scale_of(round(value))
        return f"{value / factor:,.0f} {name}"
    if 1 <= value < 1e6:
        return f"{value:,.0f}"
    return f"{value:g}"
