"""The exercises' titles, without importing the exercises, which import torch.

They are kept in ``exercises.json``, and a test compares it with the exercises. After a change,
``python -m gradmem_lib.course.learner.titles`` writes it anew.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path


@dataclass(frozen=True)
class Title:
    id: str
    title: str
    difficulty: int

    @property
    def dots(self) -> str:
        """The difficulty as ●○○, ●●○ or ●●●."""
        return "●" * self.difficulty + "○" * (3 - self.difficulty)


def titles() -> list[Title]:
    """Id, title and difficulty of every exercise, in order."""
    text = files(__package__).joinpath("exercises.json").read_text(encoding="utf-8")
    return [Title(**row) for row in json.loads(text)]


def titles_of_the_exercises() -> list[Title]:
    """The same, from the exercises themselves. It imports torch."""
    from ..catalogue import all_exercises

    return [Title(found.id, found.title, found.difficulty) for found in all_exercises()]


if __name__ == "__main__":
    rows = [json.dumps(asdict(row), ensure_ascii=False) for row in titles_of_the_exercises()]
    file = Path(__file__).with_name("exercises.json")
    file.write_text("[\n" + ",\n".join(rows) + "\n]\n", encoding="utf-8")
