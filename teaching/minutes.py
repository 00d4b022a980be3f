"""How long a lesson takes at a learner's pace. The prose counts 130 words a minute, and the code
40. An exercise counts one and a half times the minutes that it says, because these are the minutes
of somebody who knows the way. Each guess and each claim card counts a minute.

    PYTHONPATH=tools python teaching/minutes.py          the minutes of every lesson

Hints and whatever else is folded are read on demand, and an exercise's own cells belong to its
minutes. Exercises that say "optional" are not needed afterwards. Their minutes are counted apart,
and so are those of a section whose heading begins with "Optional".
"""

from __future__ import annotations

import ast
import math
import re
from dataclasses import dataclass
from pathlib import Path

from build_notebooks import ROOT, lesson_from, read_source, stored_solution, with_figures
from IPython.core.inputtransformer2 import TransformerManager

PROSE, CODE = 130, 40  # words a minute: prose of somebody whose English is a third language
EXERCISE = 1.5  # minutes for each minute that an exercise says
GUESS = CLAIM = 1  # minute for each guess, and for each claim card
FOLDED = re.compile(r"<details>.*?</details>", re.DOTALL)
TAG = re.compile(r"<[^>]+>")
EXERCISE_LINE = re.compile(r"[●○]{3} · (\d+) minutes(.*)")
STUB = re.compile(r"# your (code|value) here|^check\(", re.MULTILINE)
STATED = re.compile(r"^\*(\d+) minutes(?:[^*]*?\. (\d+) more are optional)?", re.MULTILINE)


@dataclass(frozen=True)
class Minutes:
    prose: float
    code: float
    exercises: float
    guesses: int
    claims: int
    optional: int
    cells: int  # of code
    stated: tuple[int, int]  # what the lesson's first cell says: minutes, and minutes more

    @property
    def total(self) -> float:
        """Without what is optional."""
        return self.prose + self.code + self.exercises + self.guesses + self.claims


def minutes(source: Path) -> Minutes:
    """Of the lesson that ``source`` (``solutions/NN_name.py``) describes."""
    return of_cells([(cell.cell_type, cell.source) for cell in cells_of(source)])


def cells_of(source: Path) -> list:
    """The cells of the learner's notebook."""
    notebook = read_source(source)
    solution = stored_solution(source.with_suffix(".ipynb"), notebook)
    return with_figures(lesson_from(notebook, source.name)[0], solution).cells


def of_cells(cells: list[tuple[str, str]]) -> Minutes:
    """Of some cells of a lesson, each a kind ("code", "markdown") and its text."""
    needed, more = without_optional_sections(cells)
    needed_texts, more_texts = _prose(needed), _prose(more)
    guesses, claims = _calls(needed)
    more_guesses, more_claims = _calls(more)

    exercises, optional = _exercises(needed_texts)
    optional += sum(_exercises(more_texts))
    optional += _reading(more_texts) + _code(more)
    optional += GUESS * more_guesses + CLAIM * more_claims

    stated = STATED.search("\n".join(needed_texts))
    return Minutes(
        prose=_reading(needed_texts),
        code=_code(needed),
        exercises=exercises,
        guesses=GUESS * guesses,
        claims=CLAIM * claims,
        optional=math.ceil(optional),
        cells=sum(kind == "code" for kind, _ in cells),
        stated=tuple(int(number or 0) for number in stated.groups()) if stated else (0, 0),
    )


def without_optional_sections(cells: list[tuple[str, str]]) -> tuple[list, list]:
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


def _prose(cells: list[tuple[str, str]]) -> list[str]:
    """What is read of the cells of prose."""
    return [TAG.sub("", FOLDED.sub("", text)) for kind, text in cells if kind == "markdown"]


def _exercises(texts: list[str]) -> tuple[float, float]:
    """The minutes of exercises that are needed, and of those that say "optional"."""
    needed = optional = 0.0
    for number, rest in EXERCISE_LINE.findall("\n".join(texts)):
        if "optional" in rest:
            optional += EXERCISE * int(number)
        else:
            needed += EXERCISE * int(number)
    return needed, optional


def _reading(texts: list[str]) -> float:
    return sum(len(text.split()) for text in texts) / PROSE


def _code(cells: list[tuple[str, str]]) -> float:
    read = [text for kind, text in cells if kind == "code" and not STUB.search(text)]
    return sum(len(text.split()) for text in read) / CODE


def _calls(cells: list[tuple[str, str]]) -> tuple[int, int]:
    """How many guesses the cells ask for, and how many claims they show."""
    guesses = claims = 0
    for kind, text in cells:
        if kind != "code":
            continue
        for node in ast.walk(ast.parse(TransformerManager().transform_cell(text))):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            if called == "predict_first":
                guesses += 1
            elif called == "claims.show":
                claims += len(node.args)
    return guesses, claims


if __name__ == "__main__":
    for path in sorted(ROOT.glob("solutions/*.py")):
        found = minutes(path)
        print(
            f"{path.stem:<28}{found.total:4.0f} minutes: {found.prose:.0f} prose, {found.code:.0f} "
            f"code, {found.exercises:.0f} exercises, {found.guesses} guesses, {found.claims} "
            f"claims, {found.optional} more optional; {found.cells} cells of code; states "
            f"{found.stated[0]} and {found.stated[1]}"
        )
