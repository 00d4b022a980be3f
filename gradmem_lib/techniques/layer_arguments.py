"""The arguments of a layer: the input that comes from the layer before, and all others."""

from __future__ import annotations

import warnings
from typing import Any

from torch import Tensor

from ..compat.tensors import storage_key
from ..compat.trees import tree_flatten
from ..hf_names import LAYER_INPUT, hf_class

CACHE_WARNING = (
    "training with checkpoints leaves the key-value cache out: set model.config.use_cache=False"
)


def split_input(args: tuple, kwargs: dict) -> tuple[Any, tuple]:
    """Split a layer's arguments into its input and the rest.

    The rest is (the other positional arguments, or None if the input was named; the named ones).
    """
    if args:
        return args[0], (args[1:], kwargs)
    if LAYER_INPUT not in kwargs:
        raise TypeError(
            "a checkpointed layer was called without a positional argument (only "
            f"{sorted(kwargs) or 'nothing'}): pass what one layer hands to the next as the first "
            "argument"
        )
    named = dict(kwargs)
    return named.pop(LAYER_INPUT), (None, named)


def join_input(x: Any, rest: tuple) -> tuple[tuple, dict]:
    """The opposite of ``split_input``: (args, kwargs)."""
    positional, named = rest
    if positional is None:  # the input was named
        return (), named | {LAYER_INPUT: x}
    return (x, *positional), named


def same_arguments(a: Any, b: Any) -> bool:
    """Whether two sets of arguments are the same.

    Tensors are the same if they are views of the same elements. Other values must be equal.
    """
    (leaves, kind), (other_leaves, other_kind) = tree_flatten(a), tree_flatten(b)
    return kind == other_kind and all(map(_same_leaf, leaves, other_leaves))


def _same_leaf(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return _elements(a) == _elements(b)
    return a is b or (type(a) is type(b) and bool(a == b))


def _elements(t: Tensor) -> tuple:
    """Which elements of memory a tensor is a view of."""
    return storage_key(t.untyped_storage()), t.storage_offset(), t.shape, t.stride(), t.dtype


def without_cache(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """The arguments with None for a key-value cache, of which it warns.

    ``RuntimeError`` if it has entries.
    """
    kind = hf_class("Cache")
    caches = [value for value in (*args, *kwargs.values()) if isinstance(value, kind)]
    if any(cache.get_seq_length() > 0 for cache in caches):
        raise RuntimeError(
            "the layers were given a key-value cache that has entries, and running them again "
            "would add to it again: train without one (use_cache=False), or remove the checkpoints"
        )
    if caches:
        warnings.warn(CACHE_WARNING, stacklevel=2)

    def without(value: Any) -> Any:
        return None if isinstance(value, kind) else value

    named = {name: without(value) for name, value in kwargs.items()}
    if "use_cache" in named:
        named["use_cache"] = False
    return tuple(map(without, args)), named
