"""Walks ask who holds each storage: before a forward if a fifth more is alive than at the walk
before, at an error or a budget, and at the end.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Collection
from types import FrameType

from .paths import Held, who_holds
from .recording import Entry, Recording, holder_of

MOST_WALKS = 10
HIGHER = 1.2  # times the bytes of the last walk
SHARE = 0.01  # of a run's time, at most
FIRST = 0.05  # seconds that the first walk will take, as a guess
SMALL = 1 / 2000  # of the live bytes: nobody asks who holds such a storage


class Walks:
    """``seconds``: what walks may take in addition to their share of the run's time."""

    def __init__(self, recording: Recording, seconds: float = 0.0):
        self.recording, self.seconds = recording, seconds
        self.begun, self.spent, self.last, self.count = time.perf_counter(), 0.0, FIRST, 0
        self.height = 0  # live bytes at the last walk

    def look(self, frame: FrameType | None) -> None:
        """Walk, if it is worth it and there is time for it."""
        self.recording.drain()
        if self.count >= MOST_WALKS or self.recording.total <= HIGHER * self.height:
            return
        allowed = self.seconds + SHARE * (time.perf_counter() - self.begun)
        if self.spent + self.last <= allowed:
            self.walk(frame)

    def walk(
        self,
        frame: FrameType | None,
        error: BaseException | None = None,
        everywhere: bool = False,
    ) -> None:
        """Note who holds each large storage now. If a walk fails, there is no other one."""
        began = time.perf_counter()
        live = self.recording.live
        least = SMALL * self.recording.total
        wanted = {key: entry.nbytes for key, entry in live.items() if entry.nbytes >= least}
        self.count += 1
        self.height = self.recording.total
        try:
            for key, held in who_holds(wanted, frame, error, everywhere).items():
                before = holder_of(live[key])
                if held.path or before is None:  # the name that it had says more than none
                    live[key].held = held
        except Exception:
            self.count = MOST_WALKS
        self.last = time.perf_counter() - began
        self.spent += self.last


def likely_holders(entries: Collection[Entry]) -> dict[int, Held]:
    """By the address of an entry that no walk has met: who holds what the same line and module have
    made by the same operation, if most of those bytes that were met agree.
    """
    votes = defaultdict[tuple, Counter[Held]](Counter)
    for entry in entries:
        held = holder_of(entry)
        if held is not None:
            votes[_made(entry)][held] += entry.nbytes
    likely = {}
    for entry in entries:
        if holder_of(entry) is None and _made(entry) in votes:
            of_its_kind = votes[_made(entry)]
            held, nbytes = of_its_kind.most_common(1)[0]
            if 2 * nbytes > of_its_kind.total():
                likely[id(entry)] = held
    return likely


def _made(entry: Entry) -> tuple:
    owner = entry.module  # a name, or a weak reference and a type
    of_module = owner if isinstance(owner, str) else id(owner[0])
    return entry.line, entry.op, entry.category, of_module
