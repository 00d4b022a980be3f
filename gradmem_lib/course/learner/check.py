"""The function that learners call: ``check("1.3", answer)``.

Also: the list of exercises, and tests of an exercise's quality.
"""

from __future__ import annotations

from typing import Any

from ..catalogue import get
from ..judge.not_attempted import given
from ..judge.verdict import PASSED, judge, wrong


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
