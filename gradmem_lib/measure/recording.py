"""The live storages, their bytes by category, and both at every moment of a run."""

from __future__ import annotations

import heapq
import weakref
from collections import deque
from collections.abc import Iterable
from types import CodeType
from typing import Any

import numpy as np
import torch
from torch import UntypedStorage

from ..compat.tensors import storage_key
from ..names import (
    BETWEEN_STEPS,
    CATEGORIES,
    GRADIENTS,
    MOMENTS,
    PARAMETERS,
    PHASE_OF_MOMENT,
    PHASES,
    TEMPORARIES,
)
from .paths import Held
from .storages import NO_STORAGE, has_memory, storages_of
from .timeline import Holder, MemorySnapshot, largest_of_windows

# A sample as it is kept: its number, the number of the operation, moment, finished optimizer steps,
# total; then bytes by category.
MOMENT, STEP, TOTAL = 2, 3, 4
NEW, COLUMNS = 5, 5 + len(CATEGORIES)
BY = slice(NEW, COLUMNS)
MAX_PENDING_LIFETIMES = 8192
MAX_BATCHES = 1024
MAX_PAST = 16_384  # the last freed storages whose lines and shapes are known
EXISTED = -1  # the step of a storage that was there before its first use
_PHASES = np.array(PHASE_OF_MOMENT)


class Entry(weakref.ref):
    """A live storage. The weak reference's callback runs when its bytes are freed.

    ``nbytes``: the bytes that are counted; ``size``: the storage's own size; ``sample``: the first
    sample that contains it; ``module``: a submodule or a name; ``op``: the operation that made it;
    ``dtype`` and ``shape``: those of its first tensor; ``step``: the optimizer steps that were
    finished when it was made; ``turn``: the turns; ``line``: the calling line, as code and
    number; ``moment``: the moment that ran then.

    Few entries have these, and the others have the values below. ``expanded``: it is several times
    larger than all that it was computed from. ``is_result``: an outermost module has returned it.
    ``origin``: a gradient or a weight, if it was computed outside of modules from such ones alone.
    ``stop``: the first sample without it, if it was freed. ``updated``: the last step of an
    optimizer that has this weight, or this state. ``continues``: a part of it was joined before.
    ``parts_until``: the last step before which, or in whose first use, a part of it was taken.
    ``held``: who held it when a walk has last met it.
    """

    __slots__ = (
        "__dict__",
        "category",
        "dtype",
        "key",
        "line",
        "module",
        "moment",
        "nbytes",
        "op",
        "sample",
        "shape",
        "size",
        "step",
        "turn",
    )
    category: int
    dtype: torch.dtype | None
    key: int
    line: tuple[CodeType, int] | None
    module: Any
    moment: int
    nbytes: int
    op: Any
    sample: int
    shape: tuple[int, ...]
    size: int
    step: int
    turn: int
    expanded = False
    is_result = False
    origin: Entry | None = None
    stop: int | None = None
    updated = -1
    continues = False
    parts_until = -1
    held: Held | None = None

    @property
    def computed_from(self) -> str:
        """ "gradients" or "parameters", which its origin may have become later, or nothing."""
        if self.origin is None or self.origin.category not in (GRADIENTS, PARAMETERS):
            return ""
        return CATEGORIES[self.origin.category]


class Peak:
    """The sample with the most bytes since some moment.

    ``freed_since``: the entries that were alive at that sample and have been freed after it.
    """

    def __init__(self) -> None:
        self.total, self.moment, self.step, self.turn = 0, BETWEEN_STEPS, 0, 0
        self.sample = -1
        self.freed_since: list[Entry] = []


class Recording:
    """Counts each storage of ``device`` from its allocation to its free, and samples the sum.

    It keeps all samples, or about ``max_samples`` of them. Each of these is then the largest of its
    window, so no peak is lost. A gradient is a temporary until it is the ``.grad`` of its
    parameter, and so are an optimizer's first states. A storage is written into the samples under
    its last category, when it is freed or when the samples are read.
    """

    def __init__(self, device: torch.device, max_samples: float = np.inf):
        self.device, self.max_samples = device, max_samples
        self._type, self._index = device.type, device.index
        self.live: dict[int, Entry] = {}
        self.freed: deque[Entry] = deque()
        # The storages that were freed last: a remedy may act on those that look like the peak's.
        self.past: deque[Entry] = deque(maxlen=MAX_PAST)
        self._queue_freed = self.freed.append
        self.total = 0
        self.op, self.moment = 0, BETWEEN_STEPS  # of the last operation
        self.step = 0  # optimizer steps that are finished
        self.turn = 0  # see `Position`
        # Where training goes on with batches of another size: (operation, rows of the batch)
        self.batches: list[tuple[int, int]] = []
        self.count = 0  # samples so far
        self.restarted_at = 0  # the first sample that `run_peak` may be
        self.run_peak, self.window_peak = Peak(), Peak()
        self.moment_peaks: dict[int, int] = {}  # of the moments since the last reset
        self.moments_seen = set[int]()
        self._flushed = np.zeros((0, COLUMNS), dtype=np.int64)
        # New samples; and of freed storages: first sample, first one without it, bytes, category.
        # Flat lists of ints, so that the garbage collector has nothing to traverse.
        self._rows, self._lifetimes = list[int](), list[int]()
        self._stride, self._capacity = 1, NEW * max_samples

    @property
    def phase(self) -> int:
        return PHASE_OF_MOMENT[self.moment]

    # Subclasses may override these four (predictions do).

    def size(self, storage: UntypedStorage) -> int:
        """Bytes to count for ``storage``; 0 leaves it out."""
        device = storage.device
        on_device = device == self.device or (self._index is None and device.type == self._type)
        return storage.nbytes() if on_device and has_memory(storage) else 0

    # ``scratch(func, args)``: bytes that a kernel allocates and frees inside one operation. Only
    # rules of that kernel give them.
    scratch: Any = None

    def after_alloc(self, entry: Entry) -> None:
        """Called after ``entry`` has been counted."""

    def after_free(self, entry: Entry) -> None:
        """Called after ``entry`` has been freed."""

    # What is alive

    def on_alloc(
        self,
        storage: UntypedStorage,
        category: int,
        module: object = "",
        op: object = "",
        tensor: torch.Tensor | None = None,
        line: tuple[CodeType, int] | None = None,
    ) -> int:
        """Count a new storage, and return its bytes (0 if it is left out).

        ``tensor`` is the first one in it, ``line`` the calling line.
        """
        nbytes = self.size(storage)
        if nbytes == 0:
            return 0
        entry = Entry(storage, self._queue_freed)
        entry.key = storage_key(storage)
        entry.nbytes = nbytes
        entry.size = storage.nbytes()
        entry.category = category
        entry.module = module
        entry.op = op
        entry.sample = self.count
        entry.step = self.step
        entry.turn = self.turn
        entry.moment = self.moment
        entry.line = line
        entry.dtype = None if tensor is None else tensor.dtype
        # a strided nested tensor has rows of several sizes, and no shape
        has_shape = tensor is not None and not (tensor.is_nested and tensor.layout == torch.strided)
        entry.shape = tensor.shape if has_shape else ()
        self.live[entry.key] = entry
        self.total += nbytes
        self.after_alloc(entry)
        return nbytes

    def on_free(self, entry: Entry) -> None:
        """Stop counting ``entry``, whose storage was freed or resized."""
        if self.live.get(entry.key) is not entry:
            return
        del self.live[entry.key]
        self.total -= entry.nbytes
        self._lifetimes += (entry.sample, self.count, entry.nbytes, entry.category)
        if len(self._lifetimes) >= 4 * MAX_PENDING_LIFETIMES:
            self._flush()
        entry.stop = self.count
        self.past.append(entry)
        for peak in (self.run_peak, self.window_peak):
            if entry.sample <= peak.sample:
                peak.freed_since.append(entry)
        self.after_free(entry)

    def entry_of(self, tensor: torch.Tensor) -> Entry | None:
        """What is known of the storage of a tensor that has one of its own, if it is counted."""
        try:
            return self.live.get(storage_key(tensor.untyped_storage()))
        except NO_STORAGE:
            return None

    def drain(self) -> None:
        """Process the frees since the last call."""
        while self.freed:
            self.on_free(self.freed.popleft())

    def resize(self, entry: Entry, storage: UntypedStorage) -> int:
        """Count a storage's new size. Returns the bytes that it adds."""
        self.on_free(entry)
        nbytes = self.on_alloc(storage, entry.category, entry.module, entry.op, None, entry.line)
        return max(nbytes - entry.nbytes, 0)

    def tag(self, value: Any, category: int, module: object) -> None:
        """Put the storages of ``value`` (a tensor or several) into ``category``.

        New storages are counted.
        """
        tensor = value if isinstance(value, torch.Tensor) else None
        for storage in storages_of(value):
            self.tag_storage(storage, category, module, tensor)

    def tag_storage(
        self,
        storage: UntypedStorage,
        category: int,
        module: object,
        tensor: torch.Tensor | None = None,
    ) -> None:
        if self.freed:
            self.drain()  # a storage that was just freed may have had the same address
        entry = self.live.get(storage_key(storage))
        if entry is None:
            self.on_alloc(storage, category, module, tensor=tensor)
        else:
            entry.module, entry.category = module, category

    def backdate(self, entries: list[Entry]) -> int:
        """Count ``entries`` from the first sample on, and return their bytes.

        They were just found, but existed before the block.
        """
        nbytes = sum(entry.nbytes for entry in entries)
        for entry in entries:
            entry.sample = 0
        self._flush()[:, TOTAL] += nbytes
        self.moment_peaks = {m: total + nbytes for m, total in self.moment_peaks.items()}
        self.run_peak.total += nbytes
        self.window_peak.total += nbytes
        return nbytes

    def record_scratch(self, nbytes: int, func: object) -> None:
        """Sample ``nbytes`` of scratch memory, allocated and freed inside operation ``func``."""
        self._lifetimes += (self.count, self.count + 1, nbytes, TEMPORARIES)
        self.total += nbytes
        self.sample(func)
        self.total -= nbytes

    def note_batch(self, rows: int) -> None:
        """Training goes on with a batch of ``rows`` rows; 0 if that is not known."""
        before = self.batches[-1][1] if self.batches else 0
        if rows not in (0, before) and len(self.batches) < MAX_BATCHES:
            self.batches.append((self.op, rows))

    # Samples

    def sample(self, func: object = "") -> None:
        """Record the live bytes after operation ``func``."""
        total, moment = self.total, self.moment
        if total > self.window_peak.total:  # which is never above the run's
            for peak in (self.window_peak, self.run_peak):
                if total > peak.total:
                    peak.total, peak.moment, peak.step = total, moment, self.step
                    peak.turn, peak.sample, peak.freed_since = self.turn, self.count, []
        if total > self.moment_peaks.get(moment, -1):
            self.moment_peaks[moment] = total
            self.moments_seen.add(moment)
        new = (self.count, self.op, moment, self.step, total)
        if self.count % self._stride == 0:
            if len(self._rows) >= self._capacity:
                rows = self._flush()  # every other sample stays, the larger of two
                self._flushed, self._stride = (
                    rows[largest_of_windows(rows[:, TOTAL], 2)],
                    2 * self._stride,
                )
                self._capacity = NEW * (self.max_samples - len(self._flushed))
            self._rows += new
        elif total >= (self._rows[-1] if self._rows else self._flushed[-1, TOTAL]):
            self._rows[-NEW:] = new
        self.count += 1

    def rows(self) -> np.ndarray:
        """int64 (samples, 11), as in ``Timeline``: operation, phase, total, bytes by category (the
        last one that each storage had), moment, finished optimizer steps.
        """
        alive = [(e.sample, self.count, e.nbytes, e.category) for e in self.live.values()]
        kept = _add_lifetimes(self._flush().copy(), alive)
        phases = _PHASES[kept[:, MOMENT]]
        columns = (kept[:, 1], phases, kept[:, TOTAL], kept[:, BY], kept[:, MOMENT], kept[:, STEP])
        return np.column_stack(columns)

    def sample_numbers(self) -> np.ndarray:
        """The number of the sample in each of ``rows``: int64 (samples,)."""
        return self._flush()[:, 0].copy()

    def bytes_of(self, holders: Iterable[Holder]) -> np.ndarray:
        """Of the bytes by category, those of ``holders``: int64 (samples, 6), as in ``rows``."""
        lifetimes = []
        for holder in holders:
            category = CATEGORIES.index(holder.category)
            lifetimes.append((*holder.samples, holder.nbytes, category))
        rows = np.zeros_like(self._flush())
        rows[:, 0] = self._flushed[:, 0]
        return _add_lifetimes(rows, lifetimes)[:, BY]

    def lifetime(self, entry: Entry) -> tuple[int, int]:
        """The first sample with ``entry``, and the first one without it."""
        return entry.sample, self.count if entry.stop is None else entry.stop

    def _flush(self) -> np.ndarray:
        """Add the pending samples and the bytes of freed storages to the stored samples."""
        new = np.pad(
            np.array(self._rows, dtype=np.int64).reshape(-1, NEW), ((0, 0), (0, len(CATEGORIES)))
        )
        self._flushed = _add_lifetimes(np.concatenate((self._flushed, new)), self._lifetimes)
        self._rows, self._lifetimes = [], []
        self._capacity = NEW * (self.max_samples - len(self._flushed))
        return self._flushed

    # Moments

    def at(self, peak: Peak | None = None) -> MemorySnapshot:
        """The live bytes now, or at ``peak``."""
        by = dict.fromkeys(CATEGORIES, 0)
        for entry in self.entries(peak):
            by[CATEGORIES[entry.category]] += entry.nbytes
        then = peak or self
        phase = PHASES[PHASE_OF_MOMENT[then.moment]]
        return MemorySnapshot(then.total, by, phase, MOMENTS[then.moment], then.step, then.turn)

    def entries(self, peak: Peak | None = None) -> list[Entry]:
        """The entries that are alive now, or were alive at ``peak``."""
        live = list(self.live.values())
        if peak is None:
            return live
        return [entry for entry in live if entry.sample <= peak.sample] + peak.freed_since

    def largest(self, most: int) -> list[Entry]:
        """The ``most`` storages with the most bytes times samples: of those that are alive, and of
        those that were freed last. What was alive at the peak comes first.
        """
        entries = [*self.past, *self.live.values()]
        peak = self.run_peak.sample

        def size(entry: Entry) -> tuple[bool, int]:
            first, stop = self.lifetime(entry)
            return first <= peak < stop, entry.nbytes * (stop - first)

        return heapq.nlargest(most, entries, size)

    def next_window(self) -> MemorySnapshot:
        """The peak of the current window. A new window begins."""
        self.drain()
        found, self.window_peak = self.at(self.window_peak), Peak()
        self.sample()
        return found

    def restart(self) -> None:
        """Forget all peaks, and start from the bytes that are live now."""
        self.run_peak = Peak()
        self.restarted_at = self.count
        self.next_window()
        self.moment_peaks = {}


def _add_lifetimes(rows: np.ndarray, lifetimes: Any) -> np.ndarray:
    """Add the bytes of each lifetime to its category, in all samples of ``rows`` that it spans."""
    lifetimes = np.array(lifetimes, dtype=np.int64).reshape(-1, 4)
    change = np.zeros((len(rows) + 1, len(CATEGORIES)), dtype=np.int64)
    first, stop, nbytes, category = lifetimes.T
    for samples, sign in ((first, 1), (stop, -1)):
        index = np.searchsorted(rows[:, 0], samples)
        np.add.at(change, (index, category), sign * nbytes)
    rows[:, BY] += change.cumsum(axis=0)[:-1]
    return rows
