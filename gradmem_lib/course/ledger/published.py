"""Peaks that others measured on their own cards, beside this library's predictions for the same
runs, made without a card.

``published.json`` holds what ``benchmarks/published.py`` predicted; BERT-large's rows come from
``claims.bert_large``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from ...units import MiB
from ...view.peaks import off_by, pairs_table

RECORD = Path(__file__).with_name("published.json")
BERT_LARGE = "Transformers' documentation, BERT-large, V100, 2022"
# how the rows' sources begin
SOURCES = ("FitCheck", "PEFT", "Answer.AI", "LitGPT", "torchtune", "Transformers")


@dataclass(frozen=True)
class Row:
    """One published figure. ``source``: who measured, and on which card. ``run`` and ``what``:
    which run, and which figure they read (reserved, allocated, ...). ``published`` and
    ``predicted`` are bytes.
    """

    source: str
    run: str
    what: str
    published: int
    predicted: int


def rows() -> list[Row]:
    """All figures, by source."""
    from . import bert_large

    found = [Row(**row) for row in json.loads(RECORD.read_text(encoding="utf-8"))["rows"]]
    for row in bert_large.rows():
        name, predicted = row.run.name, round(row.total * MiB)
        found.append(Row(BERT_LARGE, name, "held by the process", row.run.mib * MiB, predicted))
    return found


def table() -> str:
    """All figures as a table in markdown, in GB (10^9 bytes)."""
    lines = ["| run | figure | measured, GB | predicted, GB | off |", "|---|---|---|---|---|"]
    source = None
    for row in rows():
        if row.source != source:
            source = row.source
            lines.append(f"| **{source}** | | | | |")
        sizes = f"{row.published / 1e9:.2f} | {row.predicted / 1e9:.2f}"
        lines.append(
            f"| {row.run} | {row.what} | {sizes} | {off_by(row.published, row.predicted)} |"
        )
    return "\n".join(lines)


def show(*sources: str) -> None:
    """Show all figures with bars, or only those of ``sources`` (the beginnings of names, as in
    ``"PEFT"``). ``table()`` has them as text.
    """
    from IPython.display import HTML, display

    groups: dict[str, list] = {}
    for row in rows():
        if row.source.startswith(sources or ""):
            pair = f"{row.run}: {row.what}", row.published, row.predicted
            groups.setdefault(row.source, []).append(pair)
    if not groups:
        raise ValueError(
            f"nothing is recorded of {', '.join(sources)}: choose among {', '.join(SOURCES)}"
        )
    title = "Measured on a card by others, and predicted without one"
    display(HTML(pairs_table(groups, title)))
