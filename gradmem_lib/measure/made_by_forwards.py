"""What forwards have made that is still there at the peak: which storages, by which lines, and how
much of it a forward without a graph would need.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

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


class _Made(NamedTuple):
    """Equal tensors that one forward has made in one place: where, their bytes each, how many."""

    module: str
    nbytes: int
    times: int


def needed_without_a_graph(holders: Sequence[Holder], facts: Facts) -> int:
    """An upper bound of the bytes of these activations that one forward needs at once, without a
    graph: all tensors of its largest layer, and the largest tensor of each layer, which the model
    may keep, as for skip connections or a list of features. Of a layer that runs n times in a
    forward, it may keep n.
    """
    made = _made_by_one_forward(holders, facts)
    by_outer_layer = defaultdict[str, list[_Made]](list)
    kept_of_layer = defaultdict[str, int](int)  # by the innermost layer that made it
    for one in made:
        layers = _layers_of(one.module, facts.structure)
        outer, inner = layers[0], layers[-1]
        by_outer_layer[outer].append(one)
        kept_of_layer[inner] = max(kept_of_layer[inner], one.nbytes * one.times)
    largest_layer = 0
    for layer, of_layer in by_outer_layer.items():
        largest_layer = max(largest_layer, _needed_in_layer(layer, of_layer, facts.structure))
    return min(largest_layer + sum(kept_of_layer.values()), _total(made))


def _made_by_one_forward(holders: Sequence[Holder], facts: Facts) -> list[_Made]:
    """What these holders are of one forward. Several forwards have made the same tensors: of each
    place and shape, those of the forward that has made the most count.
    """
    times = Counter[tuple]()  # by forward and place
    for holder in holders:
        done = facts.last_begun(holder.samples[0])
        place = (holder.module, holder.op, holder.shape, holder.dtype, holder.line)
        times[id(done), place, holder.nbytes] += 1
    most = Counter[tuple]()  # by place
    for (_, place, nbytes), count in times.items():
        most[place, nbytes] = max(most[place, nbytes], count)
    return [_Made(place[0], nbytes, count) for (place, nbytes), count in most.items()]


def _total(made: Sequence[_Made]) -> int:
    return sum(one.nbytes * one.times for one in made)


def _needed_in_layer(layer: str, made: Sequence[_Made], structure: Structure | None) -> int:
    """How many bytes of ``made`` one run of a layer needs at once, at most.

    A chain needs those of one of its layers, and that layer's input. Any other layer may need all.
    """
    if structure is not None and layer in structure.chains:
        by_child = defaultdict[str, list[_Made]](list)
        for one in made:
            by_child[_child_of(layer, one.module)].append(one)
        largest_child = 0
        for child, of_child in by_child.items():
            largest_child = max(largest_child, _needed_in_layer(child, of_child, structure))
        largest_input = max(one.nbytes for one in made)
        return min(largest_child + largest_input, _total(made))
    # What was made the fewest times was made once in each run, so this is the number of runs.
    runs = min(one.times for one in made)
    return sum(one.nbytes * ceil(one.times / runs) for one in made)


def _child_of(chain: str, module: str) -> str:
    """The name of the layer of ``chain`` that is ``module``, or contains it."""
    inner = f"{chain}." if chain else ""
    return inner + module.removeprefix(inner).partition(".")[0]


def _layers_of(module: str, structure: Structure | None) -> list[str]:
    """The names of the layers that contain a module, the outermost first; what is inside a chain of
    layers is of the chain. An empty name if the module is in none, or if the whole model is a
    chain; its own name if it is not in the tracked model.
    """
    if structure is None:
        return [""]
    parts = module.split(".")
    if parts[0] not in structure.children:
        is_own_forward = module == structure.name and "" not in structure.chains
        return [""] if is_own_forward else [module]
    if "" in structure.chains:
        return [""]
    found = list[str]()
    for n in range(1, len(parts) + 1):
        name = ".".join(parts[:n])
        if name in structure.chains:
            return [*found, name]
        if name in structure.layers:
            found.append(name)
    return found or [""]
