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
        if not self.height:  # nothing is old before the first forward
            self.height = self.recording.total
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
    """By the address of an entry: who holds what the same line and module have made by the same
    operation, if most of those bytes that were met agree.

    It is of entries that no walk has met, and of those that only a variable had then: the newest
    one of a list is in a variable as well, which has the shorter path.
    """
    votes = defaultdict[tuple, Counter[Held]](Counter)
    met = Counter[tuple]()
    for entry in entries:
        held = holder_of(entry)
        if held is None:
            continue
        met[_made(entry)] += entry.nbytes
        # The entries of a dict have names of their own, and are in the same dict.
        for path in {held.path, held.box or held.path}:
            votes[_made(entry)][held._replace(path=path)] += entry.nbytes
    agreed = {}
    for kind, of_its_kind in votes.items():
        most = [held for held, nbytes in of_its_kind.items() if 2 * nbytes > met[kind]]
        if most:
            agreed[kind] = max(most, key=lambda held: len(held.path))
    likely = {}
    for entry in entries:
        held, of_most = holder_of(entry), agreed.get(_made(entry))
        in_a_variable = held is not None and not held.box and not held.graph
        if of_most is not None and (held is None or (in_a_variable and of_most.box)):
            likely[id(entry)] = of_most
    return likely


def _made(entry: Entry) -> tuple:
    owner = entry.module  # a name, or a weak reference and a type
    of_module = owner if isinstance(owner, str) else id(owner[0])
    return entry.line, entry.op, entry.category, of_module
