"""A learner's progress on one screen: ``gradmem progress``.

The exercises' titles come from ``exercises.json``, since importing the exercises imports torch. A
test compares the file with them. ``python -m gradmem_lib.course.setup.overview`` writes it anew.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from ..learner.progress import load, location

WIDTH = 80


def overview() -> str:
    """One line for each lesson: how many exercises have passed, and the next one."""
    progress = load()
    lessons: dict[str, list[dict[str, Any]]] = {}
    for exercise in known_exercises():
        lessons.setdefault(f"{int(exercise['id'].partition('.')[0]):02d}", []).append(exercise)
    lines = ["lesson  passed  next exercise"]
    for lesson, exercises in lessons.items():
        lines.append(_lesson_line(lesson, exercises, progress["checks"]))
    lines += ["", "●○○ easy, ●●○ takes thought, ●●● hard"]
    lines.append(_guesses(progress["guesses"]))
    if progress.get("puzzles"):
        lines.append(f"Puzzles of lesson 11 solved: {len(progress['puzzles'])}")
    lines.append("All exercises, guesses and stars: gradmem progress --all")
    lines += textwrap.wrap(f"kept in {location()}", WIDTH, break_long_words=False)
    return "\n".join(lines)


def _lesson_line(
    lesson: str, exercises: list[dict[str, Any]], checks: Mapping[str, Mapping[str, Any]]
) -> str:
    to_do = []
    for exercise in exercises:
        if checks.get(exercise["id"], {}).get("outcome") != "passed":
            to_do.append(exercise)
    passed = len(exercises) - len(to_do)
    start = f"  {lesson}    {passed:>2} of {len(exercises):<3}"
    if not to_do:
        return f"{start} all passed"
    first = to_do[0]
    dots = "●" * first["difficulty"] + "○" * (3 - first["difficulty"])
    tries = checks.get(first["id"], {}).get("tries", 0)
    tried = f" (tries: {tries})" if tries else ""
    title = textwrap.shorten(first["title"], 44 - len(tried), placeholder=" ...")
    return f"{start} {first['id']:<5} {dots}  {title}{tried}"


def _guesses(guesses: Mapping[str, Mapping[str, Any]]) -> str:
    if not guesses:
        return "Predictions: none yet"
    revealed = [guess for guess in guesses.values() if guess.get("measured") is not None]
    return f"Predictions: {len(guesses)}, of which {len(revealed)} were compared with a measurement"


def known_exercises() -> list[dict[str, Any]]:
    """Id, title and difficulty of every exercise, in order."""
    text = files(__package__).joinpath("exercises.json").read_text(encoding="utf-8")
    return json.loads(text)


def listed_exercises() -> list[dict[str, Any]]:
    """What ``exercises.json`` should hold, from the exercises themselves. It imports torch."""
    from ..catalogue import all_exercises

    return [
        {"id": exercise.id, "title": exercise.title, "difficulty": exercise.difficulty}
        for exercise in all_exercises()
    ]


if __name__ == "__main__":
    rows = ",\n".join(json.dumps(row, ensure_ascii=False) for row in listed_exercises())
    Path(__file__).with_name("exercises.json").write_text(f"[\n{rows}\n]\n", encoding="utf-8")
