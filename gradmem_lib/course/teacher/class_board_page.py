"""The pages of ``python -m gradmem_lib class``: one with all tables and pictures, and one for each
prediction whose measured value waits for a click.
"""

from __future__ import annotations

import time
from html import escape
from urllib.parse import quote

from .class_board_document import document
from .class_board_guesses import card, cards, guesses_by_prediction
from .class_board_tables import Rows, learners, what_holds, where_everybody_is


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
    when = f"as of {time.strftime('%H:%M:%S')}"
    if refresh:
        when += f", read again every {refresh} s"
    else:
        when += ", not updated any more"
    parts = [
        f"<h1>The class</h1><p>{learners(len(rows))}, {when}.</p>",
        '<div class="two">',
        f"<section>{where_everybody_is(rows)}</section>",
        f"<section>{what_holds(rows)}</section>",
        "</div>",
        cards(rows, measured),
        _files_to_look_at(remarks, names),
    ]
    return document("".join(parts), refresh)


def measured_pages(rows: Rows, *, back: str, refresh: int) -> dict[str, str]:
    """Pages by file name, one for each prediction that somebody has measured: its guesses beside
    the value.

    ``back``: the name of the file that they link back to, one folder above.
    """
    link = f'<p><a href="../{quote(back)}">Back to the class</a></p>'
    pages = {}
    for id, entries in guesses_by_prediction(rows).items():
        if any(measured is not None for _, measured, _ in entries):
            body = f'<div class="large">{card(id, entries)}</div>{link}'
            pages[f"{id}.html"] = document(body, refresh)
    return pages


def _files_to_look_at(remarks: list[tuple[str, str]], names: bool) -> str:
    if not remarks:
        return ""
    hint = ""
    if not names:
        hint = '<p class="note">Their names may tell who is who: --names shows them.</p>'
    items = [f"<li>{escape(name)}: {escape(remark)}</li>" for name, remark in remarks]
    return f"<h2>Files to look at</h2>{hint}<ul>{''.join(items)}</ul>"
