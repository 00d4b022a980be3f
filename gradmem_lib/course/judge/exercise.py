"""What an exercise is: a right answer, the cases in which answers are seen, and a few mistakes.

    Exercise("0.1", area, calls((2, 3), (4, 4)), '''
        width * height → width + height
            this adds the sides: an area is their product.
    ''')

``cases(answer)`` yields pairs of a name and what was seen, the simplest case first. The first case
in which an answer differs from the right one is what the learner hears, so its name is a
requirement in the task's words. A mistake is a change of the right answer's text, or a wrong answer
by name, and below it its sentence, which is said only of an answer that does the same. Title,
difficulty, minutes and hints stand in the notebook.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import sys
import textwrap
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ...units import parse_bytes
from .compare import Measured


@dataclass(frozen=True)
class Exercise:
    """One exercise. ``right``: a right answer, which is a function, a class or a value.

    ``cases(answer)`` runs an answer on inputs that it makes afresh. ``mistakes`` is a text of
    changes and sentences, see ``parsed``. ``changes`` names the arguments that an answer may
    change, or one switch of an argument: ``"p state"``, ``"model.mode"``, ``"model.hook"``, or
    ``"model.train"`` for a mode that may be left in training. ``tolerance`` is relative and holds
    for floats; whole numbers must be equal. ``pairs``: two mistakes at once are named too, which is
    for steps and loops, not for formulas. ``afterwards(answer)`` is what else is said of a right
    answer.
    """

    id: str
    right: Any
    cases: Callable[[Any], Iterable[tuple[str, Any]]]
    mistakes: str = ""
    changes: str = ""
    tolerance: float = 1e-5
    pairs: bool = False
    afterwards: Callable[[Any], str] | None = None

    @property
    def name(self) -> str:
        """The learner's name for it: that of the right answer, or "the answer"."""
        return getattr(self.right, "__name__", "the answer")

    def wrong_answers(self) -> Iterator[tuple[Any, str]]:
        """(wrong answer, sentence) of each mistake."""
        for changes, says in parsed(self.mistakes):
            yield self.changed(changes), says

    def with_two_mistakes(self) -> Iterator[tuple[Any, str]]:
        """(wrong answer, both sentences) of each two mistakes whose changes fit into one text."""
        for (one, says), (other, too) in itertools.combinations(parsed(self.mistakes), 2):
            # two mistakes may share a change
            both = self.changed(list(dict.fromkeys(one + other)))
            if both is not None:
                yield both, f"two things at once: {says} And {too}"

    def changed(self, changes: list[str]) -> Any:
        """The right answer with these changes of its text; ``None`` where one of them does not fit.
        A line without an arrow is an expression for a whole wrong answer.
        """
        # A value does not know its module.
        home = self.right if callable(self.right) else self.cases
        names = dict(vars(sys.modules[home.__module__]))
        if len(changes) == 1 and " →" not in changes[0]:
            return eval(changes[0], names)
        text = textwrap.dedent(inspect.getsource(self.right))
        for change in changes:
            was, arrow, now = change.partition(" →")
            if not arrow or text.count(was) != 1:
                return None
            now = now.strip()
            if not now and is_statement(was, text):
                now = "pass"
            text = text.replace(was, now)
        try:
            exec(compile(text, f"<{self.id}>", "exec"), names)
        except SyntaxError:  # two changes may not go together
            return None
        return names[self.right.__name__]


def is_statement(was: str, text: str) -> bool:
    """Whether ``was`` is a whole line of ``text``, so that ``pass`` must take its place."""
    return was.strip() in map(str.strip, text.splitlines())


def parsed(mistakes: str) -> Iterator[tuple[list[str], str]]:
    """(changes, sentence) of each mistake. Each change is a line ``was → now``, or ``was →`` for
    one that is left out. A sentence stands below its changes, four spaces further to the right.
    """
    changes: list[str] = []
    says: list[str] = []
    for line in [*textwrap.dedent(mistakes).strip().splitlines(), "end"]:
        if line.startswith("    "):
            says.append(line.strip())
            continue
        if says:
            yield changes, " ".join(says)
            changes, says = [], []
        if line:
            changes.append(line)


class Unusable(TypeError):
    """An answer that no case can use; its text says what to return."""


class Hidden(str):
    """The name of a case that is judged and never shown: no answer can be a list of them."""


def calls(*cases: tuple, hidden: Iterable[tuple] = ()) -> Callable:
    """Cases that call the answer with these arguments, each time with copies of them."""

    def of(answer):
        for kind, given in ((str, cases), (Hidden, hidden)):
            for arguments in given:
                written = ", ".join(map(repr, arguments))
                yield kind(f"({written})"), answer(*copy.deepcopy(arguments))

    of.arguments = cases
    return of


def measured(
    run: Callable[[], Any],
    budget: int | str,
    unit: str = "",
    size: int = 0,
    model: Any = None,
    optimizer: Any = None,
) -> Measured:
    """What ``run()`` returns, with its peak of live bytes beside ``budget``.

    ``unit`` of ``size`` bytes ("tensors as large as p") puts what is too much into words. The
    budget is compared afterwards and not enforced, so that the peak is known in full.
    """
    from ...measure.tracker import MemoryTracker

    with MemoryTracker(model, optimizer, live=False) as tracker:
        value = run()
    peak, most = tracker.peak.total, parse_bytes(budget)
    says = f"Your code peaks at {peak:,} bytes; the budget is {most:,} bytes"
    if size and peak - most >= size / 2:
        says += f", {(peak - most) / size:.1f} {unit} too many"
    return Measured(value, peak, most, f"{says}.")


def outside_torch(run: Callable[[], Any], enough: int) -> Measured:
    """The most bytes that Python and numpy hold at once for ``run()``, which no ``MemoryTracker``
    sees, beside the bytes that are ``enough``.
    """
    was_tracing = tracemalloc.is_tracing()
    tracemalloc.start()  # nothing if it has begun
    try:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        run()
        held = tracemalloc.get_traced_memory()[1] - before
    finally:
        if not was_tracing:
            tracemalloc.stop()
    says = f"Python and numpy hold about {held // 1000:,} kB; {enough // 1000:,} kB are enough."
    return Measured(None, held, enough, says)
