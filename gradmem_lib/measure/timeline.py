"""The results of a measurement: live bytes at one moment, who holds a storage, and live bytes over
a whole run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..names import CATEGORIES, PHASES

OP, PHASE, TOTAL, BY = 0, 1, 2, slice(3, None)  # columns of a timeline's rows


@dataclass(frozen=True)
class MemorySnapshot:
    """Live bytes at one moment: their sum, their sum in each category, and the phase of
    the step.
    """

    total: int
    by_category: dict[str, int]
    phase: str

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {n:,}" for name, n in self.by_category.items() if n)
        return f"{self.total:,} bytes in {self.phase}" + (f" ({parts})" if parts else "")


class Holder(NamedTuple):
    """One storage: its bytes, category, the module or parameter it belongs to, and the operation
    that made it.
    """

    nbytes: int
    category: str
    module: str
    op: str


class Timeline:
    """Live bytes over the operations of a run. Every list has one entry for each sample.

    ``rows`` is an int64 array (samples, 3 + 6): operation index, phase, total bytes, then bytes by
    category. If a run has more samples than are kept, it is thinned evenly. Each sample that stays
    is the largest of its window, so no peak is lost.
    """

    def __init__(self, rows: np.ndarray):
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def events(self) -> list[int]:
        return self.rows[:, OP].tolist()

    @property
    def phases(self) -> list[str]:
        return [PHASES[code] for code in self.rows[:, PHASE]]

    @property
    def totals(self) -> list[int]:
        return self.rows[:, TOTAL].tolist()

    @property
    def by_category(self) -> dict[str, list[int]]:
        return dict(zip(CATEGORIES, self.rows[:, BY].T.tolist(), strict=True))

    @property
    def peak_index(self) -> int:
        """Index of the first largest sample. Raises ``ValueError`` on an empty timeline."""
        return int(self.rows[:, TOTAL].argmax())

    def decimate(self, max_points: int) -> Timeline:
        """At most ``max_points`` samples, each the largest of its window."""
        n = len(self.rows)
        if n <= max_points:
            return self
        return Timeline(self.rows[largest_of_windows(self.rows[:, TOTAL], -(-n // max_points))])


def largest_of_windows(values: np.ndarray, window: int) -> np.ndarray:
    """The index of the first largest value in each window of ``window`` consecutive values."""
    starts = np.arange(0, len(values), window)
    padded = np.full(len(starts) * window, -1, dtype=np.int64)
    padded[: len(values)] = values
    return starts + padded.reshape(-1, window).argmax(axis=1)
