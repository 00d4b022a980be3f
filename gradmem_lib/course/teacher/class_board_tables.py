"""The two tables of a class's board: which lesson each learner has reached, and which exercises
hold them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from statistics import median
from typing import Any

from ..learner.titles import titles

# A learner's label; and their "checks", (passed, tries) by exercise, and "guesses",
# (guess, measured or None, unit) by prediction.
Rows = list[tuple[str, dict[str, Any]]]


@dataclass(frozen=True)
class Learner:
    label: str
    passed: Counter  # exercises by lesson
    touched: set[str]  # lessons with any entry
    last: str | None  # of these; None: not begun


def where_everybody_is(rows: Rows) -> dict[str, Any]:
    """Learners, the exercises of each lesson, and how many learners are in each lesson."""
    known = {exercise.id: _lesson(exercise.id) for exercise in titles()}
    lessons = Counter(known.values())  # in the course's order
    learners = []
    for label, found in rows:
        checks = found["checks"]
        passed = Counter(known[id] for id, (done, _) in checks.items() if done and id in known)
        touched = {_lesson(id) for id in (*checks, *found["guesses"])} & set(lessons)
        learners.append(Learner(label, passed, touched, max(touched, default=None)))
    here = Counter(learner.last for learner in learners)
    return {"learners": learners, "lessons": lessons, "here": here, "not_begun": here[None]}


def _lesson(id: str) -> str:
    """The lesson of an exercise or a prediction: "03" for "3.2" and "3.a"."""
    return id.partition(".")[0].zfill(2)


@dataclass(frozen=True)
class Held:
    """An exercise that somebody has tried and not passed."""

    name: str
    held: int  # learners who have tried it and not passed
    tried: int  # learners who have tried it
    tries: float  # median number of tries of those whom it holds


def held_exercises(rows: Rows) -> list[Held]:
    """Those that hold most learners first; equals in the course's order."""
    exercises = []
    for exercise in titles():
        entries = [
            found["checks"][exercise.id] for _, found in rows if exercise.id in found["checks"]
        ]
        tries = [n for passed, n in entries if not passed]
        if tries:
            name = f"{exercise.id}, {exercise.title}"
            exercises.append(Held(name, len(tries), len(entries), median(tries)))
    return sorted(exercises, key=lambda each: -each.held)
