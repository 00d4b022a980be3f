"""The claims ledger: every figure and rule of five documents, with an answer that is computed again each time
it is shown.

A lesson's answers live in ``claims/lesson_NN.py``: one function per claim, marked ``@answers("C05")``, that
works on real objects and returns a ``Finding``. ``python -m gradmem_lib.course.claims --write`` turns them into
LEDGER.md.
"""

from __future__ import annotations

import importlib
import pkgutil
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

from .table import CLAIMS, DOCUMENTS, Claim

__all__ = [
    "CLAIMS",
    "DOCUMENTS",
    "VERDICTS",
    "Claim",
    "Finding",
    "answered",
    "answers",
    "find",
    "page",
    "show",
]

VERDICTS = ("holds", "holds only if", "does not hold")


@dataclass(frozen=True)
class Finding:
    """The answer to a claim. ``summary``: one or two sentences; ``figures``: what was computed, bytes
    unless the name says otherwise; ``needs``: what the answer needs beyond a CPU, empty for nothing."""

    verdict: str
    summary: str
    figures: dict[str, int | float | str] = field(default_factory=dict)
    needs: str = ""

    def __post_init__(self) -> None:
        if self.verdict not in VERDICTS:
            raise ValueError(f"verdict is {self.verdict!r}: choose one of {', '.join(map(repr, VERDICTS))}")


_ANSWERS: dict[str, Callable[[], Finding]] = {}


def _known(claim_id: str) -> Claim:
    if claim_id not in CLAIMS:
        raise KeyError(f"there is no claim {claim_id!r}: claims are named {min(CLAIMS)} to {max(CLAIMS)}")
    return CLAIMS[claim_id]


def answers(claim_id: str) -> Callable[[Callable[[], Finding]], Callable[[], Finding]]:
    """Mark the function that answers a claim. ``ValueError`` when another one does already."""
    _known(claim_id)

    def register(function: Callable[[], Finding]) -> Callable[[], Finding]:
        other = _ANSWERS.setdefault(claim_id, function)
        if (other.__module__, other.__qualname__) != (function.__module__, function.__qualname__):
            raise ValueError(
                f"{claim_id} has two answers, {other.__qualname__} and {function.__qualname__}: keep one"
            )
        _ANSWERS[claim_id] = function
        return function

    return register


@cache
def _load_lessons() -> None:
    for module in pkgutil.iter_modules(__path__):
        if module.name.startswith("lesson_"):
            importlib.import_module(f".{module.name}", __name__)


def answered() -> list[str]:
    """Ids of the claims that have an answer, in order."""
    _load_lessons()
    return sorted(_ANSWERS)


@cache
def find(claim_id: str) -> Finding | None:
    """Compute a claim's finding; None while it is open. ``KeyError`` for an unknown id."""
    _known(claim_id)
    _load_lessons()
    return _ANSWERS[claim_id]() if claim_id in _ANSWERS else None


def _value(value: int | float | str) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}" if isinstance(value, float) else value


def show(*claim_ids: str, figures: bool = False) -> None:
    """Print each claim and its verdict in a few lines of plain text, and with ``figures=True`` all that was computed."""
    for number, claim_id in enumerate(claim_ids):
        claim, finding = _known(claim_id), find(claim_id)
        lines = [f"{claim.id} claims: {claim.says}"]
        if finding is None:
            lines.append(f"   Open: lesson {claim.lesson} answers it.")
        else:
            lines.append(f"   {finding.verdict.upper()}: {finding.summary}")
        if number:
            print()
        for line in lines:
            print(textwrap.fill(line, 100, subsequent_indent="   "))
        found = finding.figures if finding and figures else {}
        width = max(map(len, found), default=0)
        for name, value in found.items():
            print(f"   {name:{width}}  {_value(value)}")


def _entry(claim: Claim, finding: Finding) -> list[str]:
    rows = [f"| {name} | {_value(value)} |" for name, value in finding.figures.items()]
    figures = ["| Figure | Found |", "|---|---|", *rows, ""] if rows else []
    needs = [f"Needs: {finding.needs}", ""] if finding.needs else []
    return [
        f"### {claim.id}: {finding.verdict}",
        "",
        f"> {claim.says}",
        f"> ({claim.document})",
        "",
        f"**{finding.verdict.capitalize()}**{' ' if finding.verdict.endswith('if') else '. '}{finding.summary}",
        "",
        *figures,
        *needs,
        f"Shown in lesson {claim.lesson}.",
        "",
    ]


def page() -> str:
    """The ledger as markdown: the answered claims with their findings, then those still open."""
    done = answered()
    open_claims = [claim for claim in CLAIMS.values() if claim.id not in done]
    count = {verdict: sum(find(name).verdict == verdict for name in done) for verdict in VERDICTS}
    totals = ", ".join(f"{n} *{verdict}*" for verdict, n in count.items())
    lines = [
        "# Claims ledger",
        "",
        f"What five documents about training memory say ({len(CLAIMS)} claims, in our words), and what the",
        f"course finds. {len(done)} are answered: {totals}. The other {len(open_claims)} are open.",
        "",
        "This page is written by `python -m gradmem_lib.course.claims --write`, and a test computes every entry",
        "again. Figures are exact bytes unless they say otherwise; GB is 1,000,000,000 bytes and GiB is",
        "1,073,741,824.",
        "",
        "## Answered",
        "",
        *(line for name in done for line in _entry(CLAIMS[name], find(name))),
        "## Open",
        "",
        "| Claim | Lesson | What is claimed | By |",
        "|---|---|---|---|",
        *(f"| {c.id} | {c.lesson} | {c.says} | {', '.join(c.documents)} |" for c in open_claims),
        "",
        "## Documents",
        "",
        *(f"- {key}: {title}" for key, title in DOCUMENTS.items()),
    ]
    return "\n".join(lines) + "\n"
