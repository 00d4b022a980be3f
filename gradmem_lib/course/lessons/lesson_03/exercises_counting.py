"""Lesson 03's exercises that count: micro-batches for an update, items of a batch, and the loss to
log.
"""

from __future__ import annotations

import math
import statistics
from ast import literal_eval
from functools import partial

import torch

from ....names import IGNORED
from ...judge.compare import difference, plain
from ...judge.exercise import Exercise, Mistake, calls
from ..shared.gradient_weights import why
from ..shared.settings import rows


def plan_window(
    tokens_per_update: int, micro_batch: int, seq_len: int, gpus: int
) -> tuple[int, int]:
    """Micro-batches that each GPU needs for at least ``tokens_per_update``, and the tokens that
    makes.
    """
    at_once = micro_batch * seq_len * gpus
    steps = math.ceil(tokens_per_update / at_once)
    return steps, steps * at_once


def _window(steps=math.ceil, *, tokens=None, length=True, cards=True):
    def wrong(tokens_per_update, micro_batch, seq_len, gpus):
        at_once = micro_batch * seq_len**length * gpus**cards
        k = steps(tokens_per_update / at_once)
        return k, tokens_per_update if tokens == "asked for" else k * at_once

    return wrong


def _explain_window(got, expected):
    pairs = {
        case: list(plain(value))
        for case, value in got.items()
        if isinstance(plain(value), (tuple, torch.Tensor))
    }
    if len(pairs) < len(expected) or any(len(pair) != 2 for pair in pairs.values()):
        return None
    steps = {case: float(pair[0]) for case, pair in pairs.items()}
    tokens = {case: float(pair[1]) for case, pair in pairs.items()}
    cases = {case: literal_eval(case) for case in expected}
    if all(steps[case] == right[0] for case, right in expected.items()):
        if all(tokens[case] == right[1] - cases[case][0] for case, right in expected.items()):
            return (
                "the steps are right; the second number is only the surplus: return all tokens "
                "of the update."
            )
        return (
            "the steps are right; the second number is not: it is the tokens of that many "
            "micro-batches on all GPUs."
        )
    if any(k != round(k) for k in steps.values()):
        return "the steps are a fraction: only whole micro-batches are possible, so round up."
    if all(steps[case] == right[0] * cases[case][3] for case, right in expected.items()):
        return "these are the steps of all GPUs together: return the steps of each GPU."
    return None


def count_targets(labels: torch.Tensor) -> int:
    """How many tokens a causal language model predicts, for labels (batch, sequence) in which -100
    is to be ignored.
    """
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


def _explain_count(got, expected):
    numbers = {case: plain(value) for case, value in got.items()}
    found = {
        case: value.tolist() if isinstance(value, torch.Tensor) else value
        for case, value in numbers.items()
    }
    if all(
        isinstance(value, (list, tuple)) and sum(value) == expected[case]
        for case, value in found.items()
    ):
        return "this is a count for each row: return one number, their sum."
    one_off = (
        lambda labels: (labels.flatten()[1:] != IGNORED).sum(),
        lambda labels: (labels != IGNORED).sum() - 1,
    )
    if any(difference(got, _observe_count(once)) is None for once in one_off):
        return (
            "this subtracts one for the whole batch: each sequence has a first token that "
            "nothing predicts."
        )
    return None


def window_loss(means: list[float], counts: list[int]) -> float:
    """The mean loss of a window's items, from each micro-batch's mean loss and its number
    of items.
    """
    return sum(mean * count for mean, count in zip(means, counts, strict=True)) / sum(counts)


_UNITS = tuple(([float(i == j) for i in range(3)], [2, 5, 3]) for j in range(3))


_ALL = ([1.0, 1.0, 1.0], [2, 5, 3])


_LOGGED = calls(
    ([2.0, 4.0], [10, 30]),
    ([3.0, 1.0, 2.5], [5, 0, 20]),
    ([2.5, 3.5], [8, 8]),
    hidden=(*_UNITS, _ALL, ([1.5, 4.5, 0.5, 2.0], [7, 1, 9, 3])),
)


def _each_mean(means: list[float], counts: list[int]) -> list[float]:
    return means


def _of_each_item(means: list[float], counts: list[int]) -> list[float]:
    """For each item, the mean of its micro-batch."""
    found = []
    for mean, count in zip(means, counts, strict=True):
        found += [mean] * count
    return found


_PICKS = (
    ("median", statistics.median),
    ("median", statistics.median_low),
    ("median", statistics.median_high),
    ("largest", max),
    ("smallest", min),
)
_FROM = (("the means", _each_mean), ("all items' means", _of_each_item))


def _picked(pick, values, means: list[float], counts: list[int]) -> float:
    """One of some values, in place of their average."""
    return pick(values(means, counts))


def _no_average(got) -> str:
    """What is said of one of the means, picked by its size."""
    for name, pick in _PICKS:
        for what, values in _FROM:
            if difference(got, _LOGGED(partial(_picked, pick, values))) is None:
                return (
                    f"this is the {name} of {what}: the loss to log is an average, in which each "
                    "mean is weighted by its number of items."
                )
    return ""


def _explain_logged(got, expected):
    if says := _no_average(got):
        return says
    shares = [got[f"({means}, {counts})"] for means, counts in _UNITS]
    if not all(isinstance(plain(share), (int, float)) for share in shares):
        return None
    counts = _UNITS[0][1]
    if not math.isclose(
        sum(map(plain, shares)), plain(got[f"({_ALL[0]}, {_ALL[1]})"]), rel_tol=1e-9
    ):
        return None  # no weighted sum at all
    return why(
        [plain(share) / count for share, count in zip(shares, counts, strict=True)], counts, "loss"
    )


EXERCISES = (
    Exercise(
        id="3.1",
        title="from tokens per update to micro-batches",
        difficulty=1,
        minutes=4,
        trains="micro-batch, accumulation and GPUs, with remainders",
        reference=plan_window,
        observe=calls(
            (524288, 4, 2048, 1),
            (524288, 4, 2048, 8),
            (500000, 4, 2048, 1),
            (524288, 8, 1000, 3),
            (1000, 4, 2048, 1),
            hidden=((100_000, 3, 700, 7), (90_000, 5, 600, 3), (77, 1, 10, 6)),
        ),
        explain=_explain_window,
        mistakes=(
            Mistake(
                "rounds down",
                _window(math.floor),
                (
                    "this rounds down, and the update gets fewer tokens than asked for: the "
                    "remaining tokens need a micro-batch too."
                ),
            ),
            Mistake(
                "rounds down, and returns what was asked for",
                lambda tokens, micro, seq_len, gpus: (tokens // (micro * seq_len * gpus), tokens),
                (
                    "this rounds down, and the update gets fewer tokens than asked for: the "
                    "remaining tokens need a micro-batch too."
                ),
            ),
            Mistake(
                "rounds down, at least one",
                _window(lambda n: max(1, math.floor(n))),
                "this rounds down, but to no less than 1: the update must see at least the tokens.",
            ),
            Mistake(
                "one more",
                _window(lambda n: math.floor(n) + 1),
                (
                    "this adds a micro-batch even where the division has no remainder: round up "
                    "only when there is one."
                ),
            ),
            Mistake(
                "rounds",
                _window(round),
                (
                    "this rounds to the nearest number, which may be too few tokens: the update "
                    "needs at least the tokens asked for, so round up."
                ),
            ),
            Mistake(
                "without the GPUs",
                _window(cards=False),
                (
                    "this forgets the GPUs: each of them works on a micro-batch of its own at the "
                    "same time."
                ),
            ),
            Mistake(
                "sequences",
                _window(length=False),
                "this counts sequences: a micro-batch has micro_batch times seq_len tokens.",
            ),
            Mistake(
                "shifted",
                lambda tokens, micro, length, gpus: plan_window(tokens, micro, length - 1, gpus),
                (
                    "this counts seq_len - 1 tokens for each sequence: the plan counts all tokens, "
                    "micro_batch times seq_len in a micro-batch."
                ),
            ),
            Mistake(
                "asked for",
                _window(tokens="asked for"),
                (
                    "the steps are right; the tokens are those asked for, not the tokens of that "
                    "many whole micro-batches."
                ),
            ),
        ),
    ),
    Exercise(
        id="3.2",
        title="what counts as an item",
        difficulty=1,
        minutes=5,
        trains="padding, -100 and the causal shift",
        reference=count_targets,
        observe=_observe_count,
        explain=_explain_count,
        mistakes=(
            Mistake(
                "everything",
                lambda labels: labels.numel(),
                "this counts padding: a label of -100 adds nothing to the loss.",
            ),
            Mistake(
                "everything but the first",
                lambda labels: labels[:, 1:].numel(),
                (
                    "this still counts padding, after the shift: a label of -100 adds nothing to "
                    "the loss."
                ),
            ),
            Mistake(
                "the ignored ones",
                lambda labels: int((labels[:, 1:] == IGNORED).sum()),
                "this counts the labels that are ignored: count those that are not -100.",
            ),
            Mistake(
                "the first and the last",
                lambda labels: int((labels[:, 1:-1] != IGNORED).sum()),
                (
                    "the last label is left out too: it is compared with the output before it. "
                    "Only the first label of a sequence is compared with nothing."
                ),
            ),
            Mistake(
                "the first sequence",
                lambda labels: int((labels[1:] != IGNORED).sum()),
                (
                    "labels[1:] leaves out the first sequence: positions are the second "
                    "dimension, labels[:, 1:]."
                ),
            ),
            Mistake(
                "position 0",
                lambda labels: int((labels != IGNORED).sum()),
                (
                    "this counts position 0: nothing comes before the first token, so nothing "
                    "predicts it."
                ),
            ),
            Mistake(
                "the last dropped",
                lambda labels: int((labels[:, :-1] != IGNORED).sum()),
                (
                    "this drops the last label and keeps the first: logits lose their last "
                    "position, labels their first."
                ),
            ),
            Mistake(
                "the last dropped, and token 0",
                lambda labels: int((labels[:, :-1] > 0).sum()),
                (
                    "this drops the last label and keeps the first: logits lose their last "
                    "position, labels their first."
                ),
            ),
            Mistake(
                "sequence by sequence",
                lambda labels: int((labels != IGNORED).sum()) - len(labels),
                (
                    "this subtracts one for every sequence: where the first label is already "
                    "-100, a real label is lost."
                ),
            ),
            Mistake(
                "sequence by sequence, down to 0",
                lambda labels: max(0, int((labels != IGNORED).sum()) - len(labels)),
                (
                    "this subtracts one for every sequence: where the first label is already "
                    "-100, a real label is lost."
                ),
            ),
            Mistake(
                "id 0 is padding",
                lambda labels: int((labels[:, 1:] > 0).sum()),
                (
                    "this treats token 0 as padding: it is a token like any other, and only -100 "
                    "is ignored."
                ),
            ),
        ),
    ),
    Exercise(
        id="3.5",
        title="the loss to log",
        difficulty=1,
        minutes=3,
        trains="weighting what is logged as what is trained",
        reference=window_loss,
        observe=_LOGGED,
        explain=_explain_logged,
        mistakes=(
            Mistake(
                "unweighted",
                lambda means, counts: sum(means) / len(means),
                (
                    "this averages the means without weights: a micro-batch with few tokens "
                    "counts as much as one with many."
                ),
            ),
            Mistake(
                "after dividing",
                lambda means, counts: sum(means) / len(means) ** 2,
                (
                    "this divides by K before logging, and then averages: K times too small. Log "
                    "before dividing, or add up instead of averaging."
                ),
            ),
            Mistake(
                "the last", lambda means, counts: means[-1], "this logs only the last micro-batch."
            ),
            Mistake(
                "the sum",
                lambda means, counts: sum(m * c for m, c in zip(means, counts, strict=True)),
                "this is the sum over all items: divide it by their number.",
            ),
            Mistake(
                "added up",
                lambda means, counts: sum(means),
                "this adds up means: K times too large.",
            ),
            Mistake(
                "by K",
                lambda means, counts: (
                    sum(m * c for m, c in zip(means, counts, strict=True)) / len(means)
                ),
                "the sum over all items is divided by K: divide it by the number of items.",
            ),
        ),
    ),
)
