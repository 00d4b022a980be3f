"""What forwards have made that is still there at the peak: which storages, by which lines, and how
much of it a forward without a graph would need.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from .facts import Facts
from .source_lines import SourceLine
from .structure import Structure
from .timeline import ForwardPass, Holder

# A forward may keep tensors itself, which a graph keeps as well: nothing tells them apart.
ONE_OF_EACH_LAYER = "and the model itself keeps one tensor of each layer at most"


def made_by(passes: Sequence[ForwardPass], facts: Facts, and_after: bool = False) -> list[Holder]:
    """The activations at the peak that these forwards have made and not returned.

    ``and_after``: also what was made after each of them, until the next forward began.
    """
    wanted = {id(done) for done in passes}
    found = []
    for holder in facts.activations:
        last = facts.last_begun(holder.samples[0])
        if last is None or holder.is_result or id(last) not in wanted:
            continue
        made_inside = holder.samples[0] < last.samples[1]
        if made_inside or and_after:
            found.append(holder)
    return found


def lines_of_results(holders: Sequence[Holder], facts: Facts) -> tuple[SourceLine, ...]:
    """The lines that made ``holders``, those with the most bytes first.

    For what a model has returned, it is the line that called the model.
    """
    # A long run's list has only the last forwards. What an earlier one has returned is of the same
    # call as a later result from the same place in the model.
    callers = dict[tuple, SourceLine]()
    for holder in holders:
        last = facts.last_begun(holder.samples[0])
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


def needed_without_a_graph(holders: Sequence[Holder], facts: Facts) -> int:
    """How many bytes of these activations one forward needs at once, at most, if nothing is kept
    for a backward, and if the forward itself keeps one tensor of each layer at most, as for skip
    connections or a list of features: the tensors of its largest layer, and the largest one of each
    layer.
    """
    # Several forwards have made the same tensors: each place and shape counts once.
    sizes = dict[tuple, int]()
    for holder in holders:
        sizes[holder.module, holder.op, holder.shape, holder.line] = holder.nbytes
    of_layer = Counter[str]()
    largest_of_layer = defaultdict[str, int](int)
    for (module, *_), nbytes in sizes.items():
        layer = _layer_of(module, facts.structure)
        of_layer[layer] += nbytes
        largest_of_layer[layer] = max(largest_of_layer[layer], nbytes)
    largest_layer = max(of_layer.values(), default=0)
    return min(largest_layer + sum(largest_of_layer.values()), sum(sizes.values()))


def _layer_of(module: str, structure: Structure | None) -> str:
    """The name of the outermost layer that contains a module; empty if it is in none."""
    if structure is None:
        return ""
    parts = module.split(".")
    for n in range(1, len(parts) + 1):
        name = ".".join(parts[:n])
        if name in structure.layers:
            return name
    return ""
