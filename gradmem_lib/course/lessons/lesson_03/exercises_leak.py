"""Lesson 03's leak: a figure for the log that keeps the graph of every micro-batch of a window."""

import torch
from torch.nn.functional import cross_entropy

from ....techniques.accumulation import split
from ...judge.exercise import Exercise
from ..shared.leaks import leak_cases, new_net
from ..shared.settings import seeded, sgd

WINDOW_BUDGET = "2 MiB"
ROWS, CLASSES, PIECES = 8, 1000, 16


def window_setting(pieces: int = PIECES) -> tuple:
    """A small classifier of 1,000 classes, its SGD, and a batch that makes ``pieces``
    micro-batches of 8 rows: inputs (rows, 64) and labels (rows).
    """
    net = new_net(CLASSES)
    with seeded(3):
        x = torch.randn(pieces * ROWS, 64)
        return net, sgd(net), (x, torch.randint(CLASSES, (len(x),)))


def larger_steps(pieces: int):
    """``window_setting`` with a learning rate at which an entropy after the update is another."""
    model, optimizer, batch = window_setting(pieces)
    optimizer.param_groups[0]["lr"] = 5.0
    return model, optimizer, batch


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


LEAK = Exercise(
    "3.10",
    window_leak,
    leak_cases(
        line=8,
        setting=window_setting,
        size=PIECES,
        counted="micro-batches",
        budget=WINDOW_BUDGET,
        outside=350_000,  # one micro-batch as a list of Python's numbers is 264 kB
        other=larger_steps,
        where=" and a learning rate of 5",
    ),
    """
    entropy -= (p * p.log()).sum().item() → entropy = entropy - (p * p.log()).sum()
    return entropy → return entropy.item()
        the sum still has a graph, which keeps the probabilities of every micro-batch: no backward
        goes through it, so nothing frees them. Add each micro-batch's entropy as a number.
    return 8 → return 4
        line 4 makes the logits of one micro-batch: the next micro-batch's would take their place,
        if nothing else kept them.
    return 8 → return 5
        the graph of line 5's loss is freed in the next line: that is what accumulation is for.
    return 8 → return 7
        line 7 makes the probabilities of one micro-batch: the next ones would take their place, if
        no later line kept them.
    return 8 → return 11
        line 11 makes a number of the sum, but the window has ended by then: all of its graphs have
        been kept, by another line.
    entropy -= → entropy = -
        only the last micro-batch's entropy is logged: the other figures of the sum are gone.
    loss.backward() → (loss + (logits.softmax(-1) * logits.log_softmax(-1)).sum() / rows).backward()
        backward goes through the entropy too, so it is trained: the log needs no gradient.
    optimizer.step() → optimizer.step(); now = lambda x: model(x).softmax(-1).detach()
    return entropy → return -sum((now(x) * now(x).log()).sum() for x, _ in split(batch, 8)) / rows
        the entropy is that of the model after the step: the script logs the entropy before it, and
        with a larger learning rate the two differ.
    """,
)
