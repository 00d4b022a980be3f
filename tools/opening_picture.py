"""Draws the picture that lessons 00 to 05 open with: what lesson 00's last run needs after each of
them, beside its card.

The bytes are those that ``first_run`` printed in the stored solutions, and stand nowhere else.
"""

from __future__ import annotations

import re
from base64 import b64encode
from dataclasses import dataclass
from html import escape
from pathlib import Path

import nbformat

from gradmem_lib.view.style import COLORS, INK
from gradmem_lib.view.svg import pattern

PRINTED = re.compile(
    r"^forward ([\d.]+) MiB, backward ([\d.]+) MiB, optimizer_step ([\d.]+) MiB\ncard (\d+) MiB: ",
    re.MULTILINE,
)
WORDS = "The same training run after each lesson: its peak, in MiB"

# The picture has a ground of its own, so that it looks the same on a light and on a dark page.
GROUND, TEXT, OTHERS = "#ffffff", "#1c2330", "#c3c9d4"
WIDTH, ROW, TOP = 545, 24, 40
LEFT, LONGEST = 230, 255  # where bars begin, and the length of the longest


@dataclass(frozen=True)
class Bar:
    """A lesson, and the MiB at the run's peak with what it has taught."""

    lesson: str  # "03"
    title: str
    peak: float
    card: float


def bars(solutions: Path) -> list[Bar]:
    """A bar for each solution in the folder that has made the run: the last one of the first cell
    that makes it. A puzzle may make others.
    """
    found = []
    for path in sorted(solutions.glob("*.ipynb")):
        notebook = nbformat.read(path, as_version=nbformat.NO_CONVERT)
        code = [cell for cell in notebook.cells if cell.cell_type == "code"]
        texts = [output.get("text", "") for cell in code for output in cell.outputs]
        printed = next(filter(None, map(PRINTED.findall, texts)), None)
        if printed:
            *phases, card = map(float, printed[-1])
            title = re.match(r"# \d\d · ([^\n,]+)", notebook.cells[0].source)[1]
            found.append(Bar(path.name[:2], title, max(phases), card))
    return found


def image(solutions: Path, lesson: str) -> str:
    """An ``<img>`` for a cell of Markdown, in which the bar of ``lesson`` stands out. Its words say
    all figures to those who do not see it. An empty text where no solution has made the run yet.
    """
    drawn = bars(solutions)
    if not drawn:
        return ""
    said = [f"{bar.lesson} {bar.title} {bar.peak:g}" for bar in drawn]
    words = f"{WORDS}. {', '.join(said)}. The card has {drawn[0].card:g}. This is lesson {lesson}."
    source = b64encode(svg(drawn, lesson).encode()).decode()
    return f'<img width="{WIDTH}" alt="{escape(words)}" src="data:image/svg+xml;base64,{source}">'


def svg(drawn: list[Bar], lesson: str) -> str:
    """The bars from top to bottom, and the card as a dashed line. A dotted box stands for what
    ``lesson`` takes off the run.
    """
    scale = LONGEST / max(drawn[0].card, *(bar.peak for bar in drawn))
    bottom = TOP + ROW * len(drawn)
    card = LEFT + scale * drawn[0].card
    rows, before = [], drawn[0].peak
    for i, bar in enumerate(drawn):
        end = LEFT + scale * bar.peak
        saved = scale * max(before - bar.peak, 0) if bar.lesson == lesson else 0
        rows.append(_row(bar, TOP + ROW * i, end, saved, bar.lesson == lesson))
        before = bar.peak
    return "".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 30}" '
            f'font-family="system-ui,sans-serif" font-size="13" fill="{TEXT}">',
            f"<defs>{pattern('this', COLORS['activations'], '/')}</defs>",
            f'<rect width="{WIDTH}" height="{bottom + 30}" rx="6" fill="{GROUND}"/>',
            f'<text x="14" y="24">{WORDS}</text>',
            *rows,
            f'<path d="M{card:.0f} {TOP - 4}V{bottom + 8}" stroke="{TEXT}" stroke-width="2" '
            'stroke-dasharray="5 3"/>',
            f'<text x="{card + 6:.0f}" y="{bottom + 16}">card: {drawn[0].card:g} MiB</text></svg>',
        ]
    )


def _row(bar: Bar, y: int, end: float, saved: float, stands_out: bool) -> str:
    """A lesson's name, its bar up to ``end``, a box as wide as ``saved``, and its MiB. Where it
    stands out, it is hatched and in bold.
    """
    fill, weight, box = OTHERS, "", ""
    if stands_out:
        fill, weight = "url(#this)", ' font-weight="700"'
    if saved:
        box = (
            f'<rect x="{end:.0f}" y="{y + 3}" width="{saved:.0f}" height="{ROW - 6}" fill="none" '
            f'stroke="{TEXT}" stroke-dasharray="2 3"/>'
        )
    return (
        f'<text x="14" y="{y + 16}"{weight}>{bar.lesson} · {escape(bar.title)}</text>'
        f'<rect x="{LEFT}" y="{y + 3}" width="{end - LEFT:.0f}" height="{ROW - 6}" fill="{fill}" '
        f'stroke="{INK}"/>{box}'
        f'<text x="{end + saved + 6:.0f}" y="{y + 16}"{weight}>{bar.peak:g}</text>'
    )
