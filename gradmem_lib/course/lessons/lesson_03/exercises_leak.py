"""Lesson 03's leak: a figure for the log that keeps the graph of every micro-batch of a window."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from ....techniques.accumulation import split
from ...judge.exercise import Exercise, Mistake
from ..shared.leaks import Leak, new_net, sgd

WINDOW_BUDGET = "2 MiB"
ROWS, CLASSES, PIECES = 8, 1000, 16


def window_setting(pieces: int = PIECES) -> tuple[nn.Module, torch.optim.Optimizer, tuple]:
    """A small classifier of 1,000 classes, its SGD, and a batch that makes ``pieces``
    micro-batches of 8 rows: inputs (rows, 64) and labels (rows).
    """
    generator = torch.Generator().manual_seed(3)
    net = new_net(CLASSES)
    x = torch.randn(pieces * ROWS, 64, generator=generator)
    return net, sgd(net), (x, torch.randint(CLASSES, (len(x),), generator=generator))


def _larger_steps(pieces: int) -> tuple[nn.Module, torch.optim.Optimizer, tuple]:
    """``window_setting`` with a learning rate at which an entropy after the update is another."""
    model, optimizer, batch = window_setting(pieces)
    optimizer.param_groups[0]["lr"] = 5.0
    return model, optimizer, batch


def _trains(add=lambda total, new: total + new, *, size=ROWS, grad=True, each=False, trained=False):
    """A script that differs from the lesson's in how it adds up, or in what people change first."""

    def script(model, optimizer, batch):
        entropy, rows = 0.0, len(batch[1])
        for x, y in split(batch, size):
            with torch.set_grad_enabled(grad):
                logits = model(x)
                loss = cross_entropy(logits, y, reduction="sum") / rows
                p = logits.softmax(-1)
            new = -(p * p.log()).sum() / rows
            objective = loss - new if trained else loss
            objective.backward()
            entropy = add(entropy, new)
            if each:
                optimizer.step()
                optimizer.zero_grad()
        if not each:
            optimizer.step()
            optimizer.zero_grad()
        return float(entropy)

    return script


def with_entropy(model, optimizer, batch):
    """The script of the lesson, line by line."""
    entropy, rows = 0.0, len(batch[1])
    for x, y in split(batch, 8):
        logits = model(x)
        loss = cross_entropy(logits, y, reduction="sum") / rows
        loss.backward()
        p = logits.softmax(-1)
        entropy = entropy - (p * p.log()).sum() / rows
    optimizer.step()
    optimizer.zero_grad()
    return entropy.item()


def window_leak():
    """The line that keeps each micro-batch's graph, and a script that adds up numbers."""

    def fixed(model, optimizer, batch):
        entropy, rows = 0.0, len(batch[1])
        for x, y in split(batch, 8):
            logits = model(x)
            loss = cross_entropy(logits, y, reduction="sum") / rows
            loss.backward()
            p = logits.softmax(-1)
            entropy -= (p * p.log()).sum().item() / rows
        optimizer.step()
        optimizer.zero_grad()
        return entropy

    return 8, fixed


LEAK = Leak(
    script=with_entropy,
    fixed=window_leak()[1],
    line=8,
    setting=window_setting,
    batches=PIECES,
    counted="micro-batches",
    budget=WINDOW_BUDGET,
    outside=350_000,  # one micro-batch as a list of Python's numbers is 264 kB
    hidden_setting=_larger_steps,
    stays=(
        "logits or probabilities of too many rows are alive at once. If the sum still has a graph, "
        "the graph keeps the probabilities of every micro-batch: no backward goes through it, so "
        "nothing frees them. Compute each micro-batch's entropy at once, and add it as a number."
    ),
    innocent={
        4: (
            "line 4 makes the logits of one micro-batch: the next micro-batch's would take their "
            "place, if nothing else kept them."
        ),
        5: (
            "the graph of line 5's loss is freed in the next line: that is what accumulation is "
            "for. Look for a graph that no backward frees."
        ),
        6: (
            "line 6 frees the graph of the loss, once for each micro-batch, as it should: look for "
            "a graph that no backward frees."
        ),
        7: (
            "line 7 makes the probabilities of one micro-batch: the next ones would take their "
            "place, if no later line kept them."
        ),
        11: (
            "line 11 makes a number of the sum, but the window has ended by then: all of its "
            "graphs have been kept, by another line."
        ),
    },
)


def _entropy_after(model, optimizer, batch):
    """The log's figure is that of the model after the update."""
    rows = len(batch[1])
    for x, y in split(batch, ROWS):
        (cross_entropy(model(x), y, reduction="sum") / rows).backward()
    optimizer.step()
    optimizer.zero_grad()
    entropy = 0.0
    with torch.no_grad():
        for x, _ in split(batch, ROWS):
            p = model(x).softmax(-1)
            entropy -= (p * p.log()).sum().item() / rows
    return entropy


def _item(total, new):
    return total + new.item()


EXERCISES = (
    Exercise(
        id="3.10",
        title="a window that keeps its graphs",
        difficulty=2,
        minutes=6,
        trains="finding the graph that no backward frees",
        reference=window_leak,
        observe=LEAK.observe,
        explain=LEAK.explain,
        mistakes=(
            LEAK.as_it_was(),
            Mistake(
                "smaller pieces",
                LEAK.with_fix(_trains(size=1)),
                (
                    "the micro-batches are smaller, and there are more of them: together, the "
                    "graphs that are kept are still those of the whole batch."
                ),
            ),
            Mistake(
                "the last micro-batch alone",
                LEAK.with_fix(_trains(lambda total, new: new.item())),
                (
                    "only the last micro-batch's entropy is logged: the graphs are gone, and so "
                    "are the other figures of the sum."
                ),
            ),
            Mistake(
                "a step each",
                LEAK.with_fix(_trains(_item, each=True)),
                (
                    "the optimizer steps after each micro-batch: the batch is then 8 rows, and the "
                    "updates are different."
                ),
            ),
            Mistake(
                "trained too",
                LEAK.with_fix(_trains(_item, trained=True)),
                (
                    "backward goes through the entropy too, so it is trained: the graph is freed, "
                    "but the updates are different. The log needs no gradient."
                ),
            ),
            Mistake(
                "no gradients",
                LEAK.with_fix(_trains(_item, grad=False)),
                (
                    "no_grad around the forward leaves backward nothing to go through: only the "
                    "figure for the log needs no graph."
                ),
            ),
            Mistake(
                "entropy after the step",
                LEAK.with_fix(_entropy_after),
                (
                    "the entropy is that of the model after the step. The script logs the entropy "
                    "before it, and with a larger learning rate the two differ."
                ),
            ),
            *LEAK.wrong_lines(),
        ),
    ),
)
