"""The exercises' titles and difficulties, as their notebooks state them.

``make notebooks`` writes them to ``exercises.json``, so that nobody has to import the exercises,
which import torch.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files


@dataclass(frozen=True)
class Title:
    id: str
    title: str
    difficulty: int

    @property
    def dots(self) -> str:
        """The difficulty as ●○○, ●●○ or ●●●."""
        return "●" * self.difficulty + "○" * (3 - self.difficulty)


@cache
def titles() -> tuple[Title, ...]:
    """Id, title and difficulty of every exercise, in order."""
    text = files(__package__).joinpath("exercises.json").read_text(encoding="utf-8")
    return tuple(Title(**row) for row in json.loads(text))


def title_of(id: str) -> str:
    """The title of the exercise; empty for one that stands in no notebook."""
    for row in titles():
        if row.id == id:
            return row.title
    return ""
