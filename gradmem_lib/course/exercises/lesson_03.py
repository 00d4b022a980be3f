"""Lesson 03's exercises about windows: micro-batches and their items, the right divisor, the whole loop, the log."""

from __future__ import annotations

import math
from itertools import islice

import torch

from ...names import IGNORED
from ..exercise import Exercise, Mistake, calls
from .settings import Bigrams, bigram_loss, flat, rows


def plan_window(tokens_per_update: int, micro_batch: int, seq_len: int, gpus: int) -> tuple[int, int]:
    """Micro-batches that each GPU needs for at least ``tokens_per_update``, and the tokens that makes."""
    at_once = micro_batch * seq_len * gpus
    steps = math.ceil(tokens_per_update / at_once)
    return steps, steps * at_once


def _window(steps=math.ceil, *, tokens=None, length=True, cards=True):
    def wrong(tokens_per_update, micro_batch, seq_len, gpus):
        at_once = micro_batch * seq_len**length * gpus**cards
        k = steps(tokens_per_update / at_once)
        return k, tokens_per_update if tokens == "asked for" else k * at_once

    return wrong


def count_targets(labels: torch.Tensor) -> int:
    """How many tokens a causal language model predicts, for labels (batch, sequence) in which -100 is to be ignored."""
    return int((labels[:, 1:] != IGNORED).sum())


def _observe_count(candidate):
    prompt = rows(8, 8)
    prompt[:, :3] = IGNORED
    zeros = rows(6, 4)
    zeros[0, 2] = zeros[1, 1] = 0
    cases = {
        "sequences of 5, 3 and 8 tokens": rows(5, 3, 8),
        "a prompt that is not trained on": prompt,
        "padding on the left": rows(5, 3).flip(1),
        "a real token with id 0": zeros,
        "nothing but padding": torch.full((2, 4), IGNORED),
    }
    return {name: candidate(labels) for name, labels in cases.items()}


def accumulate(micro_batches, loss_and_count) -> float:
    """Leave the gradient of the mean loss over all tokens of a list of micro-batches; return that mean."""
    total = sum(loss_and_count(micro)[1] for micro in micro_batches)
    mean = 0.0
    for micro in micro_batches:
        loss, _ = loss_and_count(micro)
        (loss / total).backward()
        mean += loss.item() / total
    return mean


def accumulates(backward, report=None):
    """A wrong ``accumulate``: what it calls backward on, from (loss, count, K, total), and returns, from (losses, counts)."""

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


def _observe_accumulate(candidate):
    cases = {
        "micro-batches of equal counts": [rows(6, 6), rows(6, 6, seed=1), rows(6, 6, seed=2)],
        "micro-batches of unequal counts": unequal(),
        "one micro-batch without a label": [rows(4), torch.full((1, 5), IGNORED), rows(7, seed=1)],
    }
    found = {}
    for name, micro_batches in cases.items():
        model = Bigrams()
        loss = candidate(micro_batches, bigram_loss(model))
        found[name] = {"gradient": flat(p.grad for p in model.parameters()), "loss": loss}
    return found


def unequal():
    return [rows(2), rows(9, 3, seed=1), rows(12, 12, seed=2), rows(5, seed=3)]


def train(model, optimizer, micro_batches, window, loss_and_count) -> list[float]:
    """An update after every ``window`` micro-batches and one for what is left; each update's mean loss."""
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
    """A wrong ``train``: what it does after each micro-batch, if it zeroes ``first``, how it weighs one, from (count, total, K)."""

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


def _observe_train(candidate):
    found = {}
    for name, lengths, window in (
        ("6 micro-batches in windows of 3", ((2,), (9, 3), (12, 12), (5,), (4, 4), (7,)), 3),
        ("7 micro-batches in windows of 3", ((2,), (9, 3), (12, 12), (5,), (4, 4), (7,), (6, 2)), 3),
        ("5 micro-batches in windows of 2", ((6,), (3,), (8,), (5,), (4,)), 2),
    ):
        model = Bigrams()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        micro_batches = (rows(*each, seed=seed) for seed, each in enumerate(lengths))
        losses = candidate(model, optimizer, micro_batches, window, bigram_loss(model))
        found[name] = {"losses": losses, "weights": flat(model.parameters())}
    return found


def window_loss(means: list[float], counts: list[int]) -> float:
    """The mean loss of a window's items, from each micro-batch's mean loss and its number of items."""
    return sum(mean * count for mean, count in zip(means, counts, strict=True)) / sum(counts)


EXERCISES = (
    Exercise(
        id="3.1", title="from tokens per update to micro-batches", difficulty=1, minutes=4,
        trains="micro-batch, accumulation and GPUs, with remainders",
        reference=plan_window,
        observe=calls(
            (524288, 4, 2048, 1), (524288, 4, 2048, 8), (500000, 4, 2048, 1), (524288, 8, 1000, 3), (1000, 4, 2048, 1)
        ),
        mistakes=(
            Mistake("rounds down", _window(math.floor),
                    "this rounds down, and the update gets fewer tokens than asked for: whatever is left needs a micro-batch too."),
            Mistake("one more", _window(lambda n: math.floor(n) + 1),
                    "this adds a micro-batch even where the division comes out even: round up only when something is left."),
            Mistake("rounds", _window(round),
                    "this rounds to the nearest, which is down as often as up: at least the tokens asked for means up."),
            Mistake("without the GPUs", _window(cards=False),
                    "this forgets the GPUs: each of them works on a micro-batch of its own at the same time."),
            Mistake("sequences", _window(length=False),
                    "this counts sequences: a micro-batch has micro_batch times seq_len tokens."),
            Mistake("asked for", _window(tokens="asked for"),
                    "the steps are right; the tokens are those asked for, not those that so many whole micro-batches make."),
        ),
    ),
    Exercise(
        id="3.2", title="what counts as an item", difficulty=1, minutes=5,
        trains="padding, -100 and the causal shift",
        reference=count_targets,
        observe=_observe_count,
        mistakes=(
            Mistake("everything", lambda labels: labels.numel(),
                    "this counts padding: a label of -100 adds nothing to the loss."),
            Mistake("everything but the first", lambda labels: labels[:, 1:].numel(),
                    "this counts padding, if only after the shift: a label of -100 adds nothing to the loss."),
            Mistake("position 0", lambda labels: int((labels != IGNORED).sum()),
                    "this counts position 0: nothing comes before the first token, so nothing predicts it."),
            Mistake("the last dropped", lambda labels: int((labels[:, :-1] != IGNORED).sum()),
                    "this drops the last label and keeps the first: logits lose their last position, labels their first."),
            Mistake("sequence by sequence", lambda labels: int((labels != IGNORED).sum()) - len(labels),
                    "this takes one off for every sequence: one whose first label is -100 anyway loses a real one."),
            Mistake("id 0 is padding", lambda labels: int((labels[:, 1:] > 0).sum()),
                    "this takes token 0 for padding: it is a token like any other, and -100 alone is ignored."),
        ),
    ),
    Exercise(
        id="3.3", title="the right divisor", difficulty=2, minutes=8,
        trains="the gradient of a mean, taken piece by piece",
        reference=accumulate,
        observe=_observe_accumulate,
        mistakes=(
            Mistake("no division", accumulates(lambda loss, count, k, total: loss),
                    "no division: this is the gradient of the sum, as many times too large as there are tokens."),
            Mistake("sum of means", accumulates(lambda loss, count, k, total: loss / count, lambda ls, cs: sum(_each_mean(ls, cs))),
                    "this adds up the means of the micro-batches: with K of them the result is about K times too large."),
            Mistake("by K", accumulates(lambda loss, count, k, total: loss / count / k, mean_of_means),
                    "dividing by K gives every micro-batch the same weight: a token of a short one then counts more than one of a long one."),
            Mistake("logged unweighted", accumulates(lambda loss, count, k, total: loss / total, mean_of_means),
                    "the gradient is right; the loss is an unweighted average of the micro-batches' means."),
            Mistake("logged last", accumulates(lambda loss, count, k, total: loss / total, lambda ls, cs: ls[-1] / cs[-1]),
                    "the gradient is right; the loss is the last micro-batch's alone."),
            Mistake("mean times count", accumulates(lambda loss, count, k, total: loss / total, _mean_times_count),
                    "a micro-batch without labels has 0 / 0 for a mean, and times 0 that is still not a number: stay with the sum."),
        ),
    ),
    Exercise(
        id="3.4", title="the whole loop, and what is left at its end", difficulty=2, minutes=8,
        trains="when to step, when to zero, and the last incomplete window",
        reference=train,
        observe=_observe_train,
        mistakes=(
            Mistake("zeroes inside", _trains(first=True, zero=False),
                    "this zeroes the gradients inside the window: only the last micro-batch's survive."),
            Mistake("steps every micro-batch", _trains(step_and_zero, each=True, weight=lambda count, total, k: count),
                    "this steps after every micro-batch: that trains with small batches and accumulates nothing."),
            Mistake("drops the last", _trains(last=False),
                    "this drops the last window when it is not full: its micro-batches were read and taught nothing."),
            Mistake("last one by the full window", _trains(full=True),
                    "the last window is divided as if it were full: with fewer micro-batches its gradient comes out too small."),
            Mistake("never zeroes", _trains(zero=False),
                    "without zero_grad between windows, every update repeats the gradients of all those before it."),
            Mistake("by K", _trains(weight=lambda count, total, k: count * k),
                    "the windows are right; inside them every micro-batch has the same weight, however many tokens it has."),
        ),
    ),
    Exercise(
        id="3.5", title="the loss to log", difficulty=1, minutes=3,
        trains="weighting what is logged as what is trained",
        reference=window_loss,
        observe=calls(([2.0, 4.0], [10, 30]), ([3.0, 1.0, 2.5], [5, 0, 20]), ([2.5, 3.5], [8, 8])),
        mistakes=(
            Mistake("unweighted", lambda means, counts: sum(means) / len(means),
                    "this averages the means without weights: a micro-batch with few tokens counts as much as one with many."),
            Mistake("after dividing", lambda means, counts: sum(means) / len(means) ** 2,
                    "this logs after dividing by K and then averages: K times too small. Log before dividing, or add up after."),
            Mistake("the last", lambda means, counts: means[-1], "this logs the last micro-batch alone."),
            Mistake("the sum", lambda means, counts: sum(m * c for m, c in zip(means, counts, strict=True)),
                    "this is the sum over all items: divide it by their number."),
            Mistake("added up", lambda means, counts: sum(means), "this adds up means: K times too large."),
            Mistake("by K", lambda means, counts: sum(m * c for m, c in zip(means, counts, strict=True)) / len(means),
                    "the sum over all items is divided by K: divide it by the number of items."),
        ),
    ),
)  # fmt: skip
