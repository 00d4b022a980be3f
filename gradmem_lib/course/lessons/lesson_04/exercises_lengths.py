"""Lesson 04's exercises that reckon with segments: their peak, and their best length."""

from __future__ import annotations

import math
from ast import literal_eval

from ....techniques.schedules import uniform_segments
from ...judge.compare import describe, plain
from ...judge.exercise import Exercise, Mistake, Seen, calls


def kept_at_peak(lengths, a, x):
    """The most bytes kept at once by segments of these lengths: earlier boundaries, and one whole
    segment.
    """
    return max(i * x + length * a for i, length in enumerate(lengths))


_PARTS = [3, 2, 5, 8]  # with a = 1,000 and x = 1, the thousands are layers and the rest boundaries
_INPUTS_TWICE = "each layer's input is counted twice: a includes x, so m layers keep m * a."
_EARLIER = "each segment keeps one boundary, its input, until its backward"


# How many layers an answer counts in full for the lengths _PARTS, and what is said of that number.
_LAYERS = (
    (
        max(_PARTS) - 1,
        "one layer of the segment that runs again is missing: count a for each of its m layers.",
    ),
    (
        1,
        "a is counted once: the segment that runs again keeps a for each of its layers, in full.",
    ),
    (
        sum(_PARTS),
        "all layers are counted in full at once: only the segment that runs again is in memory in "
        "full.",
    ),
    (
        min(_PARTS),
        "this takes the segment that needs least: the peak is at the segment that needs most.",
    ),
    (
        _PARTS[0],
        "only the first length is used, as if all segments were equal: each has its own.",
    ),
    (
        sum(_PARTS) / len(_PARTS),
        "the mean length is used, as if all segments were equal: each has its own.",
    ),
)
# How many boundaries an answer counts for the same lengths.
_BOUNDARIES = {
    sum(_PARTS[:-1]): f"a boundary is counted for each earlier layer: {_EARLIER}.",
    sum(_PARTS): f"a boundary is counted for each layer: {_EARLIER}.",
    len(_PARTS): (
        f"one boundary too many: a already includes the segment's own boundary, and {_EARLIER}."
    ),
    0: f"the boundaries of earlier segments are left out: {_EARLIER}.",
}


def _explain_peak(got, expected):
    got = {case: plain(value) for case, value in got.items()}
    if not all(isinstance(value, (int, float)) for value in got.values()):
        return None
    answer, right = (seen[f"({_PARTS}, 1000, 1)"] for seen in (got, expected))
    if answer == 1000 * (len(_PARTS) - 1) + max(_PARTS):
        return (
            "a and x are swapped: a segment that runs again has a bytes for each layer, and an "
            "earlier segment has x bytes in all."
        )
    cases = {case: literal_eval(case) for case in expected}
    if says := _one_number_of_layers(got, cases) or _layers_in_full(answer):
        return says
    if _inputs_twice(got, cases):
        return _INPUTS_TWICE
    waiting = answer - 1000 * max(_PARTS)
    if answer != right and 0 <= waiting <= 20:
        return _BOUNDARIES.get(waiting, f"the boundaries are counted wrongly: {_EARLIER}.")
    if all(got[case] == (len(m) - 1) * x + max(m) * a for case, (m, a, x) in cases.items()):
        return (
            "this adds all boundaries but the last to the longest segment: those of later "
            "segments are freed before its backward."
        )
    if all(got[case] == (len(m) - 1) * x + m[-1] * a for case, (m, a, x) in cases.items()):
        return "this uses only the last segment: an earlier, longer one may need more."
    return _too_many_layers(got, cases)


# Numbers of layers that are the same for _PARTS, but not in every case.
_SAME_FOR_PARTS = (
    (
        lambda lengths: sum(lengths) // len(lengths),
        "the mean length is used, as if all segments were equal: each has its own.",
    ),
    (
        len,
        "segments are counted where their layers should be: a segment of m layers keeps m * a.",
    ),
)


def _one_number_of_layers(got, cases) -> str | None:
    """What is said if every case counts the mean length, rounded down, or the number of segments,
    with no, all or all but one of the boundaries beside it.
    """
    for layers, says in _SAME_FOR_PARTS:
        for less in (None, 0, 1):
            peaks = {}
            for case, (lengths, a, x) in cases.items():
                waiting = 0 if less is None else len(lengths) - less
                peaks[case] = waiting * x + layers(lengths) * a
            if got == peaks:
                return says
    return None


def _layers_in_full(answer: float) -> str | None:
    """What is said of how many layers the ``answer`` for _PARTS counts in full."""
    for layers, says in _LAYERS:
        if 0 <= answer - 1000 * layers <= 20:
            return says
    return None


def _too_many_layers(got, cases) -> str | None:
    """What is said if each segment counts one layer more, or the segment before it too, or if the
    last segment is left out.
    """
    one_more, two_segments, without_last = {}, {}, {}
    for case, (lengths, a, x) in cases.items():
        before = [0, *lengths[:-1]]
        places = list(enumerate(zip(lengths, before, strict=True)))
        one_more[case] = max(i * x + (m + 1) * a for i, (m, _) in places)
        if len(lengths) > 1:
            without_last[case] = max(i * x + m * a for i, (m, _) in places[:-1])
        two_segments[case] = max(i * x + (m + last) * a for i, (m, last) in places)
    if got == one_more:
        return "one layer too many: a segment of m layers that runs again keeps m * a."
    if {case: got[case] for case in without_last} == without_last:
        return "the last segment is left out: here it runs again too, like all others."
    if got == two_segments:
        return (
            "two segments are counted in full at once: what a segment keeps is freed in its "
            "backward, before the next one runs again."
        )
    return None


def _inputs_twice(got, cases) -> bool:
    """Whether a layer counts a + x everywhere, with boundaries of any number beside it."""
    # For segment i of n: how many boundaries wait beside its m layers.
    waiting = (
        lambda i, n: 0,
        lambda i, n: i,
        lambda i, n: i + 1,
        lambda i, n: n - 1,
        lambda i, n: n,
    )
    for count in waiting:
        peaks = {}
        for case, (lengths, a, x) in cases.items():
            n = len(lengths)
            peaks[case] = max(count(i, n) * x + m * (a + x) for i, m in enumerate(lengths))
        if got == peaks:
            return True
    return False


def best_length(n, a, x):
    """The segment length k with the lowest peak for ``n`` layers that keep ``a`` bytes each, ``x``
    of them their input.
    """
    # the rule; where a last, shorter segment decides, its neighbours are better
    near = math.sqrt(n * x / a)
    return min(
        range(1, n + 1), key=lambda k: (kept_at_peak(uniform_segments(n, k), a, x), abs(k - near))
    )


# None of them but the one of 1 layer has k = n as its only best length. There is no other: a
# includes x, so two segments never need more than one segment of all layers.
_CHAINS = {
    "64 layers, a = x": (64, 1000, 1000),
    "100 layers, a = 4 x": (100, 4000, 1000),
    "32 layers, a = 23 x (a 7B)": (32, 23_000, 1000),
    "96 layers, a = 28 x": (96, 28_000, 1000),
    "4 layers, a = 20 x": (4, 20_000, 1000),
    "1 layer, a = x": (1, 1000, 1000),
    "50 layers, a = 9 x": (50, 27_000, 3000),
    "13 layers, a = 5 x": (13, 5000, 1000),
    "16 layers, a = x = 1": (16, 1, 1),  # k is larger than a and x here
    "64 layers, a = 2.5 x": (64, 2500, 1000),  # as many layers as above, and no whole ratio
    "10 layers, a = x": (10, 1000, 1000),  # where a short last segment counts
    "3 layers, a = x": (3, 1000, 1000),  # the best is more than half of all
    "400 layers, a = x": (400, 1000, 1000),
}


def _observe_length(candidate):
    found, lengths = {}, {}
    for name, (n, a, x) in _CHAINS.items():
        lengths[name] = k = plain(candidate(n, a, x))
        whole = isinstance(k, int) or (isinstance(k, float) and k.is_integer())
        fits = whole and 1 <= k <= n
        # Two lengths may have the same peak, so the peak is what counts.
        peak, no_length = math.nan, ""
        if fits:
            peak = kept_at_peak(uniform_segments(n, int(k)), a, x)
        elif k is None:
            no_length = "None"
        else:
            no_length = describe(k)
        found[name] = {"what is no length from 1 to n": no_length, "peak with your k": peak}
    return Seen(found, lengths=lengths)


def _one_too_small(lengths, expected) -> bool:
    for name, (n, a, x) in _CHAINS.items():
        k = lengths[name]
        if not isinstance(k, int) or not 0 <= k < n:
            return False
        peak = kept_at_peak(uniform_segments(n, k + 1), a, x)
        if peak != expected[name]["peak with your k"]:
            return False
    return True


_SWAPPED = (
    "a and x are swapped (or this is n / k, the number of segments): the more a layer keeps, the "
    "shorter the segments."
)


# What k is, where it comes from another formula: (the length before it is rounded, sentence).
_OTHER_LENGTHS = (
    (lambda n, a, x: n * x / a, "the root is missing: this is n · x / a, and k is its root."),
    (
        lambda n, a, x: a / x,
        "this is a / x, which does not depend on n: more layers need longer segments.",
    ),
    (
        lambda n, a, x: 2 * math.sqrt(n * x / a),
        "this is twice √(n · x / a): the two costs are equal at the root itself.",
    ),
    (
        lambda n, a, x: math.log2(n),
        "this is the logarithm of n: the two costs are equal at √(n · x / a).",
    ),
)


def _why_other_length(lengths) -> str | None:
    """What is said of lengths that come from another formula in every case, however rounded."""
    cases = [(int(k), *_CHAINS[name]) for name, k in lengths.items()]
    for formula, says in _OTHER_LENGTHS:
        if all(_rounds(formula(n, a, x), k, n) for k, n, a, x in cases):
            return says
    if all(_is_number_of_segments(*case) for case in cases):
        return "this is n / k, the number of segments: return the length of one."
    if all(_has_highest_peak(*case) for case in cases):
        return "these lengths have the highest peak of all: take one with the lowest."
    return None


def _peaks(n: int, a: int, x: int) -> dict[int, int]:
    """The peak of each length."""
    return {k: kept_at_peak(uniform_segments(n, k), a, x) for k in range(1, n + 1)}


def _is_number_of_segments(k: int, n: int, a: int, x: int) -> bool:
    """Whether ``k`` is how many segments there are, for one of the best lengths."""
    peaks = _peaks(n, a, x)
    best = [length for length, peak in peaks.items() if peak == min(peaks.values())]
    return k in [len(uniform_segments(n, length)) for length in best]


def _has_highest_peak(k: int, n: int, a: int, x: int) -> bool:
    peaks = _peaks(n, a, x)
    return peaks[k] == max(peaks.values())


def _rounds(length: float, k: float, n: int) -> bool:
    """Whether ``k`` is ``length``, rounded in any way, and brought within 1 to n."""
    return any(k == min(n, max(1, way(length))) for way in (math.floor, round, math.ceil))


def _explain_length(got, expected):
    if _one_too_small(got.notes["lengths"], expected):
        return (
            "each length is one too small. If it is a place in a list of peaks: places are counted "
            "from 0, and lengths from 1."
        )
    peaks = {name: case["peak with your k"] for name, case in expected.items()}
    if got.notes["lengths"] == peaks:
        return "this is the lowest peak, in bytes: return the length k that has it."
    for name in expected:
        what = got[name]["what is no length from 1 to n"]
        if what == "None":
            return "best_length returned None: is a `return` missing?"
        if what:
            return (
                f"for {name}, k is {what}: return a segment's length, a whole number from 1 to n."
            )
    if all(
        abs(float(k) - math.sqrt(_CHAINS[name][0])) <= 1 for name, k in got.notes["lengths"].items()
    ):
        return (
            "this is √n, which is right where a layer keeps no more than its input: with a > x, "
            "segments must be shorter."
        )
    if says := _why_other_length(got.notes["lengths"]):
        return says
    peak = "peak with your k"
    name = next(name for name in expected if got[name][peak] != expected[name][peak])
    n, a, x = _CHAINS[name]
    k = int(got.notes["lengths"][name])
    how = (
        "long: segments run again in full"
        if k > best_length(n, a, x)
        else "short: too many boundaries wait"
    )
    layers = "one layer" if k == 1 else f"{k} layers"
    return f"segments of {layers} are too {how}; the two costs are equal at √(n · x / a)."


EXERCISES = (
    Exercise(
        id="4.5",
        title="the peak of a schedule",
        difficulty=2,
        minutes=5,
        trains="finding the segment whose backward needs the most",
        reference=kept_at_peak,
        observe=calls(
            ([1, 1, 1, 1], 1000, 1000),
            ([4, 4, 4, 4], 3000, 1000),
            ([4, 4, 1], 5000, 1000),
            ([9], 5000, 1000),
            ([5, 4, 3, 2], 3000, 1000),
            ([2, 3, 4, 5], 3000, 1000),
            hidden=((_PARTS, 1000, 1), ([7, 3, 6, 1, 2], 2500, 700), ([3, 2, 2, 2], 1000, 800)),
        ),
        explain=_explain_peak,
        mistakes=(
            Mistake(
                "boundaries alone",
                lambda lengths, a, x: len(lengths) * x,
                (
                    "this counts only boundaries: in backward, the segment that runs again is in "
                    "memory too, with a bytes for each layer."
                ),
            ),
            Mistake(
                "the segment alone",
                lambda lengths, a, x: max(lengths) * a,
                (
                    "this counts the segment that runs again, but not the boundaries of the "
                    "earlier segments, which are still kept."
                ),
            ),
            Mistake(
                "its own boundary twice",
                lambda lengths, a, x: max(i * x + m * a for i, m in enumerate(lengths, 1)),
                (
                    "this counts a segment's own boundary twice: a includes the input of its first "
                    "layer."
                ),
            ),
            Mistake(
                "inputs once more",
                lambda lengths, a, x: max(i * x + m * (a + x) for i, m in enumerate(lengths)),
                _INPUTS_TWICE,
            ),
            Mistake(
                "inputs apart",
                lambda lengths, a, x: max(i * x + m * (a - x) for i, m in enumerate(lengths, 1)),
                (
                    "the inputs of the layers inside the segment are left out: when it runs again, "
                    "each of its layers keeps all of a."
                ),
            ),
            Mistake(
                "without the inputs",
                lambda lengths, a, x: max(i * x + m * (a - x) for i, m in enumerate(lengths)),
                (
                    "x is taken off a: when a segment runs again, each of its layers keeps all of "
                    "a, its input included."
                ),
            ),
            Mistake(
                "all boundaries",
                lambda lengths, a, x: len(lengths) * x + max(lengths) * a,
                (
                    "this adds all boundaries to the longest segment: those of later segments are "
                    "freed before its backward."
                ),
            ),
            Mistake(
                "all later boundaries",
                lambda lengths, a, x: max(i * x + m * a for i, m in enumerate(lengths[::-1])),
                (
                    "the boundaries are counted from the end: when a segment runs again, the "
                    "boundaries of earlier segments are still kept."
                ),
            ),
            Mistake(
                "the longest segment",
                lambda lengths, a, x: max((m, i * x + m * a) for i, m in enumerate(lengths))[1],
                (
                    "this looks at the longest segment alone: a shorter, later one has more "
                    "boundaries before it, and may need more."
                ),
            ),
            Mistake(
                "the last segment",
                lambda lengths, a, x: (len(lengths) - 1) * x + lengths[-1] * a,
                "this uses only the last segment: an earlier, longer one may need more.",
            ),
        ),
    ),
    Exercise(
        id="4.6",
        title="the best segment length",
        difficulty=2,
        minutes=5,
        trains="deriving the rule, and knowing when the root of n is not it",
        reference=best_length,
        observe=_observe_length,
        explain=_explain_length,
        mistakes=(
            Mistake(
                "the root of n",
                lambda n, a, x: max(1, round(math.sqrt(n))),
                (
                    "this is √n, which is right where a layer keeps no more than its input: with "
                    "a > x, segments must be shorter."
                ),
            ),
            Mistake(
                "the wrong way round",
                lambda n, a, x: min(n, max(1, round(math.sqrt(n * a / x)))),
                _SWAPPED,
            ),
            Mistake(
                "the wrong way round, past n",
                lambda n, a, x: round(math.sqrt(n * a / x)),
                _SWAPPED,
            ),
            Mistake(
                "always 1",
                lambda n, a, x: 1,
                (
                    "segments of one layer are right for most Transformers, but not for every "
                    "model: the length depends on n, a and x."
                ),
            ),
            Mistake(
                "down to 0",
                lambda n, a, x: round(math.sqrt(n * x / a)),
                (
                    "for 4 layers with a = 20 x your k is 0: √(n · x / a) is 0.45 there, and a "
                    "segment has at least one layer."
                ),
            ),
            Mistake(
                "a fraction",
                lambda n, a, x: math.sqrt(n * x / a),
                "k must be a whole number: round it.",
            ),
            Mistake(
                "rounds down",
                lambda n, a, x: max(1, int(math.sqrt(n * x / a))),
                "this rounds down, but the nearest whole number is above: 1.85 is closer to 2.",
            ),
            Mistake(
                "divisors alone",
                lambda n, a, x: min(
                    (k for k in range(1, n + 1) if n % k == 0),
                    key=lambda k: kept_at_peak(uniform_segments(n, k), a, x),
                ),
                (
                    "only lengths that divide n are tried: the last segment may be shorter than "
                    "the others."
                ),
            ),
            Mistake(
                "powers of two alone",
                lambda n, a, x: min(
                    (2**i for i in range(n.bit_length())),
                    key=lambda k: kept_at_peak(uniform_segments(n, k), a, x),
                ),
                "only powers of two are tried: every whole number from 1 to n is a length.",
            ),
            Mistake(
                "rounds up",
                lambda n, a, x: min(n, math.ceil(math.sqrt(n * x / a))),
                (
                    "this rounds up, but the nearest whole number is below: round √(n · x / a) to "
                    "the nearest."
                ),
            ),
        ),
    ),
)
