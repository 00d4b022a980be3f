"""Which storages hold a tensor's bytes.

A storage is the block of bytes behind one or more tensors. Views and tied weights share a storage,
so each storage counts once.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import FunctionType, ModuleType
from typing import Any

import torch

from ..compat.fake_tensors import is_fake_without_memory
from ..compat.tensors import inner_tensors, inside_transform, sparse_parts

_PLAIN = (torch.Tensor, torch.nn.Parameter)
# ValueError: a lazy module has no size
NO_STORAGE = (NotImplementedError, RuntimeError, ValueError)
_META = torch.device("meta")
# Their attributes are not asked for. Numbers and text have none.
_HOLD_NOTHING = (torch.nn.Parameter, torch.nn.Module, type, ModuleType, FunctionType)
_BY_ROW, _BY_COLUMN = (torch.sparse_csr, torch.sparse_bsr), (torch.sparse_csc, torch.sparse_bsc)


def tensors_in(values: Iterable) -> Iterator[torch.Tensor]:
    """The tensors in ``values``, and in the lists, tuples and dicts among them."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (tuple, list, dict)):
            yield from tensors_in(value.values() if isinstance(value, dict) else value)


def tensors_held(owner: Any) -> Iterator[torch.Tensor]:
    """The tensors that ``owner`` holds: in lists, tuples and dicts, and in the attributes of
    objects, however deep.

    Parameters, modules and what belongs to them are left out, and so is what a function closes
    over.
    """
    seen: set[int] = set()
    waiting = [owner]
    while waiting:
        value = waiting.pop()
        if isinstance(value, _HOLD_NOTHING) or id(value) in seen:
            continue
        if isinstance(value, torch.Tensor):
            yield value
            continue
        seen.add(id(value))
        if isinstance(value, Mapping):
            waiting += value.values()
        elif isinstance(value, (list, tuple, set, frozenset, deque)):
            waiting += value
        else:
            waiting += getattr(value, "__dict__", {}).values()


def tensors_to_watch(given: Any) -> list[torch.Tensor]:
    """The tensors of a tensor, a module, or a collection of them, however deep.

    Raises ``TypeError`` for anything else, and for a collection that is not empty and has none.
    """
    expected = (
        "tracker.watch takes a tensor, a torch.nn.Module, or a collection of them (a list, a dict "
        "such as state_dict(), a generator)"
    )
    is_text = isinstance(given, (str, bytes))
    if is_text or not isinstance(given, (torch.Tensor, torch.nn.Module, Iterable)):
        raise TypeError(f"{expected}, and was given {type(given).__name__}")
    found: list[torch.Tensor] = []
    passed_over = set[str]()
    waiting = [given]
    while waiting:
        value = waiting.pop()
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, torch.nn.Module):
            found += [*value.parameters(), *value.buffers()]
        elif isinstance(value, Mapping):
            waiting.extend(value.values())
        elif value is None or isinstance(value, (str, bytes, bool, int, float, complex)):
            passed_over.add(type(value).__name__)  # an optimizer's states have numbers as well
        elif isinstance(value, Iterable):
            waiting.extend(value)
        else:
            raise TypeError(
                f"{expected}, and was given a {type(given).__name__} with a {type(value).__name__}"
            )
    if passed_over and not found:
        names = ", ".join(sorted(passed_over))
        raise TypeError(f"{expected}, and was given a {type(given).__name__} with {names} only")
    return found


def storages_of(value: Any) -> Sequence[torch.UntypedStorage]:
    """The storages of a tensor, or of all tensors in a list, tuple or dict.

    For a wrapper without a storage of its own, they are the storages of the tensors inside it.
    """
    if type(value) in _PLAIN or isinstance(value, torch.Tensor):
        if type(value) not in _PLAIN and is_fake_without_memory(value):
            return ()
        try:  # the code of `own_storage`, without a call, since every operation runs this
            storage = value.untyped_storage()
            if type(value) in _PLAIN or has_memory(storage):
                return (storage,)
        except NO_STORAGE:
            pass
        value = _parts(value)
    elif isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return ()
    return [storage for part in value for storage in storages_of(part)]


def own_storage(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """The storage of ``tensor``; ``None`` for a wrapper.

    A wrapper has no storage of its own, or one with a size but no memory.
    """
    try:
        storage = tensor.untyped_storage()
    except NO_STORAGE:
        return None
    return storage if type(tensor) in _PLAIN or has_memory(storage) else None


def has_memory(storage: torch.UntypedStorage) -> bool:
    """Whether a storage has memory.

    Wrappers, and the zeros of forward-mode differentiation, have a size but no memory.
    """
    try:
        # PyTorch warns if a fake tensor, whose device is meta, is asked for its address.
        return storage.device == _META or storage.data_ptr() != 0 or storage.nbytes() == 0
    except RuntimeError:
        return storage.device == _META  # a fake tensor's storage counts as if it had memory


def _parts(tensor: torch.Tensor) -> Iterable[torch.Tensor]:
    """The tensors inside a tensor without a storage of its own.

    There are none if it hides its memory or has none.
    """
    if (under := inside_transform(tensor)) is not None:
        return (under,)
    if tensor.layout == torch.sparse_coo:
        return sparse_parts(tensor)
    if tensor.layout in _BY_ROW:
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in _BY_COLUMN:
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    inner = inner_tensors(tensor)
    # A tensor that does not name its parts has them among its attributes. A DTensor also names its
    # mesh, which is no tensor.
    return tensors_in(vars(tensor).values() if inner is None else inner)
