"""Peaks that others measured on their own cards, predicted without one.

    python benchmarks/published.py [fitcheck] [peft] [answer] [litgpt] [torchtune]

Each of ``published_*.py`` says what that software did otherwise than a ``Recipe`` of today, taken
from its source. Only the lengths of rows behind PEFT's figures are found from one of its methods;
nothing else is fitted. What FitCheck's process held after loading is an input. Ten minutes for all;
the rows of those that are not named stay as they were recorded. PEFT's need ``pip install --no-deps
peft==0.19.1``.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from importlib import import_module
from importlib.util import find_spec

from shared import record

from gradmem_lib.course.ledger import published
from gradmem_lib.view.peaks import off_by

FAMILIES = ("fitcheck", "peft", "answer", "litgpt", "torchtune")  # in the order of the table


def main(names: list[str]) -> None:
    recorded = json.loads(published.RECORD.read_text(encoding="utf-8"))["rows"]
    rows: list[dict] = []
    for name in FAMILIES:
        family = import_module(f"published_{name}")
        if name not in (names or FAMILIES) or (name == "peft" and not find_spec("peft")):
            print(f"{family.SOURCE}: as recorded")
            rows += [row for row in recorded if row["source"] == family.SOURCE]
            continue
        for row in family.rows():
            print(
                f"{row.source}, {row.run}: {row.what} {off_by(row.published, row.predicted)}",
                flush=True,
            )
            rows.append(asdict(row))
    record("published", {"rows": rows}, published.RECORD)


if __name__ == "__main__":
    main(sys.argv[1:])
