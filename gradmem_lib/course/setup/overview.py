"""A learner's progress on one screen: ``gradmem progress``."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

from ..learner.progress import load, location
from ..learner.titles import Title, titles

WIDTH = 80


def overview() -> str:
    """One line for each lesson: how many exercises have passed, and the next one."""
    progress = load()
    lessons: dict[str, list[Title]] = {}
    for exercise in titles():
        lessons.setdefault(f"{int(exercise.id.partition('.')[0]):02d}", []).append(exercise)
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
    lesson: str, exercises: list[Title], checks: Mapping[str, Mapping[str, Any]]
) -> str:
    to_do = []
    for exercise in exercises:
        if checks.get(exercise.id, {}).get("outcome") != "passed":
            to_do.append(exercise)
    passed = len(exercises) - len(to_do)
    start = f"  {lesson}    {passed:>2} of {len(exercises):<3}"
    if not to_do:
        return f"{start} all passed"
    first = to_do[0]
    tries = checks.get(first.id, {}).get("tries", 0)
    tried = f" (tries: {tries})" if tries else ""
    title = textwrap.shorten(first.title, 44 - len(tried), placeholder=" ...")
    return f"{start} {first.id:<5} {first.dots}  {title}{tried}"


def _guesses(guesses: Mapping[str, Mapping[str, Any]]) -> str:
    if not guesses:
        return "Predictions: none yet"
    revealed = [guess for guess in guesses.values() if guess.get("measured") is not None]
    return f"Predictions: {len(guesses)}, of which {len(revealed)} were compared with a measurement"
