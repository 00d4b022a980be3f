"""What a learner has done so far, in words."""

from __future__ import annotations

from ..catalogue import all_exercises, lessons
from ..learner.guesses import how_far, show
from ..learner.progress import load, location


def summary() -> str:
    """The table that ``python -m gradmem_lib progress`` prints: exercises by lesson, then guesses
    and how far off they were.
    """
    progress = load()
    rows: list[str] = []
    for lesson in lessons():
        exercises = all_exercises(lesson)
        states = [_state(progress["checks"].get(exercise.id)) for exercise in exercises]
        passed = sum(state == "passed" for state in states)
        rows.append(f"Lesson {lesson}: {passed} of {len(exercises)} exercises passed")
        rows += [
            f"  {exercise.id:<5} {exercise.dots}  {state:<24}  {exercise.title}"
            for exercise, state in zip(exercises, states, strict=True)
        ]
        rows.append("")
    if progress.get("puzzles"):
        from ..lessons.lesson_11.stars import stars

        rows += ["Stars of lesson 11's puzzles", str(stars()), ""]
    rows.append("Predictions" if progress["guesses"] else "Predictions: none yet")
    for id, entry in sorted(progress["guesses"].items()):
        guess, measured, unit = entry["guess"], entry.get("measured"), entry["unit"]
        outcome = (
            "not revealed yet"
            if measured is None
            else f"measured {show(measured, unit)}: {how_far(guess, measured)}"
        )
        rows.append(f"  {id:<5} guess {show(guess, unit)}; {outcome}")
    return "\n".join([*rows, "", f"kept in {location()}"])


def _state(entry: dict | None) -> str:
    if entry is None:
        return "open"
    tries = f"{entry['tries']} {'try' if entry['tries'] == 1 else 'tries'}"
    return "passed" if entry["outcome"] == "passed" else f"attempted ({tries})"
