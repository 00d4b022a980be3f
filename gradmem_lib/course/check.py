"""How an exercise checks itself: run the answer, run the reference, run every known mistake, and compare.

An exercise's ``observe`` runs a candidate on the exercise's cases and returns what it did, as numbers, tensors, or dicts
of those. The reference and the known mistakes are candidates too. So an answer is right when it is observed to do what
the reference does, however it is written, and a wrong one that does what a known mistake does can be told its name.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import dis
import functools
import inspect
import itertools
import os
import pkgutil
import re
import textwrap
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from . import exercises
from .compare import Difference, Measured, describe, difference

PASSED, OPEN, WRONG = "passed", "not attempted", "not yet"
_GIVEN = "__given_by_the_course__"


@dataclass(frozen=True)
class Mistake:
    """A wrong answer that people really give. It runs, and ``says`` is the sentence that names it.

    ``function`` is what a learner would hand to ``check``: a function, a class, or for a value exercise a plain value.
    """

    name: str
    function: Any
    says: str


@dataclass(frozen=True, kw_only=True)
class Exercise:
    """One exercise. Difficulty is 1 to 3; ``minutes`` and ``trains`` tell the learner what it costs and gives.

    ``reference`` is a right answer: a function, a class or a plain value. ``observe(candidate)`` returns what a candidate
    does, from inputs made afresh on each call; the default is the candidate itself, for value exercises. A dict from
    ``observe`` has one entry per case, and its keys are shown to the learner ("two layers, bf16").
    ``explain(got, expected)`` may return a sentence for whole families of mistakes, or ``None``. ``tolerance`` is
    relative and holds for floats; whole numbers must be equal.
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
    tolerance: float = 1e-5

    @property
    def name(self) -> str:
        """What a learner calls it: the reference's name, or "the answer"."""
        return getattr(self.reference, "__name__", "the answer")

    @property
    def dots(self) -> str:
        """The difficulty as ●○○, ●●○ or ●●●."""
        return "●" * self.difficulty + "○" * (3 - self.difficulty)


@dataclass(frozen=True)
class Verdict:
    """``outcome`` is ``"passed"``, ``"not attempted"`` or ``"not yet"``; ``line`` is what the learner reads; ``result`` is
    what later cells use: the candidate if it passed, else the reference."""

    outcome: str
    line: str
    result: Any


class UnknownExercise(KeyError):
    """There is no exercise of that id. The message lists those that there are."""

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError would show the sentence in quotes


def check(id: str, candidate: Any) -> Any:
    """Judge ``candidate`` as the answer to exercise ``id``, print one line, and return what later cells should use.

    That is the candidate if it passed, else the reference, so that a notebook runs to its end either way. A reference
    function or class handed back is recognised and counts as not attempted; a plain value is not recognisable, so give
    the result of a value exercise a name of its own: ``per_card = check("1.2", answer)``.

    Raises ``UnknownExercise`` (a ``KeyError``) for an id that does not exist, and nothing else.
    """
    from .progress import record_check

    exercise = get(id)
    try:
        verdict = judge(exercise, candidate)
    except Exception as error:
        # Too odd even to compare, such as a list that holds itself.
        says = f"this answer cannot be compared ({type(error).__name__}): return plain numbers or tensors"
        verdict = _wrong(exercise, says)
    record_check(exercise.id, verdict.outcome)
    print(verdict.line)
    return verdict.result


def get(id: str) -> Exercise:
    """The exercise of that id, such as ``"1.3"``. Raises ``UnknownExercise``."""
    match = re.fullmatch(r"\s*(\d+)\.\d+\s*", id) if isinstance(id, str) else None
    lesson = f"{int(match[1]):02d}" if match else ""
    if lesson not in lessons():
        raise UnknownExercise(
            f'there is no exercise {id!r}: ids are text such as "0.1" (lesson 0, exercise 1), and the lessons with '
            f"exercises are {_listed(lessons())}"
        )
    found = {exercise.id: exercise for exercise in all_exercises(lesson)}
    if id.strip() not in found:
        raise UnknownExercise(f"there is no exercise {id!r}: lesson {lesson} has {_listed(list(found))}")
    return found[id.strip()]


def all_exercises(lesson: int | str | None = None) -> list[Exercise]:
    """All exercises in order, or those of one lesson (1, "1" or "01")."""
    wanted = lessons() if lesson is None else [f"{int(lesson):02d}"]
    modules = (
        import_module(f"{exercises.__name__}.lesson_{number}") for number in wanted if number in lessons()
    )
    return [exercise for module in modules for exercise in module.EXERCISES]


def lessons() -> list[str]:
    """Numbers of the lessons that have exercises: ``["00", "01", …]``."""
    names = (module.name for module in pkgutil.iter_modules(exercises.__path__))
    return sorted(name.removeprefix("lesson_") for name in names if re.fullmatch(r"lesson_\d\d", name))


def calls(*cases: tuple) -> Callable[[Callable], dict[str, Any]]:
    """An ``observe`` that calls the candidate once per tuple of arguments, each time with fresh copies of them.

    ``observe=calls(((2, 3), 4), ((5,), 2))`` observes ``candidate((2, 3), 4)`` and ``candidate((5,), 2)``. For arguments
    that are not short when written out, such as models, write a function that returns a dict of named cases.
    """
    return lambda candidate: {
        f"({', '.join(map(repr, arguments))})": candidate(*copy.deepcopy(arguments)) for arguments in cases
    }


def measure(run: Callable[[], Any], *, budget: int | str, model=None, optimizer=None) -> Measured:
    """Run ``run()`` under a ``MemoryTracker`` and return its value and its peak in bytes, beside ``budget``.

    For use inside ``observe``: ``check`` then accepts the right value only if the peak is at most the budget, and says
    how many bytes over it was. The budget is compared afterwards, not enforced, so that the peak is known in full.
    """
    from ..measure.tracker import MemoryTracker
    from ..units import parse_bytes

    with MemoryTracker(model, optimizer, live=False) as tracker:
        value = run()
    return Measured(value, tracker.peak.total, parse_bytes(budget))


def judge(exercise: Exercise, candidate: Any) -> Verdict:
    """The verdict on ``candidate``. Nothing is printed or recorded, and whatever it prints itself is swallowed.

    Exceptions of the candidate become a verdict; only ``KeyboardInterrupt`` passes through.
    """
    if _is_open(exercise, candidate):
        return _not_attempted(exercise)
    complaint = _wrong_kind(exercise, candidate)
    if complaint:
        return _wrong(exercise, complaint)
    run = _run(exercise, candidate)
    if run.unfinished:
        return _not_attempted(exercise)
    expected = _run(exercise, exercise.reference)
    if expected.failure:
        return _wrong(
            exercise, f"this cannot be checked here, since the reference stopped too: {expected.failure.says}"
        )
    found = None if run.failure else difference(run.value, expected.value, exercise.tolerance)
    if not run.failure and found is None:
        return Verdict(PASSED, f"✓ {exercise.id} passed: {exercise.title}", candidate)
    if callable(candidate) and _has_gaps(candidate, exercise.reference):
        return _not_attempted(exercise)
    return _wrong(exercise, _diagnosis(exercise, run, expected, found))


def audit(exercise: Exercise) -> list[str]:
    """What is wrong with an exercise, one sentence each; empty when it is fit to be given to a learner.

    Runs the reference, every known mistake and the stubs of a learner who has not begun.
    """
    problems = []
    if (
        not re.fullmatch(r"\d+\.\d+", exercise.id)
        or exercise.difficulty not in (1, 2, 3)
        or exercise.minutes < 1
    ):
        problems.append("the id must look like 1.3, the difficulty be 1 to 3 and the minutes at least 1")
    if not exercise.title or not exercise.trains:
        problems.append("the title and what the exercise trains must be said")
    if len(exercise.mistakes) < 4:
        problems.append(f"only {len(exercise.mistakes)} known mistakes: at least four are needed")
    verdict = judge(exercise, exercise.reference)
    if verdict.outcome != PASSED:
        problems.append(f"the reference does not pass: {verdict.line}")
    for mistake in exercise.mistakes:
        if "\n" in mistake.says or not mistake.says.endswith("."):
            problems.append(f"mistake {mistake.name!r} must say one line that ends with a full stop")
        verdict = judge(exercise, mistake.function)
        if mistake.says not in verdict.line:
            problems.append(f"mistake {mistake.name!r} is not named as itself: {verdict.line}")
    for stub in _stubs(exercise):
        verdict = judge(exercise, stub)
        if verdict.outcome != OPEN:
            problems.append(f"a stub ({describe(stub)}) is not called {OPEN}: {verdict.line}")
    return problems


@dataclass(frozen=True)
class _Failure:
    """An exception, kept as text: the exception itself would keep the tensors of its frames alive."""

    key: tuple[str, str]
    says: str


@dataclass(frozen=True)
class _Run:
    value: Any = None
    failure: _Failure | None = None
    unfinished: bool = False


class _Unfinished(BaseException):
    """The candidate returned ``...`` or ``NotImplemented``. Not an ``Exception``, so that no ``observe`` catches it."""


def _run(exercise: Exercise, candidate: Any) -> _Run:
    returned: list[Any] = []
    subject = _watched(candidate, returned) if inspect.isroutine(candidate) else candidate
    try:
        with _undisturbed():
            value = exercise.observe(subject)
    except KeyboardInterrupt:
        raise
    except _Unfinished:
        return _Run(unfinished=True)
    except BaseException as error:  # SystemExit too: exit() in an answer must not end the kernel
        if _is_stub_error(error, candidate):
            return _Run(unfinished=True)
        forgot_return = bool(returned) and returned[-1] is None
        return _Run(failure=_failure(error, candidate, exercise, forgot_return))
    return _Run(value=value, unfinished=_has_ellipsis(value))


def _watched(function: Callable, returned: list[Any]) -> Callable:
    @functools.wraps(function)
    def watched(*args, **kwargs):
        result = function(*args, **kwargs)
        if _has_ellipsis(result):
            raise _Unfinished
        # Only whether it is None is of use later: holding more would keep the answer's tensors alive.
        returned[:] = [None if result is None else ...]
        return result

    return watched


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Same random numbers for every candidate, gradients on, nothing shown; and everything as before afterwards."""
    import torch
    from IPython.utils.capture import capture_output

    cuda = [torch.cuda.current_device()] if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    with (
        capture_output(),
        warnings.catch_warnings(),
        torch.random.fork_rng(devices=cuda),
        torch.enable_grad(),
    ):
        warnings.simplefilter("ignore")
        # Not torch.manual_seed: it would also seed a CUDA device that has not started yet, and nothing would undo that.
        torch.default_generator.manual_seed(0)
        if cuda:
            torch.cuda.manual_seed(0)
        yield


def _failure(error: BaseException, candidate: Any, exercise: Exercise, forgot_return: bool) -> _Failure:
    kind, text = type(error).__name__, _one_line(str(error))
    line = _line_of(error, candidate)
    raised = f"{kind}: {text}" if text else kind
    if hasattr(error, "budget") and hasattr(error, "snapshot"):
        says = (
            f"your code goes over its budget of {error.budget:,} bytes: with the {error.asked:,} bytes it asked for "
            f"last, {error.snapshot.total:,} bytes would be live, {error.snapshot.total - error.budget:,} too many"
        )
    elif line:
        says = f"your code raised {kind} at {line}" + (f": {text}" if text else "")
    elif forgot_return:
        says = f"{exercise.name} returned None: is a `return` missing?"
    elif callable(candidate):
        says = f"{exercise.name}{_signature(exercise.reference)} could not be used: {raised}"
    else:
        says = f"{describe(candidate)} could not be used: {raised}"
    return _Failure((kind, str(error)), says)


def _line_of(error: BaseException, candidate: Any) -> str:
    """ "line 3 of its cell": how far the candidate came, in the file (or cell) that it is written in; empty if nowhere."""
    codes = {function.__code__ for function in _functions(candidate)}
    frames = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    inside = itertools.dropwhile(lambda entry: entry[0] not in codes, frames)
    lines = [
        (line, code.co_filename)
        for code, line in inside
        if code.co_filename in {own.co_filename for own in codes}
    ]
    if not lines:
        return ""
    line, file = lines[-1]
    return f"line {line} of {os.path.basename(file) if os.path.exists(file) else 'its cell'}"


def _one_line(text: str) -> str:
    """The first line of a message, of bounded length and without addresses, which differ from run to run."""
    first = text.strip().partition("\n")[0].rstrip()
    first = re.sub(r"0x[0-9a-fA-F]{6,}", "0x…", first)
    return first if len(first) <= 200 else first[:199] + "…"


def _is_open(exercise: Exercise, candidate: Any) -> bool:
    if candidate is None or candidate is NotImplemented or _has_ellipsis(candidate):
        return True
    if getattr(candidate, "__dict__", {}).get(_GIVEN) == exercise.id:
        return True
    functions = _functions(candidate) if inspect.isroutine(candidate) else []
    return bool(functions) and all(map(_does_nothing, functions))


def _has_gaps(candidate: Any, reference: Any) -> bool:
    """Does a ``...`` still stand among its statements, or does a method do nothing that does something in the reference?"""
    idle = {function.__name__ for function in _functions(reference) if _does_nothing(function)}
    return any(
        _has_bare_ellipsis(function) or (_does_nothing(function) and function.__name__ not in idle)
        for function in _functions(candidate)
    )


def _functions(candidate: Any) -> list[Any]:
    """The Python functions that make up a function, a class, or an object of some class."""
    while isinstance(candidate, functools.partial):
        candidate = candidate.func
    candidate = inspect.unwrap(candidate) if callable(candidate) else candidate
    if inspect.isroutine(candidate):
        parts = [candidate]
    else:
        parts = list(vars(candidate if isinstance(candidate, type) else type(candidate)).values())
    parts = [getattr(part, "fget", None) or getattr(part, "__func__", part) for part in parts]
    return [inspect.unwrap(part) for part in parts if inspect.isfunction(inspect.unwrap(part))]


def _does_nothing(function: Any) -> bool:
    """A body of ``...``, ``pass`` or a docstring: its bytecode only returns ``None`` or ``...``."""
    steps = [
        step
        for step in dis.get_instructions(function)
        if step.opname not in ("RESUME", "NOP", "RETURN_VALUE")
    ]
    return all(
        step.opname in ("LOAD_CONST", "RETURN_CONST") and (step.argval is None or step.argval is Ellipsis)
        for step in steps
    )


def _has_bare_ellipsis(function: Any) -> bool:
    # The compiler drops a bare `...`, so only the source shows it.
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return False
    bare = (node.value for node in ast.walk(tree) if isinstance(node, ast.Expr))
    return any(isinstance(value, ast.Constant) and value.value is Ellipsis for value in bare)


def _has_ellipsis(value: Any) -> bool:
    if isinstance(value, Measured):
        return _has_ellipsis(value.value)
    if isinstance(value, dict):
        return any(map(_has_ellipsis, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(_has_ellipsis, value))
    return value is Ellipsis or value is NotImplemented


def _is_stub_error(error: BaseException, candidate: Any) -> bool:
    """``raise NotImplementedError`` in the candidate itself, or arithmetic on a ``...`` that it still holds.

    An operation that PyTorch lacks raises ``NotImplementedError`` too, but not by a ``raise`` in the candidate's code.
    """
    if isinstance(error, (TypeError, AttributeError)) and "ellipsis" in str(error):
        return True
    last = error.__traceback__
    while last and last.tb_next:
        last = last.tb_next
    if not isinstance(error, NotImplementedError) or last is None:
        return False
    code = last.tb_frame.f_code
    ours = any(function.__code__.co_filename == code.co_filename for function in _functions(candidate))
    return ours and dis.opname[code.co_code[last.tb_lasti]] == "RAISE_VARARGS"


def _stubs(exercise: Exercise) -> list[Any]:
    """What a learner who has not begun hands in."""
    if not callable(exercise.reference):
        return [..., None]

    def does_nothing(*args, **kwargs): ...

    def returns_ellipsis(*args, **kwargs):
        result = ...
        return result

    def raises(*args, **kwargs):
        raise NotImplementedError("your code here")

    functions = [returns_ellipsis, raises] if not isinstance(exercise.reference, type) else []
    return [..., None, does_nothing, *functions, _given(exercise)]


def _not_attempted(exercise: Exercise) -> Verdict:
    line = f"○ {exercise.id} not attempted yet: {exercise.title} (later cells use the reference solution)"
    return Verdict(OPEN, line, _given(exercise))


def _wrong(exercise: Exercise, says: str) -> Verdict:
    stop = "" if says[-1:] in (".", "?", "!", "…") else "."
    return Verdict(WRONG, f"✗ {exercise.id} not yet: {says}{stop}", _given(exercise))


def _given(exercise: Exercise) -> Any:
    """The reference, marked where it can be, so that checking it again is no attempt."""
    reference = exercise.reference
    if isinstance(reference, type):
        return type(reference)(
            reference.__name__, (reference,), {_GIVEN: exercise.id, "__doc__": reference.__doc__}
        )
    if not callable(reference):
        return copy.deepcopy(reference)

    @functools.wraps(reference)
    def given(*args, **kwargs):
        return reference(*args, **kwargs)

    setattr(given, _GIVEN, exercise.id)
    return given


def _wrong_kind(exercise: Exercise, candidate: Any) -> str:
    """What to say when a function came for a value, a value for a function, or a function of other arguments."""
    name, reference = exercise.name, exercise.reference
    if not callable(reference):
        asked = f"the answer is a value, and you gave a function: write check({exercise.id!r}, value)"
        return asked if inspect.isroutine(candidate) else ""
    asked = f"expected {'the class' if isinstance(reference, type) else 'a function'} {name}{_signature(reference)}"
    if not callable(candidate):
        return f"{asked}, and got {describe(candidate)}: hand over {name} itself, without calling it"
    if not _accepts_the_same(candidate, reference):
        return f"{asked}, and yours is {getattr(candidate, '__name__', name)}{_signature(candidate)}"
    return ""


def _signature(function: Any) -> str:
    with contextlib.suppress(ValueError, TypeError):
        names = [str(p.replace(annotation=p.empty)) for p in inspect.signature(function).parameters.values()]
        return f"({', '.join(names)})"
    return "(…)"


def _accepts_the_same(candidate: Any, reference: Any) -> bool:
    """Can ``candidate`` be called with every argument that ``reference`` takes? Names of positional ones are free."""
    try:
        theirs, ours = inspect.signature(candidate), inspect.signature(reference).parameters.values()
    except (ValueError, TypeError):
        return True  # a built-in without a signature: calling it will tell
    positional = [p for p in ours if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    by_name = [p.name for p in ours if p.kind is p.KEYWORD_ONLY]
    try:
        theirs.bind(*positional, **dict.fromkeys(by_name))
    except TypeError:
        return False
    return True


def _diagnosis(exercise: Exercise, run: _Run, expected: _Run, found: Difference | None) -> str:
    """The sentence for a wrong answer: a known mistake's, the author's explanation, or where it first differs."""
    over = over_budget(found.over) if found and found.over else ""
    for mistake in exercise.mistakes:
        known = _run(exercise, mistake.function)
        if _same_outcome(run, known, exercise.tolerance):
            return f"{mistake.says} {over}".strip()
    if run.failure:
        return run.failure.says
    if over:
        return f"{_place(exercise, found)}the numbers are right, the bytes are too many. {over}"
    says = exercise.explain(run.value, expected.value) if exercise.explain else None
    return says or _place(exercise, found) + (found.said if callable(exercise.reference) else found.hinted)


def over_budget(run: Measured) -> str:
    return (
        f"Your code peaks at {run.peak:,} bytes; the budget is {run.budget:,} bytes ({run.over:,} too many)."
    )


def _same_outcome(one: _Run, other: _Run, tolerance: float) -> bool:
    if one.failure or other.failure:
        return bool(one.failure and other.failure) and one.failure.key == other.failure.key
    return difference(one.value, other.value, tolerance) is None


def _place(exercise: Exercise, found: Difference) -> str:
    """ "for tensor_bytes((2, 3), 4): " or "for two layers, entry 'gradients': "; empty for a plain value."""
    if not found.path:
        return ""
    case, *rest = found.path if callable(exercise.reference) else ("", *found.path)
    case = f"{exercise.name}{case}" if str(case).startswith("(") else case
    words = [str(case)] if case != "" else []
    for step in rest:
        placed = isinstance(step, str) and step.startswith(("item ", "at index "))
        words.append(step if placed else f"entry {step!r}")
    return f"for {', '.join(words)}: "


def _listed(words: list[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
