"""The pages of ``python -m gradmem_lib class``: one with all tables and pictures, and one for each
prediction whose measured value waits for a click. ``class_board.html`` says what they look like.
"""

from __future__ import annotations

import time
from pathlib import Path
from urllib.parse import quote

from ...view.template import html_from
from .class_board_guesses import Card, guesses_by_prediction
from .class_board_style import STYLE
from .class_board_tables import Rows, held_exercises, where_everybody_is

SIGN = '<meta name="generator" content="gradmem class">'  # tells a board from other files
_TEMPLATE = Path(__file__).with_name("class_board.html")


def page(
    rows: Rows, remarks: list[tuple[str, str]], *, names: bool, refresh: int, measured: str = ""
) -> str:
    """The whole file, which reloads itself after ``refresh`` seconds (0: never).

    Args:
        rows: the learners.
        remarks: a file's name, and what a teacher should know about it.
        names: whether the names of files are shown.
        refresh: seconds.
        measured: the folder of the pages with measured values. Then this page links to them and
            does not show the values.
    """
    guesses = guesses_by_prediction(rows)
    return _filled(
        refresh,
        n_learners="1 learner" if len(rows) == 1 else f"{len(rows)} learners",
        time=time.strftime("%H:%M:%S"),
        **where_everybody_is(rows),
        held=held_exercises(rows),
        most_exercises=8,  # in the table of what holds people
        most_named=3,  # in the sentence above it
        cards=[Card(id, entries, measured) for id, entries in guesses.items()],
        remarks=remarks,
        names=names,
    )


def measured_pages(rows: Rows, *, back: str, refresh: int) -> dict[str, str]:
    """Pages by file name, one for each prediction that somebody has measured: its guesses beside
    the value.

    ``back``: the name of the file that they link back to, one folder above.
    """
    pages = {}
    for id, entries in guesses_by_prediction(rows).items():
        if any(measured is not None for _, measured, _ in entries):
            card = Card(id, entries)
            pages[f"{id}.html"] = _filled(refresh, measured_card=card, back=quote(back))
    return pages


def _filled(refresh: int, **values) -> str:
    template = _TEMPLATE.read_text(encoding="utf-8")
    return html_from(template, sign=SIGN, style=STYLE, refresh=refresh, **values)
