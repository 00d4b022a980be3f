"""A cause is a row: which storages it is about, a sentence, a remedy, and how much of these bytes
the remedy needs.

A row is given the storages at the peak that no earlier row has claimed, and claims those that it
finds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any

from ..units import format_bytes
from .cause import WORTH, Cause, kinds_of, largest_held, lines_of
from .facts import Facts, total
from .timeline import Holder

# The peak is in a part of a step in which graphs and gradients wait for one another.
BEFORE_THE_OPTIMIZER = ("training forward", "loss", "backward")


@dataclass(frozen=True)
class Group:
    """The storages that a row has found.

    ``words``: for the row's sentence, by name. ``changes``: fields of ``Cause`` that are not as the
    row says.
    """

    holders: Sequence[Holder]
    words: Mapping[str, object] = field(default_factory=dict)
    changes: Mapping[str, Any] = field(default_factory=dict)


Find = Callable[[Sequence[Holder], Facts], Group | None]


@dataclass(frozen=True)
class Row:
    """``evidence``: a sentence with {size} and {peak}, which are bytes, {count} for the number of
    tensors, {kinds} for what they are, {path} for the name that holds the most of them, and the
    words of its ``Group``.
    """

    name: str
    evidence: str
    remedy: str
    find: Find
    least: float = WORTH  # of the peak
    moments: Collection[str] = ()  # of the peak; all, if there are none
    # The part of the bytes that the remedy needs as well, at most; ``None`` if it is not known.
    stays: float | None = 0
    condition: str = "Without these bytes"
    claims: bool = True  # whether no later row is given its storages
    alone: bool = False  # whether it is said only where nothing else can be


def those(
    which: Callable[[Holder, Facts], bool],
    more: Callable[[list[Holder], Facts], Group | None] | None = None,
) -> Find:
    """A search for all storages of which ``which`` is true, and for what there is ``more`` to say
    of them.
    """

    def find(free: Sequence[Holder], facts: Facts) -> Group | None:
        found = [holder for holder in free if which(holder, facts)]
        if more is None or not found:
            return Group(found)
        return more(found, facts)

    return find


def cause_of(row: Row, free: Sequence[Holder], facts: Facts) -> Cause | None:
    """The cause that a row finds among storages that are ``free`` to be claimed."""
    if row.moments and facts.peak.moment not in row.moments:
        return None
    group = row.find(free, facts)
    if group is None:
        return None
    nbytes = group.changes.get("nbytes", total(group.holders))
    if nbytes < row.least * facts.peak.total:
        return None
    held, _ = largest_held(group.holders)
    words = {
        "size": format_bytes(nbytes),
        "peak": format_bytes(facts.peak.total),
        "count": len(group.holders),
        "kinds": kinds_of(group.holders),
        "path": held.path,
    }
    cause = Cause(
        name=row.name,
        nbytes=nbytes,
        evidence=row.evidence.format(**words | dict(group.words)),
        remedy=row.remedy,
        lines=lines_of(group.holders),
        holders=group.holders,
        stays=None if row.stays is None else ceil(row.stays * nbytes),
        condition=row.condition,
    )
    return replace(cause, **group.changes)
