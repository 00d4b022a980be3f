"""The samples of a run and its peak, put right when a storage turns out to belong to another category."""

from __future__ import annotations

from array import array

import numpy as np

from ..names import CATEGORIES, IDLE, PHASES
from .storages import Entry, Recorder
from .timeline import MemorySnapshot, Timeline, largest_of_windows

N = len(CATEGORIES)
COLUMNS = 4 + N  # the sample's number, the operation's, phase, total, and bytes by category
TOTAL, BY = 3, slice(4, 4 + N)
KEPT_MOVES = 8192


class Recording(Recorder):
    """Keeps samples, all of them or (``keep``) about so many: then each is the largest of its window, and no peak is lost.

    A gradient is a temporary until its parameter has it, and so are an optimizer's first states. When the category of a
    storage changes, the samples since it appeared are put right, those of the peak included.
    """

    def __init__(self, keep: int | None = None):
        self.keep = keep
        self.count = 0  # samples so far
        self.phase_peaks = [0] * len(PHASES)
        self._rows = array("q")
        self._moves = array("q")  # sample a storage is part of from, sample it moved at, bytes, before, after
        self._stride, self._in_window = 1, 0
        self._window: tuple | None = None
        self.peak_total, self._peak_by, self._peak_phase, self._peak_sample = 0, [0] * N, IDLE, -1
        self._dead_at_peak: list[Entry] = []

    # What it hears

    def entered(self, entry: Entry) -> None:
        entry.sample = self.count

    def left(self, entry: Entry) -> None:
        if entry.sample <= self._peak_sample:
            self._dead_at_peak.append(entry)

    def moved(self, entry: Entry, before: int) -> None:
        if entry.sample <= self._peak_sample:  # it was this all along, also at the peak
            self._peak_by[before] -= entry.nbytes
            self._peak_by[entry.category] += entry.nbytes
        if entry.sample < self.count:
            self._moves.extend((entry.sample, self.count, entry.nbytes, before, entry.category))
            if self.keep is not None and len(self._moves) >= 5 * KEPT_MOVES:
                self._settle()

    def was_there(self, entry: Entry) -> None:
        entry.sample = 0
        rows = self._all_rows()
        rows[:, TOTAL] += entry.nbytes
        rows[:, BY.start + entry.category] += entry.nbytes
        self._write(rows)
        self.phase_peaks = [n and n + entry.nbytes for n in self.phase_peaks]
        self.peak_total += entry.nbytes
        self._peak_by[entry.category] += entry.nbytes

    def sampled(self, op: int, phase: int, total: int, by: list[int], func: object) -> None:
        if total > self.peak_total:
            self.take_peak(phase, total, by)
        if total > self.phase_peaks[phase]:
            self.phase_peaks[phase] = total
        window = self._window
        if window is None or total >= window[TOTAL]:
            self._window = (self.count, op, phase, total, *by)
        self.count += 1
        self._in_window += 1
        if self._in_window >= self._stride:
            self._rows.extend(self._window)
            self._window, self._in_window = None, 0
            if self.keep is not None and len(self._rows) >= self.keep * COLUMNS:
                self._thin_out()

    # What it tells

    def rows(self) -> np.ndarray:
        """int64 (samples, 9): operation, phase, total, and bytes by the category that they turned out to belong to."""
        rows = self._all_rows()
        rows[:, BY] += self._corrections(rows[:, 0])
        return rows[:, 1:]

    def timeline(self) -> Timeline:
        return Timeline(self.rows())

    def peak(self) -> MemorySnapshot:
        """The moment with the most bytes since the beginning, or since ``take_peak``."""
        by = dict(zip(CATEGORIES, self._peak_by, strict=True))
        return MemorySnapshot(self.peak_total, by, PHASES[self._peak_phase])

    def at_peak(self, live: list[Entry]) -> list[Entry]:
        """The entries that were alive at the peak; ``live`` are those that are now."""
        return [e for e in live if e.sample <= self._peak_sample] + self._dead_at_peak

    def take_peak(self, phase: int, total: int, by: list[int]) -> None:
        """Take this moment for the peak."""
        self.peak_total, self._peak_by = total, list(by)
        self._peak_phase, self._peak_sample = phase, self.count
        self._dead_at_peak = []

    def forget_holders(self) -> None:
        self._dead_at_peak = []

    def _all_rows(self) -> np.ndarray:
        rows = np.array(self._rows, dtype=np.int64)
        if self._window is not None:
            rows = np.concatenate([rows, np.array(self._window, dtype=np.int64)])
        return rows.reshape(-1, COLUMNS)

    def _corrections(self, samples: np.ndarray) -> np.ndarray:
        """int64 (len(samples), 6): what to add to bytes by category."""
        change = np.zeros((len(samples) + 1, N), dtype=np.int64)
        moves = np.array(self._moves, dtype=np.int64).reshape(-1, 5)
        begin, end = np.searchsorted(samples, moves[:, 0]), np.searchsorted(samples, moves[:, 1])
        nbytes, before, after = moves[:, 2], moves[:, 3], moves[:, 4]
        for at, sign in ((begin, 1), (end, -1)):
            np.add.at(change, (at, after), sign * nbytes)
            np.add.at(change, (at, before), -sign * nbytes)
        return change.cumsum(axis=0)[:-1]

    def _settle(self, thinner: bool = False) -> None:
        """Write the corrections into the rows; ``thinner``: and keep every other row, the larger of two."""
        rows = self._all_rows()
        rows[:, BY] += self._corrections(rows[:, 0])
        self._moves = array("q")
        self._write(rows, thinner)

    def _write(self, rows: np.ndarray, thinner: bool = False) -> None:
        if self._window is not None:
            self._window, rows = tuple(rows[-1].tolist()), rows[:-1]
        if thinner:
            rows = rows[largest_of_windows(rows[:, TOTAL], 2)]
        self._rows = array("q", rows.tobytes())

    def _thin_out(self) -> None:
        self._settle(thinner=True)
        self._stride *= 2
