"""Walks ask who holds each storage: before a forward if a fifth more is alive than at the walk
before, at an error or a budget, and at the end. At a script's end its functions have ended, and
their variables are gone, so a script's first walk is before its first forward.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Collection
from types import FrameType

from .paths import NOBODY, Held, who_holds
from .recording import Entry, Recording

MOST_WALKS = 10
HIGHER = 1.2  # times the bytes of the last walk
SHARE = 0.01  # of a run's time, at most
FIRST = 0.05  # seconds that the first walk will take, as a guess
SMALL = 1 / 2000  # of the live bytes: nobody asks who holds such a storage


class Walks:
    """``seconds``: what walks may take in addition to their share of the run's time. ``at_once``:
    whether the first walk is before the first forward.
    """

    def __init__(self, recording: Recording, seconds: float, at_once: bool):
        self.recording, self.seconds, self.at_once = recording, seconds, at_once
        self.begun, self.spent, self.last, self.count = time.process_time(), 0.0, FIRST, 0
        self.height = 0  # live bytes at the last walk

    def look(self, frame: FrameType | None) -> None:
        """Walk, if it is worth it and there is time for it. All frees have been counted."""
        if not self.height and not self.at_once:
            self.height = self.recording.total
        if self.count >= MOST_WALKS or self.recording.total <= HIGHER * self.height:
            return
        if self.has_time():
            self.walk(frame, in_a_step=True)

    def has_time(self) -> bool:
        """Whether there is time for a walk like the last one."""
        allowed = self.seconds + SHARE * (time.process_time() - self.begun)
        return self.spent + self.last <= allowed

    def walk(
        self,
        frame: FrameType | None,
        error: BaseException | None = None,
        everywhere: bool = False,
        in_a_step: bool = False,
    ) -> None:
        """Note who holds each large storage now. If a walk fails, there is no other one.

        ``in_a_step``: the functions that train are running, so that their variables are there.
        """
        began = time.process_time()
        live = self.recording.live
        least = SMALL * self.recording.total
        wanted = {key: entry.nbytes for key, entry in live.items() if entry.nbytes >= least}
        self.count += 1
        self.height = self.recording.total
        try:
            for key, held in who_holds(wanted, frame, error, everywhere).items():
                entry = live[key]
                if held.path:
                    entry.held = held
                elif in_a_step and held is NOBODY:
                    entry.held = NOBODY  # the name that it had is another tensor's now
                elif everywhere and not (entry.held or NOBODY).path:
                    entry.held = held  # else the name that it had says more than none
        except Exception:
            self.count = MOST_WALKS
        self.last = time.process_time() - began
        self.spent += self.last


def likely_holders(entries: Collection[Entry]) -> dict[int, Held]:
    """By the address of an entry: who holds what the same line and module have made by the same
    operation, if most of those bytes that were met agree.

    It is of entries that no walk has met, and of those that only a variable had then: the newest
    one of a list is in a variable as well, which has the shorter path.
    """
    bytes_of = defaultdict[tuple, Counter[Held]](Counter)
    bytes_met = Counter[tuple]()
    for entry in entries:
        held = entry.held
        if held is None:
            continue
        bytes_met[_made(entry)] += entry.nbytes
        bytes_of[_made(entry)][held] += entry.nbytes
        if held.box and held.box != held.path:
            # Entries of a dict have different paths, in the same dict, and slices any size.
            bytes_of[_made(entry)][held._replace(path=held.box, part=1)] += entry.nbytes
    usual = {}
    for kind, holders in bytes_of.items():
        majorities = [held for held, nbytes in holders.items() if 2 * nbytes > bytes_met[kind]]
        if majorities:
            usual[kind] = max(majorities, key=lambda held: len(held.path))  # the exact path
    likely = {}
    for entry in entries:
        held, of_its_kind = entry.held, usual.get(_made(entry))
        if of_its_kind is None:
            continue
        in_a_variable = held is not None and not held.box and not held.graph
        if held is None or (in_a_variable and of_its_kind.box):
            likely[id(entry)] = of_its_kind
    return likely


def _made(entry: Entry) -> tuple:
    owner = entry.module  # a name, or a weak reference and a type
    of_module = owner if isinstance(owner, str) else id(owner[0])
    return entry.line, entry.op, entry.category, of_module
