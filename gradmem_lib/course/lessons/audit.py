"""Holds an exercise to the rules for exercises: what is not ready for learners, a sentence each."""

from __future__ import annotations

import re
from typing import Any

from ..judge.compare import describe
from ..judge.exercise import Exercise
from ..judge.not_attempted import given
from ..judge.verdict import OPEN, PASSED, judge, of_reference


def audit(exercise: Exercise) -> list[str]:
    """The faults of an exercise, one sentence each; empty if the exercise is ready for learners.

    Runs the reference, every known mistake and the stubs of a learner who has not begun.
    """
    problems = _faults_of_fields(exercise)
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


def _faults_of_fields(exercise: Exercise) -> list[str]:
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
    if len(exercise.mistakes) < 4:
        problems.append(f"{len(exercise.mistakes)} known mistakes: four or more are asked for")
    if len({mistake.name for mistake in exercise.mistakes}) < len(exercise.mistakes):
        problems.append("two known mistakes have the same name")
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
