"""Draws docs/sheets/NN.svg: for each lesson one A4 sheet for the wall, to be read from two metres
and without colours.

docs/sheets/all.html prints them in one go. ``make notebooks`` runs this file.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

from build_notebooks import ROOT, write
from lesson_facts import Lesson, lessons
from sheet_facts import Bars, Bits, Curves, Sheet, sheet

from gradmem_lib.view.style import COLORS, nice_step
from gradmem_lib.view.svg import svg_pattern

FOLDER = ROOT / "docs" / "sheets"
LEFT, RIGHT, TOP, BOTTOM = 15.0, 195.0, 66.0, 164.0  # of the picture, in mm
SMALL, LABEL, BIG = 5.6, 6.4, 15.0  # sizes of letters, in mm
WIDE, BOLD = 0.54, 0.64  # of a letter, as a share of its size
PLAIN, STRONG = "#c9d0da", "#234a8a"
INK, MUTED = "#1d2330", "#5b6473"  # paper is white: darker than what reads on every theme
DASHES = ("", "4 2.5", "1.2 1.8")


def text(
    x: float, y: float, words: str, size: float = LABEL, *, anchor="start", weight=400, ink=INK
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}" '
        f'text-anchor="{anchor}" fill="{ink}">{escape(words)}</text>'
    )


def lines_of(words: str, width: float, size: float, wide: float = WIDE) -> list[str]:
    """``words`` cut into lines of at most ``width`` mm."""
    lines = [""]
    for word in words.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and len(longer) * size * wide > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines


def paragraph(x: float, y: float, words: str, width: float, size: float, **look) -> str:
    lines = lines_of(words, width, size, BOLD if "weight" in look else WIDE)
    return "".join(text(x, y + 1.25 * size * i, line, size, **look) for i, line in enumerate(lines))


def fill(category: str, strong: bool) -> str:
    if category:
        return f"url(#s{category})"
    return STRONG if strong else PLAIN


def draw_bars(bars: Bars) -> str:
    used = dict.fromkeys(category for row in bars.rows for category, _ in row.parts if category)
    legend = {category: bars.legend.get(category, category) for category in used}
    top = TOP + 10 * -(-len(legend) // 4) + (8 if bars.limits else 0)
    step = min(34.0, (BOTTOM - top) / len(bars.rows))
    start = LEFT + min(72.0, max(len(row.name) for row in bars.rows) * LABEL * BOLD + 2)
    room = max(len(row.says) for row in bars.rows) * LABEL * BOLD + 2
    longest = max(
        [sum(n for _, n in row.parts) for row in bars.rows] + [at for at, _ in bars.limits]
    )
    scale = (RIGHT - room - start) / longest
    parts, says = [_legend(legend)] if legend else [], []
    for i, row in enumerate(bars.rows):
        y, x, tall = top + i * step, start, step * 0.72
        weight, wide = (700, BOLD) if row.strong else (400, WIDE)
        size = min(LABEL, (start - LEFT - 2) / len(row.name) / wide, tall * 0.95)
        parts.append(
            text(start - 2, y + tall / 2 + size * 0.36, row.name, size, anchor="end", weight=weight)
        )
        for category, n in row.parts:
            paint = f'fill="{fill(category, row.strong)}" stroke="{INK}" stroke-width="0.3"'
            parts.append(
                f'<rect x="{x:.2f}" y="{y:.2f}" width="{n * scale:.2f}" height="{tall:.2f}" '
                f"{paint}/>"
            )
            x += n * scale
        halo = 'style="paint-order:stroke;stroke:#ffffff;stroke-width:2px"'
        words = text(
            x + 2, y + tall / 2 + size * 0.36, row.says, min(LABEL, tall * 0.95), weight=700
        )
        says.append(f"<g {halo}>{words}</g>")
    for at, name in bars.limits:
        x, end = start + at * scale, top + len(bars.rows) * step
        parts.append(
            f'<path d="M{x:.2f} {top - 2:.2f}V{end:.2f}" stroke="{INK}" stroke-width="0.9" '
            'stroke-dasharray="3 1.6"/>'
        )
        parts.append(
            text(x, top - 4, name, SMALL, anchor="end" if x > 150 else "middle", weight=700)
        )
    return "".join(parts + says)


def _legend(names: dict[str, str]) -> str:
    parts, x, y = [], LEFT, TOP
    for i, (category, name) in enumerate(names.items()):
        if i == 4:
            x, y = LEFT, TOP + 10
        parts.append(
            f'<rect x="{x:.1f}" y="{y - 1:.1f}" width="6" height="6" fill="url(#s{category})" '
            f'stroke="{INK}" stroke-width="0.3"/>'
        )
        parts.append(text(x + 8, y + 4.2, name, SMALL))
        x += 14 + len(name) * SMALL * WIDE
    return "".join(parts)


def draw_curves(curves: Curves) -> str:
    left, bottom, top, right = LEFT + 14, BOTTOM - 17, TOP + 2, RIGHT - 30
    most_x = max(x for line in curves.lines.values() for x, _ in line)
    most_y = 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        return left + x / most_x * (right - left), bottom - y / most_y * (bottom - top)

    parts = [
        f'<path d="M{left} {top}V{bottom}H{right}" fill="none" stroke="{INK}" stroke-width="0.6"/>'
    ]
    for y in (0, 0.5, 1):
        at = place(0, y)[1]
        parts.append(
            f'<path d="M{left - 2} {at:.1f}H{right}" stroke="{MUTED}" stroke-width="0.25"/>'
        )
        parts.append(text(left - 3, at + 2, f"{y:g}", anchor="end"))
    step = nice_step(most_x)
    for n in range(round(most_x / step) + 1):
        at = place(n * step, 0)[0]
        parts.append(text(at, bottom + 8, f"{n * step:,.0f}", SMALL, anchor="middle"))
    parts.append(text((left + right) / 2, bottom + 15, curves.across, SMALL, anchor="middle"))
    for dash, (name, line) in zip(DASHES, curves.lines.items(), strict=False):
        points = [place(0, 0), *(place(*point) for point in line)]
        path = "M" + "L".join(f"{x:.2f} {y:.2f}" for x, y in points)
        parts.append(
            f'<path d="{path}" fill="none" stroke="{INK}" stroke-width="1.3" '
            f'stroke-dasharray="{dash}"/>'
        )
        parts += [
            f'<circle cx="{x:.2f}" cy="{y:.2f}" r="1.5" fill="{INK}"/>' for x, y in points[1:]
        ]
        parts.append(text(points[-1][0] + 3, points[-1][1] + 1, name, weight=700))
    return "".join(parts)


def draw_bits(bits: Bits) -> str:
    parts, start, step = [], LEFT + 32, (BOTTOM - TOP - 14) / len(bits.rows)
    most = 1 + max(exponent + fraction for _, exponent, fraction in bits.rows)
    box = (RIGHT - start) / most
    for i, (name, exponent, fraction) in enumerate(bits.rows):
        y = TOP + 4 + i * step
        parts.append(text(LEFT, y + 9, name, weight=700))
        for n in range(1 + exponent + fraction):
            if n == 0:  # the sign
                paint = "#ffffff"
            else:
                paint = STRONG if n <= exponent else PLAIN
            x = start + n * box
            parts.append(
                f'<rect x="{x:.2f}" y="{y:.2f}" width="{box - 0.4:.2f}" height="13" fill="{paint}" '
                f'stroke="{INK}" stroke-width="0.4"/>'
            )
        words = f"sign, {exponent} exponent (dark), {fraction} fraction"
        parts.append(text(start, y + 20, words, SMALL))
    return "".join(parts)


def draw(lesson: Lesson, facts: Sheet) -> str:
    """The sheet as an SVG file."""
    kinds = {Bars: draw_bars, Curves: draw_curves, Bits: draw_bits}
    words = "; ".join(f"{value} {what}" for value, what in facts.numbers)
    size = min(11.0, 153 / len(lesson.title) / BOLD)
    rows = []
    for i, (value, what) in enumerate(facts.numbers):
        y = 182 + i * 22
        big = min(BIG, 66 / len(value) / BOLD)
        rows.append(text(80, y + 5, value, round(big, 1), anchor="end", weight=700))
        rows.append(
            paragraph(
                86, y + 1 if len(lines_of(what, 109, LABEL)) > 1 else y + 4.5, what, 109, LABEL
            )
        )
    defs = "".join(svg_pattern("s", name) for name in COLORS)
    defs = defs.replace("<pattern ", '<pattern patternTransform="scale(0.65)" ')
    rule = lines_of(facts.rule, 172, 9.5, BOLD)
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" width="210mm" height="297mm" viewBox="0 0 210 '
        '297" role="img" '
        "font-family=\"'DejaVu Sans', Verdana, Helvetica, Arial, "
        f'sans-serif"><title>{escape(lesson.title)}</title>'
        f"<desc>{escape(f'{facts.caption}. {words}. {facts.rule}')}</desc><defs>{defs}</defs>"
        '<rect width="210" height="297" fill="#ffffff"/>'
        + text(LEFT, 29, lesson.number, 17, weight=700)
        + text(LEFT + 27, 29, lesson.title, round(size, 1), weight=700)
        + f'<path d="M{LEFT} 35H{RIGHT}" stroke="{INK}" stroke-width="0.8"/>'
        + paragraph(LEFT, 44, facts.caption, RIGHT - LEFT, LABEL)
        + kinds[type(facts.picture)](facts.picture)
        + f'<path d="M{LEFT} 168H{RIGHT}" stroke="{INK}" stroke-width="0.4"/>'
        + "".join(rows)
        + (
            f'<rect x="{LEFT - 5}" y="240" width="{RIGHT - LEFT + 10}" height="44" rx="3" '
            f'fill="{INK}"/>'
        )
        + paragraph(
            LEFT + 2, 265.5 - 6 * (len(rule) - 1), facts.rule, 172, 9.5, weight=700, ink="#ffffff"
        )
        + text(RIGHT, 291, "gradmem: the lesson shows these figures", 3.6, anchor="end", ink=MUTED)
        + "</svg>\n"
    )


def sheets() -> dict[Path, str]:
    """Every sheet by the file that it belongs in."""
    made = {FOLDER / f"{lesson.number}.svg": draw(lesson, sheet(lesson)) for lesson in lessons()}
    pages = "\n".join(f'<img src="{path.name}" alt="sheet {path.stem}">' for path in made)
    style = (
        "@page { size: A4; margin: 0 } body { margin: 0 } img { display: block; width: 210mm; "
        "height: 296.9mm }"
    )
    head = f'<meta charset="utf-8"><title>Sheets for the wall</title><style>{style}</style>'
    return made | {
        FOLDER / "all.html": (
            f'<!doctype html><html lang="en"><head>{head}</head><body>\n{pages}\n</body></html>\n'
        )
    }


if __name__ == "__main__":
    for path, content in sheets().items():
        write(path, content)
