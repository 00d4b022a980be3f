"""The host's memory of the process and its workers, beside the bytes of tensors that are counted.

Where it grows by more than they do, the memory is in what no tracker of tensors sees: arrays of
numpy and lists of numbers, graphs of single numbers, copies in the workers of a loader, pinned
memory.
"""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any, NamedTuple

from ..units import format_bytes

EVERY = 0.25  # seconds between two looks
SHARE_OF_TIME = 0.01  # for looking at workers, which takes milliseconds
KEPT = 256
PARTS = 5  # of a run; in the first one, caches fill up
LEAST = 32 * 2**20
SHARE = 0.1  # of the process's own bytes at the end


class Look(NamedTuple):
    """``step``: how many optimizer steps were done. ``private``: bytes that the process and its
    workers share with nobody, so without files that are mapped. ``counted``: those of tensors, or
    ``None`` if tensors are counted on an accelerator.
    """

    step: int
    private: int
    counted: int | None


class Host:
    def __init__(self) -> None:
        self.looks: list[Look] = []
        self.every, self.next = EVERY, 0.0
        self.workers, self.of_workers, self.most_of_workers = 0, 0, 0
        self.workers_next = 0.0
        self.process: Any = None
        try:
            import psutil  # not everywhere where scripts are measured

            self.process = psutil.Process()
        except Exception:  # such as a machine without a readable /proc
            self.process = None

    def look(self, step: int, counted: int | None, at_the_end: bool = False) -> None:
        """Note how large the process is, unless that was done a moment ago."""
        now = time.perf_counter()
        if self.process is None or (now < self.next and not at_the_end):
            return
        self.next = now + self.every
        if now >= self.workers_next:
            self._look_at_workers()
            self.workers_next = now + (time.perf_counter() - now) / SHARE_OF_TIME
        self.looks.append(Look(step, _private(self.process) + self.of_workers, counted))
        if len(self.looks) > KEPT:
            del self.looks[::2]
            self.every *= 2

    def _look_at_workers(self) -> None:
        import psutil

        workers = self.process.children(recursive=True)
        self.workers = max(self.workers, len(workers))
        self.of_workers = 0
        for worker in workers:
            try:
                # What a fork has copied, and not what it still has in common with its parent.
                self.of_workers += worker.memory_full_info().uss
            except psutil.Error:  # it has ended meanwhile
                continue
        self.most_of_workers = max(self.most_of_workers, self.of_workers)

    def words(self) -> list[str]:
        """A sentence on how much of the host's memory was seen in use, if it is known."""
        if not self.looks:
            return []
        private = format_bytes(max(look.private for look in self.looks))
        workers = ""
        if self.workers:
            several = "es" * (self.workers > 1)
            theirs = format_bytes(self.most_of_workers)
            workers = f", {theirs} of it in {self.workers} process{several} that it started"
        return [f"On the host, this process had up to {private} where it was looked at{workers}."]

    def growth(self) -> str:
        """A sentence, if the process grows in each part of the run by more than its tensors do."""
        if len(self.looks) <= PARTS:
            return ""
        last = len(self.looks) - 1
        ends = [self.looks[last * part // PARTS] for part in range(1, PARTS + 1)]
        first, end = ends[0], ends[-1]
        uncounted = [look.private - (look.counted or 0) for look in ends]
        grown = min(uncounted[-1] - uncounted[0], end.private - first.private)
        if grown < max(LEAST, SHARE * end.private):
            return ""
        least_in_a_part = grown / (PARTS - 1) / 2
        if any(after - before < least_in_a_part for before, after in pairwise(uncounted)):
            return ""
        when = "in this run"
        if end.step > first.step:
            when = f"from step {first.step + 1} to step {end.step + 1}"
        begins = f"The process grows by {format_bytes(end.private - first.private)} {when}"
        others = (
            "arrays of numpy, numbers in lists, what torch.save has written into io.BytesIO, a "
            "loss that is added up without .item() (a graph of numbers), data that each worker of "
            "a DataLoader copies, and pinned memory."
        )
        if end.counted is None or first.counted is None:
            return (
                f"{begins}, on the host. Look for tensors that are moved there and kept, {others}"
            )
        tensors = format_bytes(max(end.counted - first.counted, 0))
        return f"{begins}, and its tensors by {tensors}. Look for {others}"


def _private(process: Any) -> int:
    """The bytes of a process without those that it shares, such as files that it has mapped."""
    found = process.memory_info()
    return found.rss - getattr(found, "shared", 0)
