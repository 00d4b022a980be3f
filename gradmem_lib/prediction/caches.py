"""Caches of functions around a module, as of ``functools.lru_cache`` on a function that makes the
numbers of positions.

A trace would leave tensors without values in them, which break the next real step.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from torch import nn

LruCache = type(lru_cache(int))


@contextmanager
def without_new_entries(model: nn.Module) -> Iterator[None]:
    """Empty the caches near ``model`` that were used in the block, before and after it.

    These are the caches among the variables of the files that define the classes of ``model``'s
    modules, and among the attributes of these classes. They are filled again when they are needed.
    """
    caches = _caches_near(model)
    misses = {id(cache): cache.cache_info().misses for cache in caches}
    try:
        yield
    finally:
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
