"""The parts of an exercise: a reference, a way to observe a candidate, and the wrong answers that
people really give.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .compare import Measured


@dataclass(frozen=True)
class Mistake:
    """A wrong answer that people really give. It runs, and ``says`` is the sentence that names it.

    ``function`` is what a learner would hand to ``check``: a function, a class, or for a value
    exercise a plain value.
    """

    name: str
    function: Any
    says: str


@dataclass(frozen=True, kw_only=True)
class Exercise:
    """One exercise. Difficulty is 1 to 3; ``minutes`` and ``trains`` tell the learner what it costs
    and gives.

    ``reference`` is a right answer: a function, a class or a plain value. ``observe(candidate)``
    returns what a candidate does, from new inputs at each call; the default is the candidate
    itself, for value exercises. A dict from ``observe`` has one entry per case, and its keys are
    shown to the learner ("two layers, bf16"). ``explain(got, expected)`` may return a sentence for
    whole families of mistakes, or ``None``; ``raises`` are pairs of a pattern for "Kind: text" of
    an exception and such a sentence. ``tolerance`` is relative and holds for floats; whole numbers
    must be equal. ``afterwards`` is called with a right answer, and returns what else is said of
    it. ``changes`` names the arguments that an answer is asked to change, or a switch of one
    ("model.mode", "model.hook"; "model.train" is a mode that may be left in training). All others
    must be left as they were, a model's mode, hooks, checkpointing and config among them, and so
    must the dtypes of all weights. What the reference leaves, an answer may leave too.
    """

    id: str
    title: str
    difficulty: int
    minutes: int
    trains: str
    reference: Any
    mistakes: tuple[Mistake, ...]
    observe: Callable[[Any], Any] = lambda candidate: candidate
    explain: Callable[[Any, Any], str | None] | None = None
    raises: tuple[tuple[str, str], ...] = ()
    tolerance: float = 1e-5
    changes: tuple[str, ...] = ()
    afterwards: Callable[[Any], str] | None = None

    @property
    def name(self) -> str:
        """The learner's name for it: the reference's name, or "the answer"."""
        return getattr(self.reference, "__name__", "the answer")

    @property
    def dots(self) -> str:
        """The difficulty as ●○○, ●●○ or ●●●."""
        return "●" * self.difficulty + "○" * (3 - self.difficulty)


class HiddenCase(str):
    """The key of a hidden case: it is never shown, so that answers cannot be hard-coded."""


@dataclass(frozen=True)
class Calls:
    """An ``observe`` that calls the candidate once per tuple of arguments, each time with fresh
    copies of them.
    """

    cases: tuple[tuple, ...]
    hidden: tuple[tuple, ...] = ()

    def __call__(self, candidate: Callable) -> dict[str, Any]:
        return {
            self.key(arguments): candidate(*copy.deepcopy(arguments))
            for arguments in (*self.cases, *self.hidden)
        }

    def key(self, arguments: tuple) -> str:
        """The key of a case: its arguments, as they are written."""
        kind = HiddenCase if arguments in self.hidden else str
        return kind(f"({', '.join(map(repr, arguments))})")


def calls(*cases: tuple, hidden: tuple[tuple, ...] = ()) -> Calls:
    """``observe=calls(((2, 3), 4), ((5,), 2))`` observes ``candidate((2, 3), 4)`` and
    ``candidate((5,), 2)``.

    Cases that are ``hidden`` are judged like the others and never printed. For arguments that are
    not short when written out, such as models, write a function that returns a dict of named cases.
    """
    return Calls(cases, hidden)


def measure(
    run: Callable[[], Any], *, budget: int | str, model: Any = None, optimizer: Any = None
) -> Measured:
    """Run ``run()`` under a ``MemoryTracker`` and return its value and its peak in bytes, beside
    ``budget``.

    For use inside ``observe``: ``check`` then accepts the right value only if the peak is at most
    the budget, and says how many bytes over it was. The budget is compared afterwards, not
    enforced, so that the peak is known in full.
    """
    from ...measure.tracker import MemoryTracker
    from ...units import parse_bytes

    with MemoryTracker(model, optimizer, live=False) as tracker:
        value = run()
    return Measured(value, tracker.peak.total, parse_bytes(budget))


class Seen(dict):
    """What a candidate did, case by case.

    ``notes`` are only for ``explain``, and are not compared.
    """

    def __init__(self, cases, **notes):
        super().__init__(cases)
        self.notes = notes


def outside_torch(run: Callable[[], Any]) -> int:
    """The most bytes that Python and numpy hold at once for ``run()``, which a ``MemoryTracker``
    does not see.
    """
    import tracemalloc

    on = tracemalloc.is_tracing()
    if not on:
        tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        run()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        if not on:
            tracemalloc.stop()
