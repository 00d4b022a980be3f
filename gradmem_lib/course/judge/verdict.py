"""Run an answer, run the reference, compare, and say what is wrong.

An exercise's ``observe`` runs a candidate on the exercise's cases and returns what it did, as
numbers, tensors, or dicts of those. The reference and the known mistakes are candidates too. So an
answer is right when it is observed to do what the reference does, however it is written, and a
wrong answer that behaves like a known mistake gets that mistake's message.
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType
from typing import TYPE_CHECKING, Any

from . import hints, time_limit
from .compare import Difference, Measured, describe, difference, over_budget, shortened
from .exercise import Calls, Exercise, HiddenCase, Mistake
from .not_attempted import (
    Endless,
    functions,
    given,
    has_ellipsis,
    has_gaps,
    is_attempt,
    is_open,
    is_stub_error,
)
from .zero_divisor import zero_divisor

if TYPE_CHECKING:
    from . import side_effects

_ENDLESS = (
    "{} contains itself (a list that was appended to itself, for example), or is nested "
    "hundreds of times: return plain numbers or tensors"
)
_SLOW_CHECK = (
    "your code returned, and the check of what it returned was stopped after {:.0f} seconds: it is "
    "slow for this answer, so nothing is known about it. Try one that is nearer to the exercise"
)
PASSED, OPEN, WRONG = "passed", "not attempted", "not yet"


@dataclass(frozen=True)
class Verdict:
    """``outcome`` is ``"passed"``, ``"not attempted"`` or ``"not yet"``; ``line`` is what the
    learner reads; ``result`` is what later cells use: the candidate if it passed, else the
    reference.
    """

    outcome: str
    line: str
    result: Any


def judge(exercise: Exercise, candidate: Any, expected: Run | None = None) -> Verdict:
    """The verdict on ``candidate``. Nothing is printed or recorded, and the candidate's own output
    is suppressed.

    Exceptions of the candidate become a verdict; only ``KeyboardInterrupt`` passes through.
    ``expected`` is the result of ``of_reference``: give it to judge many answers to one exercise.
    """
    try:
        if is_open(exercise, candidate):
            return _not_attempted(exercise)
    except Endless:
        return wrong(exercise, _ENDLESS.format("your answer"))
    complaint = _wrong_kind(exercise, candidate)
    if complaint:
        return wrong(exercise, complaint)
    # The reference first: nothing that an answer leaves behind can reach what it is compared with.
    expected = expected or of_reference(exercise)
    if expected.failure:
        return wrong(
            exercise,
            (
                "this cannot be checked here, because the reference solution failed too: "
                f"{expected.failure.says}"
            ),
        )
    return _compared_with(expected, exercise, candidate)


def _compared_with(expected: Run, exercise: Exercise, candidate: Any) -> Verdict:
    """The verdict on a ``candidate`` that is an answer of the right kind."""
    # A value runs no code of its own that might never end.
    limit = max(time_limit.SECONDS, 10 * expected.seconds) if callable(candidate) else 0
    run = _run(exercise, candidate, returns=not expected.returns_none, limit=limit)
    left = [says for what, says in run.left if says and what not in expected.left_kinds]
    if run.unfinished:
        return _not_attempted(exercise)
    found = None if run.failure else difference(run.value, expected.value, exercise.tolerance)
    if not run.failure and found is None:
        if left:
            return wrong(exercise, left[0])
        return Verdict(PASSED, f"✓ {exercise.id} passed: {exercise.title}", candidate)
    if callable(candidate) and has_gaps(candidate, exercise.reference):
        return _not_attempted(exercise, gap=True)
    return wrong(exercise, _diagnosis(exercise, candidate, run, expected, found, left))


def of_reference(exercise: Exercise) -> Run:
    """What the reference does on new inputs."""
    return _run(exercise, exercise.reference)


@dataclass(frozen=True)
class _Failure:
    """An exception, kept as text: the exception itself would keep the tensors of its frames alive.

    Two failures are the same if their ``key`` is: kind, text, the call of a function, and whether
    it was in the answer's own code. ``hint`` says what to look at, if that is known.
    """

    key: tuple[Any, ...]
    says: str
    hint: str = ""


@dataclass(frozen=True)
class Run:
    """``left``: what a candidate left behind; ``returns_none``: what its last call did."""

    value: Any = None
    unfinished: bool = False
    left: tuple[side_effects.Left, ...] = ()
    returns_none: bool = False
    seconds: float = 0.0
    failure: _Failure | None = None

    @property
    def left_kinds(self) -> set[tuple[str, str]]:
        """What was left, without the sentences. What the reference leaves, an answer may leave."""
        return {what for what, _ in self.left}


class _Unfinished(BaseException):
    """The candidate returned ``...`` or ``NotImplemented``.

    Not an ``Exception``, so that no ``observe`` catches it.
    """


def _run(exercise: Exercise, candidate: Any, *, returns: bool = True, limit: float = 0.0) -> Run:
    """``returns``: whether the candidate should return something.

    ``limit``: the seconds that it may take; 0: no limit.
    """
    from . import side_effects

    watch = _Watch(exercise)
    is_called = callable(candidate) and not isinstance(candidate, type)
    subject = watch.around(candidate) if is_called else candidate
    began = time.monotonic()
    try:
        with _undisturbed(), time_limit.stopped_after(limit) if limit else contextlib.nullcontext():
            before, process = side_effects.switches(), side_effects.process_state()
            value = exercise.observe(subject)
            unfinished = has_ellipsis(value) and not is_attempt(candidate)
            watch.left += side_effects.changed_switches(before)
            watch.left += side_effects.left_in_process(process)
    except KeyboardInterrupt:
        raise
    except _Unfinished:
        return Run(unfinished=True)
    except BaseException as error:  # SystemExit too: exit() in an answer must not end the kernel
        if is_stub_error(error, candidate):
            return Run(unfinished=True)
        forgot = returns and watch.returns_none
        failure = _failure(
            error, candidate, exercise, forgot_return=forgot, watch=watch, limit=limit
        )
        return Run(failure=failure, left=tuple(watch.left))
    seconds = time.monotonic() - began
    return Run(value, unfinished, tuple(watch.left), watch.returns_none, seconds)


class _Watch:
    """Records what calls of a candidate leave behind, and whether the last call returned nothing.

    Keeps no tensor alive.
    """

    def __init__(self, exercise: Exercise):
        self.exercise = exercise
        self.left: list[side_effects.Left] = []
        self.returns_none = False
        self.calls = 0
        self.has_returned = False  # the last call has, so what runs now is not the candidate

    def around(self, function: Callable) -> Callable:
        from . import given_arguments, side_effects

        @functools.wraps(function)
        def watched(*args, **kwargs):
            arguments = given_arguments.arguments_of(self.exercise.reference, args, kwargs)
            given = given_arguments.Given(arguments, self.exercise.changes)
            switches = side_effects.switches()
            del arguments
            self.calls += 1
            self.has_returned = False
            result = function(*args, **kwargs)
            self.has_returned = True
            if has_ellipsis(result) and not is_attempt(function):
                raise _Unfinished
            self.left += [*given.changes(), *side_effects.changed_switches(switches)]
            self.returns_none = result is None
            return result

        return watched


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Gives every candidate the same random numbers, gradients on, and no output.

    Restores everything afterwards.
    """
    import numpy
    import torch
    from IPython.utils.capture import capture_output

    from . import side_effects

    cuda = (
        [torch.cuda.current_device()]
        if torch.cuda.is_available() and torch.cuda.is_initialized()
        else []
    )
    switches, process = side_effects.switches(), side_effects.process_state()
    with (
        capture_output(),
        warnings.catch_warnings(),
        torch.random.fork_rng(devices=cuda),
        torch.enable_grad(),
        contextlib.ExitStack() as afterwards,
    ):
        afterwards.callback(side_effects.restore, switches)
        afterwards.callback(side_effects.restore_process, process)
        afterwards.callback(random.setstate, random.getstate())
        afterwards.callback(numpy.random.set_state, numpy.random.get_state())
        # The last one is called first: an answer may have replaced what restores all else.
        afterwards.callback(
            side_effects.restore_judging_functions, side_effects.judging_functions()
        )
        warnings.simplefilter("ignore")
        # Not torch.manual_seed: it would also seed a CUDA device that has not started yet, and
        # nothing would undo that.
        torch.default_generator.manual_seed(0)
        random.seed(0)
        numpy.random.seed(0)
        if cuda:
            torch.cuda.manual_seed(0)
        yield


def _failure(
    error: BaseException,
    candidate: Any,
    exercise: Exercise,
    *,
    forgot_return: bool,
    watch: _Watch,
    limit: float,
) -> _Failure:
    kind, text = type(error).__name__, _one_line(_text(error))
    own = _own_frame(error, candidate)
    line = _shown_line(*own) if own else ""
    raised = f"{kind}: {text}" if text else kind
    hint = hints.raised(kind, _text(error), exercise.raises)
    if isinstance(error, time_limit.TooLong):
        hint, place = "", f", and is at {line}" if line else ""
        says = (
            f"your code was stopped after {limit:.0f} seconds{place}: is there a loop that "
            "never ends?"
        )
        if watch.has_returned and not line:
            says = _SLOW_CHECK.format(limit)
    elif isinstance(error, Endless):
        hint, says = "", _ENDLESS.format(f"what {exercise.name} returns")
    elif hasattr(error, "budget") and hasattr(error, "snapshot"):
        says = (
            f"your code goes over its budget of {error.budget:,} bytes: with the {error.asked:,} "
            f"bytes that it requested last, {error.snapshot.total:,} bytes would be live, "
            f"{error.snapshot.total - error.budget:,} too many"
        )
    elif own:
        says = f"your code raised {kind} at {line}"
        divisor = zero_divisor(error, own[0]) if isinstance(error, ZeroDivisionError) else ""
        if divisor:
            says += f", where {divisor} is 0"
        if text:
            says += f": {text}"
    elif forgot_return:
        says, hint = f"{exercise.name} returned None: is a `return` missing?", ""
    elif callable(candidate):
        says = f"{exercise.name}{_signature(exercise.reference)} could not be used: {raised}"
    else:
        says = f"{describe(candidate)} could not be used: {raised}"
    in_own_code = bool(line) if watch.calls else None
    return _Failure((kind, _text(error), watch.calls, in_own_code), says, hint)


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # an exception whose own text raises
        return ""


def _own_frame(error: BaseException, candidate: Any) -> tuple[CodeType, int] | None:
    """How far the candidate came: the last code that ran in the file (or cell) that it is written
    in, and the line; ``None`` if it did not run.
    """
    codes = {function.__code__ for function in functions(candidate)}
    files = {code.co_filename for code in codes}
    has_begun = False  # frames before the candidate's are of this file, or of the exercise's
    last = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        has_begun = has_begun or code in codes
        if has_begun and code.co_filename in files:
            last = (code, line)  # the candidate itself, or a helper beside it
    return last


def _shown_line(code: CodeType, line: int) -> str:
    """ "line 3 of its cell"."""
    file = code.co_filename
    return f"line {line} of {os.path.basename(file) if os.path.exists(file) else 'its cell'}"


def _one_line(text: str) -> str:
    """The first line of a message, of bounded length and without addresses, which differ from run
    to run.
    """
    first = text.strip().partition("\n")[0].rstrip()
    first = re.sub(r"0x[0-9a-fA-F]{6,}", "0x…", first)
    return shortened(first, 200)


def _not_attempted(exercise: Exercise, *, gap: bool = False) -> Verdict:
    """``gap``: it ran, but part of it is not written. Who has forgotten one ``...`` hears of it."""
    line = (
        f"○ {exercise.id} not attempted yet: {exercise.title} (later cells use the reference "
        "solution)"
    )
    if gap:
        line += f". A part of {exercise.name} is still empty or `...`: write it, or delete the line"
    return Verdict(OPEN, line, given(exercise))


MOST = 800  # characters of what a line says; an answer's own text may be in it, of any length


def wrong(exercise: Exercise, says: str) -> Verdict:
    says = shortened(says, MOST)
    stop = "" if says[-1:] in (".", "?", "!", "…") else "."
    return Verdict(WRONG, f"✗ {exercise.id} not yet: {says}{stop}", given(exercise))


def _wrong_kind(exercise: Exercise, candidate: Any) -> str:
    """The sentence for a function in place of a value, a value in place of a function, or a
    function with other arguments.
    """
    name, reference = exercise.name, exercise.reference
    if not callable(reference):
        asked = (
            f"the answer is a value, but you gave a function: write check({exercise.id!r}, value)"
        )
        return asked if inspect.isroutine(candidate) else ""
    if isinstance(reference, type) and inspect.isroutine(candidate):
        what = f"a function, {getattr(candidate, '__name__', name)}{_signature(candidate)}"
        return (
            f"expected the class {name} with methods that you wrote, but got {what}: pass the "
            "class itself"
        )
    asked = (
        f"expected {'the class' if isinstance(reference, type) else 'a function'} "
        f"{name}{_signature(reference)}"
    )
    if not callable(candidate):
        return f"{asked}, but got {describe(candidate)}: pass {name} itself, without calling it"
    if inspect.isgeneratorfunction(candidate) or inspect.iscoroutinefunction(candidate):
        word = "yield" if inspect.isgeneratorfunction(candidate) else "async"
        return (
            f"there is `{word}` in {name}, so a call runs nothing yet: collect the results, and "
            "return them"
        )
    if not _accepts_the_same(candidate, reference):
        return (
            f"{asked}, but yours is {getattr(candidate, '__name__', name)}{_signature(candidate)}"
        )
    return ""


def _signature(function: Any) -> str:
    with contextlib.suppress(ValueError, TypeError):
        names = [
            str(p.replace(annotation=p.empty))
            for p in inspect.signature(function).parameters.values()
        ]
        return f"({', '.join(names)})"
    return "(…)"


def _accepts_the_same(candidate: Any, reference: Any) -> bool:
    """Can ``candidate`` be called with every argument that ``reference`` takes?

    Names of positional ones are free.
    """
    try:
        theirs, ours = (
            inspect.signature(candidate),
            inspect.signature(reference).parameters.values(),
        )
    except (ValueError, TypeError):
        return True  # a built-in without a signature: calling it will tell
    positional = [p for p in ours if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    by_name = [p.name for p in ours if p.kind is p.KEYWORD_ONLY]
    try:
        theirs.bind(*positional, **dict.fromkeys(by_name))
    except TypeError:
        return False
    return True


def _diagnosis(
    exercise: Exercise,
    candidate: Any,
    run: Run,
    expected: Run,
    found: Difference | None,
    left: list[str],
) -> str:
    """The sentence for a wrong answer: a known mistake's, or what the answer does (if its numbers
    show it), or where it differs.
    """
    known = []
    over = over_budget(found.over) if found and found.over else ""
    # One after another: those that come after the mistake that was made need not run.
    for mistake in exercise.mistakes:
        theirs = _known(exercise, mistake)
        if _same_outcome(run, theirs, exercise.tolerance):
            return f"{mistake.says} {over}".strip()
        known.append((mistake.says, theirs))
    if left:
        return left[0]
    if run.failure:
        says, hint = run.failure.says, run.failure.hint
        if not hint:
            return says
        if not says.startswith(exercise.name):  # a function's name stays as it is spelled
            says = says[0].upper() + says[1:]
        return f"{hint} {says}"
    place = _place(exercise, found)
    if says := _recognised(exercise, candidate, run, expected, known):
        where = over or _over(run.value) or _case(exercise, found)
        return f"{says if says.endswith(('.', '?', '!')) else says + '.'} {where}".strip()
    if over:
        return f"{place}the numbers are right, the bytes are too many. {over}"
    if not callable(exercise.reference):
        return place + found.hinted
    right = hints.partial_credit(run.value, expected.value, exercise.tolerance, exercise.name)
    return f"{right}; {place}{_said(found)}" if right and place else place + _said(found)


def _over(value: Any) -> str:
    """Peak and budget, if a part of what was observed exceeds its budget."""
    found = (leaf for _, leaf in hints.leaves(value) if isinstance(leaf, Measured) and leaf.over)
    return next(map(over_budget, found), "")


def _recognised(
    exercise: Exercise, candidate: Any, run: Run, expected: Run, known: list[tuple[str, Run]]
) -> str:
    """What the numbers of a wrong answer show, if they show anything."""
    got, wanted, tolerance = run.value, expected.value, exercise.tolerance
    values = [(says, theirs.value) for says, theirs in known if not theirs.failure]
    says = (
        hints.nearest_mistake(got, wanted, values, tolerance, all_of_it=True)
        or hints.other_unit(got, wanted)
        or hints.wrapped_around(got, wanted)
        or hints.not_a_number(got, wanted, tolerance)
        or _explained(exercise, got, wanted)
        or hints.nearest_mistake(got, wanted, values, tolerance)
        or hints.without_its_fraction(got, wanted)
    )
    if says or not callable(exercise.reference):
        return says
    says = hints.relation(got, wanted, tolerance)
    if not says and isinstance(exercise.observe, Calls):
        says = hints.wrong_names(got, wanted)
    if not says and isinstance(exercise.observe, Calls) and callable(candidate):
        names = list(inspect.signature(exercise.reference).parameters)
        with _undisturbed(), time_limit.stopped_after(time_limit.SECONDS):
            says = hints.insensitive_argument(
                exercise.observe, names, candidate, exercise.reference
            )
    return says


def _explained(exercise: Exercise, got: Any, expected: Any) -> str:
    """The sentence of the author's ``explain``, or none if that fails: an answer may return
    anything.
    """
    with _undisturbed(), contextlib.suppress(Exception):
        return (exercise.explain and exercise.explain(got, expected)) or ""
    return ""


def _known(exercise: Exercise, mistake: Mistake) -> Run:
    """What a known mistake does, computed once."""
    cache = vars(exercise).setdefault("_known", {})
    if mistake.name not in cache:
        cache[mistake.name] = _run(exercise, mistake.function)
    return cache[mistake.name]


def _same_outcome(one: Run, other: Run, tolerance: float) -> bool:
    if one.failure or other.failure:
        return bool(one.failure and other.failure) and one.failure.key == other.failure.key
    return difference(one.value, other.value, tolerance) is None


def _said(found: Difference) -> str:
    return found.hinted if any(isinstance(step, HiddenCase) for step in found.path) else found.said


def _case(exercise: Exercise, found: Difference) -> str:
    """ "For two layers, entry 'loss': got 3, expected 2.", to follow a sentence; empty where the
    case is a word of ours.
    """
    place = _place(exercise, found)
    if (
        not place
        or found.worded
        or (len(found.path) == 1 and found.said.startswith("it is missing"))
    ):
        return ""
    return f"{place[0].upper()}{place[1:]}{_said(found)}"


def _place(exercise: Exercise, found: Difference) -> str:
    """ "for tensor_bytes((2, 3), 4): " or "for two layers, entry 'gradients': "; empty for a plain
    value.
    """
    if not found.path:
        return ""
    case, *rest = found.path if callable(exercise.reference) else ("", *found.path)
    if isinstance(case, HiddenCase):
        case = "another case, which is not shown"
    case = f"{exercise.name}{case}" if str(case).startswith("(") else case
    words = [str(case)] if case != "" else []
    for step in rest:
        placed = isinstance(step, str) and step.startswith(("item ", "at index "))
        words.append(step if placed else f"entry {shortened(repr(step), 80)}")
    return f"for {', '.join(words)}: "
