"""Numbers that a step draws from ``random`` or ``numpy.random``.

Fake tensors have no values, but such a number has one, and a model may decide by it, as where a
layer is left out with a probability. The prediction of one draw would then be no prediction of the
next. A step that draws is traced with the lowest and with the highest numbers too.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from .question import CannotTrace

# Words of 32 bits in the state of a Mersenne Twister, the generator of Python and of numpy. The
# next 624 outputs come from them, one from each.
WORDS = 624
# The words from which it makes 1 (with 0, all that follows is 0) and 2**32 - 1: its tempering
# (Matsumoto and Nishimura 1998, equations 2.2 to 2.5) inverted.
LOWEST, HIGHEST = 0x102244C9, 0x12DD9BB3


@contextmanager
def restored_generators() -> Iterator[Callable[[], bool]]:
    """Give both generators their states back at the end.

    The function that it yields says whether one of them has been used.
    """
    python = random.getstate()
    kind, words, *rest = np.random.get_state()
    words = words.copy()  # numpy may change its own array

    def were_used() -> bool:
        _, words_now, *rest_now = np.random.get_state()
        numpy_was_used = rest_now != rest or not np.array_equal(words_now, words)
        return numpy_was_used or random.getstate() != python

    try:
        yield were_used
    finally:
        random.setstate(python)
        np.random.set_state((kind, words, *rest))


def _set_next(word: int) -> None:
    """Let both generators return what they make of ``word`` next."""
    words = [word] * WORDS
    # 3 is the version of Python's state. 0: the next output is the first word's. None: no second
    # number of a pair of normal numbers waits.
    random.setstate((3, (*words, 0), None))
    np.random.set_state(("MT19937", np.array(words, dtype=np.uint32), 0))


class _Attempt(NamedTuple):
    """What a trace returned or raised, and whether it drew a number."""

    trace: Any
    error: Exception | None
    has_drawn: bool


def _attempt(trace: Callable, word: int | None = None) -> _Attempt:
    """Run ``trace`` where the numbers of ``word`` are drawn next, or whatever comes next."""
    found, error = None, None
    with restored_generators() as were_used:
        if word is not None:
            _set_next(word)
        try:
            found = trace()
        except Exception as raised:  # as of a model whose layers are all left out
            error = raised
        return _Attempt(found, error, were_used())


def _end_alike(one: _Attempt, other: _Attempt, same: Callable) -> bool:
    """Whether both raised an error, whatever it says, or both have the same trace."""
    if one.error is not None or other.error is not None:
        return one.error is not None and other.error is not None
    return same(one.trace, other.trace)


def same_for_all_draws(trace: Callable, same: Callable, name: str) -> Any:
    """What ``trace()`` returns, if it does not depend on numbers of Python's or numpy's generator.

    ``same(one, other)`` compares two traces. Both generators keep their states. Raises
    ``CannotTrace`` if the lowest numbers or the highest ones change the trace of a step of
    ``name``, and otherwise what ``trace`` raises.
    """
    first = _attempt(trace)
    if first.has_drawn:
        for word in (LOWEST, HIGHEST):
            if _end_alike(first, _attempt(trace, word), same):
                continue
            raise CannotTrace(
                f"a step of {name} decides by numbers of Python's random module or numpy.random "
                "what it computes, as where whole layers are left out in training, so each step "
                "needs other bytes: set that probability to 0 (often called layer_dropout or "
                "layerdrop) and predict the step with all layers, or measure real steps with "
                "MemoryTracker"
            )
    if first.error is not None:
        raise first.error
    return first.trace
