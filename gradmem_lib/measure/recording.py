"""The storages that are alive, the bytes they take by category, and both at every moment of a run."""

from __future__ import annotations

import weakref
from array import array
from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from ..compat import storage_key
from ..names import CATEGORIES, IDLE, PHASES
from .storages import has_memory
from .timeline import MemorySnapshot, largest_of_windows

N = len(CATEGORIES)
COLUMNS = 4 + N  # the sample's number, the operation's, phase, total, and bytes by category
TOTAL, BY = 3, slice(4, 4 + N)
KEPT_MOVES = 8192


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
    is a temporary until its parameter has it, and so are an optimizer's first states. When the category of a storage
    changes, the samples since it appeared are put right.
    """

    def __init__(self, device: torch.device, keep: int | None = None):
        self.device, self.keep = device, keep
        self._type, self._index = device.type, device.index
        self.live: dict[int, Entry] = {}
        self.freed: deque[Entry] = deque()
        self.total, self.by = 0, [0] * N
        self.op, self.phase = 0, IDLE  # of the last operation
        self.count = 0  # samples so far
        self.run, self.lap = Peak(), Peak()
        self.phase_peaks = [0] * len(PHASES)
        self._rows = array("q")
        self._moves = array("q")  # sample a storage is part of from, sample it moved at, bytes, before, after
        self._stride = 1

    # Others may count otherwise (predictions do).

    def size(self, storage: torch.UntypedStorage) -> int:
        """Bytes to count for ``storage``; 0 for one that is to be left out."""
        device = storage.device
        here = device.type == self._type and self._index in (None, device.index)
        return storage.nbytes() if here and has_memory(storage) else 0

    def scratch(self, func: object, args: tuple) -> int:
        """Bytes that the operation ``func(*args)`` took and gave back, unseen by anyone but who knows its kernel."""
        return 0

    def entered(self, entry: Entry) -> None:
        """``entry`` is alive."""

    def left(self, entry: Entry) -> None:
        """``entry`` is gone."""

    # What is alive

    def enter(
        self, storage: torch.UntypedStorage, category: int, module: object = "", op: object = ""
    ) -> int:
        """Count a storage that is not known; the bytes that it adds."""
        nbytes = self.size(storage)
        if nbytes == 0:
            return 0
        entry = Entry(storage, self.freed.append)
        key = entry.key = storage_key(storage)
        entry.nbytes, entry.size, entry.category = nbytes, storage.nbytes(), category
        entry.module, entry.op, entry.sample = module, op, self.count
        self.live[key] = entry
        self.total += nbytes
        self.by[category] += nbytes
        self.entered(entry)
        return nbytes

    def leave(self, entry: Entry) -> None:
        if self.live.get(entry.key) is not entry:
            return
        del self.live[entry.key]
        self.total -= entry.nbytes
        self.by[entry.category] -= entry.nbytes
        for peak in (self.run, self.lap):
            if entry.sample <= peak.sample:
                peak.gone.append(entry)
        self.left(entry)

    def drain(self) -> None:
        """Take off the storages that were freed since the last look."""
        while self.freed:
            self.leave(self.freed.popleft())

    def resize(self, entry: Entry, storage: torch.UntypedStorage) -> int:
        """Take note of a storage's new size; the bytes that it adds."""
        self.leave(entry)
        return max(self.enter(storage, entry.category, entry.module, entry.op) - entry.nbytes, 0)

    def tag(self, storage: torch.UntypedStorage, category: int, module: object) -> None:
        """Put ``storage`` under ``category``, counting it if it was not known."""
        if self.freed:
            self.drain()  # its address may have been another storage's a moment ago
        entry = self.live.get(storage_key(storage))
        if entry is None:
            self.enter(storage, category, module)
            return
        entry.module = module
        before, entry.category = entry.category, category
        if before != category:
            self.by[before] -= entry.nbytes
            self.by[category] += entry.nbytes
            if entry.sample < self.count:
                self._moves.extend((entry.sample, self.count, entry.nbytes, before, category))
                if len(self._moves) >= 5 * KEPT_MOVES:
                    self._settle()

    def were_there(self, entries: list[Entry]) -> None:
        """``entries``, all of one category, have just been found, and are older than the block."""
        if not entries:
            return
        nbytes = sum(entry.nbytes for entry in entries)
        for entry in entries:
            entry.sample = 0
        rows = self._settle()
        rows[:, [TOTAL, BY.start + entries[0].category]] += nbytes
        self._rows = array("q", rows.tobytes())
        self.phase_peaks = [n and n + nbytes for n in self.phase_peaks]
        self.run.total += nbytes
        self.lap.total += nbytes

    # Samples

    def sample(self, func: object = "") -> None:
        """Note where the bytes stand after operation ``func``."""
        total, phase = self.total, self.phase
        for peak in (self.run, self.lap):
            if total > peak.total:
                peak.total, peak.phase, peak.sample, peak.gone = total, phase, self.count, []
        if total > self.phase_peaks[phase]:
            self.phase_peaks[phase] = total
        rows = self._rows
        if self.count % self._stride == 0:
            if self.keep is not None and len(rows) >= self.keep * COLUMNS:
                self._thin_out()
                rows = self._rows
            rows.extend((self.count, self.op, phase, total, *self.by))
        elif total >= rows[TOTAL - COLUMNS]:
            rows[-COLUMNS:] = array("q", (self.count, self.op, phase, total, *self.by))
        self.count += 1

    def rows(self) -> np.ndarray:
        """int64 (samples, 9): operation, phase, total, and bytes by the category that they turned out to belong to."""
        return self._settle()[:, 1:]

    def _settle(self) -> np.ndarray:
        """The samples, put right for every move since the last look."""
        rows = np.array(self._rows, dtype=np.int64).reshape(-1, COLUMNS)
        moves = np.array(self._moves, dtype=np.int64).reshape(-1, 5)
        change = np.zeros((len(rows) + 1, N), dtype=np.int64)
        nbytes, before, after = moves[:, 2], moves[:, 3], moves[:, 4]
        for samples, sign in ((moves[:, 0], 1), (moves[:, 1], -1)):
            at = np.searchsorted(rows[:, 0], samples)
            np.add.at(change, (at, after), sign * nbytes)
            np.add.at(change, (at, before), -sign * nbytes)
        rows[:, BY] += change.cumsum(axis=0)[:-1]
        self._rows, self._moves = array("q", rows.tobytes()), array("q")
        return rows

    def _thin_out(self) -> None:
        """Keep every other sample, the larger of two."""
        rows = self._settle()
        self._rows = array("q", rows[largest_of_windows(rows[:, TOTAL], 2)].tobytes())
        self._stride *= 2

    # Moments

    def now(self) -> MemorySnapshot:
        return _snapshot(self.total, self.by, self.phase)

    def at(self, peak: Peak) -> MemorySnapshot:
        by = [0] * N
        for entry in self.entries(peak):
            by[entry.category] += entry.nbytes
        return _snapshot(peak.total, by, peak.phase)

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


def _snapshot(total: int, by: Iterable[int], phase: int) -> MemorySnapshot:
    return MemorySnapshot(total, dict(zip(CATEGORIES, by, strict=True)), PHASES[phase])
