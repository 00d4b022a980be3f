"""Checkpointing schedules: which boundaries between layers to keep, and which layers to recompute
in backward.

A *schedule* is a list of segment lengths, first segment first, whose sum is the number of layers.
The input of each segment (its boundary) is kept. The activations of its layers are dropped in
forward, and recomputed when backward reaches the segment. The last segment may be kept instead.

Let a boundary have x bytes, and let each layer keep a more bytes. When the backward of segment
number i (from 1) with k layers begins, i·x + k·a + (k - 1)·x bytes are alive: i boundaries, and
everything inside the segment. The largest of these sums is the peak. In later segments more
boundaries are alive, so the best schedules put long segments first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from numbers import Real
from operator import add
from typing import TYPE_CHECKING, Any

from ..names import CHECKPOINTING
from ..rows import nearest_word
from ..units import check_positive_int, is_positive_int

if TYPE_CHECKING:
    from .layer_bytes import LayerBytes

Schedule = list[int]  # segment lengths
# Bytes, or whole multiples of any unit: one number for all layers, or one for each layer.
Sizes = int | Sequence[int]


def uniform_segments(n: int, k: int) -> list[int]:
    """``n`` layers in segments of ``k``; the last one is shorter when ``k`` does not
    divide ``n``.
    """
    check_positive_int("n", n, 12, "layers")
    check_positive_int("k", k, 3, "layers in a segment")
    return [k] * (n // k) + ([n % k] if n % k else [])


def extra_forwards(segments: Schedule, keep_last: bool = True) -> int:
    """How many forward calls of layers backward adds: one for each layer of a recomputed segment.

    ``keep_last``: whether the last segment is kept rather than recomputed.
    """
    layers = total_layers(segments)
    if keep_last:
        layers -= segments[-1]
    return layers


def schedule_peak(
    segments: Schedule,
    internal: Sizes,
    boundary: Sizes,
    *,
    keep_last: bool = True,
    temporaries: Sizes = 0,
    tail: int = 0,
) -> int:
    """The peak of a schedule's activations in bytes, including the first layer's input.

    Args:
        segments: segment lengths, first segment first.
        internal: bytes that autograd keeps inside one layer, without its input: a number, or a list
            with one a layer.
        boundary: bytes of one layer's input: a number, or a list.
        keep_last: whether the last segment is kept rather than recomputed. All of it is alive when
            its backward begins in either case. So this changes the work, but the peak only if there
            is a tail.
        temporaries: bytes that one layer's backward needs besides the saved ones: gradients inside
            it, and those of the weights of later layers. A forward is assumed to need no more
            temporaries than internals and these together.
        tail: bytes of logits and loss after the layers. All boundaries, and a kept last segment,
            are alive at that time.
    """
    return _peak(
        segments, _sizes(total_layers(segments), internal, boundary, temporaries, tail, keep_last)
    )


def _peak(segments: Schedule, sizes: list[list]) -> int:
    internal, boundary, temporaries, (tail,) = sizes
    highest = held = start = 0  # held: the bytes of the boundaries so far
    for length in segments:
        inside = held
        for layer in range(start, start + length):
            inside += boundary[layer] + internal[layer]
            highest = max(highest, inside + temporaries[layer])
        held += boundary[start]
        start += length
    return max(highest, held + tail)


def best_segments(
    n: int,
    internal: Sizes,
    boundary: Sizes,
    max_extra_forward: float = 1.0,
    *,
    keep_last: bool = True,
    temporaries: Sizes = 0,
    tail: int = 0,
) -> Schedule:
    """The schedule of ``n`` layers with the lowest ``schedule_peak``, for at most
    ``max_extra_forward`` · n extra forwards.

    The other arguments are those of ``schedule_peak``. A kept last segment costs no extra forward,
    so below 1.0 it must be longer. ``keep_last=False`` costs n extra calls, and raises
    ``ValueError`` if fewer are allowed.

    Among schedules with equal peaks, it takes the one with the fewest extra forward calls, then
    with the fewest bytes of boundaries. The result is exact: dynamic programming finds a schedule
    below a limit, and bisection finds the lowest limit.
    """
    check_positive_int("n", n, 12, "layers")
    if not isinstance(max_extra_forward, Real) or not 0 <= max_extra_forward < math.inf:
        raise ValueError(
            f"max_extra_forward={max_extra_forward!r}: give a number of at least 0, such as 1.0"
        )
    extra = math.floor(max_extra_forward * n + 1e-9)  # 0.7 * 10 is a little less than 7
    if not keep_last and extra < n:
        raise ValueError(
            f"keep_last=False runs all {n} layers again, and max_extra_forward={max_extra_forward} "
            f"allows {extra} of them: keep the last segment, or allow 1.0"
        )
    sizes = _sizes(n, internal, boundary, temporaries, tail, keep_last)
    low, high = 0, _peak([n], sizes)
    while low < high:
        middle = (low + high) // 2
        if (found := _segments_below(middle, n, extra, keep_last, sizes)) is None:
            low = middle + 1
        else:
            high = _peak(found, sizes)  # often much lower than the limit
    return _segments_below(high, n, extra, keep_last, sizes)


def safe_segments(
    layers: Sequence[LayerBytes], keep_last: bool | None = None
) -> tuple[Schedule, bool]:
    """Segments whose peak is never above that of one checkpoint a layer; and ``keep_last``.

    This holds whatever comes after the layers.

    A schedule matters at three moments of a step: in a backward that creates the gradients of the
    weights; in a backward with all of these from before (a second micro-batch); and after the
    layers, in logits and loss of any size. One checkpoint a layer has a peak in each of these.
    Minimise max(peak_i - per_layer_peak_i) over the three moments. The minimum is at most 0, except
    perhaps where ``keep_last`` is given as True or False.

    Layers without a gradient at the beginning keep nothing and are never recomputed: each gets its
    own segment.
    """
    first = next((i for i, layer in enumerate(layers) if layer.trained), len(layers) - 1)
    boundary, internal, temporaries, gradients, _ = zip(*layers[first:], strict=True)
    n = len(boundary)
    later = [sum(gradients[j + 1 :]) for j in range(n)]
    single = [1] * n
    peak = schedule_peak(single, internal, boundary, temporaries=list(map(add, temporaries, later)))
    spare = peak - schedule_peak(single, internal, boundary, temporaries=temporaries)
    sizes = {  # the second and the third moment are raised to the peak of the first
        "internal": internal,
        "boundary": boundary,
        "temporaries": [t + max(g, spare) for t, g in zip(temporaries, later, strict=True)],
        "tail": peak - sum(boundary),
    }
    found = []
    for kept in (True, False) if keep_last is None else (keep_last,):
        segments = best_segments(n, **sizes, keep_last=kept)
        highest = schedule_peak(segments, **sizes, keep_last=kept)
        found.append((highest, extra_forwards(segments, kept), not kept, segments))
    *_, recompute_last, segments = min(found)
    return [1] * first + segments, not recompute_last


def _segments_below(
    limit: int, n: int, extra: int, keep_last: bool, sizes: list[list]
) -> Schedule | None:
    """Segments whose peak is at most ``limit``; None if there are none.

    If the last segment is kept, at most ``extra`` layers are before it.
    """
    internal, boundary, temporaries, (tail,) = sizes
    # the bytes that all layers before p keep
    before = [0, *accumulate(map(add, internal, boundary))]
    # before layer q: the fewest bytes of boundaries, and its segment's start
    boundary_bytes, start_of = [0], [0]
    for q in range(1, n + 1):
        starts, highest = [], 0
        for p in reversed(range(q)):
            highest = max(highest, before[p + 1] + temporaries[p])
            if boundary_bytes[p] + highest - before[p] > limit:
                break  # a longer segment needs at least as much
            starts.append(p)
        if not starts:
            return None
        # A kept last segment should be as long as possible, since its layers are not recomputed.
        longest = q == n and keep_last
        if longest:
            start = starts[-1]
        else:
            start = min(starts, key=lambda p: boundary_bytes[p] + boundary[p])
        boundary_bytes.append(boundary_bytes[start] + boundary[start])
        start_of.append(start)
    if boundary_bytes[n] + tail > limit or (keep_last and start > extra):
        return None
    ends = [n]
    while ends[-1]:
        ends.append(start_of[ends[-1]])
    return [stop - start for stop, start in pairwise(ends)][::-1]


def checked_schedule(
    every: Any, what: str = "every", extra_names: Sequence[str] = ()
) -> str | int | tuple:
    """Check a schedule of a recipe or of ``checkpoint_layers``.

    Returns it with tuples for lists. Raises ``ValueError``, which names ``what``, for anything
    else. ``extra_names``: other names that are allowed.
    """
    names = *CHECKPOINTING, *extra_names
    if is_positive_int(every) or (
        isinstance(every, str) and (every in names or first_layers(every) is not None)
    ):
        return every
    if _are_lengths(every):
        return tuple(every)
    near = nearest_word(every, names)
    written = str(every).replace("_", "-")
    if first_layers(written) is not None:
        near = written
    if near is not None:
        raise ValueError(f"{what}={every!r} is not known: did you mean {near!r}?")
    raise ValueError(
        f"{what}={every!r}: give {', '.join(map(repr, names))}, the number of layers in a segment "
        "(a whole number of at least 1), 'first-5' for the first 5 layers one by one (fit finds "
        "how many), or a list of segment lengths such as [4, 3, 2]"
    )


def _are_lengths(every: Any) -> bool:
    return isinstance(every, (list, tuple)) and bool(every) and all(map(is_positive_int, every))


def first_layers(every: Any) -> int | None:
    """The k of ``"first-k"``, which recomputes the first k layers one by one; else ``None``."""
    number = every.removeprefix("first-") if isinstance(every, str) else ""
    return int(number) if number != every and number.isdecimal() else None


def segments_for(every: Any, n: int) -> Schedule | None:
    """The schedule for ``n`` layers that ``every`` (see ``checked_schedule``) stands for.

    ``None`` for "best", which is measured.
    """
    every = checked_schedule(every)
    if every == "best":
        return None
    if (first := first_layers(every)) is not None:
        every = (1,) * first + (n - first,) * (first < n)
    if not isinstance(every, tuple):
        return uniform_segments(
            n, {"per-layer": 1, "sqrt": max(1, round(math.sqrt(n)))}.get(every, every)
        )
    if sum(every) != n:
        raise ValueError(f"segments {list(every)} hold {sum(every)} layers, and there are {n}")
    return list(every)


def total_layers(segments: Sequence[int]) -> int:
    """How many layers a schedule has. Raises ``ValueError`` for something else."""
    if not _are_lengths(segments):
        raise ValueError(f"segments={segments!r}: give a list of segment lengths of at least 1")
    return sum(segments)


def _sizes(
    n: int, internal: Sizes, boundary: Sizes, temporaries: Sizes, tail: int, keep_last: bool
) -> list[list]:
    given = {"internal": internal, "boundary": boundary, "temporaries": temporaries}
    sizes = [_size_list(name, values, n) for name, values in given.items()]
    (tail_bytes,) = _size_list("tail", tail, 1)
    if keep_last:  # then the tail finds the same bytes alive as the last layer's own backward
        sizes[2][-1], tail_bytes = max(sizes[2][-1], tail_bytes), 0
    return [*sizes, [tail_bytes]]


def _size_list(name: str, value: Sizes, n: int) -> list:
    """``value`` as a list of ``n`` whole numbers of at least 0."""
    numbers = [value] * n if isinstance(value, (Real, str)) else list(value)
    if len(numbers) != n:
        raise ValueError(
            f"{name} has {len(numbers)} numbers for {n} layers: give one, or one for each layer"
        )
    real = all(isinstance(v, Real) and not isinstance(v, bool) for v in numbers)
    if not real or not all(0 <= v < math.inf and v == math.floor(v) for v in numbers):
        raise ValueError(
            f"{name} must be a whole number of bytes, or a list of them, and was {value!r}"
        )
    return [math.floor(v) for v in numbers]
