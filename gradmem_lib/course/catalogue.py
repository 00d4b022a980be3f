"""Finds what the lessons consist of: their exercises, by id, and the modules that answer claims.

Rooms that lessons are built on, such as the ledger, ask it for the lessons' modules. So it looks
the modules up by name, and imports none of them before somebody asks.
"""

from __future__ import annotations

import pkgutil
import re
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .judge.exercise import Exercise

MOVED = {"5.8": "6.5"}  # exercises that another lesson has now


class UnknownExercise(KeyError):
    """There is no exercise with that id. The message lists the existing ones."""

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError would show the sentence in quotes


def get(id: str) -> Exercise:
    """The exercise with that id, such as ``"1.3"``. Raises ``UnknownExercise``."""
    match = re.fullmatch(r"\s*(\d+)\.\d+\s*", id) if isinstance(id, str) else None
    lesson = f"{int(match[1]):02d}" if match else ""
    if lesson not in lessons():
        raise UnknownExercise(
            f'there is no exercise {id!r}: ids are text such as "0.1" (lesson 0, exercise 1), and '
            "the lessons with "
            f"exercises are {_listed(lessons())}"
        )
    if id.strip() in MOVED:
        return get(MOVED[id.strip()])
    found = {exercise.id: exercise for exercise in all_exercises(lesson)}
    if id.strip() not in found:
        raise UnknownExercise(
            f"there is no exercise {id!r}: lesson {lesson} has {_listed(list(found))}"
        )
    return found[id.strip()]


def all_exercises(lesson: int | str | None = None) -> list[Exercise]:
    """All exercises in order, or those of one lesson (1, "1" or "01")."""
    from .judge.exercise import Exercise

    found = []
    for name in modules_of("exercises", None if lesson is None else f"{int(lesson):02d}"):
        for value in vars(import_module(name)).values():
            if isinstance(value, Exercise):
                found.append(value)
    return sorted(found, key=lambda exercise: [int(part) for part in exercise.id.split(".")])


def lessons() -> list[str]:
    """Numbers of the lessons that have exercises: ``["00", "01", …]``."""
    numbers = re.findall(r"\.lesson_(\d\d)\.", " ".join(modules_of("exercises")))
    return sorted(set(numbers))


@cache
def modules_of(kind: str, lesson: str | None = None) -> tuple[str, ...]:
    """The modules of all lessons, or of one (``"03"``), that are of one kind.

    ``kind``: ``"exercises"`` or ``"claims"``. A lesson may spread one kind over several modules:
    ``"exercises"`` finds ``exercises.py``, ``exercises_updates.py`` and so on.
    """
    found = []
    lesson_packages = import_module(f"{__package__}.lessons")
    for folder in pkgutil.iter_modules(lesson_packages.__path__):
        number = re.fullmatch(r"lesson_(\d\d)", folder.name)
        if number is None or lesson not in (None, number[1]):
            continue
        package = f"{lesson_packages.__name__}.{folder.name}"
        for module in pkgutil.iter_modules(import_module(package).__path__):
            if module.name.split("_")[0] == kind:
                found.append(f"{package}.{module.name}")
    return tuple(found)


def _listed(words: list[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
