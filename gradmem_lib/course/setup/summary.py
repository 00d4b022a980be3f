"""What a learner has done so far, in words."""

from __future__ import annotations

from ..catalogue import lessons
from ..learner.guesses import how_far, show
from ..learner.progress import load, location
from ..learner.titles import titles

PASSED = "passed"


def summary() -> str:
    """The table that ``python -m gradmem_lib progress`` prints: exercises by lesson, then guesses
    and how far off they were.
    """
    progress = load()
    rows: list[str] = []
    for lesson in lessons():
        rows += [*_of_lesson(lesson, progress["checks"]), ""]
    if progress.get("puzzles"):
        from ..lessons.lesson_11.stars import stars

        rows += ["Stars of lesson 11's puzzles", str(stars()), ""]
    guesses = progress["guesses"]
    rows.append("Predictions" if guesses else "Predictions: none yet")
    for id, entry in sorted(guesses.items()):
        rows.append(_of_guess(id, entry))
    rows += ["", f"kept in {location()}"]
    return "\n".join(rows)


def _of_lesson(lesson: str, checks: dict) -> list[str]:
    """A line for the lesson, and one for each of its exercises."""
    exercises = [each for each in titles() if int(each.id.partition(".")[0]) == int(lesson)]
    passed = 0
    lines = []
    for exercise in exercises:
        state = _state(checks.get(exercise.id))
        if state == PASSED:
            passed += 1
        lines.append(f"  {exercise.id:<5} {exercise.dots}  {state:<24}  {exercise.title}")
    return [f"Lesson {lesson}: {passed} of {len(exercises)} exercises passed", *lines]


def _of_guess(id: str, entry: dict) -> str:
    guess, measured, unit = entry["guess"], entry.get("measured"), entry["unit"]
    if measured is None:
        outcome = "not revealed yet"
    else:
        outcome = f"measured {show(measured, unit)}: {how_far(guess, measured)}"
    return f"  {id:<5} guess {show(guess, unit)}; {outcome}"


def _state(entry: dict | None) -> str:
    """What a learner has reached in an exercise, from its entry in the progress file."""
    if entry is None:
        return "open"
    if entry["outcome"] == "passed":
        return PASSED
    tries = "1 try" if entry["tries"] == 1 else f"{entry['tries']} tries"
    return f"attempted ({tries})"
