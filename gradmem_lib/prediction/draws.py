"""Numbers that a step draws from ``random`` or ``numpy.random``.

Fake tensors have no values, but such a number has one, and a model may decide by it, as where a
layer is left out with a probability. The prediction of one draw would then be no prediction of the
next. A step that draws is traced with the lowest and with the highest numbers too.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from .question import CannotTrace

WORDS = 624  # of a Mersenne Twister's state, of 32 bits each; the next 624 outputs come from them
LOWEST = [_word + 1 for _word in range(WORDS)]
HIGHEST = [2**32 - 1 - _word for _word in range(WORDS)]


def _word_for(output: int) -> int:
    """The word of a state that the generator turns into ``output``.

    It inverts the four steps of MT19937's tempering (Matsumoto and Nishimura 1998, equations 2.2
    to 2.5), the last one first.
    """
    word = output ^ output >> 18
    word ^= word << 15 & 0xEFC60000
    lower = word
    for _ in range(4):  # each round makes 7 more of the lower bits right
        lower = word ^ lower << 7 & 0x9D2C5680
    word = lower & 0xFFFFFFFF
    upper = word ^ word >> 11
    return word ^ upper >> 11


@contextmanager
def _restored() -> Iterator[Callable[[], bool]]:
    """Give both generators their states back. The function says whether one has been used."""
    python, (kind, words, *rest) = random.getstate(), np.random.get_state()
    before = words.copy()

    def were_used() -> bool:
        now = np.random.get_state()
        same = np.array_equal(before, now[1]) and rest == list(now[2:])
        return not same or random.getstate() != python

    try:
        yield were_used
    finally:
        random.setstate(python)
        np.random.set_state((kind, before, *rest))


def _set_next(outputs: list[int]) -> None:
    """Let both generators return ``outputs`` next."""
    words = [_word_for(output) for output in outputs]
    random.setstate((3, (*words, 0), None))
    np.random.set_state(("MT19937", np.array(words, dtype=np.uint32), 0))


def _with(outputs: list[int] | None, trace: Callable) -> tuple[Any, Exception | None, bool]:
    """What ``trace()`` returns or raises, and whether it has drawn, if ``outputs`` are drawn next.

    ``None``: whatever comes next.
    """
    found, error = None, None
    with _restored() as were_used:
        if outputs is not None:
            _set_next(outputs)
        try:
            found = trace()
        except Exception as raised:  # as of a model whose layers are all left out
            error = raised
        return found, error, were_used()


def same_for_all_draws(trace: Callable, same: Callable, name: str) -> Any:
    """What ``trace()`` returns, if it does not depend on numbers of Python's or numpy's generator.

    ``same(one, other)`` compares two traces. Both generators keep their states. Raises
    ``CannotTrace`` if the lowest numbers or the highest ones change the trace of a step of
    ``name``, and otherwise what ``trace`` raises.
    """
    found, error, has_drawn = _with(None, trace)
    if has_drawn:
        for outputs in (LOWEST, HIGHEST):
            other, other_error, _ = _with(outputs, trace)
            if error is None and other_error is None:
                alike = same(found, other)
            else:
                alike = error is not None and other_error is not None
            if alike:
                continue
            raise CannotTrace(
                f"a step of {name} decides by numbers of Python's random module or numpy.random "
                "what it computes, as where whole layers are left out in training, so each step "
                "needs other bytes: set that probability to 0 (often called layer_dropout or "
                "layerdrop) and predict the step with all layers, or measure real steps with "
                "MemoryTracker"
            )
    if error is not None:
        raise error
    return found
