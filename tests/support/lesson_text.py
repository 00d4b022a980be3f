"""What a lesson says in its prose and what its stored cells printed, for tests of its sentences.

A test quotes a sentence with ``says``, reads the printed figures with ``figures`` or ``answer``,
and recomputes the one from the other.
"""

from __future__ import annotations

import re
from functools import cache

from lesson_facts import lessons


class Lesson:
    """What a lesson says, and what its stored cells printed."""

    def __init__(self, number: str):
        found = next(lesson for lesson in lessons() if lesson.number == number)
        prose = [cell.source for cell in found.cells if cell.cell_type == "markdown"]
        self.text = " ".join(" ".join(prose).split())
        self.printed = found.printed

    def says(self, sentence: str) -> bool:
        return sentence in self.text

    def figures(self, pattern: str) -> list[list[float]]:
        """The numbers in the groups of every place where the pattern matches."""
        found = re.findall(pattern, self.printed, re.MULTILINE)
        assert found, pattern
        rows = [(row,) if isinstance(row, str) else row for row in found]
        return [[float(number.replace(",", "")) for number in row] for row in rows]

    def answer(self, id: str) -> float:
        """What a prediction measured."""
        table = self.printed.partition(f"Prediction {id}\n")[2]
        return float(re.search(r"measured +([\d,.]+)", table)[1].replace(",", ""))


@cache
def lesson(number: str) -> Lesson:
    """The lesson of that number, read once."""
    return Lesson(number)
