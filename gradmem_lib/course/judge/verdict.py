"""Runs an answer, the right answer and the known mistakes in the same cases, and compares what they
did. So an answer is right when it does what the right answer does, however it is written, and a
wrong one that does as a known mistake hears that mistake's sentence.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import random
import re
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from IPython.utils.capture import capture_output

from . import given_arguments, side_effects, time_limit
from .compare import Difference, describe, difference, shortened
from .exercise import Exercise, Hidden, Unusable
from .not_attempted import (
    Endless,
    functions,
    given,
    has_ellipsis,
    is_open,
    is_stub_error,
)
from .recognise import pattern_of, what_to_look_at

PASSED, OPEN, WRONG = "passed", "not attempted", "not yet"
MOST = 800  # characters of what a line says; an answer's own text may be in it, of any length


@dataclass(frozen=True)
class Verdict:
    """``outcome``: one of the three words above. ``line``: what the learner reads. ``result``: what
    later cells use, the answer if it passed, else the right one.
    """

    outcome: str
    line: str
    result: Any


@dataclass(frozen=True)
class Raised:
    """An exception as text: the exception itself would keep the tensors of its frames alive.

    ``line``: where the answer's own code was, "line 3 of its cell"; empty if it was not running.
    """

    kind: str
    text: str
    line: str = field(default="", compare=False)


@dataclass
class Look:
    """What an answer did: ``seen`` case by case, and what it ``left`` changed, a sentence each."""

    seen: dict[str, Any] = field(default_factory=dict)
    left: dict[Any, str] = field(default_factory=dict)
    raised: Raised | None = None
    unfinished: bool = False
    returned_none: bool = False  # the last call of it
    seconds: float = 0.0

    def same_as(self, other: Look, tolerance: float) -> bool:
        return (
            self.raised == other.raised
            and self.left.keys() == other.left.keys()
            and difference(self.seen, other.seen, tolerance) is None
        )


class Unfinished(BaseException):
    """The answer returned ``...``. Not an ``Exception``, so that no case catches it."""


def judge(exercise: Exercise, answer: Any, expected: Look | None = None) -> Verdict:
    """The verdict on ``answer``. Nothing is printed or recorded, and its own output is suppressed.

    Exceptions of the answer become a verdict; only ``KeyboardInterrupt`` passes through.
    ``expected`` is the result of ``of_reference``: give it to judge many answers to one exercise.
    """
    try:
        if is_open(exercise, answer):
            return _not_attempted(exercise)
        complaint = _wrong_kind(exercise, answer)
        if complaint:
            return wrong(exercise, complaint)
        # The right answer first: nothing that an answer leaves can reach what it is compared with.
        expected = expected or of_reference(exercise)
        if expected.raised:
            return wrong(
                exercise,
                "this cannot be checked here, because the right answer failed too: "
                f"{expected.raised.kind}: {expected.raised.text}.",
            )
        return _compared(exercise, answer, expected)
    except Endless:
        return wrong(exercise, "the answer contains itself: return plain numbers or tensors.")


def of_reference(exercise: Exercise) -> Look:
    """What the right answer does on new inputs."""
    return look(exercise, exercise.right)


def _compared(exercise: Exercise, answer: Any, expected: Look) -> Verdict:
    got = look(exercise, answer, limit=max(time_limit.SECONDS, 10 * expected.seconds))
    if got.unfinished:
        return _not_attempted(exercise)
    place = first_difference(exercise, got, expected)
    if not place:
        return Verdict(PASSED, f"✓ {exercise.id} passed", answer)
    says = known_mistake(exercise, got, expected) or pattern(exercise, answer, got, expected, place)
    return wrong(exercise, place if says in place else f"{says} {place}".strip())


def _not_attempted(exercise: Exercise) -> Verdict:
    return Verdict(OPEN, f"○ {exercise.id} not attempted yet", given(exercise))


def wrong(exercise: Exercise, says: str) -> Verdict:
    says = says.replace("?.", "?")  # a question of an error's text ends a sentence too
    return Verdict(WRONG, f"✗ {exercise.id} not yet: {shortened(says, MOST)}", given(exercise))


# Looking at what an answer does.


def look(exercise: Exercise, answer: Any, limit: float = 0.0) -> Look:
    """Run ``answer`` in all cases, or until it raises. ``limit``: seconds; 0 means no limit."""
    found = Look()
    is_called = callable(answer) and not isinstance(answer, type)
    subject = _watched(exercise, answer, found) if is_called else answer
    stopped = contextlib.nullcontext()
    if limit and callable(answer):  # of a value no code runs, and a puzzle may take a minute
        stopped = time_limit.stopped_after(limit)
    began = time.monotonic()
    with _undisturbed():
        before = side_effects.state()
        try:
            with stopped:
                for name, value in exercise.cases(subject):
                    found.seen[name] = value
            found.unfinished = has_ellipsis(found.seen)
        except (KeyboardInterrupt, Endless):
            raise
        except Unfinished:
            found.unfinished = True
        except BaseException as error:  # SystemExit too: exit() must not end the kernel
            found.unfinished = is_stub_error(error, answer)
            found.raised = _raised(error, answer, limit)
        found.left.update(side_effects.changed(before))
    found.seconds = time.monotonic() - began
    return found


def _watched(exercise: Exercise, answer: Callable, found: Look) -> Callable:
    """``answer``; what each call leaves changed is noted in ``found``. No tensor is kept alive."""

    @functools.wraps(answer)
    def call(*args, **kwargs):
        arguments = given_arguments.arguments_of(exercise.right, args, kwargs)
        given_ones = given_arguments.Given(arguments, tuple(exercise.changes.split()))
        before = side_effects.state()
        del arguments
        result = answer(*args, **kwargs)
        if has_ellipsis(result):
            raise Unfinished
        for kind, says in given_ones.changes():
            found.left[kind] = found.left.get(kind) or says
        found.left.update(side_effects.changed(before))
        found.returned_none = result is None
        return result

    return call


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """The same random numbers for everybody, gradients on, and no output. All is restored."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(capture_output())
        stack.enter_context(warnings.catch_warnings())
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(torch.enable_grad())
        stack.callback(side_effects.restore, side_effects.state())
        stack.callback(random.setstate, random.getstate())
        stack.callback(numpy.random.set_state, numpy.random.get_state())
        warnings.simplefilter("ignore")
        # Not torch.manual_seed: it would also seed a CUDA device that has not started yet, and
        # nothing would undo that.
        torch.default_generator.manual_seed(0)
        random.seed(0)
        numpy.random.seed(0)
        yield


def _raised(error: BaseException, answer: Any, limit: float) -> Raised:
    codes = {function.__code__ for function in functions(answer)}
    files = {code.co_filename for code in codes}
    line = ""
    has_begun = False  # frames before the answer's own may be of the same file
    for frame, number in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        has_begun = has_begun or frame.f_code in codes
        if has_begun and file in files:
            line = f"line {number} of its cell"
            if os.path.exists(file):
                line = f"line {number} of {os.path.basename(file)}"
    if isinstance(error, time_limit.TooLong):
        return Raised("TooLong", f"{limit:.0f} seconds", line)
    text = str(error).strip().partition("\n")[0].rstrip(" .") or "without a message"
    text = re.sub(r"0x[0-9a-fA-F]{6,}", "0x…", text)  # an address differs from run to run
    return Raised(type(error).__name__, shortened(text, 200), line)


# Saying what is wrong.


def first_difference(exercise: Exercise, got: Look, expected: Look) -> str:
    """ "For <case>: got 3, expected 2.": the first place where an answer is wrong, or nothing."""
    forgot_return = got.returned_none and not expected.returned_none
    wanted = expected.seen
    if got.raised:  # only the cases that it reached
        wanted = {case: value for case, value in wanted.items() if case in got.seen}
    found = difference(got.seen, wanted, exercise.tolerance)
    if found:
        right = len(expected.seen) - len(wrong_cases(got, expected, exercise.tolerance))
        says = _place(exercise, found)
        if forgot_return:
            says += " Is a `return` missing?"
        if right:
            says += f" ({right} of {len(expected.seen)} cases came out right.)"
        return says
    if got.raised:
        return _raised_in_words(exercise, got, forgot_return)
    return left_changed(got, expected)


def left_changed(got: Look, expected: Look) -> str:
    """The sentence for the first thing that an answer leaves changed and the right one does not."""
    for kind, says in got.left.items():
        if says and kind not in expected.left:
            return f"{says}."
    return ""


def _place(exercise: Exercise, found: Difference) -> str:
    case, *rest = found.path
    said = found.said
    if not callable(exercise.right):
        said = found.hinted  # a right value is not given away
    if isinstance(case, Hidden):
        case, said = "another case, which is not shown", found.hinted
    if case.startswith("("):  # the arguments of a call
        case = exercise.name + case
    words = [case]
    for step in rest:
        placed = str(step).startswith(("item ", "at index "))
        words.append(step if placed else f"entry {shortened(repr(step), 80)}")
    return f"For {', '.join(words)}: {said.rstrip('.')}."


def _raised_in_words(exercise: Exercise, got: Look, forgot_return: bool) -> str:
    error = got.raised
    at = f" at {error.line}" if error.line else ""
    if error.kind == "TooLong":
        return (
            f"Your code was stopped after {error.text}{at}: is there a loop that never ends, or "
            "one that goes number by number?"
        )
    if not error.line and forgot_return:
        return f"{exercise.name} returned None: is a `return` missing?"
    if error.kind == Unusable.__name__:
        return f"{error.text}."
    if not error.line:
        return f"{exercise.name} could not be used: {error.kind}: {error.text}."
    return f"Your code raised {error.kind}{at}: {error.text}."


def wrong_cases(one: Look, expected: Look, tolerance: float) -> list[str]:
    """The names of the cases in which ``one`` differs, in order."""
    found = []
    for case, value in expected.seen.items():
        if case not in one.seen or difference(one.seen[case], value, tolerance):
            found.append(case)
    return found


def known_mistake(exercise: Exercise, got: Look, expected: Look) -> str:
    """The sentence of the mistake, or of the two, that do the same in every case; else of one that
    explains nearly all that is wrong. Empty if none does.
    """
    tolerance = exercise.tolerance
    for says, theirs in _looks_of(exercise, "one", exercise.wrong_answers):
        if got.same_as(theirs, tolerance):
            return says
    if _nothing_changed(exercise, got):
        return (
            "nothing has changed: `x = …` and x.mul(…) make new tensors, and x.mul_(…) changes x."
        )
    if exercise.pairs:
        for says, theirs in _looks_of(exercise, "two", exercise.with_two_mistakes):
            if got.same_as(theirs, tolerance):
                return says
    for says, theirs in _looks_of(exercise, "one", exercise.wrong_answers):
        if _explains(theirs, got, expected, tolerance):
            return says
    return ""


def _nothing_changed(exercise: Exercise, got: Look) -> bool:
    """Whether an answer does nothing, where it should change an argument."""
    if all("." in name for name in exercise.changes.split()):
        return False
    return got.same_as(look(exercise, lambda *args, **kwargs: None), exercise.tolerance)


def _looks_of(
    exercise: Exercise, kind: str, answers: Callable[[], Iterable]
) -> Iterator[tuple[str, Look]]:
    """(sentence, what it does) of known mistakes. Each runs once, and only if somebody asks: those
    that come after the mistake that was made need not run.
    """
    # The looks that were taken before, and the mistakes of which none was taken yet.
    seen, waiting = vars(exercise).setdefault("looks", {}).setdefault(kind, ([], answers()))
    yield from seen
    for answer, says in waiting:
        found = says, look(exercise, answer, time_limit.SECONDS)
        seen.append(found)
        yield found


def _explains(theirs: Look, got: Look, expected: Look, tolerance: float) -> bool:
    """Whether ``got`` does as ``theirs`` in all cases in which this is wrong, the first wrong case
    of both among them, and these are most cases in which ``got`` is wrong.
    """
    if theirs.raised or got.raised:
        return False
    their_cases = wrong_cases(theirs, expected, tolerance)
    my_cases = wrong_cases(got, expected, tolerance)
    if not their_cases or their_cases[0] not in my_cases[:1]:
        return False
    if len(their_cases) < 0.7 * len(my_cases):
        return False
    return set(their_cases).isdisjoint(wrong_cases(got, theirs, tolerance))


def pattern(exercise: Exercise, answer: Any, got: Look, expected: Look, place: str) -> str:
    """What can be seen of a wrong answer without knowing the exercise; empty if nothing. ``place``:
    where it is wrong first, which may be a case before the one that raised.
    """
    says = left_changed(got, expected)
    if says:
        return says
    if got.raised and not got.raised.line and got.returned_none:
        return ""  # that is said already
    if got.raised and got.raised.kind in place:
        return what_to_look_at(got.raised.kind, got.raised.text)
    with contextlib.suppress(Exception), _undisturbed(), time_limit.stopped_after(5):
        return pattern_of(exercise, answer, got.seen, expected.seen)
    return ""


def _wrong_kind(exercise: Exercise, answer: Any) -> str:
    """The sentence for a value in place of a function, or for a function with other arguments."""
    name, right = exercise.name, exercise.right
    if not callable(right):
        return ""
    asked = f"expected a function {name}{_signature(right)}, but"
    if isinstance(right, type):
        asked = f"expected the class {name}, but"
    if not callable(answer):
        return f"{asked} got {describe(answer)}: pass {name} itself, without calling it."
    if isinstance(right, type):
        if inspect.isroutine(answer):
            return f"{asked} got a function: pass the class itself."
    elif not _accepts_the_same(answer, right):
        return f"{asked} yours is {getattr(answer, '__name__', name)}{_signature(answer)}."
    return ""


def _signature(function: Any) -> str:
    with contextlib.suppress(ValueError, TypeError):
        return f"({', '.join(inspect.signature(function).parameters)})"
    return "(…)"


def _accepts_the_same(answer: Any, right: Any) -> bool:
    """Can ``answer`` be called with every argument of ``right``, under whatever names?"""
    try:
        inspect.signature(answer).bind(*inspect.signature(right).parameters)
    except ValueError:
        return True  # a built-in without a signature: calling it will tell
    except TypeError:
        return False
    return True
