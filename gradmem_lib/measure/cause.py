"""A cause of a run's memory, the row that finds it, and the words that causes have in common.

A row says which storages it is about, with a sentence, a remedy, and how much of these bytes the
remedy needs. It is given the storages at the peak that no earlier row has claimed, and claims those
that it finds.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any

import torch

from ..units import format_bytes
from .facts import Facts, total
from .paths import NOBODY, Held
from .source_lines import SourceLine
from .timeline import ForwardPass, Holder

WORTH = 0.02  # of the peak; less is no reason to change a script
MUCH = 0.1  # of the peak
DOMINATES = 0.25  # of the peak
ALMOST_ALL = 0.9
LINES = 3  # that are shown
SEVERAL = 3  # steps; a tensor of the last two may be a variable that is not overwritten yet
IN_PIECES = "If these tensors are computed in eight pieces or more"
PIECES_LEAVE = 0.25  # of the bytes: an eighth for one piece, another for the gradients of it
MANY = 3  # tensors of one kind are a list
# Operations that make a tensor of one value, to be written into: one-hot numbers, a replay buffer.
FILLED = ("aten.zeros", "aten.ones", "aten.full", "aten.zeros_like", "aten.new_zeros")


@dataclass(frozen=True)
class Cause:
    """Why a run needs ``nbytes`` of its peak: the ``evidence`` and a ``remedy``, in words."""

    name: str
    nbytes: int  # at the peak, that the remedy is about
    evidence: str
    remedy: str
    lines: tuple[SourceLine, ...] = ()  # the user's lines that made the bytes, the largest first
    # The storages that these bytes are among, where they are known.
    holders: Sequence[Holder] = field(default=(), repr=False, compare=False)
    # The storages of which there are more after each step, for pictures.
    growing: Sequence[Holder] = field(default=(), repr=False, compare=False)
    # The name that holds most of the bytes, where the evidence does not have it.
    held: str = ""
    # How many of the bytes the remedy needs as well, at most; ``None`` if that is not known.
    stays: int | None = 0
    # What needs these storages, so how long they have to stay:
    # "step" or "turn": the step (or turn) that made them; they can go when it has ended.
    # "round": they are in use until others take their place, as the weights of a model until the
    #     next model is trained.
    # "nothing": they can go at once.
    # "": not known; a turn's own backward may need its activations.
    needed_in: str = ""
    # The first words of ``limit``: how far the remedy goes.
    condition: str = "Without these bytes"
    # A sentence on the peak with the remedy, where the peak does not go down by all of ``nbytes``.
    limit: str = ""

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.evidence}"]
        if self.held:
            lines.append(f"  held by {self.held}")
        lines += [f"  at {line}" for line in self.lines[:LINES]]
        lines.append(f"  Remedy: {self.remedy}")
        if self.limit:
            lines.append(f"  {self.limit}")
        return "\n".join(lines)


def is_copy_of_a_storage(holder: Holder) -> bool:
    """Whether it is a storage that deepcopy, or torch.save, has copied byte by byte."""
    return holder.dtype is torch.uint8 and holder.shape == (holder.nbytes,)


def dtype_of(holder: Holder) -> str:
    return str(holder.dtype).removeprefix("torch.")


def in_words(holder: Holder) -> str:
    shape = " × ".join(map(str, holder.shape)) or "one number"
    words = f"{dtype_of(holder)} {shape}"
    operation = holder.op.removeprefix("aten.")
    return f"{words} ({operation})" if operation else words


def kinds_of(holders: Iterable[Holder]) -> str:
    """What they are, those with the most bytes first."""
    kinds = Counter[str]()
    for holder in holders:
        kinds[in_words(holder)] += holder.nbytes
    return "; ".join(words for words, _ in kinds.most_common(LINES))


def largest_held(holders: Iterable[Holder]) -> tuple[Held, int]:
    """What holds the most of the bytes that are known to be held, and how many: the box, where
    no path in it leads to more than half of them.
    """
    by_place = defaultdict[tuple, Counter[Held]](Counter)
    for holder in holders:
        held = holder.keeper
        if held != NOBODY:
            slices_of_any_size = held._replace(part=1)
            by_place[name_of(held), held.where][slices_of_any_size] += holder.nbytes
    if not by_place:
        return NOBODY, 0
    largest = max(by_place.values(), key=Counter.total)
    [(held, nbytes)] = largest.most_common(1)
    if 2 * nbytes <= largest.total():
        held = held._replace(path=held.box)
    return held, largest.total()


def holder_of_most(holders: Sequence[Holder]) -> Held:
    """What holds half of the bytes or more; ``NOBODY`` if nothing does."""
    held, nbytes = largest_held(holders)
    return held if 2 * nbytes >= total(holders) else NOBODY


def name_of(held: Held) -> str:
    """The list, dict or attribute that holds it, where there is one."""
    return held.box or held.path


def detached(held: Held) -> str:
    """The remedy for a name that keeps graphs."""
    name, detach = name_of(held), "x.detach()"
    if not held.box and name.isidentifier():  # a tensor, and no list of them
        detach = f"{name} = {name}.detach()"
    return (
        f"`{name}` keeps whole graphs of what came earlier: detach what goes into it, {detach}, or "
        "keep a number, x.item()."
    )


def within(moment: str) -> str:
    """In words, when something happens in this moment, or in this phase."""
    return moment if moment.startswith("between") else f"in {moment}"


def lines_of(holders: Iterable[Holder]) -> tuple[SourceLine, ...]:
    """The lines that made ``holders``, those with the most bytes first."""
    nbytes = Counter[SourceLine]()
    for holder in holders:
        if holder.line is not None:
            nbytes[holder.line] += holder.nbytes
    return tuple(line for line, _ in nbytes.most_common())


def lines_of_forwards(passes: Iterable[ForwardPass]) -> tuple[SourceLine, ...]:
    return tuple(dict.fromkeys(done.line for done in passes if done.line is not None))


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
    # Whether nobody needs these bytes: few of them are worth a change where they are enough.
    costs_nothing: bool = False


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


def cause_of(
    row: Row, free: Sequence[Holder], facts: Facts, enough: int | None = None
) -> Cause | None:
    """The cause that a row finds among storages that are ``free`` to be claimed. ``enough``: so
    many bytes less, and the run would have stayed within its budget.
    """
    if row.moments and facts.peak.moment not in row.moments:
        return None
    group = row.find(free, facts)
    if group is None:
        return None
    nbytes = group.changes.get("nbytes", total(group.holders))
    least = row.least * facts.peak.total
    if row.costs_nothing and enough is not None:
        least = max(min(least, enough), WORTH * facts.peak.total)
    if nbytes < least:
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
