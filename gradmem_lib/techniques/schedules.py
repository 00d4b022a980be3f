"""Checkpointing schedules: which boundaries between layers to keep, and which layers to run again in backward.

A *schedule* is a list of segment lengths, first segment first, whose sum is the number of layers. The input of each
segment (its boundary) is kept; what the segment's layers compute inside is dropped in forward and computed anew when
backward reaches the segment. The last segment need not be dropped at all: backward begins with it.

With boundaries of x bytes and layers that keep a more bytes each, segment number i (from 1) of k layers stands at
i·x + k·a + (k - 1)·x bytes when its backward begins: i boundaries, and everything inside the segment. The largest of
these is the peak. Later segments find more boundaries kept, so the best schedules put long segments first.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from fractions import Fraction
from numbers import Integral, Real
from typing import Any

import numpy as np

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
) -> float:
    """The most bytes that a schedule needs at once for activations, the first layer's input included.

    Args:
        segments: segment lengths, first segment first; an element may be a list, a segment made of segments.
        internal: bytes that autograd keeps inside one layer, its input excluded: a number, or a list with one a layer.
        boundary: bytes of one layer's input: a number, or a list.
        keep_last: whether the last segment is kept rather than run again. It changes the work and not the peak, since
            the last segment is complete in memory when backward begins in either case.
        temporaries: bytes that one layer's backward needs besides what is kept: gradients on their way. What a forward
            needs in passing is taken to be less than that and the layer's internals together.
    """
    n = total_layers(segments)
    internal, boundary, temporaries = (
        _sizes(name, value, n)
        for name, value in (("internal", internal), ("boundary", boundary), ("temporaries", temporaries))
    )

    def peak(segments: Schedule, start: int, kept: float) -> float:
        """The peak of layers from ``start`` on, with ``kept`` bytes of earlier boundaries."""
        highest = 0
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

    return peak(segments, 0, 0)


def best_segments(
    n: int,
    internal: Sizes,
    boundary: Sizes,
    max_extra_forward: float = 1.0,
    *,
    temporaries: Sizes = 0,
) -> Schedule:
    """The schedule of ``n`` layers with the lowest ``schedule_peak``, for at most ``max_extra_forward`` · n extra forwards.

    ``internal``, ``boundary`` and ``temporaries`` are bytes as in ``schedule_peak``. The last segment is kept, so a schedule
    of plain segments costs n - (its length) extra forward calls. Below 1.0, the kept segment must be longer. Above 1.0,
    and for layers of equal size, segments may be made of segments (the result then has lists in it); layers of unequal
    size get plain segments.

    Among schedules of equal peak, the one with the fewest extra forward calls, then the one that keeps the fewest bytes
    of boundaries. Exact, by dynamic programming: for a limit on the peak, the fewest bytes of boundaries with which
    backward can reach layer q follow from those for the layers before it; the limit is halved until nothing fits.
    """
    if not _is_count(n):
        raise ValueError(f"best_segments(n={n!r}): n must be a whole number of layers, at least 1")
    internal, boundary, temporaries = (
        _sizes(name, value, n)
        for name, value in (("internal", internal), ("boundary", boundary), ("temporaries", temporaries))
    )
    sizes = _whole_numbers(internal, boundary, temporaries)
    again = math.floor(checked_extra(max_extra_forward) * n + 1e-9)  # 0.7 * 10 is a little less than 7
    nested = again > n and all((values == values[0]).all() for values in sizes)

    def find(limit: int) -> Schedule | None:
        if nested:
            return _nested_below(limit, n, again, *(int(values[0]) for values in sizes))
        return _below(limit, min(again, n - 1), *sizes)

    def peak(segments: Schedule) -> int:
        return schedule_peak(segments, *sizes[:2], temporaries=sizes[2])

    low, high = 0, peak([n])
    while low < high:
        middle = (low + high) // 2
        found = find(middle)
        if found is None:
            low = middle + 1
        else:
            high = min(middle, peak(found))  # often much lower than the limit that was asked for
    return find(high)


def _below(limit: int, again: int, internal, boundary, temporaries) -> list[int] | None:
    """Segments whose peak is at most ``limit``, with at most ``again`` layers before the last segment; or None.

    Let S(p) be all that layers before p keep. On top of ``kept`` bytes of earlier boundaries, a segment from p to q needs
    kept - S(p) + the largest of S(j + 1) + temporaries(j) over its layers j.
    """
    n = len(internal)
    before = np.concatenate([[0], np.cumsum(np.add(internal, boundary))])  # S
    tops = before[1:] + temporaries
    never = np.iinfo(np.int64).max // 4
    kept = np.full(
        n + 1, never
    )  # the fewest bytes of boundaries before layer q with which backward can reach it
    kept[0] = 0
    start_of = np.zeros(n + 1, dtype=int)
    for q in range(1, again + 1):
        highest = np.maximum.accumulate(tops[:q][::-1])[::-1]
        costs = np.where(kept[:q] + highest - before[:q] <= limit, kept[:q] + boundary[:q], never)
        start_of[q] = q - 1 - np.argmin(costs[::-1])
        kept[q] = costs[start_of[q]]
    highest = np.maximum.accumulate(tops[::-1])[::-1][: again + 1]
    fits = kept[: again + 1] + highest - before[: again + 1] <= limit
    if not fits.any():
        return None
    ends = [n, int(np.argmax(fits))]  # the first one that fits: the longest last segment
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
    scale = math.lcm(*(v.denominator for values in exact for v in values))
    total = sum(map(sum, exact))
    if total * scale >= 2**60:  # digits without end, such as 1/3: fifteen of them are kept
        scale = Fraction(2**50) / total
    return [np.array([round(v * scale) for v in values], dtype=np.int64) for values in exact]


def segments_for(every: Any, n: int) -> Schedule | None:
    """The schedule that ``every`` means for ``n`` layers; None for "best", which needs a measurement."""
    if every == "best":
        return None
    if every == "sqrt":
        return uniform_segments(n, max(1, round(math.sqrt(n))))
    if _is_count(every):
        return uniform_segments(n, every)
    if isinstance(every, (list, tuple)):
        every = as_lists(every)
        if total_layers(every) != n:
            raise ValueError(f"the segments {every} hold {total_layers(every)} layers, and there are {n}")
        return every
    raise ValueError(
        f'every={every!r}: give "sqrt", "best", a whole number of layers (at least 1), or a list of segment lengths'
    )


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


def _is_count(value: Any) -> bool:
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
