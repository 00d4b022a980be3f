"""Finds answers that count as not attempted: a stub, whose whole body does nothing, or the right
answer as the course gave it.
"""

from __future__ import annotations

import copy
import dis
import functools
import inspect
from typing import Any

from .compare import Measured
from .exercise import Exercise

_GIVEN = "__given_by_the_course__"


class Endless(ValueError):
    """An answer that contains itself, or is nested so deep that a comparison would not end."""


def is_open(exercise: Exercise, answer: Any) -> bool:
    """Whether nothing has been written: no value, no statement, or what the course handed out."""
    if answer is None or has_ellipsis(answer):
        return True
    if getattr(answer, "__dict__", {}).get(_GIVEN) == exercise.id:
        return True
    if not inspect.isroutine(answer):
        return False
    parts = functions(answer)
    return bool(parts) and all(does_nothing(part) for part in parts)


def functions(answer: Any) -> list[Any]:
    """The Python functions in a function, a class, or an object."""
    while isinstance(answer, functools.partial):
        answer = answer.func
    answer = _unwrapped(answer)
    if inspect.isroutine(answer):
        parts = [answer]
    else:
        kind = answer if isinstance(answer, type) else type(answer)
        parts = list(vars(kind).values())
    parts = [getattr(part, "fget", None) or getattr(part, "__func__", part) for part in parts]
    return [part for part in map(_unwrapped, parts) if inspect.isfunction(part)]


def _unwrapped(function: Any) -> Any:
    """The function that decorators have wrapped; itself if its ``__wrapped__`` leads back to it."""
    try:
        return inspect.unwrap(function)
    except ValueError:
        return function


def does_nothing(function: Any) -> bool:
    """Whether it only returns ``None`` or ``...``, or raises NotImplementedError for all arguments,
    whatever stands before that.
    """
    steps = [
        step for step in dis.get_instructions(function) if step.opname not in ("RESUME", "NOP")
    ]
    if all(step.opname.startswith(("LOAD_CONST", "RETURN")) for step in steps):
        return all(step.argval in (None, ...) for step in steps if "CONST" in step.opname)
    names = {step.argval for step in steps if step.opname == "LOAD_GLOBAL"}
    raises = [step.offset for step in steps if step.opname == "RAISE_VARARGS"]
    if len(raises) != 1 or "NotImplementedError" not in names:
        return False
    return is_reached_by_all(function.__code__, raises[0])


def is_reached_by_all(code: Any, offset: int) -> bool:
    """Whether a ``raise`` at ``offset`` is always reached: no jump over it, no return before it, no
    ``except`` around it.
    """
    for step in dis.get_instructions(code):
        if step.offset == offset:
            return step.opname == "RAISE_VARARGS"
        jumps = step.opcode in (*dis.hasjrel, *dis.hasjabs) and step.argval > offset
        if jumps or step.opname.startswith("RETURN") or step.opname == "PUSH_EXC_INFO":
            return False
    return False


def is_stub_error(error: BaseException, answer: Any) -> bool:
    """Whether one of the answer's functions ends in ``raise NotImplementedError`` for every
    argument, or computes with a ``...``.

    Functions that it calls in other cells of its notebook are the answer's too. An operation that
    PyTorch lacks raises ``NotImplementedError`` as well, but not in the answer's own code.
    """
    if isinstance(error, (TypeError, AttributeError)) and "ellipsis" in str(error):
        return True
    last = error.__traceback__
    while last and last.tb_next:
        last = last.tb_next
    if not isinstance(error, NotImplementedError) or last is None:
        return False
    own = functions(answer)
    files = [function.__code__.co_filename for function in own]
    scopes = [id(function.__globals__) for function in own]
    frame = last.tb_frame
    is_own = frame.f_code.co_filename in files or id(frame.f_globals) in scopes
    return is_own and is_reached_by_all(frame.f_code, last.tb_lasti)


def has_ellipsis(value: Any) -> bool:
    """Whether ``value`` contains ``...``. Raises ``Endless`` for a value that contains itself."""
    try:
        return _has_ellipsis(value)
    except RecursionError:
        raise Endless("it contains itself") from None


def _has_ellipsis(value: Any) -> bool:
    if isinstance(value, Measured):
        return _has_ellipsis(value.value)
    if isinstance(value, dict):
        return any(map(_has_ellipsis, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(_has_ellipsis, value[:10_000]))  # a learner does not type more by hand
    return value is ... or value is NotImplemented


def given(exercise: Exercise) -> Any:
    """The right answer, marked if possible, so that checking it again is no attempt."""
    right = exercise.right
    if isinstance(right, type):
        return type(right)(
            right.__name__, (right,), {_GIVEN: exercise.id, "__doc__": right.__doc__}
        )
    if not callable(right):
        return copy.deepcopy(right)

    @functools.wraps(right)
    def theirs(*args, **kwargs):
        return right(*args, **kwargs)

    setattr(theirs, _GIVEN, exercise.id)
    return theirs
