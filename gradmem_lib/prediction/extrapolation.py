"""Computes a deep model's trace from traces of a few layers.

Each event has a mark, the layer that it belongs to. A *unit* is a layer, or a few layers that are
repeated together, and a *round* is what lies between the marks of two units. A trace with one unit
more has one round more in each part of the step. If it is the shorter trace otherwise, the
additional round can be repeated as often as the model has units.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from ..compat.modules import hook_counts, own_tensors
from ..measure.timeline import BY, OP, TOTAL
from ..names import CATEGORIES
from .marks import CHUNKS, NOWHERE

_COMPARED = (int, float, str, bool, type(None), torch.dtype)
# columns of a timeline that change from sample to sample by adding something; the others are states
BYTES = [TOTAL, *range(BY.start, BY.start + len(CATEGORIES))]
SUMS = [OP, *BYTES]
# columns of Trace.places
OPERATION, PART, LIST, UNIT = range(4)
# columns of Trace.storages
COUNT, UNROUNDED = range(2)


class LeftOut(NamedTuple):
    """What a trace leaves out, since it is like what the trace has: how many micro-batches, and how
    many chunks of each loss.
    """

    micro_batches: int = 0
    chunks: int = 0


NOTHING = LeftOut()


@dataclass(frozen=True, eq=False)
class Trace:
    """The samples of one step. A trace is equal to itself alone.

    ``rows`` (samples, columns of a ``Timeline``).
    ``places`` (samples, 4): the number of the operation (equal for equal operations), the part of
    the step (what exists before it is part 0), the list of layers and the unit of layers in it.
    ``storages`` (samples, 2): how many are alive, and their bytes before they were rounded.
    ``requests``: those to a card's allocator (``allocator.replayed``). ``request_places``
    (requests, 3): the sample that counts it, and the list and unit that its block's name tells.
    ``offload_traffic_bytes``: what crosses the bus. It contains that of what is ``left_out``.
    """

    rows: np.ndarray
    places: np.ndarray
    storages: np.ndarray
    requests: tuple[int, ...] = ()
    request_places: tuple[tuple[int, int, int], ...] = ()
    offload_traffic_bytes: int = 0
    left_out: LeftOut = NOTHING

    def changes(self) -> "Changes":
        rows, storages = self.rows.copy(), np.diff(self.storages, axis=0, prepend=0)
        rows[:, SUMS] = np.diff(self.rows[:, SUMS], axis=0, prepend=0)
        return Changes(rows, filled_places(self.places), storages)


@dataclass(frozen=True)
class Changes:
    """A trace as what each sample adds to the one before it. States, as the phase, stay states."""

    rows: np.ndarray
    places: np.ndarray
    storages: np.ndarray

    def __getitem__(self, samples) -> "Changes":
        return Changes(self.rows[samples], self.places[samples], self.storages[samples])

    def equal(self, other: "Changes") -> bool:
        """Whether both have the same operations, bytes and storages, one after the other."""
        return (
            np.array_equal(self.rows, other.rows)
            and np.array_equal(self.places[:, OPERATION], other.places[:, OPERATION])
            and np.array_equal(self.storages, other.storages)
        )


def timeline_rows(changes: Changes, left_out: LeftOut) -> np.ndarray:
    """The rows of a timeline, with what was left out.

    The second micro-batch, which is parts 3 and 4 of a step, comes ``micro_batches`` more times.
    """
    if left_out.chunks:
        changes = _with_chunks(changes, left_out.chunks)
    part, rows = changes.places[:, PART], changes.rows
    again = np.tile(rows[(part == 3) | (part == 4)], (left_out.micro_batches, 1))
    rows = np.concatenate([rows[part <= 4], again, rows[part > 4]])
    rows[:, SUMS] = rows[:, SUMS].cumsum(axis=0)
    return rows


def has_equal_chunks(changes: Changes, num_losses: int) -> bool:
    """Whether, in each of ``num_losses`` losses, the last chunk but one is like the one before it.

    Then so are those that were left out.
    """
    rounds = _additional_rounds(changes, CHUNKS)
    if rounds is None or len(rounds) != num_losses:
        return False
    for start, stop in rounds:
        samples = stop - start
        one_before = changes[start - samples : start]
        if not one_before.equal(changes[start:stop]):
            return False
    return True


def _with_chunks(changes: Changes, chunks: int) -> Changes:
    """``changes`` where each loss has so many ``chunks`` more, like its last but one."""
    rounds = _additional_rounds(changes, CHUNKS) or []
    return _with_rounds(changes, [(start, changes[start:stop], chunks) for start, stop in rounds])


def extrapolate(
    short: Changes,
    longer: Mapping[int, Changes],
    repeats: Mapping[int, int],
    longest: Mapping[int, Changes],
) -> Changes | None:
    """The trace of a deep model. Lists of layers have the numbers of the marks.

    Args:
        short: the trace of a model with few units of layers in each list.
        longer: by list, the trace of the model with one unit more in this list. A list that
            ``short`` has whole is left out.
        repeats: by list, the number of units that the deep model has more than ``short``.
        longest: by list, the trace with two units more, or nothing. With it, a single
            storage may grow, by as many bytes with the second unit as with the first.

    ``None`` if the traces do not prove that the additional rounds may be repeated.
    """
    rows, storages = short.rows.copy(), short.storages.copy()
    inserted: list[tuple[int, Changes, int]] = []  # before this sample of ``short``: rounds, times
    for number, long in longer.items():
        times = repeats[number]
        rounds = _additional_rounds(long, number)
        if rounds is None:
            return None
        aligned = _without(long, rounds, number)
        if longest:
            proven = _grows_evenly(short, aligned, longest[number], number)
        else:
            proven = _grows_by_storages(short, aligned)
        if not proven:
            return None
        rows[:, SUMS] += times * (aligned.rows - short.rows)[:, SUMS]
        storages += times * (aligned.storages - short.storages)
        removed = 0
        for start, stop in rounds:
            inserted.append((start - removed, long[start:stop], times))
            removed += stop - start
    return _with_rounds(Changes(rows, short.places, storages), inserted)


def _additional_rounds(long: Changes, number: int) -> list[tuple[int, int]] | None:
    """The samples (start, stop) of the last unit but one of list ``number``, in each part of the
    step. ``None`` if one of them does not lie between its neighbours.

    The first and the last unit may be special, so neither can be repeated. If the last unit but one
    left other bytes behind than the unit before it, the last unit would begin otherwise in the
    longer trace than in the shorter one, and the comparison of the two would fail.
    """
    in_list = long.places[:, LIST] == number
    unit = np.where(in_list, long.places[:, UNIT], NOWHERE[1])
    middle = unit.max(initial=0) - 1
    edges = np.flatnonzero(np.diff(unit == middle, prepend=False, append=False))
    rounds = list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
    for start, stop in rounds:
        if start == 0 or stop == len(unit):
            return None
        if {unit[start - 1], unit[stop]} != {middle - 1, middle + 1}:
            return None
    return rounds


def _without(long: Changes, rounds: list[tuple[int, int]], number: int) -> Changes:
    """``long`` without ``rounds``. The last unit of list ``number`` moves up."""
    kept = np.ones(len(long.rows), dtype=bool)
    for start, stop in rounds:
        kept[start:stop] = False
    aligned = long[kept]
    units = aligned.places[aligned.places[:, LIST] == number, UNIT]
    last = (aligned.places[:, LIST] == number) & (
        aligned.places[:, UNIT] == units.max(initial=NOWHERE[1])
    )
    aligned.places[last, UNIT] -= 1
    return aligned


def _grows_by_storages(short: Changes, aligned: Changes) -> bool:
    """Whether both are the same step, and what has more bytes has them in more storages, as where
    all gradients are freed at once.

    One storage that is larger could grow in any way, and a card rounds it. More operations without
    bytes between two events, as where each gradient is divided in place, are a loop's.
    """
    if not _same_layers(short, aligned):
        return False
    other_storages = aligned.storages[:, COUNT] != short.storages[:, COUNT]
    more_bytes = (aligned.rows != short.rows)[:, BYTES].any(axis=1)
    more_bytes |= aligned.storages[:, UNROUNDED] != short.storages[:, UNROUNDED]
    return not (more_bytes & ~other_storages).any()


def _grows_evenly(short: Changes, aligned: Changes, longest: Changes, number: int) -> bool:
    """Whether both are the same step, and what grows from ``short`` to ``aligned`` grows by as much
    again to ``longest``, as the bucket in which DDP sends the gradients of many layers does.
    """
    first, second = _additional_rounds(longest, number), None
    if first is not None:
        once = _without(longest, first, number)
        second = _additional_rounds(once, number)
    if second is None:
        return False
    twice = _without(once, second, number)
    return (
        _same_layers(short, aligned)
        and _same_layers(short, twice)
        and np.array_equal(twice.rows - aligned.rows, aligned.rows - short.rows)
        and np.array_equal(twice.storages - aligned.storages, aligned.storages - short.storages)
    )


def _same_layers(short: Changes, aligned: Changes) -> bool:
    """Whether both have the same operations and states in the same places, and the events of layers
    are equal. Other events may have more bytes.
    """
    if not np.array_equal(short.places, aligned.places):
        return False
    in_layers = short.places[:, LIST] != NOWHERE[0]
    states = [i for i in range(short.rows.shape[1]) if i not in SUMS]
    return not (
        (_differs(short, aligned) & in_layers).any()
        or (aligned.rows != short.rows)[:, states].any()
    )


def _differs(short: Changes, aligned: Changes) -> np.ndarray:
    """Which samples have other bytes or storages (as many booleans)."""
    other_bytes = (aligned.rows != short.rows).any(axis=1)
    return other_bytes | (aligned.storages != short.storages).any(axis=1)


def _with_rounds(changes: Changes, inserted: list[tuple[int, Changes, int]]) -> Changes:
    pieces, done = [], 0
    for start, round_, times in sorted(inserted, key=lambda item: item[0]):
        pieces += [changes[done:start], *[round_] * times]
        done = start
    pieces.append(changes[done:])
    return Changes(
        np.concatenate([piece.rows for piece in pieces]),
        np.concatenate([piece.places for piece in pieces]),
        np.concatenate([piece.storages for piece in pieces]),
    )


def filled_places(places: np.ndarray) -> np.ndarray:
    """``places`` where events of no layer, between those of neighbours in a list, belong to the
    first of the two.
    """
    filled = places.copy()
    marked = np.flatnonzero(places[:, LIST] != NOWHERE[0])
    before, after = marked[:-1], marked[1:]
    part_list = places[:, [PART, LIST]]
    same_list = (part_list[before] == part_list[after]).all(axis=1)
    neighbours = same_list & (abs(places[before, UNIT] - places[after, UNIT]) <= 1)
    between = neighbours & (after - before > 1)
    for start, stop in zip(before[between], after[between], strict=True):
        filled[start + 1 : stop, [LIST, UNIT]] = places[start, [LIST, UNIT]]
    return filled


@dataclass(frozen=True, eq=False)
class RepeatedLayers:
    """A list of layers that are alike. ``period``: after so many layers, the next one is like the
    first of them (1: all are alike; 2: two kinds take turns). The very first layer may differ.
    """

    layers: nn.ModuleList | nn.Sequential
    period: int

    def __len__(self) -> int:
        return len(self.layers)


def repeated_layers(model: nn.Module) -> list[RepeatedLayers]:
    """The lists of ``model`` (``ModuleList`` or ``Sequential``) whose layers are alike, the longest
    first.

    Alike: the same modules, parameters, settings and hooks, except for numbers that count the
    layers, and the same values where the config lists one for each layer.
    """
    config, found = getattr(model, "config", None), []
    inside: set[nn.Module] = set()  # what is part of a list that was found
    for module in model.modules():
        if type(module) not in (nn.ModuleList, nn.Sequential) or module in inside:
            continue
        period = _period(module, config)
        if period is not None:
            found.append(RepeatedLayers(module, period))
            inside.update(module.modules())
    return sorted(found, key=len, reverse=True)


def _period(layers: nn.ModuleList | nn.Sequential, config) -> int | None:
    """After how many layers the layers repeat; ``None`` if they do not, at least twice."""
    n = len(layers)
    if n < 3 or len([*layers.parameters()]) < sum(len([*layer.parameters()]) for layer in layers):
        return None  # too few, or layers that share weights
    listed = [
        value
        for value in getattr(config, "__dict__", {}).values()
        if isinstance(value, list | tuple) and len(value) == n
    ]
    kinds = [
        (_fingerprint(layer, i), *[repr(value[i]) for value in listed])
        for i, layer in enumerate(layers)
    ]
    for period in range(1, n // 2 + 1):
        # the very first layer may differ, as T5's, which has the table of all layers' positions
        if all(kinds[i] == kinds[i + period] for i in range(1, n - period)):
            return period
    return None


def _fingerprint(layer: nn.Module, index: int) -> tuple:
    parts = []
    for name, module in layer.named_modules():
        settings = tuple(
            (key, value if isinstance(value, _COMPARED) else type(value))
            for key, value in sorted(vars(module).items())
            if not (type(value) is int and value == index and _counts_layers(key))
        )
        own = own_tensors(module)
        tensors = tuple(
            (key, tuple(t.shape), t.dtype, t.requires_grad, t.device.type) for key, t in own
        )
        parts.append((name, type(module), settings, tensors, hook_counts(module)))
    return tuple(parts)


def _counts_layers(name: str) -> bool:
    """Whether it is the name of a layer's number: ``layer_idx``, and not ``sliding_window``."""
    return not {"id", "idx", "index"}.isdisjoint(name.split("_"))
