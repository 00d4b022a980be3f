"""Lesson 04's exercises that run in segments: of one length, and on a card that equal ones
exceed.
"""

from __future__ import annotations

import re
from dataclasses import replace

import torch
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from ....techniques.checkpointing import checkpoint_layers
from ....techniques.schedules import best_segments
from ...judge.compare import difference
from ...judge.exercise import Exercise, Mistake, Seen, measure, outside_torch
from ..shared.settings import gradients_of
from .exercises_frozen import RANDOM
from .layers import ROWS, count_calls, first_input, kept_boundaries, trained_layers
from .settings import CHAIN_BOUNDARY, CHAIN_CARD, DEPTH, KEEPS, chain_budget, chain_setting


def run_in_segments(layers, x, k):
    """The output of ``layers`` run in checkpointed segments of ``k``; the last one may be
    shorter.
    """
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
    # More layers than rows too: an answer that counts rows for layers leaves some out there.
    for n, k, rows in ((8, 4, ROWS), (10, 4, ROWS), (9, 2, 3), (3, 5, ROWS), (7, 5, ROWS)):
        layers, x = trained_layers(n), first_input(rows=rows)
        kept = kept_boundaries(lambda layers, x, k=k: candidate(layers, x, k), trained_layers(n))
        with count_calls(layers) as order:
            candidate(layers, x, k).square().sum().backward()
        found[f"{n} layers, k = {k}"] = {
            "boundaries alive after forward": kept,
            "forward calls": len(order),
            "layers in the order in which they run": order,
            "layers that record no graph in forward": len(order.no_graph),
            "gradients": gradients_of(layers),
            "gradient of the input": torch.zeros_like(x) if x.grad is None else x.grad,
        }
    found[_DROPOUT] = {"gradients": _gradients_with_dropout(candidate)}
    layers = trained_layers(4)
    out = candidate(layers, first_input(requires_grad=False), 2)
    if out.requires_grad:
        out.square().sum().backward()
    return found | {
        "4 layers, k = 2, an input that needs no gradient": {"gradients": gradients_of(layers)}
    }


def _gradients_with_dropout(candidate) -> torch.Tensor:
    layers = trained_layers(4, dropout=0.5)
    torch.default_generator.manual_seed(6)
    candidate(layers, first_input(), 2).square().sum().backward()
    return gradients_of(layers)


_DROPOUT = "4 layers with dropout, k = 2"
_REENTRANT = (
    "this is a reentrant checkpoint, which needs an input that requires a gradient: "
    "use_reentrant=False."
)


def _explain_segments(got, expected):
    cases = list(got)[:-2]
    for case in cases:
        if got[case]["layers that record no graph in forward"]:
            return _REENTRANT
        if says := _why_segments(
            got[case], expected[case], *(int(n) for n in re.findall(r"\d+", case))
        ):
            return says
    alone = [[seen[case] for case in cases] for seen in (got, expected)]
    if difference(*alone) is not None:
        return None
    if difference(got[_DROPOUT], expected[_DROPOUT]):
        return RANDOM
    return f"no layer learns from an input that needs no gradient: {_REENTRANT}"


def _why_segments(mine, right, n, k) -> str | None:
    order, layers = mine["layers in the order in which they run"], range(n)
    if missing := [i for i in layers if i not in order]:
        last = list(range(missing[-1] + 1, n))
        how_many = -(-n // k)
        is_last_segment = len(last) == n - k * (how_many - 1)
        # In forward, and again in backward.
        if how_many > 1 and is_last_segment and order == last * how_many * 2:
            return (
                "the last segment runs in place of every segment. A function that is made in a "
                "loop looks up its variables when it runs, and by then the loop has ended: pass "
                "the segment itself to checkpoint."
            )
        return (
            f"{len(missing)} of {n} layers are left out and never run: a segment is the slice "
            "layers[start : start + k], the last one too."
        )
    learns = mine["gradients"].view(n, -1).any(1).tolist()
    if not any(learns):
        return (
            "no layer learns: the output is not what the last checkpoint returned, or it is "
            "detached."
        )
    if not all(learns) and learns[-1]:
        return (
            "the gradient stops on its way, and earlier layers learn nothing: each segment must "
            "get what the one before returned, without detach."
        )
    if once := [i for i in layers if order.count(i) == 1]:
        return (
            f"{len(once)} of {n} layers run without a checkpoint: put every segment into one, "
            "the last segment too."
        )
    return _why_lengths(mine, right, n, k)


def _why_lengths(mine, right, n, k) -> str | None:
    """What is said where each layer learns, inside a checkpoint."""
    order, wanted = (seen["layers in the order in which they run"] for seen in (mine, right))
    layers = range(n)
    if max(order.times(layers)) > 2:
        return "some layers run more than twice: one checkpoint around each segment is enough."
    if order.segments(layers) != wanted.segments(layers):
        return (
            f"for {n} layers and k = {k} your segments have {order.segments(layers)} layers, "
            f"but should have {wanted.segments(layers)}."
        )
    if mine["boundaries alive after forward"] > right["boundaries alive after forward"]:
        return "more boundaries are kept than there are segments: keep only the newest x."
    if not mine["gradient of the input"].any():
        return "x gets no gradient, though it requires one: do not detach it."
    return None


HEAD, ON_THEIR_WAY = (
    25,
    9,
)  # boundaries: what the head and its loss need, and gradients in the backward of a layer
INSIDE, PASSING = [KEEPS - 1] * (DEPTH - 1), [ON_THEIR_WAY] * (DEPTH - 1)


def train_step(layers, x):
    """Forward and backward of mean(layers(x)²) within the budget, each layer run forward at most
    twice; the loss.
    """
    with checkpoint_layers(
        layers, best_segments(DEPTH, [*INSIDE, HEAD], 1, temporaries=[*PASSING, 0])
    ):
        loss = layers(x).square().mean()
        loss.backward()
    return loss.item()


def _trains(every):
    def wrong(layers, x):
        with checkpoint_layers(layers, every):
            loss = layers(x).square().mean()
            loss.backward()
        return loss.item()

    return wrong


def _observe_budget(candidate):
    layers, x = chain_setting()
    with count_calls(layers) as order:
        measured = measure(lambda: candidate(layers, x), budget=chain_budget(), model=layers)
    gradient = torch.zeros_like(x) if x.grad is None else x.grad
    often = max(order.times(layers), default=0)
    outside = 0
    if often < 2 and not measured.over:
        # Within the card, and no layer runs again: are the tensors somewhere else?
        again, rows = chain_setting()
        held = outside_torch(lambda: candidate(again, rows))
        outside = held if held > chain_budget() // 4 else 0
    lengths = _all_segments(order, layers) if measured.over else []
    cases = {
        "64 layers": {"loss": measured.value, "gradient of the input": gradient},
        "forward calls": {"of one layer, where they are more than 2": often if often > 2 else 0},
        "the card": replace(measured, value=None),
        "outside of tensors": {"bytes": outside},
        # Tells ways that do not fit apart. As one text, so that a known mistake has all of them.
        "segments of a step that does not fit": {"lengths": ", ".join(map(str, lengths))},
    }
    return Seen(cases, lengths=lengths, needs=CHAIN_CARD + measured.over / CHAIN_BOUNDARY)


def _all_segments(order, layers) -> list[int]:
    """The lengths of the segments, and at the end that of the last one where it does not run
    again; without layers that run once at another place.
    """
    lengths = order.segments(layers)
    again = set(order[len(layers) :])
    if again and again == set(range(len(again))) and len(again) < len(layers):
        lengths.append(len(layers) - len(again))
    return lengths


def _explain_budget(got, expected):
    often = got["forward calls"]["of one layer, where they are more than 2"]
    if often:
        return (
            f"some layers run forward {often} times, and twice is the limit for each: once "
            "more "
            'in backward (every="best" also runs them once to measure).'
        )
    if difference(got["64 layers"], expected["64 layers"]):
        return None
    if got["outside of tensors"]["bytes"]:
        return (
            "what is saved waits in arrays that are no tensors, and takes as many bytes there: let "
            "layers run again instead."
        )
    return _why_too_large(got.notes["lengths"], got.notes["needs"])


def _boundaries_needed(lengths: list[int]) -> list[int]:
    """How many boundaries are alive in the backward of each segment."""
    needed = []
    for before, length in enumerate(lengths[:-1]):
        needed.append(before + KEEPS * length + ON_THEIR_WAY)
    layers_beside_the_head = lengths[-1] - 1
    return [*needed, len(lengths) - 1 + KEEPS * layers_beside_the_head + HEAD]


def _why_too_large(lengths: list[int], measured: float) -> str | None:
    """What is said of the segments of a step that does not fit, and needs ``measured``
    boundaries.
    """
    if not lengths:
        return "nothing is checkpointed: no layer runs again."
    if sum(lengths) != DEPTH:
        return None
    if set(lengths) == {1}:
        return (
            "every layer is its own segment, so 64 boundaries are kept: they do not fit on the "
            "card."
        )
    if len(set(lengths[:-1])) == 1:
        return (
            f"equal segments of {lengths[0]}: when an early segment runs again, few boundaries "
            "are kept, so it may be longer; the last segments must be shorter."
        )
    needed = _boundaries_needed(lengths)
    most = max(needed)
    if most <= CHAIN_CARD:
        return (
            "these segments fit, and something else is alive beside them: in backward no name may "
            "hold the head's outputs, and the loss is layers(x).square().mean()."
        )
    return _why_segment(lengths, needed) if abs(most - measured) < 0.1 else None


def _why_segment(lengths: list[int], needed: list[int]) -> str:
    """What is said of the segment that needs most, and more than the card has."""
    most = max(needed)
    segments = f"your segments have {', '.join(map(str, lengths))} layers"
    at = needed.index(most)
    if at < len(lengths) - 1:
        return (
            f"{segments}. Segment {at + 1} needs most, {most} boundaries: {at} of earlier "
            f"segments, {KEEPS * lengths[at]} of its {lengths[at]} layers, and in a layer's "
            f"backward gradients take {ON_THEIR_WAY} more. The card has room for {CHAIN_CARD}."
        )
    if lengths[-1] > 1:
        return (
            f"{segments}. The last segment needs most, because it has other layers beside the "
            "head: let the head be alone there."
        )
    return (
        f"{segments}, and all {at} boundaries are kept when the head and its loss need {HEAD} "
        "more: use fewer, longer segments."
    )


EXERCISES = (
    Exercise(
        id="4.4",
        title="segments",
        difficulty=2,
        minutes=6,
        trains="cutting a list of layers, to its last one",
        reference=run_in_segments,
        observe=_observe_segments,
        explain=_explain_segments,
        raises=(
            (
                r"range\(\) arg 3 must not be zero",
                (
                    "the step of a range is 0. k is the length of a segment, and so the step from "
                    "one start to the next; checkpoint_sequential takes a number of segments "
                    "instead."
                ),
            ),
            (
                r"'Tensor' object is not callable",
                (
                    "a tensor is called like a function: checkpoint takes the segment and its "
                    "input apart, checkpoint(segment, x), and calls the segment itself."
                ),
            ),
        ),
        mistakes=(
            Mistake(
                "drops the rest",
                _segments(lambda n, k: [(i * k, i * k + k) for i in range(n // k)] or [(0, 0)]),
                (
                    "layers are left out: where k does not divide the number of layers, there is "
                    "one shorter segment."
                ),
            ),
            Mistake(
                "the last takes the rest",
                _segments(_last_takes_the_rest),
                (
                    "the last segment takes all remaining layers and is too long: the exercise "
                    "asks for one more, shorter segment."
                ),
            ),
            Mistake(
                "checkpoint_sequential",
                _sequential,
                (
                    "checkpoint_sequential takes a number of segments, rounds their length down "
                    "and gives the last one all the rest: 9 layers in 5 segments are 1, 1, 1, 1, "
                    "5."
                ),
            ),
            Mistake(
                "late binding",
                _late_binding,
                (
                    "the function looks up its variables when it runs again, and by then the loop "
                    "has moved on: pass the segment itself to checkpoint."
                ),
            ),
            Mistake(
                "every k-th layer",
                _every_kth_layer,
                (
                    "one layer in k is checkpointed, and the others keep everything: put k layers "
                    "in a row into one checkpoint."
                ),
            ),
            Mistake(
                "last one plain",
                _last_one_plain,
                (
                    "the last segment runs without a checkpoint. Section 6 uses this good idea; "
                    "here, put the last segment into a checkpoint as well."
                ),
            ),
        ),
    ),
    Exercise(
        id="4.7",
        title="64 layers, their logits and a card",
        difficulty=3,
        minutes=10,
        trains="choosing segments of unequal length where what comes after the layers counts too",
        reference=train_step,
        observe=_observe_budget,
        explain=_explain_budget,
        mistakes=(
            Mistake(
                "layer by layer",
                _trains(1),
                (
                    "every layer is its own segment, so 64 boundaries are kept: they do not fit "
                    "on the card."
                ),
            ),
            Mistake(
                "the root of n",
                _trains("sqrt"),
                "segments of √64 = 8 layers are too long where a layer keeps five times its input.",
            ),
            Mistake(
                "the best equal ones",
                _trains(4),
                (
                    "these are the best equal segments, but they are not enough: when an early "
                    "segment runs again, few boundaries are kept, so it may be longer."
                ),
            ),
            Mistake(
                "the layers alone",
                _trains(best_segments(DEPTH, KEEPS - 1, 1)),
                (
                    "these lengths are the best for the layers alone: the head is counted as one "
                    "of them, but all boundaries are still kept when the logits and their loss "
                    "need 25 more. Use fewer, longer segments."
                ),
            ),
            Mistake(
                "nothing on its way",
                _trains(best_segments(DEPTH, [*INSIDE, HEAD], 1)),
                (
                    "the head and its loss are counted. The gradients in a layer's backward, 9 "
                    "boundaries, are not counted, or they are counted for the head too, whose 25 "
                    "already include everything. Now the first segments are too long."
                ),
            ),
            Mistake(
                "twice nested",
                _trains(best_segments(DEPTH, KEEPS - 1, 1, 2.0)),
                (
                    "lists inside the list: layers run forward three times, but only one extra "
                    "forward was allowed."
                ),
            ),
        ),
    ),
)
