"""Functions around a module, among its attributes and hooks, and what they hold."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import CellType, FunctionType
from typing import Any

from torch import nn

from ..compat.modules import tables_of_hooks


def tables_of_functions(module: nn.Module) -> list[dict[Any, Any]]:
    """The tables in which ``module`` itself may have functions: its attributes and its hooks."""
    return [vars(module), *tables_of_hooks(module)]


def contents(cell: CellType) -> list[Any]:
    """What a variable of a closure holds, in a list; the list is empty if it has no value yet."""
    try:
        return [cell.cell_contents]
    except ValueError:
        return []


def held_by(function: FunctionType) -> list[Any]:
    """What a function holds in its closure, its defaults and its attributes."""
    held = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    held += vars(function).values()  # such as the __wrapped__ of functools.wraps
    for cell in function.__closure__ or ():
        held += contents(cell)
    return held


def inside_of(value: Any) -> list[Any]:
    """What a list, a tuple, a dict or a ``functools.partial`` holds; nothing for other values."""
    if type(value) in (list, tuple):
        return list(value)
    if type(value) is dict:
        return list(value.values())
    if type(value) is partial:
        attributes = vars(value).values()  # such as those of functools.update_wrapper
        return [value.func, *value.args, *value.keywords.values(), *attributes]
    return []


def put_inside(container: Any, like: Any, inside: list[Any]) -> None:
    """Let ``container``, a list, a dict or a ``functools.partial`` as ``like`` is one, hold
    ``inside``, in the order of ``inside_of(like)``. It may be ``like`` itself.
    """
    if type(like) is list:
        container[:] = inside
    elif type(like) is dict:
        container.update(zip(like, inside, strict=True))
    elif type(like) is partial:
        n_args, n_named = len(like.args), len(like.keywords)
        function, args, rest = inside[0], tuple(inside[1 : 1 + n_args]), inside[1 + n_args :]
        named = dict(zip(like.keywords, rest[:n_named], strict=True))
        attributes = dict(zip(vars(like), rest[n_named:], strict=True))
        container.__setstate__((function, args, named, attributes))


@contextmanager
def variables_put_back(model: nn.Module) -> Iterator[None]:
    """Put back, after the block, the variables in closures of functions around ``model``: a trace
    would leave tensors without values in them, which break the next real step.
    """
    before = [(cell, contents(cell)) for cell in _cells_near(model)]
    try:
        yield
    finally:
        for cell, held in before:
            if held:
                cell.cell_contents = held[0]
            elif contents(cell):
                del cell.cell_contents


def _cells_near(model: nn.Module) -> list[CellType]:
    """The variables in closures of the functions around ``model``, and of those that these hold."""
    waiting: list[Any] = []
    for module in model.modules():
        for table in tables_of_functions(module):
            waiting += table.values()
    seen: set[int] = set()
    cells: list[CellType] = []
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, FunctionType):
            cells += value.__closure__ or ()
            waiting += held_by(value)
        else:
            waiting += inside_of(value)
    return cells
