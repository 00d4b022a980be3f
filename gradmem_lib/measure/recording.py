"""The live storages, their bytes by category, and both at every moment of a run."""

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
# number of the sample, number of the operation, phase, total; then bytes by category
NEW, COLUMNS = 4, 4 + N
TOTAL, BY = 3, slice(NEW, COLUMNS)
KEPT_LIVES = 8192


class Entry(weakref.ref):
    """A live storage. The weak reference's callback runs when its bytes are freed.

    ``nbytes``: the bytes that are counted; ``size``: the storage's own size; ``sample``: the first
    sample that contains it; ``module``: a submodule or a name; ``op``: the operation that made it.
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
    """The sample with the most bytes since some moment, and the entries that were alive then and
    are gone now.
    """

    def __init__(self) -> None:
        self.total, self.phase, self.sample = 0, IDLE, -1
        self.gone: list[Entry] = []


class Recording:
    """Counts each storage of ``device`` once, from when it is found until it is freed, and samples
    the sum.

    It keeps all samples, or about ``keep`` of them. Each of these is then the largest of its
    window, so no peak is lost. A gradient is a temporary until its parameter has it, and so are an
    optimizer's first states. A storage is written into the samples under its last category, when it
    is gone or when somebody reads the samples.
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
        # New samples; and of storages that are gone: first sample, first one without it, bytes,
        # category. Flat, to spare the GC.
        self._rows, self._lives = list[int](), list[int]()
        self._stride, self._room = 1, NEW * keep

    # Subclasses may override these four (predictions do).

    def size(self, storage: UntypedStorage) -> int:
        """Bytes to count for ``storage``; 0 leaves it out."""
        device = storage.device
        here = device == self.device or (self._index is None and device.type == self._type)
        return storage.nbytes() if here and has_memory(storage) else 0

    # ``scratch(func, args)``: bytes that a kernel takes and returns inside one operation. Only
    # rules of that kernel give them.
    scratch: Any = None

    def entered(self, entry: Entry) -> None:
        """Called when ``entry`` has been counted."""

    def left(self, entry: Entry) -> None:
        """Called when ``entry`` is gone."""

    # What is alive

    def enter(
        self, storage: UntypedStorage, category: int, module: object = "", op: object = ""
    ) -> int:
        """Count a new storage. Returns the bytes that it adds."""
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
        """Remove the storages that were freed since the last call."""
        while self.freed:
            self.leave(self.freed.popleft())

    def resize(self, entry: Entry, storage: UntypedStorage) -> int:
        """Count a storage's new size. Returns the bytes that it adds."""
        self.leave(entry)
        return max(self.enter(storage, entry.category, entry.module, entry.op) - entry.nbytes, 0)

    def tag(self, value: Any, category: int, module: object) -> None:
        """Put the storages of ``value`` (a tensor or several) into ``category``.

        New storages are counted.
        """
        for storage in storages_of(value):
            if self.freed:
                self.drain()  # a storage that was just freed may have had the same address
            entry = self.live.get(storage_key(storage))
            if entry is None:
                self.enter(storage, category, module)
            else:
                entry.module, entry.category = module, category

    def were_there(self, entries: list[Entry]) -> None:
        """Count ``entries`` from the first sample on: they were just found, but are older than the
        block.
        """
        nbytes = sum(entry.nbytes for entry in entries)
        for entry in entries:
            entry.sample = 0
        self._settle()[:, TOTAL] += nbytes
        self.phase_peaks = [n and n + nbytes for n in self.phase_peaks]
        self.run.total += nbytes
        self.lap.total += nbytes

    def take_and_give(self, nbytes: int, func: object) -> None:
        """Sample ``nbytes`` of scratch memory that operation ``func`` held for a moment."""
        self._lives += (self.count, self.count + 1, nbytes, TEMPORARIES)
        self.total += nbytes
        self.sample(func)
        self.total -= nbytes

    # Samples

    def sample(self, func: object = "") -> None:
        """Record the live bytes after operation ``func``."""
        total, phase = self.total, self.phase
        # a lap is never above its run
        for peak in (self.lap, self.run) if total > self.lap.total else ():
            if total > peak.total:
                peak.total, peak.phase, peak.sample, peak.gone = total, phase, self.count, []
        if total > self.phase_peaks[phase]:
            self.phase_peaks[phase] = total
        if self.count % self._stride == 0:
            if len(self._rows) >= self._room:
                rows = self._settle()  # every other sample stays, the larger of two
                self._settled, self._stride = (
                    rows[largest_of_windows(rows[:, TOTAL], 2)],
                    2 * self._stride,
                )
                self._room = NEW * (self.keep - len(self._settled))
            self._rows += (self.count, self.op, phase, total)
        elif total >= (self._rows[-1] if self._rows else self._settled[-1, TOTAL]):
            self._rows[-NEW:] = (self.count, self.op, phase, total)
        self.count += 1

    def rows(self) -> np.ndarray:
        """int64 (samples, 9): operation, phase, total, and bytes by category (the last one that
        each storage had).
        """
        alive = [(e.sample, self.count, e.nbytes, e.category) for e in self.live.values()]
        return _with(self._settle().copy(), alive)[:, 1:]

    def _settle(self) -> np.ndarray:
        """The samples, with the storages that are gone added to their bytes by category."""
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
        """The entries that are alive now, or were alive at ``peak``."""
        live = list(self.live.values())
        return live if peak is None else [e for e in live if e.sample <= peak.sample] + peak.gone

    def next_lap(self) -> MemorySnapshot:
        """The peak since the last lap, or since the beginning."""
        self.drain()
        found, self.lap = self.at(self.lap), Peak()
        self.sample()
        return found

    def restart(self) -> None:
        """Forget all peaks, and start from the bytes that are live now."""
        self.run = Peak()
        self.next_lap()
        self.phase_peaks = [0] * len(PHASES)


def _with(rows: np.ndarray, lives: Any) -> np.ndarray:
    """``rows``, with the bytes of ``lives`` added to their categories, in all samples that contain
    them.
    """
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
