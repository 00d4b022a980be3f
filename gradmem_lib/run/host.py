"""The resident memory of the process and its workers, beside the bytes of tensors that are counted.

Where the two grow apart, the memory is in what no tracker of tensors sees: arrays of numpy and
lists of numbers, graphs of single numbers, copies in the workers of a loader, pinned memory.
"""

from __future__ import annotations

import time
from itertools import pairwise
from typing import NamedTuple

from ..units import format_bytes

EVERY = 0.25  # seconds between two looks
SHARE_OF_TIME = 0.01  # for finding workers, which takes milliseconds
KEPT = 256
PARTS = 5  # of a run; in the first one, caches fill up
LEAST = 32 * 2**20
SHARE = 0.1  # of what is resident at the end


class Look(NamedTuple):
    """``step``: how many optimizer steps were done. ``resident`` and ``counted`` are bytes."""

    step: int
    resident: int
    counted: int


class Host:
    def __init__(self) -> None:
        self.looks: list[Look] = []
        self.every, self.next = EVERY, 0.0
        self.highest, self.workers = 0, 0
        self.children: list = []
        self.find_next = 0.0
        try:
            import psutil  # not everywhere where scripts are measured
        except ImportError:
            self.process = None
        else:
            self.process = psutil.Process()

    def look(self, step: int, counted: int) -> None:
        """Note what is resident, unless that was done a moment ago."""
        now = time.perf_counter()
        if self.process is None or now < self.next:
            return
        self.next = now + self.every
        self.looks.append(Look(step, self._resident(), counted))
        self.highest = max(self.highest, self.looks[-1].resident)
        if len(self.looks) > KEPT:
            del self.looks[::2]
            self.every *= 2

    def _resident(self) -> int:
        """The process's bytes, and what its children do not share with it."""
        import psutil

        began = time.perf_counter()
        if began >= self.find_next:
            self.children = self.process.children(recursive=True)
            took = time.perf_counter() - began
            self.find_next = began + took / SHARE_OF_TIME
            self.workers = max(self.workers, len(self.children))
        nbytes = self.process.memory_info().rss
        for child in self.children:
            try:
                of_child = child.memory_info()
            except psutil.Error:  # it has ended meanwhile
                continue
            nbytes += max(of_child.rss - getattr(of_child, "shared", 0), 0)
        return nbytes

    def words(self) -> list[str]:
        """A sentence on how much was resident, if it is known."""
        if not self.highest:
            return []
        workers = ""
        if self.workers:
            workers = f" and {self.workers} process{'es' * (self.workers > 1)} that it started"
        highest = format_bytes(self.highest)
        return [f"Resident on the host: at most {highest}, of this process{workers}."]

    def growth(self) -> str:
        """A sentence, if the process grows in each part of the run, and its tensors do not."""
        if len(self.looks) <= PARTS:
            return ""
        last = len(self.looks) - 1
        ends = [self.looks[last * part // PARTS] for part in range(1, PARTS + 1)]
        first, end = ends[0], ends[-1]
        beside = [look.resident - look.counted for look in ends]
        nbytes = beside[-1] - beside[0]
        even = nbytes / (PARTS - 1)
        if nbytes < max(LEAST, SHARE * end.resident):
            return ""
        if any(after - before < even / 2 for before, after in pairwise(beside)):
            return ""
        tensors = format_bytes(max(end.counted - first.counted, 0))
        return (
            f"The process grows, and its tensors do not: from step {first.step + 1} to step "
            f"{end.step + 1} what is resident became {format_bytes(end.resident - first.resident)} "
            f"more, of which {tensors} are counted tensors. Look for arrays of numpy and numbers "
            "in lists, a loss that is added up without .item() (a graph of numbers), data that "
            "each worker of a DataLoader copies, and pinned memory."
        )
