"""How long a lesson takes: a learner reads 200 words of prose or 40 of code a minute, and an
exercise takes what it says.

    PYTHONPATH=tools python teaching/minutes.py          the minutes of every lesson

Hints and whatever else is folded are read on demand, and an exercise's own cells belong to its
minutes. Exercises that say "optional" stand in a last section of their own and are not needed
afterwards. Their minutes are counted apart, and so are those of a section whose heading begins with
"Optional".
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

from build_notebooks import ROOT, lesson_from, read_source

PROSE, CODE = 200, 40  # words a minute
FOLDED = re.compile(r"<details>.*?</details>", re.DOTALL)
TAG = re.compile(r"<[^>]+>")
EXERCISE = re.compile(r"[●○]{3} · (\d+) minutes(.*)")
STUB = re.compile(r"# your (code|value) here|^check\(", re.MULTILINE)
STATED = re.compile(r"^\*(\d+) minutes(?:, and (\d+) more for optional exercises)?", re.MULTILINE)


@dataclass(frozen=True)
class Minutes:
    prose: float
    code: float
    exercises: int
    optional: int
    cells: int  # of code
    stated: tuple[int, int]  # what the lesson's first cell says: minutes, and minutes more

    @property
    def total(self) -> float:
        """Without what is optional."""
        return self.prose + self.code + self.exercises


def minutes(source: Path) -> Minutes:
    """Of the lesson that ``source`` (``solutions/NN_name.py``) describes."""
    return of_cells([(cell.cell_type, cell.source) for cell in cells_of(source)])


def cells_of(source: Path) -> list:
    """The cells of the learner's notebook."""
    return lesson_from(read_source(source), source.name)[0].cells


def of_cells(cells: list[tuple[str, str]]) -> Minutes:
    """Of some cells of a lesson, each a kind ("code", "markdown") and its text."""
    needed, more = _without_optional_sections(cells)
    prose_texts, prose, code = _texts(needed)
    _, more_prose, more_code = _texts(more)
    tasks = EXERCISE.findall("\n".join(prose_texts))
    stated = STATED.search("\n".join(prose_texts))
    exercises = sum(int(number) for number, rest in tasks if "optional" not in rest)
    optional = sum(int(number) for number, rest in tasks if "optional" in rest)
    return Minutes(
        prose=prose,
        code=code,
        exercises=exercises,
        optional=optional + math.ceil(more_prose + more_code),
        cells=sum(kind == "code" for kind, _ in cells),
        stated=tuple(int(number or 0) for number in stated.groups()) if stated else (0, 0),
    )


def _without_optional_sections(cells: list[tuple[str, str]]) -> tuple[list, list]:
    """The cells of sections that are needed, and those of optional ones.

    A cell of prose may end one section and begin the next.
    """
    needed: list[tuple[str, str]] = []
    optional: list[tuple[str, str]] = []
    chosen = needed
    for kind, text in cells:
        if kind != "markdown":
            chosen.append((kind, text))
            continue
        for part in re.split(r"^(?=## )", text, flags=re.MULTILINE):
            if part.startswith("## "):
                chosen = optional if part.startswith("## Optional") else needed
            chosen.append((kind, part))
    return needed, optional


def _texts(cells: list[tuple[str, str]]) -> tuple[list[str], float, float]:
    """The prose of some cells, and the minutes of their prose and of their code."""
    prose = [TAG.sub("", FOLDED.sub("", text)) for kind, text in cells if kind == "markdown"]
    code = [text for kind, text in cells if kind == "code" and not STUB.search(text)]
    read = sum(len(text.split()) for text in prose) / PROSE
    return prose, read, sum(len(text.split()) for text in code) / CODE


if __name__ == "__main__":
    for path in sorted(ROOT.glob("solutions/*.py")):
        found = minutes(path)
        print(
            f"{path.stem:<28}{found.total:4.0f} minutes: {found.prose:.0f} prose, {found.code:.0f} "
            f"code, {found.exercises} exercises, {found.optional} more optional; {found.cells} "
            f"cells of code; states {found.stated[0]} and {found.stated[1]}"
        )
