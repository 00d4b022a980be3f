"""Checkpointing schedules: which boundaries between layers to keep, and which layers to run again in backward.

A *schedule* is a list of segment lengths, first segment first, whose sum is the number of layers. The input of each
segment (its boundary) is kept; what the segment's layers compute inside is dropped in forward and computed anew when
backward reaches the segment. The last segment need not be dropped at all: backward begins with it.

With boundaries of x bytes and layers that keep a more bytes each, segment number i (from 1) of k layers stands at
i·x + k·a + (k - 1)·x bytes when its backward begins: i boundaries, and everything inside the segment. The largest of
these is the peak. Later segments find more boundaries kept, so the best schedules put long segments first.

What comes after the layers (logits and loss) meets all boundaries, and the inside of a last segment that is kept.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from fractions import Fraction
from numbers import Integral, Real
from typing import Any, TypeGuard

import numpy as np

from ..names import CHECKPOINTING
from .layer_bytes import LayerBytes

Schedule = list  # of segment lengths; an element may itself be a Schedule: segments within a segment
Sizes = float | Sequence[float]  # one number for all layers, or one for each


def uniform_segments(n: int, k: int) -> list[int]:
    """``n`` layers in segments of ``k``; the last one is shorter when ``k`` does not divide ``n``."""
    if not _is_count(n) or not _is_count(k):
        raise ValueError(f"uniform_segments(n={n!r}, k={k!r}): both must be whole numbers of at least 1")
    return [k] * (n // k) + ([n % k] if n % k else [])


def extra_forwards(segments: Schedule, keep_last: bool = True) -> int:
    """How many forward calls of a layer backward adds, over all layers.

    Each segment runs once more, but for a last one that is kept. Inside a nested segment the last one is always kept.
    """
    total_layers(segments)
    again = 0
    for i, item in enumerate(segments):
        if i < len(segments) - 1 or not keep_last:
            again += total_layers(item)
        if isinstance(item, list):
            again += extra_forwards(item)
    return again


def schedule_peak(
    segments: Schedule,
    internal: Sizes,
    boundary: Sizes,
    *,
    keep_last: bool = True,
    temporaries: Sizes = 0,
    tail: float = 0,
) -> float:
    """The most bytes that a schedule needs at once for activations, the first layer's input included.

    Args:
        segments: segment lengths, first segment first; an element may be a list, a segment made of segments.
        internal: bytes that autograd keeps inside one layer, its input excluded: a number, or a list with one a layer.
        boundary: bytes of one layer's input: a number, or a list.
        keep_last: whether the last segment is kept rather than run again. In the layers' own backward it changes the
            work and not the peak, since the last segment is complete in memory when backward gets there in either case.
        temporaries: bytes that one layer's backward needs besides what is kept: gradients on their way, and those of the
            weights of later layers, which are there already. What a forward needs in passing is taken to be less than that
            and the layer's internals together.
        tail: bytes that what comes after the layers needs, before backward reaches them: logits and loss. They meet
            all boundaries, and a last segment that is kept; one that is run again is not in memory yet.
    """
    n = total_layers(segments)
    internal, boundary, temporaries = (
        _sizes(name, value, n)
        for name, value in (("internal", internal), ("boundary", boundary), ("temporaries", temporaries))
    )

    def peak(segments: Schedule, start: int, kept: float) -> float:
        """The peak of layers from ``start`` on, with ``kept`` bytes of earlier boundaries."""
        highest: float = 0
        for item in segments:
            stop = start + total_layers(item)
            if isinstance(item, list):
                highest = max(highest, peak(item, start, kept))
            else:
                inside = kept
                for layer in range(start, stop):
                    inside += boundary[layer] + internal[layer]
                    highest = max(highest, inside + temporaries[layer])
            kept += boundary[start]
            start = stop
        return highest

    return max(peak(segments, 0, 0), tail + _after_forward(segments, internal, boundary, keep_last))


def _after_forward(segments: Schedule, internal: list, boundary: list, keep_last: bool) -> float:
    """Bytes that are kept when the last layer has run for the first time."""
    lengths = [total_layers(item) for item in segments]
    starts = list(itertools.accumulate(lengths, initial=0))[:-1]
    kept = sum(boundary[start] for start in starts)
    if not keep_last:
        return kept
    if isinstance(segments[-1], list):  # the segments in it are run again but for its own last
        first = starts[-1]
        return kept - boundary[first] + _after_forward(segments[-1], internal[first:], boundary[first:], True)
    return kept + sum(internal[starts[-1] :]) + sum(boundary[starts[-1] + 1 :])


def best_segments(
    n: int,
    internal: Sizes,
    boundary: Sizes,
    max_extra_forward: float = 1.0,
    *,
    keep_last: bool = True,
    temporaries: Sizes = 0,
    tail: float = 0,
) -> Schedule:
    """The schedule of ``n`` layers with the lowest ``schedule_peak``, for at most ``max_extra_forward`` · n extra forwards.

    ``internal``, ``boundary``, ``keep_last``, ``temporaries`` and ``tail`` are as in ``schedule_peak``. With a last segment
    that is kept, a schedule of plain segments costs n - (its length) extra forward calls. Below 1.0, the kept segment must
    be longer. Above 1.0, for layers of equal size and without a tail, segments may be made of segments (the result then has
    lists in it); else all are plain. ``keep_last=False`` costs n calls: ``ValueError`` where fewer are allowed.

    Among schedules of equal peak, the one with the fewest extra forward calls, then the one that keeps the fewest bytes
    of boundaries. Exact, by dynamic programming: for a limit on the peak, the fewest bytes of boundaries with which
    backward can reach layer q follow from those for the layers before it; the limit is halved until nothing fits.
    """
    if not _is_count(n):
        raise ValueError(f"best_segments(n={n!r}): n must be a whole number of layers, at least 1")
    again = math.floor(checked_extra(max_extra_forward) * n + 1e-9)  # 0.7 * 10 is a little less than 7
    if not keep_last and again < n:
        raise ValueError(
            f"keep_last=False runs all {n} layers again, and max_extra_forward={max_extra_forward} allows {again} of them: "
            "keep the last segment, or allow 1.0"
        )
    given = (("internal", internal), ("boundary", boundary), ("temporaries", temporaries))
    sizes = [_sizes(name, value, n) for name, value in given]
    *sizes, (after,) = _whole_numbers(*sizes, _sizes("tail", tail, 1))
    nested = again > n and keep_last and not after and all((v == v[0]).all() for v in sizes)

    def find(limit: int) -> Schedule | None:
        if nested:
            return _nested_below(limit, n, again, *(int(values[0]) for values in sizes))
        return _below(limit, min(again, n - 1), *sizes, int(after), keep_last)

    def peak(segments: Schedule) -> Any:
        return schedule_peak(segments, *sizes[:2], temporaries=sizes[2], tail=after, keep_last=keep_last)

    low, high = 0, peak([n])
    while low < high:
        middle = (low + high) // 2
        found = find(middle)
        if found is None:
            low = middle + 1
        else:
            high = min(middle, peak(found))  # often much lower than the limit that was asked for
    return find(high)


def safe_segments(layers: Sequence[LayerBytes], keep_last: bool | None = None) -> tuple[Schedule, bool]:
    """Segments that never need more than one checkpoint a layer, whatever comes after the layers; and whether to keep the last.

    A step has three moments at which a schedule matters: backward while the gradients of the weights come into being;
    backward with all of them there from before (a second micro-batch); and what comes after the layers, of any size.
    One checkpoint a layer has some peak in each. The schedule is the one whose worst excess over these three is the lowest,
    and that is at most 0. ``keep_last`` True or False asks for one or the other, and may cost the promise.

    Layers without a gradient at the beginning keep nothing and never run again: each gets a segment of its own.
    """
    first = next((i for i, layer in enumerate(layers) if layer.trained), len(layers) - 1)
    rest = layers[first:]
    n = len(rest)
    boundary, internal, temporaries, gradients, _ = zip(*rest, strict=True)
    later = [sum(gradients[j + 1 :]) for j in range(n)]
    growing = [t + g for t, g in zip(temporaries, later, strict=True)]
    single = [1] * n
    peak = schedule_peak(single, internal, boundary, temporaries=growing)
    shift = peak - schedule_peak(single, internal, boundary, temporaries=temporaries)
    needs = [max(g, t + shift) for g, t in zip(growing, temporaries, strict=True)]
    moments = {"temporaries": needs, "tail": peak - sum(boundary)}
    found = []
    for kept in (True, False) if keep_last is None else (keep_last,):
        segments = best_segments(n, internal, boundary, keep_last=kept, **moments)
        highest = schedule_peak(segments, internal, boundary, keep_last=kept, **moments)
        found.append((highest, extra_forwards(segments, kept), segments, kept))
    *_, segments, kept = min(found, key=lambda option: option[:2])
    return [1] * first + segments, kept


def _below(
    limit: int, again: int, internal, boundary, temporaries, tail: int, keep_last: bool
) -> list[int] | None:
    """Segments whose peak is at most ``limit``, with at most ``again`` layers before the last segment; or None.

    Let S(p) be all that layers before p keep. On top of ``kept`` bytes of earlier boundaries, a segment from p to q needs
    kept - S(p) + the largest of S(j + 1) + temporaries(j) over its layers j. The tail meets the last segment, from p on,
    at kept + S(n) - S(p), or at kept and a boundary.
    """
    n = len(internal)
    before = np.concatenate([[0], np.cumsum(np.add(internal, boundary))])  # S
    tops = before[1:] + temporaries
    never = np.iinfo(np.int64).max // 4
    # the fewest bytes of boundaries before layer q with which backward can reach it
    kept = np.full(n + 1, never)
    kept[0] = 0
    start_of = np.zeros(n + 1, dtype=int)
    for q in range(1, again + 1):
        highest = np.maximum.accumulate(tops[:q][::-1])[::-1]
        costs = np.where(kept[:q] + highest - before[:q] <= limit, kept[:q] + boundary[:q], never)
        start_of[q] = q - 1 - np.argmin(costs[::-1])
        kept[q] = costs[start_of[q]]
    starts = slice(0, again + 1)
    highest = np.maximum.accumulate(tops[::-1])[::-1][starts]
    last = before[n] - before[starts] if keep_last else boundary[starts]
    fits = kept[starts] + np.maximum(highest - before[starts], last + tail) <= limit
    if not fits.any():
        return None
    # The first one that fits is the longest last segment. One that runs again saves no work by that.
    ends = [
        n,
        int(np.argmax(fits)) if keep_last else int(np.argmin(np.where(fits, kept[starts] + last, never))),
    ]
    while ends[-1]:
        ends.append(int(start_of[ends[-1]]))
    return [stop - start for start, stop in itertools.pairwise(reversed(ends))]


def _nested_below(
    limit: int, n: int, again: int, internal: int, boundary: int, temporaries: int
) -> Schedule | None:
    """Segments, perhaps made of segments, whose peak is at most ``limit``, with at most ``again`` extra forwards; or None.

    ``calls[l]`` is the fewest extra forward calls for l layers under i earlier boundaries: none if all fit in memory,
    else the r layers of a first segment run again (and cost what r layers cost once the rest is over), and the rest
    runs under one boundary more.
    """
    tables = []
    room = limit - temporaries
    deepest = max(0, min(n - 1, (room - internal - boundary) // boundary)) if boundary else n - 1
    later = np.full(n + 1, math.inf)
    for i in range(deepest, -1, -1):
        fits = int(min(n, (room - i * boundary) // (internal + boundary))) if internal + boundary else n
        if fits < 1:
            return None
        calls, first = np.full(n + 1, math.inf), np.zeros(n + 1, dtype=int)
        calls[: fits + 1] = 0
        for length in range(fits + 1, n + 1):
            costs = np.arange(1, length) + calls[1:length] + later[length - 1 : 0 : -1]
            first[length] = length - 1 - np.argmin(costs[::-1])
            calls[length] = costs[first[length] - 1]
        tables.append((fits, first))
        later = calls
    tables.reverse()
    if calls[n] > again:
        return None

    def segments(length: int, i: int) -> Schedule:
        fits, first = tables[i]
        if length <= fits:
            return [length]
        head = segments(int(first[length]), i)
        return [head[0] if len(head) == 1 else head, *segments(length - int(first[length]), i + 1)]

    return segments(n, 0)


def _whole_numbers(*sizes: list) -> list[np.ndarray]:
    """Sizes times a common factor, as integers: sums are then exact, and equal peaks compare equal."""
    exact = [[Fraction(str(v)) for v in values] for values in sizes]
    scale: int | Fraction = math.lcm(*(v.denominator for values in exact for v in values))
    total = sum(map(sum, exact))
    if total * scale >= 2**60:  # digits without end, such as 1/3: fifteen of them are kept
        scale = Fraction(2**50) / total
    return [np.array([round(v * scale) for v in values], dtype=np.int64) for values in exact]


def checked_schedule(every: Any, what: str = "every") -> str | int | tuple:
    """A schedule as recipes and ``checkpoint_layers`` take it, lists as tuples. ``ValueError``, naming ``what``, for another.

    ``"per-layer"``, ``"sqrt"``, ``"best"``; a whole number of layers in a segment; or a list of segment lengths, in which a
    list is a segment made of segments.
    """
    if isinstance(every, str) and every in CHECKPOINTING:
        return every
    if _is_count(every):
        return every
    if isinstance(every, (list, tuple)) and every:
        return as_tuples(every)
    raise ValueError(
        f"{what}={every!r}: give {', '.join(map(repr, CHECKPOINTING))}, the number of layers in a segment (a whole number of "
        "at least 1), or a list of segment lengths such as [4, 3, 2]"
    )


def as_tuples(segments: Any) -> Any:
    total_layers(segments)
    return tuple(map(as_tuples, segments)) if isinstance(segments, (list, tuple)) else segments


def segments_for(every: Any, n: int) -> Schedule | None:
    """The schedule that ``every`` (see ``checked_schedule``) means for ``n`` layers; None for "best", which is measured."""
    every = checked_schedule(every)
    if every == "best":
        return None
    if isinstance(every, tuple):
        if total_layers(every) != n:
            raise ValueError(
                f"the segments {as_lists(every)} hold {total_layers(every)} layers, and there are {n}"
            )
        return as_lists(every)
    length = {"per-layer": 1, "sqrt": max(1, round(math.sqrt(n)))}.get(every, every)
    return uniform_segments(n, length)


def total_layers(segments: int | Schedule) -> int:
    """How many layers a schedule, or one of its elements, holds. Raises ``ValueError`` for what is not a schedule."""
    if _is_count(segments):
        return segments
    if not isinstance(segments, (list, tuple)) or not segments:
        raise ValueError(
            f"{segments!r} in a schedule: a schedule is a list of segment lengths of at least 1, and an element may itself "
            "be such a list"
        )
    return sum(total_layers(item) for item in segments)


def checked_extra(value: Any) -> float:
    if not isinstance(value, Real) or isinstance(value, bool) or not 0 <= value < math.inf:
        raise ValueError(
            f"max_extra_forward={value!r}: give how many extra forward passes are allowed, 0 or more (1.0: every layer once "
            "more)"
        )
    return value


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _sizes(name: str, value: Sizes, n: int) -> list:
    """``value`` as a list of ``n`` numbers of at least 0."""
    numbers = [value] * n if isinstance(value, (Real, str)) else list(value)
    if len(numbers) != n:
        raise ValueError(
            f"{name} has {len(numbers)} numbers for {n} layers: give one number, or one for each layer"
        )
    if not all(isinstance(v, Real) and not isinstance(v, bool) and 0 <= v < math.inf for v in numbers):
        raise ValueError(
            f"{name} must be a number of bytes of at least 0, or a list of them, and was {value!r}"
        )
    return [int(v) if isinstance(v, Integral) else float(v) for v in numbers]


def as_lists(segments: Any) -> Any:
    return [as_lists(s) for s in segments] if isinstance(segments, (list, tuple)) else segments
