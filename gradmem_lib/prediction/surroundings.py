"""What lies around a module: functions among its attributes and hooks, what these hold, and caches.

A trace would leave tensors without values in them, which break the next real step.
"""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from types import CellType, FunctionType
from typing import Any

from torch import nn

from ..compat.modules import tables_of_hooks

LruCache = type(lru_cache(int))


def contents(cell: CellType) -> list[Any]:
    """What a variable of a closure holds, in a list; the list is empty if it has no value yet."""
    try:
        return [cell.cell_contents]
    except ValueError:
        return []


def held_by(value: Any) -> list[Any]:
    """What a function holds in its closure, its defaults and its attributes, and a list, a tuple, a
    dict or a ``functools.partial`` in itself; nothing for other values.
    """
    if isinstance(value, FunctionType):
        held = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        held += vars(value).values()  # such as the __wrapped__ of functools.wraps
        for cell in value.__closure__ or ():
            held += contents(cell)
        return held
    if type(value) is partial:
        attributes = vars(value).values()  # such as those of functools.update_wrapper
        return [value.func, *value.args, *value.keywords.values(), *attributes]
    if type(value) is dict:
        return list(value.values())
    return list(value) if type(value) in (list, tuple) else []


def reached_from(values: Iterable[Any]) -> Iterator[Any]:
    """The ``values``, what they hold, what this holds, and so on."""
    waiting = list(values)
    seen: set[int] = set()
    while waiting:
        value = waiting.pop()
        if id(value) not in seen:
            seen.add(id(value))
            yield value
            waiting += held_by(value)


def functions_near(model: nn.Module) -> list[FunctionType]:
    """The functions among the attributes and hooks of ``model``, and those that these hold."""
    values: list[Any] = []
    for module in model.modules():
        for table in (vars(module), *tables_of_hooks(module)):
            values += table.values()
    return [value for value in reached_from(values) if isinstance(value, FunctionType)]


@contextmanager
def left_alone(model: nn.Module) -> Iterator[None]:
    """Put back, after the block, the variables in closures of functions around ``model``, and empty
    the caches near it that were used: they are filled again when they are needed.
    """
    variables: list[tuple[CellType, list[Any]]] = []
    for function in functions_near(model):
        for cell in function.__closure__ or ():
            variables.append((cell, contents(cell)))
    misses = [(cache, cache.cache_info().misses) for cache in _caches_near(model)]
    try:
        yield
    finally:
        for cell, held in variables:
            if held:
                cell.cell_contents = held[0]
            elif contents(cell):
                del cell.cell_contents
        for cache, number in misses:
            if cache.cache_info().misses != number:
                cache.cache_clear()


def _caches_near(model: nn.Module) -> list[Any]:
    """The caches of ``functools`` among the variables of the files that define the classes of
    ``model``'s modules, and among the attributes of these classes.
    """
    places: list[dict] = []
    for kind in {type(module) for module in model.modules()}:
        for base in kind.__mro__:
            places.append(dict(vars(base)))
            file = sys.modules.get(base.__module__)
            if file is not None:
                places.append(vars(file))
    found = {}
    for variables in places:
        for value in list(variables.values()):
            function = getattr(value, "__func__", value)  # of a static or class method
            if type(function) is LruCache:
                found[id(function)] = function
    return list(found.values())
