"""Lesson 03's exercises about windows: the right divisor, and the whole loop around it."""

from __future__ import annotations

import math
from itertools import islice

import torch

from ....names import IGNORED
from ....techniques.losses import count_targets
from ...judge.compare import describe, difference, plain
from ...judge.exercise import Exercise, Mistake, Seen
from ..shared.gradient_weights import (
    ANOTHER_STEP,
    NO_BACKWARD,
    NO_STEP,
    STEP_FIRST,
    ZEROED,
    Graphs,
    before_each_update,
    parts_of,
    weights_of,
    why,
    why_loss,
)
from ..shared.settings import Bigrams, bigram_loss, flat, gradients_of, rows


def accumulate(micro_batches, loss_and_count) -> float:
    """Leave the gradient of the mean loss over all tokens of a list of micro-batches; return that
    mean.
    """
    total = sum(loss_and_count(micro)[1] for micro in micro_batches)
    mean = 0.0
    for micro in micro_batches:
        loss, _ = loss_and_count(micro)
        (loss / total).backward()
        mean += loss.item() / total
    return mean


def accumulates(backward, report=None):
    """A wrong ``accumulate``: what it calls backward on, from (loss, count, K, total), and returns,
    from (losses, counts).
    """

    def wrong(micro_batches, loss_and_count):
        counts, losses = [loss_and_count(micro)[1] for micro in micro_batches], []
        for micro, count in zip(micro_batches, counts, strict=True):
            loss, _ = loss_and_count(micro)
            backward(loss, count, len(counts), sum(counts)).backward()
            losses.append(loss.item())
        return report(losses, counts) if report else sum(losses) / sum(counts)

    return wrong


def _each_mean(losses, counts):
    return [loss / count if count else math.nan for loss, count in zip(losses, counts, strict=True)]


def mean_of_means(losses, counts):
    return sum(_each_mean(losses, counts)) / len(losses)


def _mean_times_count(losses, counts):
    return sum(m * c for m, c in zip(_each_mean(losses, counts), counts, strict=True)) / sum(counts)


def _accumulations() -> dict[str, list]:
    return {
        "micro-batches of equal counts": [rows(6, 6), rows(6, 6, seed=1), rows(6, 6, seed=2)],
        "micro-batches of unequal counts": unequal(),
        "one micro-batch without a label": [rows(4), torch.full((1, 5), IGNORED), rows(7, seed=1)],
    }


def _observe_accumulate(candidate):
    found = {}
    backwards = 0
    for name, micro_batches in _accumulations().items():
        model = Bigrams()
        graphs = Graphs(bigram_loss(model))
        loss = candidate(micro_batches, graphs)
        found[name] = {
            "gradient": gradients_of(model),
            "loss": loss,
            "graphs that are kept at once": graphs.kept,
        }
        backwards += graphs.backwards
    return Seen(found, backwards=backwards)


def _explain_accumulate(got, expected):
    if not got.notes["backwards"]:
        return NO_BACKWARD
    # the one that tells most
    names = sorted(expected, key="micro-batches of unequal counts".__ne__)
    right = {
        name: difference(got[name]["gradient"], expected[name]["gradient"]) is None
        for name in names
    }
    for name in names:
        model, micro_batches = Bigrams(), _accumulations()[name]
        parts, counts = parts_of(bigram_loss(model), micro_batches, list(model.parameters()))
        if not right[name]:
            weights = weights_of(got[name]["gradient"], parts)
            return why(weights, counts) if weights else None
        elif all(right.values()) and difference(got[name]["loss"], expected[name]["loss"]):
            sums = [bigram_loss(model)(micro)[0].item() for micro in micro_batches]
            if what := why_loss(plain(got[name]["loss"]), sums, counts):
                return f"the gradient is right; the returned loss is {what}."
    if all(right.values()) and got[name]["graphs that are kept at once"]:
        return GRAPHS_KEPT
    return None


GRAPHS_KEPT = (
    "the graphs of several micro-batches are kept at once: call backward on each before "
    "the next forward, and keep loss.item()."
)


def unequal():
    return [rows(3), rows(9, 3, seed=1), rows(12, 12, seed=2), rows(6, seed=3)]


def train(model, optimizer, micro_batches, window, loss_and_count) -> list[float]:
    """An update after every ``window`` micro-batches and one for what is left; each update's mean
    loss.
    """
    losses, rest = [], iter(micro_batches)
    while held := list(islice(rest, window)):
        losses.append(accumulate(held, loss_and_count))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _trains(
    per_micro=lambda optimizer: None,
    *,
    first=False,
    last=True,
    each=False,
    zero=True,
    weight=None,
    full=False,
):
    """A wrong ``train``: what it does after each micro-batch, if it zeroes ``first``, how it weighs
    one, from (count, total, K).
    """

    def wrong(model, optimizer, micro_batches, window, loss_and_count):
        losses, rest = [], iter(micro_batches)
        while held := list(islice(rest, window)):
            if len(held) < window and not last:
                break
            total, mean = sum(loss_and_count(micro)[1] for micro in held), 0.0
            for micro in held:
                if first:
                    optimizer.zero_grad()
                loss, count = loss_and_count(micro)
                part = loss / (weight(count, total, len(held)) if weight else total)
                (part * len(held) / window if full else part).backward()
                mean += loss.item() / total if each else part.item()
                per_micro(optimizer)
            if not each:
                optimizer.step()
            if zero:
                optimizer.zero_grad()
            losses.append(mean)
        return losses

    return wrong


def step_and_zero(optimizer):
    optimizer.step()
    optimizer.zero_grad()


_EPOCHS = {
    "6 micro-batches in windows of 3": (((2,), (9, 3), (12, 12), (5,), (4, 4), (7,)), 3),
    "7 micro-batches in windows of 3": (((2,), (9, 3), (12, 12), (5,), (4, 4), (7,), (6, 2)), 3),
    "5 micro-batches in windows of 2": (((6,), (3,), (8,), (5,), (4,)), 2),
}


def _observe_train(candidate):
    found = {}
    backwards = {}
    for name, (lengths, window) in _EPOCHS.items():
        model = Bigrams()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
        micro_batches = [rows(*each, seed=seed) for seed, each in enumerate(lengths)]
        updates: list[torch.Tensor] = []
        graphs = Graphs(bigram_loss(model))
        before: list[int] = []

        def look(
            model=model, micro_batches=micro_batches, updates=updates, graphs=graphs, before=before
        ):
            before.append(graphs.backwards)
            with torch.enable_grad():
                parts, _ = parts_of(bigram_loss(model), micro_batches, list(model.parameters()))
            updates.append(torch.tensor(weights_of(gradients_of(model), parts) or [0.0]))

        before_each_update(optimizer, look)
        losses = candidate(model, optimizer, iter(micro_batches), window, graphs)
        # Before each update, and in all.
        backwards[name] = [*before, graphs.backwards]
        found[name] = {
            "weights": flat(model.parameters()),
            "losses": losses,
            "updates": len(updates),
            "graphs that are kept at once": graphs.kept,
            "losses that have a graph": sum(
                isinstance(loss, torch.Tensor) and loss.requires_grad for loss in losses or ()
            )
            if isinstance(losses, list | tuple)
            else 0,
        }
        found[f"{name}: each micro-batch's weight"] = {
            f"update {i}": weights for i, weights in enumerate(updates, 1)
        }
    return Seen(found | {_LIST: _observe_list(candidate)}, backwards=backwards)


_LIST = "a list of 5 micro-batches"


class MicroBatches(list):
    """A list that stops an answer which reads it from its beginning for each window."""

    def __init__(self, micro_batches):
        super().__init__(micro_batches)
        self.reads = 0

    def __iter__(self):
        self.reads += 1
        if self.reads > 20:
            raise ValueError(_FROM_THE_BEGINNING)
        return super().__iter__()


_FROM_THE_BEGINNING = (
    "a list is read from its beginning for each window: take all windows from one iterator, "
    "iter(micro_batches)."
)


def _observe_list(candidate) -> dict:
    """The losses on a list, which can be read more than once, and what stopped the answer."""
    lengths, window = list(_EPOCHS.values())[-1]
    micro_batches = MicroBatches(rows(*each, seed=seed) for seed, each in enumerate(lengths))
    model = Bigrams()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    try:
        losses = candidate(model, optimizer, micro_batches, window, bigram_loss(model))
    except (TypeError, ValueError) as error:
        return {"stopped by": str(error), "losses": []}
    return {"stopped by": "", "losses": losses}


def _explain_train(got, expected):
    for name, (lengths, window) in _EPOCHS.items():
        updates, right = (
            list(seen[f"{name}: each micro-batch's weight"].values()) for seen in (got, expected)
        )
        counts = [count_targets(rows(*each)) for each in lengths]
        if not updates:
            if plain(got[name]["losses"]) == ():
                return (
                    "nothing was read: micro_batches is an iterator, and after it is read to "
                    "its end, it gives nothing more. Keep each window in a list."
                )
            moved = difference(got[name]["weights"], flat(Bigrams().parameters()))
            return ANOTHER_STEP if moved else NO_STEP
        if len(updates[0]) == len(counts) and not held_of(updates)[0]:
            return _why_nothing(got.notes["backwards"][name])
        if held_of(updates) == held_of(right)[:-1]:
            # The update is missing, and perhaps its loss is not.
            losses = plain(got[name]["losses"])
            has_loss = isinstance(losses, tuple) and len(losses) == len(right)
            return _why_no_last_update(len(counts), window, has_loss)
        if says := _why_updates(updates, right, counts, window):
            return says
    return _why_graphs(got) or _why_losses(got, expected)


def _why_nothing(backwards: list[int]) -> str:
    """What is said where the first update has no gradient. ``backwards``: how often backward had
    run before each update, and in all.
    """
    if not backwards[-1]:
        return NO_BACKWARD
    if not backwards[0]:
        return STEP_FIRST
    return ZEROED


def _why_no_last_update(micro_batches: int, window: int, has_loss: bool) -> str:
    """What is said where each update is made of its window, and the last one is missing."""
    is_full = micro_batches % window == 0
    if has_loss:
        which = "the last window" if is_full else "the last window, which is not full,"
        return f"{which} has its loss in the list, but no step() is made for it."
    if is_full:
        return (
            f"with {micro_batches} micro-batches in windows of {window} the last window is full, "
            "and no update is made of it: each window makes an update."
        )
    return (
        "this drops the last window when it is not full: its micro-batches were read but not used."
    )


def held_of(updates) -> list[set[int]]:
    """Which micro-batches each update is made of, from 0."""
    return [{i for i, w in enumerate(u.tolist()) if abs(w) > 1e-9} for u in updates]


def _why_graphs(got) -> str | None:
    if any(got[name]["losses that have a graph"] for name in _EPOCHS):
        return "the losses keep their graphs, one for each update: keep loss.item()."
    if any(got[name]["graphs that are kept at once"] for name in _EPOCHS):
        return GRAPHS_KEPT
    return None


def _why_losses(got, expected) -> str | None:
    """What is said where each update is right."""
    others = [name for name in expected if name != _LIST]
    if all(difference(got[name], expected[name]) is None for name in others):
        stopped = got[_LIST]["stopped by"]
        if stopped == _FROM_THE_BEGINNING:
            return stopped
        return f"micro_batches may be a list too, and your code does not read one: {stopped}."
    losses, right = next((got[name]["losses"], expected[name]["losses"]) for name in _EPOCHS)
    if isinstance(plain(losses), tuple) and len(losses) == len(right):
        lengths, window = next(iter(_EPOCHS.values()))
        first = [
            bigram_loss(Bigrams())(rows(*each, seed=i)) for i, each in enumerate(lengths[:window])
        ]
        if what := why_loss(
            plain(losses[0]), [loss.item() for loss, _ in first], [int(n) for _, n in first]
        ):
            return f"the updates are right; the first of the losses is {what}."
        if isinstance(plain(losses[0]), tuple):
            return (
                "the updates are right, but the first of the losses is "
                f"{describe(losses[0])}: put the mean loss alone into the list, one number."
            )
        return (
            "the updates are right, but the losses are not: each loss is the mean that backward "
            "was called on, before the update."
        )
    return None


def _why_updates(updates, right, counts, window) -> str | None:
    held, wanted = held_of(updates), held_of(right)
    if len(updates) == len(counts) > len(right):
        if all(len(one) <= 1 for one in held):
            return (
                "this steps after every micro-batch: that trains with small batches and "
                "accumulates nothing."
            )
        return (
            f"{len(updates)} updates are made of {len(counts)} micro-batches, and some "
            "micro-batches are in several of them: each belongs to one window, and "
            f"{len(counts)} in windows of {window} make {len(right)} updates."
        )
    if (
        held
        and len(held[0]) > 0
        and held[0] == set(range(len(held[0]))) != wanted[0]
        and len(updates) <= len(right) + 1
    ):
        many = "micro-batch" if len(held[0]) == 1 else "micro-batches"
        return f"the first update is made of {len(held[0])} {many}, and the window is {window}."
    joined = [*wanted[:-2], set().union(*wanted[-2:])]
    if len(updates) == len(right) - 1 and held == joined:
        return (
            "what is left at the end is joined to the window before it: it makes an update of its "
            "own."
        )
    for number, (mine, theirs, u) in enumerate(zip(held, wanted, updates, strict=False), 1):
        # The gradients are those of the weights before this update, so the micro-batches went
        # through the model again: gradients that were left in .grad are others.
        if mine > theirs and min(mine) < min(theirs):
            return (
                f"update {number} is made of {_named(mine)}, and should be made of "
                f"{_named(theirs)}: the others belong to an earlier window. If you collect a "
                "window in a list, empty it after each update; if you slice a list, begin where "
                "the last slice ended."
            )
        inside = sorted(theirs)
        if mine == theirs and all(
            math.isclose(u[i] * sum(counts), 1, rel_tol=1e-3) for i in inside
        ):
            return (
                "this divides by the items of all micro-batches: an update is the mean over "
                "those of its own window."
            )
        says = (
            why([u[i].item() for i in inside], [counts[i] for i in inside]) if len(u) > 1 else None
        )
        if says:
            return (
                says if len(inside) == window else f"in the last window, which is not full, {says}"
            )
    return (
        f"there are {len(updates)} updates, and there should be {len(right)}."
        if len(updates) != len(right)
        else None
    )


def _named(micro_batches: set[int]) -> str:
    """ "micro-batches 1, 2 and 3", from indices that begin at 0."""
    *most, last = [str(i + 1) for i in sorted(micro_batches)]
    if not most:
        return f"micro-batch {last}"
    return f"micro-batches {', '.join(most)} and {last}"


# What an answer raises that takes a micro-batch apart itself, as if it were a dict of tensors.
COUNTS_ITSELF = (
    "too many indices for tensor|only integers, slices|object has no attribute 'labels'",
    (
        "a micro-batch may be anything that loss_and_count takes (here it is a tensor, and no dict "
        "with labels): loss_and_count(micro) also says how many items it has."
    ),
)


EXERCISES = (
    Exercise(
        id="3.3",
        title="the right divisor",
        difficulty=2,
        minutes=8,
        trains="the gradient of a mean, taken piece by piece",
        reference=accumulate,
        observe=_observe_accumulate,
        explain=_explain_accumulate,
        raises=(
            COUNTS_ITSELF,
            (
                "ZeroDivisionError",
                (
                    "a micro-batch may have 0 items: divide by the items of the whole window, "
                    "never by those of one micro-batch."
                ),
            ),
        ),
        mistakes=(
            Mistake(
                "no division",
                accumulates(lambda loss, count, k, total: loss),
                (
                    "no division: this is the gradient of the sum, as many times too large as "
                    "there are tokens."
                ),
            ),
            Mistake(
                "sum of means",
                accumulates(
                    lambda loss, count, k, total: loss / count,
                    lambda ls, cs: sum(_each_mean(ls, cs)),
                ),
                (
                    "this adds up the means of the micro-batches: with K of them the result is "
                    "about K times too large."
                ),
            ),
            Mistake(
                "by K",
                accumulates(lambda loss, count, k, total: loss / count / k, mean_of_means),
                (
                    "dividing by K gives every micro-batch the same weight: a token of a short one "
                    "then counts more than one of a long one."
                ),
            ),
            Mistake(
                "logged unweighted",
                accumulates(lambda loss, count, k, total: loss / total, mean_of_means),
                (
                    "the gradient is right; the loss is an unweighted average of the "
                    "micro-batches' means."
                ),
            ),
            Mistake(
                "logged last",
                accumulates(
                    lambda loss, count, k, total: loss / total, lambda ls, cs: ls[-1] / cs[-1]
                ),
                "the gradient is right; the loss is only the last micro-batch's.",
            ),
            Mistake(
                "mean times count",
                accumulates(lambda loss, count, k, total: loss / total, _mean_times_count),
                (
                    "the mean of a micro-batch without labels is 0 / 0, which is not a number, "
                    "even when multiplied by 0: use the sum."
                ),
            ),
        ),
    ),
    Exercise(
        id="3.4",
        title="the whole loop, and what is left at its end",
        difficulty=2,
        minutes=8,
        trains="when to step, when to zero, and the last incomplete window",
        reference=train,
        observe=_observe_train,
        explain=_explain_train,
        raises=(
            COUNTS_ITSELF,
            (
                r"has no len\(\)|not subscriptable",
                (
                    "micro_batches is an iterator, which has no length and no [ ]: islice reads "
                    "one window, and list() reads everything."
                ),
            ),
            (
                "ZeroDivisionError",
                (
                    "where `window` divides the number of micro-batches, nothing is left for a "
                    "last update: accumulate no empty list."
                ),
            ),
        ),
        mistakes=(
            Mistake(
                "zeroes inside",
                _trains(first=True, zero=False),
                (
                    "this zeroes the gradients inside the window: only the last micro-batch's "
                    "gradients are left."
                ),
            ),
            Mistake(
                "steps every micro-batch",
                _trains(step_and_zero, each=True, weight=lambda count, total, k: count),
                (
                    "this steps after every micro-batch: that trains with small batches and "
                    "accumulates nothing."
                ),
            ),
            Mistake(
                "drops the last",
                _trains(last=False),
                (
                    "this drops the last window when it is not full: its micro-batches were read "
                    "but not used."
                ),
            ),
            Mistake(
                "last one by the full window",
                _trains(full=True),
                (
                    "the last window is divided as if it were full: with fewer micro-batches its "
                    "gradient is too small."
                ),
            ),
            Mistake(
                "never zeroes",
                _trains(zero=False),
                (
                    "without zero_grad between windows, every update repeats the gradients of all "
                    "those before it."
                ),
            ),
            Mistake(
                "by K",
                _trains(weight=lambda count, total, k: count * k),
                (
                    "the windows are right; inside a window every micro-batch has the same weight, "
                    "however many tokens it has."
                ),
            ),
        ),
    ),
)
