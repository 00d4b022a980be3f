"""The page of ``python -m gradmem_lib class``: tables and pictures as one HTML file, without a
script.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from functools import cache
from html import escape
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import quote

from ...units import KiB, format_bytes
from ...view.style import COLORS, nice_step, scale_of
from ...view.svg import ALARM_BOTH, frame, svg_halo, svg_text
from ..learner.guesses import how_far
from ..learner.titles import titles

INK, MUTED, PAPER = "#1d2330", "#5b6473", "#ffffff"  # a page of its own is light everywhere
SIGN = '<meta name="generator" content="gradmem class">'
Rows = list[tuple[str, dict[str, Any]]]  # a learner's label, and their "checks" and "guesses"
_BINS, _WIDE, _HIGH, _LEFT = 24, 460, 190, 16
_DECADES = 20  # from here on, most guesses would share a linear axis's first bars
_STYLE = f"""
:root {{ color-scheme: light; --jp-layout-color0: {PAPER}; }}
body {{ margin: 0 auto; padding: 1rem; max-width: 1240px; color: {INK}; background: {PAPER};
  font: 16px/1.45 system-ui, sans-serif; }}
h1 {{ font-size: 1.5rem; margin: 0; }}
h2 {{ font-size: 1.15rem; margin: 1.8rem 0 .4rem; }}
h3 {{ font-size: 1rem; margin: 0; }}
p {{ margin: .3rem 0; max-width: 75ch; overflow-wrap: anywhere; }}
.note {{ color: {MUTED}; font-size: .875rem; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }}
th, td {{ padding: .2rem .5rem; text-align: left; }}
thead th {{ border-bottom: 2px solid {INK}; vertical-align: bottom; }}
tbody tr {{ border-bottom: 1px solid #dde2ea; }} .n {{ text-align: center; white-space: nowrap; }}
tbody th {{ font-weight: 400; min-width: 6rem; max-width: 18rem; overflow-wrap: break-word; }}
th.who {{ position: sticky; left: 0; background: {PAPER}; max-width: 11rem; }}
thead .n {{ white-space: normal; max-width: 6rem; vertical-align: bottom; }}
.two {{ display: flex; flex-wrap: wrap; gap: 0 3rem; }}
section {{ max-width: 100%; flex: 0 1 auto; }} section p {{ max-width: 34rem; }}
.here {{ outline: 2px solid {ALARM_BOTH}; outline-offset: -2px; font-weight: 700; }}
.cards {{ display: grid; gap: 1.4rem;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 350px), 1fr)); }}
a {{ color: {COLORS["parameters"]}; }}
.large {{ font-size: 1.4rem; }}
.large h3, .large .note {{ font-size: inherit; }}
.large svg {{ max-width: 100% !important; }}
"""


def page(
    rows: Rows, remarks: list[tuple[str, str]], *, names: bool, refresh: int, measured: str = ""
) -> str:
    """The whole file, which reloads itself after ``refresh`` seconds (0: never).

    ``measured``: the folder of the pages with measured values. Then this page links to them and
    does not show the values.
    """
    when = f"as of {time.strftime('%H:%M:%S')}" + (
        f", read again every {refresh} s" if refresh else ", not updated any more"
    )
    return _document(
        f"<h1>The class</h1><p>{_count(len(rows), 'learner')}, {when}.</p>"
        f'<div class="two"><section>{_places(rows)}</section><section>{_held(rows)}</section></div>'
        f"{_guesses(rows, measured)}{_files(remarks, names)}",
        refresh,
    )


def measured_pages(rows: Rows, *, back: str, refresh: int) -> dict[str, str]:
    """Pages by file name, one for each prediction that somebody has measured: its guesses beside
    the value.
    """
    link = f'<p><a href="../{quote(back)}">Back to the class</a></p>'
    return {
        f"{id}.html": _document(f'<div class="large">{_card(id, entries)}</div>{link}', refresh)
        for id, entries in _asked(rows).items()
        if any(measured is not None for _, measured, _ in entries)
    }


def _document(body: str, refresh: int) -> str:
    # An address with a # would not be reloaded: for browsers, it is a place on the same page.
    again = f'<meta http-equiv="refresh" content="{refresh}">' if refresh else ""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">{SIGN}{again}'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; style-src '
        "'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1"><title>The '
        "class</title>"
        f"<style>{_STYLE}</style></head><body>{body}</body></html>\n"
    )


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"


def _lesson(id: str) -> str:
    return id.partition(".")[0].zfill(2)


def _places(rows: Rows) -> str:
    """Lessons x learners: the number of passed exercises, and each learner's last lesson with any
    entry.
    """
    if not rows:
        return (
            "<p>There is no progress file in this folder yet. Learners appear as soon as theirs "
            "is there.</p>"
        )
    of = Counter(_lesson(exercise.id) for exercise in titles())
    known = {exercise.id for exercise in titles()}
    body, here = [], Counter()
    for label, found in rows:
        passed = Counter(
            _lesson(id) for id, (done, _) in found["checks"].items() if done and id in known
        )
        touched = {_lesson(id) for id in (*found["checks"], *found["guesses"])} & set(of)
        last = max(touched, default=None)
        here[last] += 1
        cells = []
        for lesson, total in of.items():
            share = passed[lesson] / total
            look = ' class="n here"' if lesson == last else ' class="n"'
            tint = (
                f' style="background:rgba(27,152,128,{0.08 + 0.42 * share:.2f})"'
                if lesson in touched
                else ""
            )
            cells.append(
                f"<td{look}{tint}>{f'{passed[lesson]}/{total}' if lesson in touched else ''}</td>"
            )
        body.append(f'<tr><th scope="row" class="who">{escape(label)}</th>{"".join(cells)}</tr>')
    head = "".join(f'<th scope="col" class="n">{lesson}</th>' for lesson in of)
    foot = "".join(f'<td class="n">{here[lesson] or ""}</td>' for lesson in of)
    return (
        '<h2>Where everybody is</h2><p class="note">Exercises passed, optional ones included, by '
        "lesson. A frame marks the last "
        "lesson in which a learner has made a guess or tried an exercise."
        f"{f' Not begun: {here[None]}.' if here[None] else ''}</p>"
        '<div class="wide"><table><thead><tr><th '
        f'class="who">lesson</th>{head}</tr></thead><tbody>{"".join(body)}'
        '<tr><th scope="row" class="who"><b>learners '
        f"here</b></th>{foot}</tr></tbody></table></div>"
    )


def _held(rows: Rows, most: int = 8) -> str:
    """The exercises that most learners have tried and not passed."""
    table = []
    for exercise in titles():
        entries = [
            found["checks"][exercise.id] for _, found in rows if exercise.id in found["checks"]
        ]
        tries = [n for passed, n in entries if not passed]
        if tries:
            table.append((len(tries), len(entries), median(tries), exercise))
    table.sort(key=lambda row: -row[0])
    if not table:
        return (
            "<h2>What holds people</h2><p>Nobody has tried an exercise without passing it.</p>"
            * bool(rows)
        )
    top = [exercise for n, *_, exercise in table if n == table[0][0]]
    which = " and ".join(f"<b>{exercise.id}, {escape(exercise.title)}</b>" for exercise in top[:3])
    more = f" ({len(top) - 3} more as many)" if len(top) > 3 else ""
    holds = f"hold{'s' if len(top) == 1 else ''} most people{more}"
    each = "it" if len(top) == 1 else "each"
    return (
        f"<h2>What holds people</h2><p>{which} {holds}: {table[0][0]} of "
        f"{_count(len(rows), 'learner')} have "
        f'tried {each} and not passed yet.</p><div class="wide"><table><thead><tr><th '
        'scope="col">exercise</th>'
        '<th scope="col" class="n">held</th><th scope="col" class="n">tried</th><th scope="col" '
        'class="n">their tries (median)</th></tr></thead><tbody>'
        + "".join(
            f'<tr><th scope="row">{exercise.id}, {escape(exercise.title)}</th><td '
            f'class="n">{held}</td><td class="n">{tried}</td><td class="n">{tries:g}</td></tr>'
            for held, tried, tries, exercise in table[:most]
        )
        + "</tbody></table></div>"
    )


def _files(remarks: list[tuple[str, str]], names: bool) -> str:
    if not remarks:
        return ""
    items = "".join(f"<li>{escape(name)}: {escape(remark)}</li>" for name, remark in remarks)
    hint = (
        "" if names else '<p class="note">Their names may tell who is who: --names shows them.</p>'
    )
    return f"<h2>Files to look at</h2>{hint}<ul>{items}</ul>"


def _asked(rows: Rows) -> dict[str, list[tuple]]:
    """All (guess, measured, unit) of each prediction, in the course's order."""
    asked: dict[str, list[tuple]] = {}
    for _, found in rows:
        for id, entry in found["guesses"].items():
            asked.setdefault(id, []).append(entry)
    return {id: asked[id] for id in sorted(asked, key=lambda id: (int(id.split(".")[0]), id))}


def _guesses(rows: Rows, measured: str) -> str:
    """A picture for each prediction."""
    cards = "".join(_card(id, entries, measured) for id, entries in _asked(rows).items())
    return cards and (
        '<h2>Guesses</h2><p class="note">The upright line is the value that the learners\' own '
        "lessons measured, or predicted "
        f'where the lesson runs nothing.</p><div class="cards">{cards}</div>'
    )


@cache
def _questions() -> dict[str, str]:
    return json.loads((Path(__file__).parent / "questions.json").read_text(encoding="utf-8"))


def _card(id: str, entries: list[tuple], measured: str = "") -> str:
    """Question, picture and sentences. Values in another unit than most are counted, not drawn."""
    unit = Counter(unit for *_, unit in entries).most_common(1)[0][0]
    same = [entry for entry in entries if entry[2] == unit]
    values = [value for _, value, _ in same if value is not None]
    link = ""
    if measured and values:
        values, link = (
            None,
            f'<p><a href="{quote(measured)}/{id}.html">Show the measured value</a></p>',
        )
    shown = _shown(id, unit, [guess for guess, *_ in same], values, len(entries) - len(same))
    question = f"<p>{escape(_questions()[id])}</p>" if id in _questions() else ""
    return f"<div><h3>Prediction {id}</h3>{question}{shown}{link}</div>"


def _shown(id: str, unit: str, guesses: list, values: list | None, strange: int) -> str:
    """Picture and sentences. ``values``: the measured values, or ``None`` if they are not shown."""
    middle, line = median(guesses), median(values) if values else None
    said = [
        (
            f"Median of {_count(len(guesses), 'guess').replace('guesss', 'guesses')}: "
            f"{_human(middle, unit)}."
        )
    ]
    if values:
        far = f"The median is {how_far(middle, line)}.".replace("is within", "lies within")
        said.append(f"Measured: {_human(line, unit)}. {far}")
        if min(values) != max(values):
            low, high = _human(min(values), unit), _human(max(values), unit)
            said.append(
                f"Machines differ ({low} to {high}): the line is the median of {len(values)}."
            )
    elif values is not None:
        said.append(
            "Nobody has shown the measured value yet, and it is in no file: there is no line."
        )
    bars, beyond = _picture(id, unit, guesses, line, " ".join(said))
    said += [f"Beyond the picture: {beyond}."] if beyond else []
    said += [f"In another unit, left out: {strange}."] if strange else []
    return f'{bars}<p class="note">{escape(" ".join(said))}</p>'


def _human(value: float, unit: str) -> str:
    return format_bytes(round(value)) if unit == "bytes" else f"{value:,.4g} {unit}".strip()


def _picture(id: str, unit: str, guesses: list, line: float | None, words: str) -> tuple[str, int]:
    """How many learners made which guesses (on a logarithmic axis if guesses span decades), and how
    many are beyond the axis.
    """
    known = guesses + [line] * (line is not None)
    above = [value for value in known if value > 0]
    log = (
        unit not in ("%", "percent")
        and (line is None or line > 0)
        and len(above) > len(known) / 2
        and max(above) / min(above) >= _DECADES
    )
    place = math.log10 if log else float
    if log:
        centre = place(median(above) if line is None else line)
        drawn = [place(v) for v in guesses if v > 0 and abs(place(v) - centre) <= 6]
    else:
        drawn = [place(v) for v in guesses]
    ends = drawn + ([place(line)] if line is not None else [])
    low, high = min(ends), max(ends)
    margin = (high - low) * 0.06 or (0.5 if log else abs(low) * 0.5 or 1.0)
    low, high = low - margin, high + margin
    step, floor = (_WIDE - 2 * _LEFT) / _BINS, _HIGH - 26

    def x(value: float) -> float:
        return _LEFT + (value - low) / (high - low) * (_WIDE - 2 * _LEFT)

    counts = Counter(min(int((value - low) / (high - low) * _BINS), _BINS - 1) for value in drawn)
    tall = (floor - 42) / max(counts.values(), default=1)
    title = f"Guesses of prediction {id}"
    parts = [frame(f"g{id.replace('.', '')}", _WIDE, _HIGH, 13, title=title, words=words)]
    if line is not None:
        parts.append(_measured_line(x(place(line)), floor, f"measured {_human(line, unit)}"))
    for i, n in counts.items():
        left, top = _LEFT + i * step, floor - n * tall
        parts.append(
            f'<rect x="{left + 1:.1f}" y="{top:.1f}" width="{step - 2:.1f}" '
            f'height="{n * tall:.1f}" fill="{COLORS["parameters"]}"/>'
        )
        number = svg_text(left + step / 2, top - 4, str(n), anchor="middle", size=12, opacity=1)
        parts.append(f"<g {svg_halo(4)}>{number}</g>")
    parts.append(f'<path d="M{_LEFT} {floor}H{_WIDE - _LEFT}" stroke="currentColor"/>')
    for value, name in _ticks(low, high, unit, log):
        parts.append(f'<path d="M{x(value):.1f} {floor}v5" stroke="currentColor"/>')
        parts.append(svg_text(x(value), floor + 20, name, anchor="middle", size=13))
    return "".join(parts) + "</svg>", len(guesses) - len(drawn)


def _measured_line(at: float, floor: float, words: str) -> str:
    """The line of the measured value, with ``words`` on the side where they have room."""
    anchor = "middle"
    if at < _WIDE * 0.3:
        anchor = "start"
    elif at > _WIDE * 0.7:
        anchor = "end"
    line = f'<path d="M{at:.1f} 22V{floor}" stroke="{ALARM_BOTH}" stroke-width="3"/>'
    return line + svg_text(at, 15, words, anchor=anchor, size=13, weight=700)


def _ticks(low: float, high: float, unit: str, log: bool) -> list[tuple[float, str]]:
    """At most eight ticks from ``low`` to ``high``, at round numbers; for bytes, at round numbers
    of KiB, MiB and so on.
    """
    if log:
        tens = [10.0**n for n in range(math.floor(low), math.ceil(high) + 1)]
        if unit == "bytes":
            tens = [KiB**k * 10.0**j for k in range(11) for j in range(3)]
        between = (1, 2, 5) if high - low < 2.2 else (1,)
        marks = [ten * n for ten in tens for n in between if low <= math.log10(ten * n) <= high]
        marks = marks[:: math.ceil(len(marks) / 7) or 1]
        return [(math.log10(v), _plain(v, unit)) for v in marks]
    factor, name = scale_of(round(high)) if unit == "bytes" else (1, "")
    step = nice_step((high - low) / factor)
    first = math.ceil(low / factor / step)
    marks = [n * step for n in range(first, math.floor(high / factor / step) + 1)][:8]
    return [(v * factor, f"{v:g} {name}".strip()) for v in marks]


def _plain(value: float, unit: str) -> str:
    if unit != "bytes":
        return f"{value:,.0f}" if 1 <= value < 1e6 else f"{value:g}"
    factor, name = scale_of(round(value))
    return f"{value / factor:,.0f} {name}"
