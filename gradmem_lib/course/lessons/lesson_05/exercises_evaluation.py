"""Lesson 05's exercise about an evaluation that fits the card, and leaves the model as it was."""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn

from ....names import IGNORED
from ....techniques.accumulation import split
from ....techniques.losses import count_targets
from ...judge.compare import difference, plain
from ...judge.exercise import Exercise, Mistake, Seen, measure
from ..shared.settings import quietly
from .settings import EVAL_CARD, EVAL_ROWS, evaluation_setting


def held_out_loss(model, rows) -> float:
    """The mean loss over all predicted tokens of ``rows``, within the card; ``model`` is left as it
    was.
    """
    model.eval()
    total = 0.0
    with torch.no_grad():
        for micro in split(rows, 4):
            loss = model(**micro, use_cache=False).loss
            total += loss.item() * count_targets(micro["labels"])
    model.train()
    return total / count_targets(rows["labels"])


def _held_out(*, mode=True, back=True, grad=False, weigh=True, first=False, last=True):
    """A wrong ``held_out_loss``."""

    def wrong(model, rows):
        model.train(not mode)
        total, items, parts = 0.0, 0, 0
        with torch.set_grad_enabled(grad):
            for micro in split(rows, 4):
                if not last and len(micro["labels"]) < 4:
                    break
                count = (
                    int((micro["labels"] != IGNORED).sum())
                    if first
                    else count_targets(micro["labels"])
                )
                total += model(**micro, use_cache=False).loss.item() * (count if weigh else 1)
                items, parts = items + count, parts + 1
        model.train(back)
        return total / (items if weigh else parts)

    return wrong


@contextmanager
def _seen(model):
    """What forward passes of ``model`` do: a dict of the most rows, whether one built a graph,
    filled a cache or had dropout.
    """
    seen = {"rows": 0, "graph": False, "cache": False, "dropout": False, "dtypes": set(), "all": 0}

    def look(module, args, kwargs, out):
        if hasattr(out, "logits"):
            logits = out.logits
        else:  # a tuple: the logits stand behind the loss, if there is one
            logits = out[0] if out[0].ndim == 3 else out[1]
        seen["rows"] = max(seen["rows"], len(logits))
        seen["all"] += len(logits)
        seen["graph"] |= logits.requires_grad
        seen["cache"] |= getattr(out, "past_key_values", None) is not None
        seen["dropout"] |= any(
            m.training and m.p for m in module.modules() if isinstance(m, nn.Dropout)
        )
        seen["dtypes"].add(logits.dtype)

    handle = model.register_forward_hook(look, with_kwargs=True)
    try:
        yield seen
    finally:
        handle.remove()


@quietly
def _observe_evaluation(candidate):
    model, held_out = evaluation_setting()
    with _seen(model) as seen:
        measured = measure(lambda: candidate(model, held_out), budget=EVAL_CARD, model=model)
    found = {"what is too much": ""}
    if seen["graph"]:
        found = {"what is too much": "a graph"}
    elif measured.over:
        too_many = f"{seen['rows']} rows" if seen["rows"] > EVAL_ROWS else ""
        found = {"what is too much": too_many or ("the cache" if seen["cache"] else "the logits")}
    return Seen(
        found
        | {
            "18 rows": {"loss": measured.value},
            "the model afterwards": {"is in train mode (1 is yes)": int(model.training)},
            "the card": replace(measured, value=None),
        },
        seen=seen,
    )


_TOO_MUCH_TO_EVALUATE = {
    "a graph": (
        "gradients are on, so every layer's activations are kept for a backward that never "
        "comes: torch.no_grad()."
    ),
    "the cache": (
        "the key-value cache is on, as from_pretrained leaves it: keys and values of "
        "every layer are kept until the last layer has run. Training keeps them anyway; "
        "here give use_cache=False."
    ),
    "the logits": (
        "the pieces are small enough, but something as large as their logits is in memory beside "
        "them: keep only the loss of a piece, which is one number, and let its logits go before "
        "the next piece runs."
    ),
    "18 rows": "all 18 rows go through at once: cut them into pieces, as in training.",
}


@quietly
def _explain_evaluation(got, expected):
    what = got["what is too much"]
    if what:
        rows = (
            f"{what} at a time are too many for this card: an evaluation needs micro-batches too."
        )
        return _TOO_MUCH_TO_EVALUATE.get(what, rows)
    seen, loss = got.notes["seen"], plain(got["18 rows"]["loss"])
    if difference(loss, expected["18 rows"]["loss"]) is None or not isinstance(loss, (int, float)):
        return None
    if seen["dropout"]:
        return (
            "dropout is on, so a part of the activations is zero in this loss: call "
            "model.eval() first."
        )
    if seen["dtypes"] != expected.notes["seen"]["dtypes"]:
        return (
            "the logits are bf16 (autocast?): the loss loses its precision; evaluate in the "
            "model's own dtype."
        )
    if seen["all"] < 18:
        return (
            f"{seen['all']} rows are evaluated, but there are 18: evaluate all rows, the last "
            "piece too."
        )
    return _why_loss(loss)


def _why_loss(loss: float) -> str | None:
    """What a wrong loss is, over all rows and for pieces of every size."""
    model, held_out = evaluation_setting()
    model.eval()
    with torch.no_grad():
        rows = list(split(held_out, 1))
        counts = [count_targets(row["labels"]) for row in rows]
        sums = [
            model(**row, use_cache=False).loss.item() * n
            for row, n in zip(rows, counts, strict=True)
        ]
    first = [n + 1 for n in counts]  # as many labels as tokens
    for size in range(1, 19):
        pieces = [slice(start, start + size) for start in range(0, 18, size)]
        means = [sum(sums[piece]) / sum(counts[piece]) for piece in pieces]
        by_rows = [len(rows[piece]) for piece in pieces]
        for value, says in (
            (
                sum(means) / len(means),
                (
                    "this is a mean of means: rows of few tokens, and the last, smaller piece, "
                    "count as much as full ones; weight by predicted tokens."
                ),
            ),
            (
                _average(means, by_rows),
                (
                    "each piece is weighted by its rows, or by all of its labels, padding too: "
                    "weight by predicted tokens."
                ),
            ),
            (
                _average(means, [sum(first[piece]) for piece in pieces]),
                (
                    "position 0 of each row is counted, and nothing predicts it: count labels[:, "
                    "1:], as count_targets does."
                ),
            ),
            (
                sum(means),
                (
                    "the means of the pieces are added up: divide, and weight them by predicted "
                    "tokens."
                ),
            ),
            (means[-1], "this is only the last piece's mean."),
            (
                math.exp(min(sum(sums) / sum(counts), 700)),
                "this is the perplexity, exp of the mean loss: return the mean loss itself.",
            ),
        ):
            if math.isclose(loss, value, rel_tol=2e-5):
                return says
    return _why_divisor(loss, held_out["labels"], sums, counts)


def _why_divisor(loss: float, labels_of_all, sums, counts) -> str | None:
    """What is said of the sum over all tokens, divided by another number than theirs."""
    for size in range(2, 18):
        starts = range(0, 18, size)
        if math.isclose(loss, sum(sums) / len(starts), rel_tol=2e-5):
            return (
                "the sum over all tokens is divided by the number of pieces: divide it by the "
                "predicted tokens of all pieces."
            )
        if math.isclose(loss, sum(sums) / sum(counts[starts[-1] :]), rel_tol=2e-5):
            return (
                "the sum over all tokens is divided by the predicted tokens of the last piece: add "
                "up those of all pieces."
            )
    for labels in (labels_of_all.numel(), labels_of_all[:, 1:].numel()):
        if math.isclose(loss, sum(sums) / labels, rel_tol=1e-4):
            return (
                "the sum over the predicted tokens is divided by all labels, padding too: divide "
                "it by the predicted tokens, count_targets(labels)."
            )
    if math.isclose(loss, sum(sums) / len(sums), rel_tol=1e-4):
        return "the sum over all tokens is divided by the rows: divide it by the predicted tokens."
    if math.isclose(loss, sum(sums), rel_tol=1e-4):
        return (
            "this is the sum over all tokens: return the mean, so divide by the number of tokens."
        )
    return None


def _average(values, weights) -> float:
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)


EXERCISES = (
    Exercise(
        id="5.7",
        title="an evaluation within the card",
        difficulty=2,
        minutes=8,
        trains="what an evaluation holds, and what it must leave as it was",
        reference=held_out_loss,
        observe=_observe_evaluation,
        explain=_explain_evaluation,
        mistakes=(
            Mistake("a graph", _held_out(grad=True), _TOO_MUCH_TO_EVALUATE["a graph"]),
            Mistake(
                "left in eval",
                _held_out(back=False),
                (
                    "the loss is right, but the model is left in eval mode: training continues "
                    "without dropout, and checkpointing saves no memory; call model.train()."
                ),
            ),
            Mistake(
                "dropout",
                _held_out(mode=False),
                (
                    "dropout is on, so a part of the activations is zero in this loss: call "
                    "model.eval() first."
                ),
            ),
            Mistake(
                "mean of means",
                _held_out(weigh=False),
                (
                    "this is a mean of means: rows of few tokens, and the last, smaller piece, "
                    "count "
                    "as much as full ones; weight by predicted tokens."
                ),
            ),
            Mistake(
                "first tokens too",
                _held_out(first=True),
                (
                    "position 0 of each row is counted, and nothing predicts it: count labels[:, "
                    "1:], "
                    "as count_targets does."
                ),
            ),
            Mistake(
                "last piece dropped",
                _held_out(last=False),
                "the last rows are dropped: 18 rows are four pieces of 4 and one of 2.",
            ),
        ),
    ),
)
