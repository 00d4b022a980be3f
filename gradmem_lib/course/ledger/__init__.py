"""The claims ledger: every figure and rule of five documents, with an answer that is computed again
each time it is shown.

A lesson's answers live in ``lessons/lesson_NN/claims*.py``: one function per claim, marked
``@answers("C05")``, that works on real objects and returns a ``Finding``. ``python -m
gradmem_lib.course.ledger --write`` turns them into docs/ledger.md.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from functools import cache

from .display import draw
from .finding import VERDICTS, Figure, Finding
from .markdown import as_markdown
from .table import CLAIMS, DOCUMENTS, Claim

__all__ = [
    "CLAIMS",
    "DOCUMENTS",
    "VERDICTS",
    "Claim",
    "Figure",
    "Finding",
    "answered",
    "answers",
    "find",
    "lesson_of",
    "page",
    "show",
]

_ANSWERS: dict[str, Callable[[], Finding]] = {}


def _known(claim_id: str) -> Claim:
    if claim_id not in CLAIMS:
        raise KeyError(
            f"there is no claim {claim_id!r}: claims are named {min(CLAIMS)} to {max(CLAIMS)}"
        )
    return CLAIMS[claim_id]


def answers(claim_id: str) -> Callable[[Callable[[], Finding]], Callable[[], Finding]]:
    """Mark the function that answers a claim. ``ValueError`` when another one does already."""
    _known(claim_id)

    def register(function: Callable[[], Finding]) -> Callable[[], Finding]:
        other = _ANSWERS.setdefault(claim_id, function)
        if (other.__module__, other.__qualname__) != (function.__module__, function.__qualname__):
            raise ValueError(
                f"{claim_id} has two answers, {other.__qualname__} and "
                f"{function.__qualname__}: keep one"
            )
        _ANSWERS[claim_id] = function
        return function

    return register


@cache
def _load_lessons() -> None:
    # The answers import this package, so it can import them only when one is asked for.
    from ..catalogue import modules_of

    for name in modules_of("claims"):
        importlib.import_module(name)


def answered() -> list[str]:
    """Ids of the claims that have an answer, in order."""
    _load_lessons()
    return sorted(_ANSWERS)


def lesson_of(claim_id: str) -> str:
    """The number of the lesson that a claim's answer belongs to, such as "04"."""
    _load_lessons()
    return re.search(r"\.lesson_(\d\d)\.", _ANSWERS[claim_id].__module__)[1]


@cache
def find(claim_id: str) -> Finding:
    """Compute a claim's finding. ``KeyError`` for an unknown id."""
    _known(claim_id)
    _load_lessons()
    return _ANSWERS[claim_id]()


def show(*claim_ids: str) -> None:
    """Show each claim with its verdict: in a notebook a line that unfolds, elsewhere a few lines of
    text. docs/ledger.md has all figures. ``KeyError`` for an unknown id.
    """
    draw([(_known(claim_id), find(claim_id)) for claim_id in claim_ids])


def page() -> str:
    """The ledger as markdown: a table of all claims, then an entry for each."""
    return as_markdown(
        {claim_id: find(claim_id) for claim_id in CLAIMS},
        {claim_id: lesson_of(claim_id) for claim_id in CLAIMS},
    )
