"""Which storages are alive, and whose they are: a ledger, and who listens to it.

A storage is the block of bytes behind one or more tensors. Views and tied weights share one, so bytes are counted by
storage: once when it appears, and off again when Python's weak reference to it says that it is gone.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ..compat import inner_tensors, sparse_parts, storage_key, under_transform
from ..names import CATEGORIES


class Entry(weakref.ref):
    """A live storage. The weak reference's callback tells the ledger that its bytes are free.

    ``nbytes``: as counted; ``size``: as the storage said; ``number``: how many entries came before; ``sample``: the first
    sample that it is part of; ``module``: a submodule or a name; ``op``: the operation that made it.
    """

    __slots__ = ("category", "key", "module", "nbytes", "number", "op", "sample", "size")
    category: int
    key: int
    module: Any
    nbytes: int
    number: int
    op: Any
    sample: int
    size: int


class Recorder:
    """Says what a ledger counts, and hears of every change to it. This one counts everything and keeps nothing."""

    def size(self, storage: torch.UntypedStorage) -> int:
        """Bytes to count for ``storage``; 0 for one that is to be left out."""
        return storage.nbytes()

    def scratch(self, func: object, args: tuple) -> int:
        """Bytes that the operation ``func(*args)`` took and gave back, unseen by anyone but who knows its kernel."""
        return 0

    def entered(self, entry: Entry) -> None:
        """``entry`` is alive; to set ``entry.sample``."""
        entry.sample = 0

    def left(self, entry: Entry) -> None:
        """``entry`` is gone."""

    def moved(self, entry: Entry, before: int) -> None:
        """``entry`` turned out to belong to ``entry.category``; until now it was counted under ``before``."""

    def was_there(self, entry: Entry) -> None:
        """``entry`` has just been found, and is older than the block."""

    def sampled(self, op: int, phase: int, total: int, by: list[int], func: object) -> None:
        """Bytes stand at ``total`` after operation number ``op``, which is ``func``."""


class Ledger:
    """Live bytes: ``total``, and ``by`` category (six integers)."""

    def __init__(self, recorder: Recorder):
        self.recorder = recorder
        self.storages: dict[int, Entry] = {}
        self.freed: deque[Entry] = deque()
        self.total = 0
        self.by = [0] * len(CATEGORIES)
        self._entered = 0

    def enter(
        self, storage: torch.UntypedStorage, category: int, module: object = "", op: object = ""
    ) -> int:
        """Count a storage that is not known; the bytes that it adds."""
        nbytes = self.recorder.size(storage)
        if nbytes == 0:
            return 0
        entry = Entry(storage, self.freed.append)
        key = entry.key = storage_key(storage)
        entry.nbytes, entry.size, entry.category = nbytes, storage.nbytes(), category
        entry.module, entry.op, entry.number = module, op, self._entered
        self._entered += 1
        self.storages[key] = entry
        self.total += nbytes
        self.by[category] += nbytes
        self.recorder.entered(entry)
        return nbytes

    def resize(self, entry: Entry, storage: torch.UntypedStorage) -> int:
        """Take note of a storage's new size; the bytes that it adds."""
        grown = self.recorder.size(storage) - entry.nbytes
        entry.size = storage.nbytes()
        entry.nbytes += grown
        self.total += grown
        self.by[entry.category] += grown
        return max(grown, 0)

    def tag(self, storage: torch.UntypedStorage, category: int, module: object) -> Entry | None:
        """Put ``storage`` under ``category``, counting it if it was not known: then its entry is returned."""
        if self.freed:
            self.drain()  # its address may have been another storage's a moment ago
        entry = self.storages.get(storage_key(storage))
        if entry is None:
            return self.storages[storage_key(storage)] if self.enter(storage, category, module) else None
        entry.module = module
        before = entry.category
        if before != category:
            self.by[before] -= entry.nbytes
            self.by[category] += entry.nbytes
            entry.category = category
            self.recorder.moved(entry, before)
        return None

    def drain(self) -> None:
        """Take off the storages that were freed since the last look."""
        while self.freed:
            entry = self.freed.popleft()
            if self.storages.get(entry.key) is not entry:
                continue
            del self.storages[entry.key]
            self.total -= entry.nbytes
            self.by[entry.category] -= entry.nbytes
            self.recorder.left(entry)


def tensors_in(values: Iterable) -> Iterator[torch.Tensor]:
    """The tensors in ``values``, and in the lists, tuples and dicts among them."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from tensors_in(value)
        elif isinstance(value, dict):
            yield from tensors_in(value.values())


def storages_of(tensor: torch.Tensor) -> Iterator[torch.UntypedStorage]:
    """What holds the bytes of ``tensor``: its storage, or those of the tensors inside it (sparse, DTensor, quantized)."""
    storage = own_storage(tensor)
    if storage is not None:
        yield storage
    else:
        for part in _parts(tensor):
            yield from storages_of(part)


def own_storage(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """The storage of ``tensor``; ``None`` for one that has none of its own."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) and _is_wrapper(tensor):
        return None
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None


_dispatches: dict[type[torch.Tensor], bool] = {}


def dispatches(kind: type[torch.Tensor]) -> bool:
    """Whether tensors of this type have operations of their own."""
    known = _dispatches.get(kind)
    if known is None:
        known = kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
        _dispatches[kind] = known
    return known


def _is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` only looks as large as it is: its storage has a size and no memory, which is in tensors inside."""
    if not dispatches(type(tensor)):
        return False
    try:
        return not has_memory(tensor.untyped_storage())
    except (NotImplementedError, RuntimeError):
        return True


def has_memory(storage: torch.UntypedStorage) -> bool:
    """Whether there is anything behind a storage's size: not in wrappers, nor in the zeros of forward-mode differentiation."""
    try:
        # A fake tensor's storage is on "meta", and is what it is taken for.
        return storage.device.type == "meta" or storage.nbytes() == 0 or storage.data_ptr() != 0
    except RuntimeError:
        return False


def _parts(tensor: torch.Tensor) -> Iterable[torch.Tensor]:
    """The tensors inside a tensor without a storage; nothing for those that hide their memory or have none."""
    under = under_transform(tensor)
    if under is not None:
        return (under,)
    if tensor.layout == torch.sparse_coo:
        return sparse_parts(tensor)
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    if dispatches(type(tensor)):
        inner = inner_tensors(tensor)
        # A DTensor also names its mesh, which is no tensor.
        return tensors_in(vars(tensor).values() if inner is None else inner)
    return ()
