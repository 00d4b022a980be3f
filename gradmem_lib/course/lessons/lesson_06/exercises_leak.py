"""Lesson 06's leak: an evaluation that collects logits until its end."""

from __future__ import annotations

import math

import torch
from torch import nn

from ...judge.compare import plain
from ...judge.exercise import Exercise, Mistake
from ..shared.leaks import Leak, new_net

EVALUATION_BUDGET = "1 MiB"
ROWS, CLASSES, BATCHES, LAST = 16, 1000, 40, 5


def evaluation_leak_setting(batches: int = BATCHES) -> tuple[nn.Module, list]:
    """A small classifier of 1,000 classes in training mode, and batches of 16 rows with their
    labels; the last one has 5.
    """
    net = new_net(CLASSES)
    return net, _batches_for(net, batches)


def _setting_with_dropout(batches: int) -> tuple[nn.Module, list]:
    """The same with dropout, so that an evaluation in training mode has another accuracy."""
    net = new_net(CLASSES)
    net.body.insert(2, nn.Dropout(0.5))
    net.eval()
    given = _batches_for(net, batches)
    net.train()
    return net, given


def _batches_for(net: nn.Module, batches: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Rows of 64 numbers, with labels of which ``net`` finds about half."""
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(batches * ROWS, 64, generator=generator)
    with torch.no_grad():
        found = net(x).argmax(-1)
    wrong = torch.rand(len(found), generator=generator) < torch.linspace(0, 1, len(found))
    labels = torch.where(wrong, CLASSES - 1 - found, found)
    given = list(zip(x.split(ROWS), labels.split(ROWS), strict=True))
    given[-1] = (given[-1][0][:LAST], given[-1][1][:LAST])
    return given


def _evaluates(
    keep=lambda logits: logits,
    *,
    size=ROWS,
    first=0,
    means=False,
    grad=False,
    to_eval=True,
    back=True,
):
    """A script that differs from the lesson's in what it keeps, or in what people change first."""

    def script(model, batches):
        if to_eval:
            model.eval()
        outputs, labels = [], []
        for x, y in batches[: first or len(batches)]:
            for rows, right in zip(x.split(size), y.split(size), strict=True):
                with torch.set_grad_enabled(grad):
                    logits = model(rows)
                outputs.append(keep(logits))
                labels.append(right)
        if back:
            model.train()
        hits = []
        for kept, right in zip(outputs, labels, strict=True):
            found = kept.argmax(-1) if kept.ndim == 2 else kept
            hits.append((found == right).float())
        if means:
            return torch.stack([hit.mean() for hit in hits]).mean().item()
        return torch.cat(hits).mean().item()

    return script


def evaluate(model, batches):
    """The script of the lesson, line by line."""
    model.eval()
    outputs = []
    with torch.no_grad():
        for x, _ in batches:
            logits = model(x)
            outputs.append(logits)
    predictions = torch.cat(outputs).argmax(-1)
    labels = torch.cat([y for _, y in batches])
    model.train()
    return (predictions == labels).float().mean().item()


def logits_leak():
    """The line that keeps the logits, and an evaluation that keeps one number of each row."""

    def fixed(model, batches):
        model.eval()
        outputs = []
        with torch.no_grad():
            for x, _ in batches:
                outputs.append(model(x).argmax(-1))
        predictions = torch.cat(outputs)
        labels = torch.cat([y for _, y in batches])
        model.train()
        return (predictions == labels).float().mean().item()

    return 7, fixed


LEAK = Leak(
    script=evaluate,
    fixed=logits_leak()[1],
    line=7,
    setting=evaluation_leak_setting,
    hidden_setting=_setting_with_dropout,
    batches=BATCHES,
    budget=EVALUATION_BUDGET,
    outside=600_000,  # the logits of one batch as a list of Python's numbers are about 520 kB
    stays=(
        "1,000 numbers of every row are still kept until the end. The accuracy needs one of them, "
        "the largest's place: logits.argmax(-1), before the list. Here the model is on the CPU, "
        "where .cpu() moves nothing."
    ),
    innocent={
        2: (
            "model.eval() switches dropout off, and keeps nothing: look for what is there after "
            "each batch."
        ),
        4: "no graph is recorded, thanks to line 4: look for what is there after each batch.",
        6: (
            "line 6 makes the logits of one batch: the next batch's would take their place, if "
            "nothing else kept them."
        ),
        8: (
            "line 8 copies all logits into one tensor, which doubles them, but they have been kept "
            "before: look for the line that does so."
        ),
        9: "line 9 keeps one number of each row: look for a line that keeps a thousand.",
    },
)


def _argmax(logits):
    return logits.argmax(-1)


_ALONG_ROWS = (
    "argmax(0) looks along the rows, and finds the best row of each class: the best class of each "
    "row is argmax(-1)."
)


def _explain(got, expected):
    """What the returned number is instead of the accuracy, where the bytes are right."""
    mine, right = got[LEAK.shown], expected[LEAK.shown]
    number, accuracy = plain(mine.value["returned"]), right.value["returned"]
    rows = (BATCHES - 1) * ROWS + LAST
    if not got["the line"] and not mine.over and isinstance(number, (int, float)):
        for other, says in (
            (100 * accuracy, "a percentage"),
            (rows * accuracy, "the number of hits"),
            (1 - accuracy, "the share of rows that are wrong"),
        ):
            if math.isclose(number, other, rel_tol=1e-5):
                return f"this is {says}: the script returns the share of rows that are right."
        if math.isclose(number, rows * accuracy / (BATCHES * ROWS), rel_tol=1e-5):
            return f"this divides by {BATCHES * ROWS} rows: the last batch has {LAST}, not {ROWS}."
    return LEAK.explain(got, expected)


def _best_rows(model, batches):
    """Compares the best row of each class, as far as there are labels."""
    model.eval()
    with torch.no_grad():
        found = torch.cat([model(x).argmax(0) for x, _ in batches])
    labels = torch.cat([y for _, y in batches])
    model.train()
    return (found[: len(labels)] == labels).float().mean().item()


EXERCISES = (
    Exercise(
        id="6.7",
        title="an evaluation that collects",
        difficulty=1,
        minutes=5,
        trains="keeping of each batch what the result needs, and no more",
        reference=logits_leak,
        observe=LEAK.observe,
        explain=_explain,
        # The logits' other side: a number of each class, where there is a label of each row.
        raises=((f"\\b{BATCHES * CLASSES}\\b|\\b{CLASSES}\\b.*\\b{ROWS}\\b", _ALONG_ROWS),),
        mistakes=(
            LEAK.as_it_was(),
            Mistake(
                "half the bytes",
                LEAK.with_fix(_evaluates(lambda logits: logits.bfloat16())),
                (
                    "the logits are narrower, but all of them are still kept: a data set twice as "
                    "long would need the same bytes again. And rounded logits may have another "
                    "largest one."
                ),
            ),
            Mistake(
                "smaller batches",
                LEAK.with_fix(_evaluates(size=ROWS // 4)),
                (
                    "the batches are smaller, and there are more of them: the list has the same "
                    "logits at its end."
                ),
            ),
            Mistake(
                "a graph too",
                LEAK.with_fix(_evaluates(grad=True)),
                (
                    "without no_grad the list keeps each batch's graph as well, and with it the "
                    "activations."
                ),
            ),
            Mistake(
                "the first batches",
                LEAK.with_fix(_evaluates(_argmax, first=5)),
                "only the first batches are evaluated: the accuracy is that of other rows.",
            ),
            Mistake(
                "mean of means",
                LEAK.with_fix(_evaluates(_argmax, means=True)),
                (
                    "this is a mean of the batches' means: the last batch has 5 rows, and the "
                    "others have 16; count hits and rows."
                ),
            ),
            Mistake("argmax(0)", LEAK.with_fix(_best_rows), _ALONG_ROWS),
            Mistake(
                "left in eval",
                LEAK.with_fix(_evaluates(_argmax, back=False)),
                "the model is left in eval mode: what the script does at its end belongs to it.",
            ),
            Mistake(
                "never in eval",
                LEAK.with_fix(_evaluates(_argmax, to_eval=False)),
                (
                    "the model stays in training mode: a model with dropout then has another "
                    "accuracy, at random. Line 2 of the script keeps nothing, so leave it there."
                ),
            ),
            *LEAK.wrong_lines(),
        ),
    ),
)
