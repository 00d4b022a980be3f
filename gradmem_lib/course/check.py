"""The function that learners call: ``check("1.3", answer)``.

Also: the list of exercises, and tests of an exercise's quality.
"""

from __future__ import annotations

import pkgutil
import re
from importlib import import_module
from typing import Any

from . import exercises
from .compare import describe
from .exercise import Exercise
from .judging import OPEN, PASSED, judge, of_reference, wrong
from .stubs import given

MOVED = {"5.8": "6.5"}  # exercises that another lesson has now


class UnknownExercise(KeyError):
    """There is no exercise with that id. The message lists the existing ones."""

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError would show the sentence in quotes


def check(id: str, candidate: Any) -> Any:
    """Judge ``candidate`` as the answer to exercise ``id``, print one line, and return what later
    cells should use.

    It returns the candidate if it passed, else the reference, so that a notebook runs to its end in
    either case. A reference function or class that is checked again is recognised, and counts as
    not attempted. A plain value cannot be recognised, so give the result of a value exercise its
    own name: ``per_card = check("1.2", answer)``.

    Raises ``UnknownExercise`` (a ``KeyError``) for an id that does not exist, and nothing else.
    """
    from .progress import record_check

    exercise = get(id)
    try:
        verdict = judge(exercise, candidate)
    except KeyboardInterrupt:
        # Everything that was switched is back by now, and a traceback through the course's own code
        # helps nobody.
        print(f"○ {exercise.id} interrupted, and not judged: {exercise.title}")
        return given(exercise)
    except Exception as error:
        # Too odd even to compare, such as a list that holds itself.
        says = (
            f"this answer cannot be compared ({type(error).__name__}): return plain numbers or "
            "tensors"
        )
        verdict = wrong(exercise, says)
    record_check(exercise.id, verdict.outcome)
    more = verdict.outcome == PASSED and exercise.afterwards and exercise.afterwards(candidate)
    print(verdict.line, *([more] if more else []))
    return verdict.result


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
    wanted = lessons() if lesson is None else [f"{int(lesson):02d}"]
    modules = [
        import_module(f"{exercises.__name__}.{name}")
        for number, name in _modules()
        if number in wanted
    ]
    found = [exercise for module in modules for exercise in module.EXERCISES]
    return sorted(found, key=lambda exercise: [int(part) for part in exercise.id.split(".")])


def lessons() -> list[str]:
    """Numbers of the lessons that have exercises: ``["00", "01", …]``."""
    return sorted({number for number, _ in _modules()})


def _modules() -> list[tuple[str, str]]:
    """("03", "lesson_03_updates") for every file of exercises; a lesson may have several."""
    names = (module.name for module in pkgutil.iter_modules(exercises.__path__))
    return [
        (match[1], match[0])
        for match in (re.fullmatch(r"lesson_(\d\d)(_\w+)?", name) for name in names)
        if match
    ]


def audit(exercise: Exercise) -> list[str]:
    """The faults of an exercise, one sentence each; empty if the exercise is ready for learners.

    Runs the reference, every known mistake and the stubs of a learner who has not begun.
    """
    problems = []
    if (
        not re.fullmatch(r"\d+\.\d+", exercise.id)
        or exercise.difficulty not in (1, 2, 3)
        or exercise.minutes < 1
    ):
        problems.append(
            "the id must look like 1.3, the difficulty be 1 to 3 and the minutes at least 1"
        )
    if not exercise.title or not exercise.trains:
        problems.append("the title and what the exercise trains must be said")
    if not 4 <= len(exercise.mistakes) <= 6:
        problems.append(f"{len(exercise.mistakes)} known mistakes: four to six are asked for")
    expected = of_reference(exercise)
    verdict = judge(exercise, exercise.reference, expected)
    if verdict.outcome != PASSED:
        problems.append(f"the reference does not pass: {verdict.line}")
    for mistake in exercise.mistakes:
        if "\n" in mistake.says or not mistake.says.endswith("."):
            problems.append(
                f"mistake {mistake.name!r} must say one line that ends with a full stop"
            )
        verdict = judge(exercise, mistake.function, expected)
        if mistake.says not in verdict.line:
            problems.append(f"mistake {mistake.name!r} is not named as itself: {verdict.line}")
    for stub in _stubs(exercise):
        verdict = judge(exercise, stub, expected)
        if verdict.outcome != OPEN:
            problems.append(f"a stub ({describe(stub)}) is not called {OPEN}: {verdict.line}")
    return problems


def _stubs(exercise: Exercise) -> list[Any]:
    """The answers of a learner who has not begun."""
    if not callable(exercise.reference):
        return [..., None]

    def does_nothing(*args, **kwargs): ...

    def returns_ellipsis(*args, **kwargs):
        result = ...
        return result

    def raises(*args, **kwargs):
        raise NotImplementedError("your code here")

    functions = [returns_ellipsis, raises] if not isinstance(exercise.reference, type) else []
    return [..., None, does_nothing, *functions, given(exercise)]


def _listed(words: list[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
