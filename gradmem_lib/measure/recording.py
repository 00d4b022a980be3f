"""The storages that are alive, the bytes they take by category, and both at every moment of a run."""

import weakref
from collections import deque
from typing import Any

import numpy as np
import torch
from torch import UntypedStorage

from ..compat import storage_key
from ..names import CATEGORIES, IDLE, PHASES, TEMPORARIES
from .storages import has_memory, storages_of
from .timeline import MemorySnapshot, largest_of_windows

N = len(CATEGORIES)
NEW, COLUMNS = 4, 4 + N  # the sample's number, the operation's, phase, total; and bytes by category
TOTAL, BY = 3, slice(NEW, COLUMNS)
KEPT_LIVES = 8192


class Entry(weakref.ref):
    """A live storage. The weak reference's callback says that its bytes are free.

    ``nbytes``: as counted; ``size``: as the storage said; ``sample``: the first sample that it is part of; ``module``: a
    submodule or a name; ``op``: the operation that made it.
    """

    __slots__ = ("category", "key", "module", "nbytes", "op", "sample", "size")
    category: int
    key: int
    module: Any
    nbytes: int
    op: Any
    sample: int
    size: int


class Peak:
    """The sample with the most bytes since some moment, and the entries that were alive in it and are no more."""

    def __init__(self) -> None:
        self.total, self.phase, self.sample = 0, IDLE, -1
        self.gone: list[Entry] = []


class Recording:
    """Counts each storage of ``device`` once, from when it is found until it is freed, and samples what that adds up to.

    It keeps all samples, or (``keep``) about so many: then each is the largest of its window, and no peak is lost. A gradient
    is a temporary until its parameter has it, and so are an optimizer's first states. A storage is written into the samples
    when it is gone, or when they are asked for, under the last category that it had.
    """

    def __init__(self, device: torch.device, keep: float = np.inf):
        self.device, self.keep = device, keep
        self._type, self._index = device.type, device.index
        self.live: dict[int, Entry] = {}
        self.freed: deque[Entry] = deque()
        self._went = self.freed.append
        self.total = 0
        self.op, self.phase = 0, IDLE  # of the last operation
        self.count = 0  # samples so far
        self.run, self.lap = Peak(), Peak()
        self.phase_peaks = [0] * len(PHASES)
        self._settled = np.zeros((0, COLUMNS), dtype=np.int64)
        # Samples since; and of what is gone, its first sample, the first without it, bytes, category. Flat, for the GC's sake.
        self._rows, self._lives = list[int](), list[int]()
        self._stride, self._room = 1, NEW * keep

    # Others may count otherwise (predictions do).

    def size(self, storage: UntypedStorage) -> int:
        """Bytes to count for ``storage``; 0 for one that is to be left out."""
        device = storage.device
        here = device == self.device or (self._index is None and device.type == self._type)
        return storage.nbytes() if here and has_memory(storage) else 0

    # ``scratch(func, args)``: bytes that an operation took and gave back, unseen by anyone but who knows its kernel.
    scratch: Any = None

    def entered(self, entry: Entry) -> None:
        """``entry`` is alive."""

    def left(self, entry: Entry) -> None:
        """``entry`` is gone."""

    # What is alive

    def enter(self, storage: UntypedStorage, category: int, module: object = "", op: object = "") -> int:
        """Count a storage that is not known; the bytes that it adds."""
        nbytes = self.size(storage)
        if nbytes == 0:
            return 0
        entry = Entry(storage, self._went)
        key = entry.key = storage_key(storage)
        entry.nbytes, entry.size, entry.category = nbytes, storage.nbytes(), category
        entry.module, entry.op, entry.sample = module, op, self.count
        self.live[key] = entry
        self.total += nbytes
        self.entered(entry)
        return nbytes

    def leave(self, entry: Entry) -> None:
        if self.live.get(entry.key) is not entry:
            return
        del self.live[entry.key]
        self.total -= entry.nbytes
        self._lives += (entry.sample, self.count, entry.nbytes, entry.category)
        if len(self._lives) >= 4 * KEPT_LIVES:
            self._settle()
        for peak in (self.run, self.lap):
            if entry.sample <= peak.sample:
                peak.gone.append(entry)
        self.left(entry)

    def drain(self) -> None:
        """Take off the storages that were freed since the last look."""
        while self.freed:
            self.leave(self.freed.popleft())

    def resize(self, entry: Entry, storage: UntypedStorage) -> int:
        """Take note of a storage's new size; the bytes that it adds."""
        self.leave(entry)
        return max(self.enter(storage, entry.category, entry.module, entry.op) - entry.nbytes, 0)

    def tag(self, value: Any, category: int, module: object) -> None:
        """Put what holds ``value``, a tensor or several, under ``category``, counting it if it was not known."""
        for storage in storages_of(value):
            if self.freed:
                self.drain()  # its address may have been another storage's a moment ago
            entry = self.live.get(storage_key(storage))
            if entry is None:
                self.enter(storage, category, module)
            else:
                entry.module, entry.category = module, category

    def were_there(self, entries: list[Entry]) -> None:
        """``entries`` have just been found, and are older than the block."""
        nbytes = sum(entry.nbytes for entry in entries)
        for entry in entries:
            entry.sample = 0
        self._settle()[:, TOTAL] += nbytes
        self.phase_peaks = [n and n + nbytes for n in self.phase_peaks]
        self.run.total += nbytes
        self.lap.total += nbytes

    def take_and_give(self, nbytes: int, func: object) -> None:
        """Sample ``nbytes`` that operation ``func`` had for a moment."""
        self._lives += (self.count, self.count + 1, nbytes, TEMPORARIES)
        self.total += nbytes
        self.sample(func)
        self.total -= nbytes

    # Samples

    def sample(self, func: object = "") -> None:
        """Note where the bytes stand after operation ``func``."""
        total, phase = self.total, self.phase
        for peak in (self.lap, self.run) if total > self.lap.total else ():  # no lap is above its run
            if total > peak.total:
                peak.total, peak.phase, peak.sample, peak.gone = total, phase, self.count, []
        if total > self.phase_peaks[phase]:
            self.phase_peaks[phase] = total
        if self.count % self._stride == 0:
            if len(self._rows) >= self._room:
                rows = self._settle()  # every other sample stays, the larger of two
                self._settled, self._stride = rows[largest_of_windows(rows[:, TOTAL], 2)], 2 * self._stride
                self._room = NEW * (self.keep - len(self._settled))
            self._rows += (self.count, self.op, phase, total)
        elif total >= (self._rows[-1] if self._rows else self._settled[-1, TOTAL]):
            self._rows[-NEW:] = (self.count, self.op, phase, total)
        self.count += 1

    def rows(self) -> np.ndarray:
        """int64 (samples, 9): operation, phase, total, and bytes by the category that they turned out to belong to."""
        alive = [(e.sample, self.count, e.nbytes, e.category) for e in self.live.values()]
        return _with(self._settle().copy(), alive)[:, 1:]

    def _settle(self) -> np.ndarray:
        """The samples, with what has come and gone in their bytes by category."""
        new = np.pad(np.array(self._rows, dtype=np.int64).reshape(-1, NEW), ((0, 0), (0, N)))
        self._settled = _with(np.concatenate((self._settled, new)), self._lives)
        self._rows, self._lives = [], []
        self._room = NEW * (self.keep - len(self._settled))
        return self._settled

    # Moments

    def now(self) -> MemorySnapshot:
        return _snapshot(self.entries(), self.total, self.phase)

    def at(self, peak: Peak) -> MemorySnapshot:
        return _snapshot(self.entries(peak), peak.total, peak.phase)

    def entries(self, peak: Peak | None = None) -> list[Entry]:
        """What is alive now, or was at ``peak``."""
        live = list(self.live.values())
        return live if peak is None else [e for e in live if e.sample <= peak.sample] + peak.gone

    def next_lap(self) -> MemorySnapshot:
        """The peak since the last lap, or since the beginning."""
        self.drain()
        found, self.lap = self.at(self.lap), Peak()
        self.sample()
        return found

    def restart(self) -> None:
        """Forget all peaks but for the bytes that are live now."""
        self.run = Peak()
        self.next_lap()
        self.phase_peaks = [0] * len(PHASES)


def _with(rows: np.ndarray, lives: Any) -> np.ndarray:
    """``rows``, with the bytes of ``lives`` added to their categories from the first sample of each until before its last."""
    lives = np.array(lives, dtype=np.int64).reshape(-1, 4)
    change = np.zeros((len(rows) + 1, N), dtype=np.int64)
    for samples, sign in ((lives[:, 0], 1), (lives[:, 1], -1)):
        np.add.at(change, (np.searchsorted(rows[:, 0], samples), lives[:, 3]), sign * lives[:, 2])
    rows[:, BY] += change.cumsum(axis=0)[:-1]
    return rows


def _snapshot(entries: list[Entry], total: int, phase: int) -> MemorySnapshot:
    by = dict.fromkeys(CATEGORIES, 0)
    for entry in entries:
        by[CATEGORIES[entry.category]] += entry.nbytes
    return MemorySnapshot(total, by, PHASES[phase])
