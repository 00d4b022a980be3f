"""What a lesson says of itself: its sections with their minutes, its predictions, and the figures
that its cells printed.

Read from the source, ``solutions/NN_name.py``, and from the outputs that are stored beside it.
Nothing is run.
"""

from __future__ import annotations

import ast
import json
import re
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from build_notebooks import ROOT
from minutes import Minutes, cells_of, of_cells

EXERCISE = re.compile(
    r"^### Exercise (\d+\.\d+) · (.*)\n\n([●○]{3}) · (\d+) minutes( · optional)?", re.MULTILINE
)
ROW = re.compile(r"^  (\w[\w ]*?)  +(\S.*?)(?:  +(\S.*))?$")


@dataclass(frozen=True)
class Asked:
    """One prediction: what is asked, when in the lesson, before which cell, and what the lesson
    found.
    """

    id: str
    question: str
    unit: str
    section: str
    minute: int  # of the lesson, by when a learner on his own is there
    before: str  # the first line of the cell that answers
    found: str
    differs: bool  # between machines, or in the short form that is stored


@dataclass(frozen=True)
class StatedExercise:
    """What the lesson says above an exercise."""

    id: str
    title: str
    dots: str  # the difficulty: ●○○, ●●○ or ●●●
    minutes: int
    optional: bool


class Lesson:
    """A lesson by its source."""

    def __init__(self, source: Path):
        self.source, self.number = source, source.name[:2]
        self.cells = cells_of(source)
        self.title = re.search(r"^# \d\d · (.*)$", self.cells[0].source, re.MULTILINE)[1]

    @property
    def needs(self) -> str:
        """What a learner should know before."""
        return " ".join(
            re.search(r"You need:? (.*?)\*$", self.cells[0].source, re.MULTILINE | re.DOTALL)[
                1
            ].split()
        )

    @cached_property
    def exercises(self) -> list[StatedExercise]:
        """By number."""
        found = []
        for cell in self.cells:
            for id, title, dots, minutes, optional in EXERCISE.findall(cell.source):
                found.append(StatedExercise(id, title, dots, int(minutes), bool(optional)))
        return sorted(found, key=lambda exercise: int(exercise.id.partition(".")[2]))

    def cell_under(self, heading: str) -> str:
        """The prose of the cell with that heading, without the heading and the paragraph
        after it.
        """
        cell = next(c for c in self.cells if f"### {heading}\n" in c.source)
        return cell.source.partition(f"### {heading}\n")[2].strip().partition("\n\n")[2]

    @cached_property
    def sections(self) -> dict[str, Minutes]:
        """Minutes by section, in order.

        What comes before the first one has the name "0"; "1 · Three batches" is a name.
        """
        parts: dict[str, list] = {"0": []}
        for cell in self.cells:
            texts = [cell.source]
            if cell.cell_type == "markdown":
                texts = re.split(r"^(?=## )", cell.source, flags=re.MULTILINE)
            for text in texts:
                if cell.cell_type == "markdown" and text.startswith("## "):
                    parts[text.partition("\n")[0].removeprefix("## ")] = []
                list(parts.values())[-1].append((cell.cell_type, text))
        return {name: of_cells(cells) for name, cells in parts.items()}

    @property
    def minutes(self) -> Minutes:
        return of_cells([(cell.cell_type, cell.source) for cell in self.cells])

    @cached_property
    def printed(self) -> str:
        """All that the stored notebook's cells printed."""
        return "\n".join(text for text, _ in self._outputs)

    @cached_property
    def _outputs(self) -> list[tuple[str, bool]]:
        notebook = json.loads(self.source.with_suffix(".ipynb").read_text(encoding="utf-8"))
        return [
            ("".join(output["text"]), "nbval-ignore-output" in cell["metadata"].get("tags", []))
            for cell in notebook["cells"]
            for output in cell.get("outputs", [])
            if output["output_type"] == "stream"
        ]

    @cached_property
    def asked(self) -> list[Asked]:
        """The lesson's predictions, in order."""
        found, section, seen, question = [], "0", [], ""
        for i, cell in enumerate(self.cells):
            if cell.cell_type == "markdown":
                section = (re.findall(r"^## (.*)$", cell.source, re.MULTILINE) or [section])[-1]
            seen.append((cell.cell_type, cell.source))
            calls = _calls(cell.source) if cell.cell_type == "code" else []
            for name, value in calls:
                if name == "question":
                    question = value
                    continue
                id, words, unit = value
                following = next(
                    c for c in self.cells[i + 1 :] if c.cell_type == "code" and _first_line(c)
                )
                at = round(of_cells(seen).total)
                before = _first_line(following)
                answer, differs = self._answer(id, unit)
                found.append(
                    Asked(id, words or question, unit, section, at, before, answer, differs)
                )
        return found

    def _answer(self, id: str, unit: str) -> tuple[str, bool]:
        for text, differs in self._outputs:
            table = re.search(rf"^Prediction {re.escape(id)}\n((?:  .*\n)+)", text, re.MULTILINE)
            if table:
                _, exact, human = ROW.match(table[1].splitlines()[-1]).groups()
                return (
                    human if unit == "bytes" and human and not human.endswith(" B") else exact
                ), differs
        raise LookupError(
            f"{self.source.name}: no stored output answers prediction {id}; run `make notebooks`"
        )


def _calls(source: str) -> list[tuple[str, object]]:
    """Of a cell: ("question", its text) for each such assignment, ("ask", (id, text or "", unit))
    for each prediction.
    """
    found: list[tuple[str, object]] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "question":
            found.append(("question", ast.literal_eval(node.value)))
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "predict_first":
            id, words = node.args
            unit = next(
                (ast.literal_eval(k.value) for k in node.keywords if k.arg == "unit"), "bytes"
            )
            text = ast.literal_eval(words) if isinstance(words, ast.Constant) else ""
            found.append(("ask", (ast.literal_eval(id), text, unit)))
    return found


def _first_line(cell) -> str:
    """What a reader recognises a code cell by: its first line that is neither import, comment nor
    blank.
    """
    lines = (line.strip() for line in cell.source.split("\n"))
    line = next(
        (line for line in lines if line and not re.match(r"#|from |import |\)|%", line)), ""
    )
    return line if len(line) <= 60 else line[:56] + " ..."


@cache
def lessons() -> list[Lesson]:
    """Those that have been run: a lesson's figures are what its stored notebook printed."""
    sources = sorted(ROOT.glob("solutions/[0-9][0-9]_*.py"))
    return [Lesson(source) for source in sources if source.with_suffix(".ipynb").exists()]
