"""What functions around a module remember: caches, as of ``functools.lru_cache`` on a function that
makes the numbers of positions, and variables of a closure.

A trace would leave tensors without values in them, which break the next real step.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import CellType, FunctionType
from typing import Any

from torch import nn

from ..compat.modules import tables_of_hooks

LruCache = type(lru_cache(int))


@contextmanager
def without_new_entries(model: nn.Module) -> Iterator[None]:
    """Empty the caches near ``model`` that were used in the block, and put back the variables of
    closures.

    The caches are those among the variables of the files that define the classes of ``model``'s
    modules, and among the attributes of these classes. They are filled again when they are needed.
    The closures are those of functions among the attributes and the hooks of the modules.
    """
    caches = _caches_near(model)
    misses = {id(cache): cache.cache_info().misses for cache in caches}
    cells = [(cell, _contents(cell)) for cell in _cells_near(model)]
    try:
        yield
    finally:
        for cell, before in cells:
            _put_back(cell, before)
        for cache in caches:
            if cache.cache_info().misses != misses[id(cache)]:
                cache.cache_clear()


def _caches_near(model: nn.Module) -> list[Any]:
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


def _cells_near(model: nn.Module) -> list[CellType]:
    """The variables of the closures of functions among the attributes and hooks of the modules, and
    of functions that these hold.
    """
    functions: list[FunctionType] = []
    for module in model.modules():
        for table in [vars(module), *tables_of_hooks(module)]:
            functions += [value for value in table.values() if isinstance(value, FunctionType)]
    found: dict[int, CellType] = {}
    while functions:
        for cell in functions.pop().__closure__ or ():
            if id(cell) in found:
                continue
            found[id(cell)] = cell
            functions += [value for value in _contents(cell) if isinstance(value, FunctionType)]
    return list(found.values())


def _contents(cell: CellType) -> list[Any]:
    """What a variable of a closure holds, in a list; the list is empty if it has no value yet."""
    try:
        return [cell.cell_contents]
    except ValueError:
        return []


def _put_back(cell: CellType, contents: list[Any]) -> None:
    if contents:
        cell.cell_contents = contents[0]
    elif _contents(cell):
        del cell.cell_contents
