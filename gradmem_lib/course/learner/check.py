"""The function that learners call: ``check("1.3", answer)``."""

from __future__ import annotations

import textwrap
from typing import Any

from ..catalogue import get


def check(id: str, candidate: Any) -> Any:
    """Judge ``candidate`` as the answer to exercise ``id``, print one line, and return what later
    cells should use.

    It returns the candidate if it passed, else the reference, so that a notebook runs to its end in
    either case. A reference function or class that is checked again is recognised, and counts as
    not attempted. A plain value cannot be recognised, so give the result of a value exercise its
    own name: ``per_card = check("1.2", answer)``.

    Raises ``UnknownExercise`` (a ``KeyError``) for an id that does not exist, and nothing else.
    """
    # Not above: the judge imports torch, and `from gradmem_lib import check` need not wait for it.
    from ..judge.not_attempted import given
    from ..judge.verdict import OPEN, PASSED, WRONG, judge, wrong
    from .progress import record_check
    from .titles import title_of

    exercise = get(id)
    title = title_of(exercise.id)
    try:
        verdict = judge(exercise, candidate)
    except KeyboardInterrupt:
        # Everything that was switched is back by now, and a traceback through the course's own code
        # helps nobody.
        print(f"○ {exercise.id} interrupted, and not judged: {title}")
        return given(exercise)
    except Exception as error:  # too odd even to compare
        says = (
            f"this answer cannot be compared ({type(error).__name__}): return plain numbers or "
            "tensors."
        )
        verdict = wrong(exercise, says)
    record_check(exercise.id, verdict.outcome)
    after = {
        PASSED: f": {title}",
        OPEN: f": {title} (later cells use the reference solution)",
    }
    line = verdict.line + after.get(verdict.outcome, "")
    if verdict.outcome == PASSED and exercise.afterwards:
        line += f" {exercise.afterwards(candidate)}"
    if verdict.outcome == WRONG:
        line = filled(line)
    print(line)
    return verdict.result


def filled(text: str) -> str:
    """``text`` in lines of 90 columns, for JupyterLab breaks longer ones inside words. The case
    ("For …") begins a new one.
    """
    lines = text.replace(". For ", ".\nFor ").splitlines()
    return "\n".join(
        textwrap.fill(line, 90, break_long_words=False, break_on_hyphens=False) for line in lines
    )
