"""Finds answers that count as not attempted: a stub, the reference itself, or given lines with a
gap.
"""

from __future__ import annotations

import ast
import copy
import dis
import functools
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .compare import Measured
from .exercise import Exercise

_GIVEN = "__given_by_the_course__"


class Endless(ValueError):
    """An answer that contains itself, or is nested so deep that a comparison would not end."""


def is_open(exercise: Exercise, candidate: Any) -> bool:
    if candidate is None or candidate is NotImplemented or has_ellipsis(candidate):
        return True
    if getattr(candidate, "__dict__", {}).get(_GIVEN) == exercise.id:
        return True
    parts = functions(candidate) if inspect.isroutine(candidate) else []
    return bool(parts) and all(_does_nothing(part) or _gives_up(part) for part in parts)


def has_gaps(candidate: Any, reference: Any) -> bool:
    """Whether one of its statements is still ``...``, or a method of the reference's is empty.

    An empty helper of its own, and ``...`` in one branch, belong to an attempt.
    """
    asked = {f.__name__ for f in functions(reference) if not _does_nothing(f)}
    for function in functions(candidate):
        if isinstance(reference, type) and function.__name__ not in asked:
            continue
        if _is_empty(function):
            return True
        if any(place.statement and not place.in_branch for place in _ellipses(function)):
            return True
    return False


def is_attempt(candidate: Any) -> bool:
    """Whether its ``...`` are all in branches, so that a ``...`` as its result is a mistake."""
    places = [place for function in functions(candidate) for place in _ellipses(function)]
    return bool(places) and all(place.in_branch for place in places)


def functions(candidate: Any) -> list[Any]:
    """The Python functions in a function, a class, or an object."""
    while isinstance(candidate, functools.partial):
        candidate = candidate.func
    candidate = _unwrapped(candidate) if callable(candidate) else candidate
    if inspect.isroutine(candidate):
        parts = [candidate]
    else:
        parts = list(vars(candidate if isinstance(candidate, type) else type(candidate)).values())
    parts = [getattr(part, "fget", None) or getattr(part, "__func__", part) for part in parts]
    return [part for part in map(_unwrapped, parts) if inspect.isfunction(part)]


def _unwrapped(function: Any) -> Any:
    """The function that decorators have wrapped; ``function`` itself if its ``__wrapped__`` leads
    back to it.
    """
    try:
        return inspect.unwrap(function)
    except ValueError:
        return function


def _does_nothing(function: Any) -> bool:
    """A body of ``...``, ``pass`` or a docstring: its bytecode only returns ``None`` or ``...``."""
    steps = [
        step
        for step in dis.get_instructions(function)
        if step.opname not in ("RESUME", "NOP", "RETURN_VALUE")
    ]
    return all(
        step.opname in ("LOAD_CONST", "RETURN_CONST")
        and (step.argval is None or step.argval is Ellipsis)
        for step in steps
    )


def _is_empty(function: Any) -> bool:
    """Whether its body is ``...``, ``pass`` or a docstring; ``return None`` is an answer."""
    tree = _tree_of(function)
    if tree is None:
        return _does_nothing(function)
    returns = any(isinstance(node, ast.Return) for node in ast.walk(tree))
    return _does_nothing(function) and not returns


@dataclass(frozen=True)
class _Place:
    """Where a ``...`` stands: as a whole statement, or in a branch that need not run."""

    statement: bool
    in_branch: bool


_BRANCHES = (ast.If, ast.IfExp, ast.Try, ast.Match, ast.BoolOp)


def _ellipses(function: Any) -> list[_Place]:
    """Every ``...`` of a function that is no index, as ``x[..., 0]`` has one.

    The compiler drops a bare ``...``, so only the source shows it. A function inside is a branch.
    """
    tree = _tree_of(function)
    if tree is None or not isinstance(tree.body[0], ast.FunctionDef):
        return []  # the line of a lambda has more than the lambda
    return list(_ellipses_in(tree.body[0], in_branch=False))


def _ellipses_in(node: ast.AST, *, in_branch: bool, depth: int = 0) -> Iterator[_Place]:
    inner = isinstance(node, (ast.FunctionDef, ast.Lambda)) and depth > 0
    in_branch = in_branch or inner or isinstance(node, _BRANCHES)
    for child in ast.iter_child_nodes(node):
        if isinstance(node, ast.Subscript) and child is node.slice:
            continue
        if isinstance(child, ast.Constant) and child.value is Ellipsis:
            yield _Place(isinstance(node, ast.Expr), in_branch)
        else:
            yield from _ellipses_in(child, in_branch=in_branch, depth=depth + 1)


def _tree_of(function: Any) -> ast.Module | None:
    """The source of a function, if it has one that can be read on its own."""
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, ValueError, SyntaxError):  # ValueError: __wrapped__ in a circle
        return None


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
    return value is Ellipsis or value is NotImplemented


def is_stub_error(error: BaseException, candidate: Any) -> bool:
    """Whether one of the candidate's functions ends in ``raise NotImplementedError`` for every
    argument, or computes with a ``...``.

    Functions that it calls in other cells of its notebook are the candidate's too. A ``raise`` in a
    branch counts as an attempt. An operation that PyTorch lacks raises ``NotImplementedError`` too,
    but not in the candidate's own code.
    """
    if isinstance(error, (TypeError, AttributeError)) and "ellipsis" in str(error):
        return not is_attempt(candidate)
    last = error.__traceback__
    while last and last.tb_next:
        last = last.tb_next
    if not isinstance(error, NotImplementedError) or last is None:
        return False
    code, own = last.tb_frame.f_code, functions(candidate)
    names, scopes = [f.__code__.co_filename for f in own], [id(f.__globals__) for f in own]
    ours = code.co_filename in names or id(last.tb_frame.f_globals) in scopes
    return ours and _raises_in_any_case(code, last.tb_lasti)


def _gives_up(function: Any) -> bool:
    """Whether it ends in ``raise NotImplementedError`` for every argument."""
    steps = list(dis.get_instructions(function))
    raises = [step.offset for step in steps if step.opname == "RAISE_VARARGS"]
    names = {step.argval for step in steps if step.opname == "LOAD_GLOBAL"}
    return (
        len(raises) == 1
        and "NotImplementedError" in names
        and _raises_in_any_case(function.__code__, raises[0])
    )


def _raises_in_any_case(code: Any, offset: int) -> bool:
    """Whether a ``raise`` at ``offset`` is always reached: no jump over it, no return before it, no
    ``except`` around it.
    """
    for step in dis.get_instructions(code):
        if step.offset == offset:
            return step.opname == "RAISE_VARARGS"
        jumps = step.opcode in (*dis.hasjrel, *dis.hasjabs) and step.argval > offset
        if (
            jumps
            or step.opname.startswith("RETURN")
            or step.opname in ("PUSH_EXC_INFO", "SETUP_FINALLY")
        ):
            return False
    return False


def given(exercise: Exercise) -> Any:
    """The reference, marked if possible, so that checking it again does not count as an attempt."""
    reference = exercise.reference
    if isinstance(reference, type):
        return type(reference)(
            reference.__name__, (reference,), {_GIVEN: exercise.id, "__doc__": reference.__doc__}
        )
    if not callable(reference):
        return copy.deepcopy(reference)

    @functools.wraps(reference)
    def theirs(*args, **kwargs):
        return reference(*args, **kwargs)

    setattr(theirs, _GIVEN, exercise.id)
    return theirs
