"""Changes the solutions of the exercises, one place at a time, with Python's ``ast``.

Each change is one that people make without seeing it: a statement is left out, an operator is
another one, two arguments are exchanged, a loop ends too early, a switch is left on. So a changed
solution is nearly always a wrong answer, and its check must refuse it.
"""

from __future__ import annotations

import ast
import copy
import inspect
import linecache
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from support.paths import ROOT

from gradmem_lib.course.judge.exercise import Exercise


@dataclass(frozen=True)
class Solution:
    """A solution as statements: ``before`` is what they need, ``own`` is what may be changed."""

    name: str
    before: list[ast.stmt]
    own: list[ast.stmt]
    names: dict[str, Any]  # what the statements find besides


@dataclass(frozen=True)
class Change:
    """A solution with one change. ``was`` and ``now`` are the changed statement, on one line."""

    was: str
    now: str
    solution: Solution

    @property
    def words(self) -> str:
        return f"`{self.was}` → `{self.now}`"


def solution_of(exercise: Exercise) -> Solution:
    """The solution that the notebook shows: from its own cell, or from the library's file."""
    own = _in_notebook(exercise.id)
    if own is not None:
        return own
    reference = exercise.right
    module = sys.modules[reference.__module__]
    tree = ast.parse(textwrap.dedent(inspect.getsource(reference)))
    return Solution(reference.__name__, [], tree.body, vars(module))


def answer_of(solution: Solution) -> Any:
    """The answer that a solution's statements define, as a cell would define it."""
    tree = ast.Module([*solution.before, *solution.own], type_ignores=[])
    text = ast.unparse(ast.fix_missing_locations(tree))
    file = f"<changed solution {abs(hash(text))}>"
    # An answer's source is read by the check, as it is read of a notebook's cell.
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    names = dict(solution.names)
    exec(compile(text, file, "exec"), names)
    return names[solution.name]


# The solutions in the notebooks' sources.


@cache
def _notebook(lesson: int) -> tuple[str, ast.Module]:
    (path,) = Path(ROOT, "solutions").glob(f"{lesson:02d}_*.py")
    text = path.read_text(encoding="utf-8")
    return text, ast.parse(text)


def _in_notebook(id: str) -> Solution | None:
    """The functions and classes between the last ``check`` and this one that hold a solution."""
    text, tree = _notebook(int(id.split(".", maxsplit=1)[0]))
    earlier, own = [], []
    for statement in tree.body:
        checked = _checked(statement)
        if checked and checked[0] == id:
            break
        if checked:
            own = []
            continue
        earlier.append(statement)
        if "### BEGIN SOLUTION" in (ast.get_source_segment(text, statement) or ""):
            own.append(statement)
    if not own or checked is None:
        return None
    return Solution(checked[1], _needed(own, earlier, checked[1]), own, {"__name__": "answer"})


def _checked(statement: ast.stmt) -> tuple[str, str] | None:
    """("3.3", "accumulate") for ``accumulate = check("3.3", accumulate)``."""
    for node in ast.walk(statement):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "check":
            return ast.literal_eval(node.args[0]), ast.unparse(node.args[1])
    return None


def _needed(own: list[ast.stmt], earlier: list[ast.stmt], name: str) -> list[ast.stmt]:
    """The earlier statements that define what ``own`` uses, and what those use, in their order."""
    defined = {}
    for place, statement in enumerate(earlier):
        for known in _defines(statement):
            defined[known] = place
    places: set[int] = set()
    wanted = [name, *_used(own)]
    while wanted:
        place = defined.get(wanted.pop())
        if place is not None and place not in places:
            places.add(place)
            wanted += _used([earlier[place]])
    return [earlier[place] for place in sorted(places) if earlier[place] not in own]


def _defines(statement: ast.stmt) -> list[str]:
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        return [statement.name]
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        return [(name.asname or name.name).split(".")[0] for name in statement.names]
    if isinstance(statement, (ast.Assign, ast.AnnAssign)):
        return _stored(statement)
    return []  # a loop or a block shows something, and defines nothing that a solution needs


def _stored(statement: ast.stmt) -> list[str]:
    names = [node for node in ast.walk(statement) if isinstance(node, ast.Name)]
    return [node.id for node in names if isinstance(node.ctx, ast.Store)]


def _used(statements: list[ast.stmt]) -> list[str]:
    """The names that statements read; of a function, those that are not its own."""
    found = []
    for statement in statements:
        read = _touched(statement)
        for node in ast.walk(statement):
            if isinstance(node, ast.FunctionDef):
                read -= _own_names(node)
        found += sorted(read)
    return found


# The changes.


def _but(node: Any, **fields: Any) -> Any:
    """A copy of a node with other fields."""
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


def _put(items: list, place: int, *others: Any) -> list:
    """The items with others in the place of one."""
    return [*items[:place], *others, *items[place + 1 :]]


def _fewer(items: list) -> list[list]:
    """Each time another one is left out."""
    return [_put(items, i) for i in range(len(items))]


def _turned(items: list) -> list[list]:
    """Each time two other neighbours are exchanged."""
    return [_exchanged(items, i) for i in range(len(items) - 1)]


def _exchanged(items: list, place: int) -> list:
    return [*items[:place], items[place + 1], items[place], *items[place + 2 :]]


def changes_of(solution: Solution) -> list[Change]:
    """Every single change of a solution, in a fixed order; no two have the same text."""
    found: dict[str, Change] = {}
    for position, statement in enumerate(solution.own):
        for was, now, changed in _changed(statement):
            one = Change(was, now, replace(solution, own=_put(solution.own, position, changed)))
            if was != now:
                found.setdefault(one.words, one)
    return list(found.values())


def _changed(definition: ast.stmt) -> Iterator[tuple[str, str, ast.stmt]]:
    """(statement before, statement after, whole definition after) of each change."""
    for function in _functions_in(definition):
        names = sorted(_own_names(function))
        texts = sorted({node.value for node in ast.walk(function) if _is_text(node)})
        for block in _blocks(function):
            for was, now, statements in _other_blocks(block):
                yield was, now, _with(definition, block, statements)
            for place, statement in enumerate(block):
                if _is_docstring(statement):
                    continue
                for other in _other_statements(statement, names, texts):
                    changed = _with(definition, block, _put(block, place, other))
                    yield _line(statement), _line(other), changed
        yield from _other_decorators(definition, function)


def _functions_in(definition: ast.stmt) -> list[ast.FunctionDef]:
    """The outermost functions: a class's methods, or the function itself."""
    if isinstance(definition, ast.FunctionDef):
        return [definition]
    return [node for node in getattr(definition, "body", []) if isinstance(node, ast.FunctionDef)]


def _own_names(function: ast.FunctionDef) -> set[str]:
    stored = {name for statement in function.body for name in _stored(statement)}
    given = function.args
    return stored | {arg.arg for arg in (*given.posonlyargs, *given.args, *given.kwonlyargs)}


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and "\n" not in node.value


def _blocks(function: ast.FunctionDef) -> list[list[ast.stmt]]:
    """Every list of statements in a function, without its docstring."""
    found = []
    for node in ast.walk(function):
        for field in ("body", "orelse", "finalbody"):
            block = getattr(node, field, None)
            if isinstance(block, list) and block and isinstance(block[0], ast.stmt):
                found.append(block)
    return found


def _with(definition: ast.stmt, block: list, statements: list) -> ast.stmt:
    """A copy of ``definition`` where ``statements`` stand in place of ``block``."""
    kept = list(block)
    block[:] = statements
    try:
        return copy.deepcopy(definition)
    finally:
        block[:] = kept


def _line(statement: ast.AST) -> str:
    """A statement in one line; of a loop, a block or a function the line that begins it."""
    text = ast.unparse(ast.fix_missing_locations(copy.deepcopy(statement)))
    if isinstance(statement, (ast.FunctionDef, ast.For, ast.While, ast.If, ast.With, ast.Try)):
        text = text.partition(":\n")[0] + ":"
    return " ".join(text.split())


def _other_blocks(block: list[ast.stmt]) -> Iterator[tuple[str, str, list[ast.stmt]]]:
    """A statement left out, two exchanged, a ``with`` or ``if`` taken away, a body run twice."""
    for i, statement in enumerate(block):
        if _is_docstring(statement):
            continue
        was = _line(statement)
        yield was, "", _put(block, i) or [ast.Pass()]
        if isinstance(statement, (ast.With, ast.If)):
            yield was, "its body alone", _put(block, i, *statement.body)
        if isinstance(statement, (ast.Expr, ast.AugAssign)) and not _may_run_twice(statement):
            yield was, "twice", _put(block, i, statement, statement)
        if i + 1 < len(block) and not _independent(statement, block[i + 1]):
            yield was, f"after {_line(block[i + 1])}", _exchanged(block, i)


def _may_run_twice(statement: ast.stmt) -> bool:
    """Whether a second run of a statement changes nothing, as that of ``zero_grad()``."""
    called = getattr(getattr(statement, "value", None), "func", None)
    return getattr(called, "attr", "") in _SAME_TWICE


_SAME_TWICE = (
    *("zero_grad", "eval", "train", "requires_grad_", "float", "copy_", "set_rng_state", "save"),
    *("activation_checkpointing_enable", "__init__"),
)


def _independent(first: ast.stmt, second: ast.stmt) -> bool:
    """Whether two assignments say the same in either order: neither reads what the other sets."""
    if not (isinstance(first, ast.Assign) and isinstance(second, ast.Assign)):
        return False
    return not (_touched(first) & {*_stored(second)} or _touched(second) & {*_stored(first)})


def _touched(statement: ast.stmt) -> set[str]:
    return {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}


def _other_decorators(
    definition: ast.stmt, function: ast.FunctionDef
) -> Iterator[tuple[str, str, ast.stmt]]:
    """A decorator left out, of the function or of one inside it."""
    for node in ast.walk(function):
        if not isinstance(node, ast.FunctionDef):
            continue
        decorators = node.decorator_list
        for decorator, rest in zip(list(decorators), _fewer(decorators), strict=True):
            if ast.unparse(decorator) != "staticmethod":  # without it, the class cannot be used
                yield f"@{ast.unparse(decorator)}", "", _with(definition, decorators, rest)


def _other_statements(
    statement: ast.stmt, names: list[str], texts: list[str]
) -> Iterator[ast.stmt]:
    """A statement with one of its expressions changed, without those of the blocks inside it."""
    yield from _other_forms(statement)
    for field, value in ast.iter_fields(statement):
        if field in ("body", "orelse", "finalbody", "decorator_list", "args", "name"):
            continue
        for other in _other_values(value, names, texts):
            yield _but(statement, **{field: other})


def _other_values(value: Any, names: list[str], texts: list[str]) -> Iterator[Any]:
    """What may stand in place of a field of a node: an expression, a list of them, an operator."""
    if isinstance(value, list):
        for i, entry in enumerate(value):
            for other in _other_values(entry, names, texts):
                yield _put(value, i, other)
        return
    if not isinstance(value, ast.AST) or getattr(value, "arg", None) in _SAME_WITHOUT:
        return
    yield from _other_expressions(value, names, texts)
    for field, inside in ast.iter_fields(value):
        for other in _other_values(inside, names, texts):
            yield _but(value, **{field: other})


def _other_forms(statement: ast.stmt) -> Iterator[ast.stmt]:
    """Another kind of statement, such as a loop over a part, or no result."""
    if isinstance(statement, ast.Return) and statement.value is not None:
        yield ast.Return(None)
        if isinstance(statement.value, ast.Tuple) and len(statement.value.elts) > 1:
            yield ast.Return(_but(statement.value, elts=statement.value.elts[::-1]))
    if isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
        # Where the left side is a tensor, this is another tensor, and the given one stays.
        target = _but(statement.target, ctx=ast.Load())
        value = ast.BinOp(target, statement.op, statement.value)
        yield ast.Assign([statement.target], value, lineno=statement.lineno)
        yield ast.Assign([statement.target], statement.value, lineno=statement.lineno)
    if isinstance(statement, ast.For):
        for part in _parts(statement.iter):
            yield _but(statement, iter=part)
    if isinstance(statement, (ast.If, ast.While)):
        yield _but(statement, test=ast.UnaryOp(ast.Not(), statement.test))


def _parts(iterable: ast.expr) -> list[ast.expr]:
    """The first alone, the last alone, all but the first, all but the last."""
    slices = ("[:1]", "[-1:]", "[1:]", "[:-1]")
    text = ast.unparse(iterable)
    return [ast.parse(f"list({text}){part}", mode="eval").body for part in slices]


def _table(text: str) -> dict[str, list[str]]:
    """The first word of each line, with the others."""
    return {first: rest for first, *rest in map(str.split, text.strip().splitlines())}


_OPERATORS = _table("""
    Add Sub
    Sub Add
    Mult Div Add
    Div Mult FloorDiv
    FloorDiv Div
    Mod FloorDiv
    Pow Mult
    BitAnd BitOr
    BitOr BitAnd
    LShift RShift
    RShift LShift
    Eq NotEq
    NotEq Eq
    Lt LtE GtE
    LtE Lt Gt
    Gt GtE LtE
    GtE Gt Lt
    Is IsNot
    IsNot Is
    In NotIn
    NotIn In
    And Or
    Or And
""")
# A check takes Python's numbers, numpy's, and tensors of one number.
_SAME_WITHOUT = ("strict", "display")  # of zip and of a counter: what is computed stays
_NUMBERS = ("float", "int", "item", "list", "tuple")
_FUNCTIONS = _table("""
    min max
    max min
    sum max
    any all
    all any
    ceil floor
    floor ceil
    amax amin
    isfinite isinf
    zeros ones
    zeros_like ones_like
    sqrt square
    square abs
    float double
    bfloat16 half
""")


def _other_expressions(node: ast.AST, names: list[str], texts: list[str]) -> Iterator[ast.AST]:
    """What may stand in place of one expression or operator."""
    for other in _OPERATORS.get(type(node).__name__, ()):
        yield getattr(ast, other)()
    if isinstance(node, ast.Constant):
        yield from (ast.Constant(value) for value in _other_constants(node.value, texts))
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
        yield from _other_names(node, names)
    if type(node) in _OTHERS:
        yield from _OTHERS[type(node)](node)


def _other_products(node: ast.BinOp) -> Iterator[ast.expr]:
    yield from (node.left, node.right)
    if not isinstance(node.op, (ast.Add, ast.Mult, ast.BitAnd, ast.BitOr)):
        yield _but(node, left=node.right, right=node.left)


def _other_choices(node: ast.IfExp) -> Iterator[ast.expr]:
    yield from (node.body, node.orelse)
    yield _but(node, body=node.orelse, orelse=node.body)


def _other_constants(value: Any, texts: list[str]) -> list[Any]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, value - 1]
    if isinstance(value, float):
        return [value * 2, value / 2] if value else [1.0]
    if isinstance(value, str):
        return [text for text in texts if text != value][:2]
    return []


def _other_calls(node: ast.Call) -> Iterator[ast.expr]:
    """An argument left out, two exchanged, the call left out, another function."""
    for args in (*_fewer(node.args), *_turned(node.args)):
        yield _but(node, args=args)
    for keyword, rest in zip(node.keywords, _fewer(node.keywords), strict=True):
        if keyword.arg not in _SAME_WITHOUT:
            yield _but(node, keywords=rest)
    called = ast.unparse(node.func)
    if len(node.args) == 1 and not node.keywords and called not in _NUMBERS:
        yield node.args[0]  # x in place of sum(x)
    if isinstance(node.func, ast.Attribute):
        if node.func.attr not in _NUMBERS:
            yield node.func.value  # x in place of x.detach()
        yield _but(node, func=_but(node.func, attr=_other_method(node.func.attr)))
    elif called in ("min", "max", "sum", "any", "all"):
        yield _but(node, func=_but(node.func, id=_FUNCTIONS[called][0]))


def _other_method(name: str) -> str:
    """Another method; of one that works in place, the one that makes a new tensor."""
    if name.endswith("_") and not name.endswith("__"):
        return name.rstrip("_")
    return _FUNCTIONS.get(name, [name])[0]


def _other_comprehensions(node: ast.comprehension) -> Iterator[ast.comprehension]:
    for i, condition in enumerate(node.ifs):
        yield _but(node, ifs=_put(node.ifs, i))
        yield _but(node, ifs=_put(node.ifs, i, ast.UnaryOp(ast.Not(), condition)))
    for part in _parts(node.iter):
        yield _but(node, iter=part)


def _other_names(node: ast.Name, names: list[str]) -> Iterator[ast.Name]:
    """The next two names of the function, in the order of the alphabet."""
    if node.id not in names:
        return
    place = names.index(node.id)
    for step in (1, 2):
        other = names[(place + step) % len(names)]
        if other != node.id:
            yield _but(node, id=other)


def _other_slices(node: ast.Slice) -> Iterator[ast.Slice]:
    for end in ("lower", "upper"):
        if getattr(node, end) is not None:
            yield _but(node, **{end: None})


def _other_sequences(node: ast.Tuple | ast.List) -> Iterator[ast.expr]:
    """An entry left out, and two neighbours exchanged."""
    if len(node.elts) < 2 or not isinstance(node.ctx, ast.Load):
        return
    for elements in (*_fewer(node.elts), *_turned(node.elts)):
        yield _but(node, elts=elements)


_OTHERS: dict[type, Callable[[Any], Iterator[ast.AST]]] = {
    ast.Call: _other_calls,
    ast.BinOp: _other_products,
    ast.UnaryOp: lambda node: iter((node.operand,)),
    ast.BoolOp: lambda node: iter(node.values),
    ast.IfExp: _other_choices,
    ast.comprehension: _other_comprehensions,
    ast.Slice: _other_slices,
    ast.Tuple: _other_sequences,
    ast.List: _other_sequences,
}
