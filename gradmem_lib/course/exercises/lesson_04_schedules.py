"""Lesson 04's exercises about schedules: segments, their peak, the best length, and a card that equal segments exceed."""

from __future__ import annotations

import math

import torch
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from ...techniques.checkpointing import checkpoint_layers
from ...techniques.schedules import best_segments, uniform_segments
from ..compare import difference
from ..exercise import Exercise, Mistake, calls, measure
from .lesson_04 import count_calls, first_input, kept_boundaries, trained_layers
from .settings import DEPTH, KEEPS, chain_budget, chain_setting, gradients_of


def run_in_segments(layers, x, k):
    """The output of ``layers`` run in checkpointed segments of ``k``; the last one may be shorter."""
    for start in range(0, len(layers), k):
        x = checkpoint(layers[start : start + k], x, use_reentrant=False)
    return x


def _segments(*parts):
    """A wrong ``run_in_segments``: ``parts(n, k)`` gives (start, stop) pairs."""
    (pairs,) = parts

    def wrong(layers, x, k):
        for start, stop in pairs(len(layers), k):
            x = checkpoint(layers[start:stop], x, use_reentrant=False)
        return x

    return wrong


def _last_takes_the_rest(n, k):
    starts = list(range(0, n - k + 1, k)) or [0]
    return list(zip(starts, [*starts[1:], n], strict=True))


def _sequential(layers, x, k):
    return checkpoint_sequential(layers, -(-len(layers) // k), x, use_reentrant=False)


def _late_binding(layers, x, k):
    for start in range(0, len(layers), k):
        x = checkpoint(lambda h: layers[start : start + k](h), x, use_reentrant=False)  # noqa: B023
    return x


def _every_kth_layer(layers, x, k):
    for i, layer in enumerate(layers):
        x = checkpoint(layer, x, use_reentrant=False) if i % k == 0 else layer(x)
    return x


def _last_one_plain(layers, x, k):
    *starts, last = range(0, len(layers), k)
    for start in starts:
        x = checkpoint(layers[start : start + k], x, use_reentrant=False)
    return layers[last:](x)


def _observe_segments(candidate):
    found = {}
    for n, k in ((8, 4), (10, 4), (9, 2), (3, 5)):
        layers, x = trained_layers(n), first_input()
        kept = kept_boundaries(
            lambda layers, x, k=k: candidate(layers, x, k), trained_layers(n), first_input()
        )
        with count_calls(layers) as order:
            candidate(layers, x, k).square().sum().backward()
        found[f"{n} layers, k = {k}"] = {
            "boundaries alive after forward": kept,
            "forward calls": len(order),
            "layers in the order in which they run": order,
            "gradients": gradients_of(layers),
        }
    layers = trained_layers(4)
    out = candidate(layers, first_input(requires_grad=False), 2)
    if out.requires_grad:
        out.square().sum().backward()
    return found | {"4 layers, k = 2, an input that needs no gradient": {"gradients": gradients_of(layers)}}


def _explain_segments(got, expected):
    *_, last = got
    if (
        difference(
            [got[case] for case in got if case != last], [expected[case] for case in got if case != last]
        )
        is None
    ):
        return f"for {last}: no layer learns; that is the reentrant kind of checkpoint: use_reentrant=False."
    return None


def kept_at_peak(lengths, a, x):
    """The most bytes kept at once by segments of these lengths: earlier boundaries, and one whole segment."""
    return max(i * x + length * a for i, length in enumerate(lengths))


def best_length(n, a, x):
    """The segment length k with the lowest peak for ``n`` layers that keep ``a`` bytes each, ``x`` of them their input."""
    near = math.sqrt(n * x / a)  # the rule; where a last, shorter segment decides, its neighbours are better
    return min(range(1, n + 1), key=lambda k: (kept_at_peak(uniform_segments(n, k), a, x), abs(k - near)))


def _observe_length(candidate):
    found = {}
    for name, n, a, x in (
        ("64 layers, a = x", 64, 1000, 1000),
        ("100 layers, a = 4 x", 100, 4000, 1000),
        ("32 layers, a = 23 x (a 7B)", 32, 23_000, 1000),
        ("96 layers, a = 28 x", 96, 28_000, 1000),
        ("4 layers, a = 20 x", 4, 20_000, 1000),
        ("1 layer, a = x", 1, 1000, 1000),
    ):
        k = candidate(n, a, x)
        k = k.item() if hasattr(k, "item") else k  # numpy's numbers and 0-d tensors
        whole = isinstance(k, int) or (isinstance(k, float) and k.is_integer())
        fits = whole and 1 <= k <= n
        # Two lengths may have the same peak, so the peak is what counts.
        found[name] = {
            "k is a whole number from 1 to n (1 is yes)": int(fits),
            "peak with your k": kept_at_peak(uniform_segments(n, int(k)), a, x) if fits else math.nan,
        }
    return found


def train_step(layers, x):
    """Forward and backward of mean(layers(x)²) within the budget, each layer run forward at most twice; the loss."""
    with checkpoint_layers(layers, best_segments(len(layers), internal=KEEPS - 1, boundary=1)):
        loss = layers(x).square().mean()
        loss.backward()
    return loss.item()


def _trains(every, keep_last=None):
    def wrong(layers, x):
        with checkpoint_layers(layers, every, keep_last=keep_last):
            loss = layers(x).square().mean()
            loss.backward()
        return loss.item()

    return wrong


def _steps(forward):
    def wrong(layers, x):
        loss = forward(layers, x).square().mean()
        loss.backward()
        return loss.item()

    return wrong


def _observe_budget(candidate):
    layers, x = chain_setting()
    with count_calls(layers) as order:
        measured = measure(lambda: candidate(layers, x), budget=chain_budget(), model=layers)
    gradient = torch.zeros_like(x) if x.grad is None else x.grad
    return {
        "64 layers": {"loss": measured.value, "gradient of the input": gradient},
        "forward calls": {"more than 2 for each layer (too many)": max(0, len(order) - 2 * DEPTH)},
        "the card": measured,
        # Tells two ways of the same peak apart: none, and a checkpoint around everything.
        "forward calls of a step that does not fit": {"in all": len(order) if measured.over else 0},
    }


EXERCISES = (
    Exercise(
        id="4.4", title="segments", difficulty=2, minutes=6,
        trains="cutting a list of layers, to its last one",
        reference=run_in_segments,
        observe=_observe_segments,
        explain=_explain_segments,
        mistakes=(
            Mistake("drops the rest", _segments(lambda n, k: [(i * k, i * k + k) for i in range(n // k)] or [(0, 0)]),
                    "layers are left out: where k does not divide the number of layers, a shorter segment is left over."),
            Mistake("the last takes the rest", _segments(_last_takes_the_rest),
                    "the last segment takes whatever is left: it grows too long, where a shorter one of its own was asked for."),
            Mistake("checkpoint_sequential", _sequential,
                    "checkpoint_sequential takes a number of segments, rounds their length down and gives the last one all the rest: 9 layers in 5 segments are 1, 1, 1, 1, 5."),
            Mistake("late binding", _late_binding,
                    "the lambda looks up its variables when it runs again, and by then the loop has moved on: hand the segment itself to checkpoint."),
            Mistake("every k-th layer", _every_kth_layer,
                    "one layer in k is checkpointed, and the others keep everything: put k layers in a row into one checkpoint."),
            Mistake("last one plain", _last_one_plain,
                    "a fine idea, which section 7 takes up: the last segment runs without a checkpoint. Here, put it into one as well."),
        ),
    ),
    Exercise(
        id="4.5", title="the peak of a schedule", difficulty=2, minutes=5,
        trains="finding the segment whose backward needs the most",
        reference=kept_at_peak,
        observe=calls(
            ([1, 1, 1, 1], 1000, 1000), ([4, 4, 4, 4], 3000, 1000), ([4, 4, 1], 5000, 1000), ([9], 5000, 1000),
            ([5, 4, 3, 2], 3000, 1000), ([2, 3, 4, 5], 3000, 1000),
        ),
        mistakes=(
            Mistake("boundaries alone", lambda lengths, a, x: len(lengths) * x,
                    "this counts boundaries alone: in backward, a segment that runs again is there in full, with a bytes for each layer."),
            Mistake("the segment alone", lambda lengths, a, x: max(lengths) * a,
                    "this counts the segment that runs again, and not the boundaries of the earlier ones, which are still waiting."),
            Mistake("its own boundary twice", lambda lengths, a, x: max(i * x + m * a for i, m in enumerate(lengths, 1)),
                    "this counts a segment's own boundary twice: a includes the input of its first layer."),
            Mistake("all boundaries", lambda lengths, a, x: len(lengths) * x + max(lengths) * a,
                    "the longest segment does not meet all boundaries: later ones are gone when its backward comes."),
            Mistake("all later boundaries", lambda lengths, a, x: max(i * x + m * a for i, m in enumerate(lengths[::-1])),
                    "the boundaries are counted from the end: when a segment runs again, the earlier ones are those still there."),
            Mistake("the last segment", lambda lengths, a, x: (len(lengths) - 1) * x + lengths[-1] * a,
                    "this looks at the last segment alone: an earlier, longer one may need more."),
        ),
    ),
    Exercise(
        id="4.6", title="the best segment length", difficulty=2, minutes=6,
        trains="deriving the rule, and knowing when the root of n is not it",
        reference=best_length,
        observe=_observe_length,
        mistakes=(
            Mistake("the root of n", lambda n, a, x: max(1, round(math.sqrt(n))),
                    "this is √n, which is right where a layer keeps no more than its input: with a > x, segments must be shorter."),
            Mistake("the wrong way round", lambda n, a, x: min(n, max(1, round(math.sqrt(n * a / x)))),
                    "a and x are the wrong way round (or this is n / k, the number of segments): the more a layer keeps, the shorter the segments."),
            Mistake("always 1", lambda n, a, x: 1,
                    "one layer is right for most Transformers, and not for every chain: let n, a and x decide."),
            Mistake("down to 0", lambda n, a, x: round(math.sqrt(n * x / a)),
                    "for a shallow network of large layers this rounds to 0: no segment has fewer layers than one."),
            Mistake("a fraction", lambda n, a, x: math.sqrt(n * x / a), "k must be a whole number: round it."),
            Mistake("rounds down", lambda n, a, x: max(1, int(math.sqrt(n * x / a))),
                    "this rounds down where the nearest whole number is above: 1.85 is closer to 2."),
        ),
    ),
    Exercise(
        id="4.7", title="64 layers on a card that the root of n exceeds", difficulty=3, minutes=10,
        trains="choosing segments of unequal length under a budget of bytes and of forward calls",
        reference=train_step,
        observe=_observe_budget,
        mistakes=(
            Mistake("none", _steps(lambda layers, x: layers(x)), "nothing is checkpointed."),
            Mistake("layer by layer", _trains(1),
                    "every layer is a segment of its own, so 64 boundaries wait: that is more than the card has."),
            Mistake("the root of n", _trains("sqrt"),
                    "segments of √64 = 8 layers are too long where a layer keeps five times its input."),
            Mistake("the best equal ones", _trains(4),
                    "this is the best that equal segments can do, and not enough: early segments find few boundaries, so they may be longer."),
            Mistake("short first", _trains(best_segments(DEPTH, KEEPS - 1, 1)[::-1]),
                    "these are the right lengths the wrong way round: the last segments find the most boundaries, so they must be the shortest."),
            Mistake("twice nested", _trains(best_segments(DEPTH, KEEPS - 1, 1, 2.0)),
                    "it fits with room to spare, and layers run forward three times: one extra forward was allowed."),
        ),
    ),
)  # fmt: skip
