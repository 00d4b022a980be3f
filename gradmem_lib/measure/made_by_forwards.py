"""What forwards have made that is still there at the peak: which storages, and by which lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from .facts import Facts
from .source_lines import SourceLine
from .timeline import ForwardPass, Holder

ONE_FORWARD = "and each forward needs no more than with a graph"


def made_by(
    passes: Sequence[ForwardPass],
    free: Sequence[Holder],
    facts: Facts,
    and_after: bool = False,
) -> list[Holder]:
    """The activations among ``free`` that these forwards have made and not returned, without those
    that a list or a dict of the script keeps.

    ``and_after``: also what was made after each of them, until the next forward began.
    """
    wanted = {id(done) for done in passes}
    found = []
    for holder in free:
        last = facts.maker_of(holder)
        is_kept = holder.is_result or (holder.keeper.box and not holder.keeper.graph)
        of_a_graph = holder.category == "activations" and not is_kept
        if not of_a_graph or last is None or id(last) not in wanted:
            continue
        made_inside = holder.first_sample < last.end_sample
        if made_inside or and_after:
            found.append(holder)
    return found


def largest_forward(holders: Iterable[Holder], facts: Facts) -> int:
    """Of the bytes that forwards have made, those of the forward that has made the most: an upper
    bound of what they need without graphs, one after another.
    """
    nbytes = Counter[int]()
    for holder in holders:
        nbytes[id(facts.maker_of(holder))] += holder.nbytes
    return max(nbytes.values(), default=0)


def lines_of_results(holders: Sequence[Holder], facts: Facts) -> tuple[SourceLine, ...]:
    """The lines that made ``holders``, those with the most bytes first.

    For what a model has returned, it is the line that called the model.
    """
    # A long run's list has only the last forwards. What an earlier one has returned is of the same
    # call as a later result from the same place in the model.
    callers = dict[tuple, SourceLine]()
    for holder in holders:
        last = facts.maker_of(holder)
        if holder.is_result and last is not None and last.line is not None:
            callers[_place(holder)] = last.line
    nbytes = Counter[SourceLine]()
    for holder in holders:
        line = callers.get(_place(holder), holder.line)
        if line is not None:
            nbytes[line] += holder.nbytes
    return tuple(line for line, _ in nbytes.most_common())


def _place(holder: Holder) -> tuple:
    """Where in a model it was made."""
    return holder.module, holder.op, holder.line
