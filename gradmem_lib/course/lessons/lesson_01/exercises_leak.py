"""Lesson 01's leak: a history that keeps tensors where numbers are enough."""

from __future__ import annotations

from collections import deque

import torch
import torch.nn.functional as F
from torch import nn

from ...judge.exercise import Exercise, Mistake
from ..shared.leaks import Leak, adamw, new_net

HISTORY_BUDGET = "2 MiB"
ROWS, BATCHES = 256, 24


def history_setting(batches: int = BATCHES) -> tuple[nn.Module, torch.optim.Optimizer, list]:
    """A small network, its AdamW, and batches of 256 inputs with their targets.

    Four batches come again and again, so that the data itself does not grow.
    """
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(4, ROWS, 64, generator=generator)
    targets = inputs.roll(1, dims=2)
    net = new_net()
    return net, adamw(net), [(inputs[i % 4], targets[i % 4]) for i in range(batches)]


def _trains(keep=lambda loss, out: (loss, out), *, history=list, rows=ROWS, grad=True):
    """A script that differs from the lesson's in what it keeps, or in what people change first."""

    def script(model, optimizer, batches):
        kept = history()
        for x, y in batches:
            with torch.set_grad_enabled(grad):
                out = model(x[:rows])
                loss = F.mse_loss(out, y[:rows])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            kept.append(keep(loss, out))
        return [(float(loss), float(torch.as_tensor(out).mean())) for loss, out in kept]

    return script


def with_history(model, optimizer, batches):
    """The script of the lesson, line by line."""
    history = []
    for x, y in batches:
        out = model(x)
        loss = F.mse_loss(out, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        history.append((loss, out))
    return [(loss.item(), out.mean().item()) for loss, out in history]


def history_leak():
    """The line that keeps tensors of every batch, and a script that keeps numbers."""

    def fixed(model, optimizer, batches):
        history = []
        for x, y in batches:
            out = model(x)
            loss = F.mse_loss(out, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            history.append((loss.item(), out.mean().item()))
        return history

    return 9, fixed


LEAK = Leak(
    script=with_history,
    fixed=history_leak()[1],
    line=9,
    setting=history_setting,
    batches=BATCHES,
    budget=HISTORY_BUDGET,
    outside=600_000,  # the outputs of one batch as a list of Python's numbers are about 530 kB
    stays=(
        "tensors of every batch are still kept: detach() and del take away the graph or a name, "
        "and the list still holds the tensor. Keep numbers: .item()."
    ),
    innocent={
        4: (
            "line 4 makes the outputs, and every step needs them: the next step's would take their "
            "place, if nothing else kept them."
        ),
        5: (
            "line 5 makes the loss, and every step needs it: the next step's would take its place, "
            "if nothing else kept it."
        ),
        6: ("line 6 frees what the graph has saved: look for what is still there after the step."),
        8: "line 8 frees the gradients: look for what is still there after the step.",
        10: (
            "line 10 makes numbers, but only after the last batch: by then all tensors have been "
            "kept, by another line."
        ),
    },
)


def _numbers(loss, out):
    return loss.item(), out.mean().item()


EXERCISES = (
    Exercise(
        id="1.9",
        title="a history that grows",
        difficulty=1,
        minutes=5,
        trains="telling the line that makes a tensor from the line that keeps it",
        reference=history_leak,
        observe=LEAK.observe,
        explain=LEAK.explain,
        mistakes=(
            LEAK.as_it_was(),
            Mistake(
                "one of the two",
                LEAK.with_fix(_trains(lambda loss, out: (loss.item(), out))),
                (
                    "one of the pair is a number now, and the other still keeps 64 KiB of every "
                    "batch. Keeping the loss is enough: here its storage is as large as the tensor "
                    "that it was computed from."
                ),
            ),
            Mistake(
                "the last ones",
                LEAK.with_fix(_trains(_numbers, history=lambda: deque(maxlen=3))),
                (
                    "only the last batches are returned: the bytes no longer grow, but the script "
                    "returns a pair of numbers for every batch."
                ),
            ),
            Mistake(
                "half the rows",
                LEAK.with_fix(_trains(rows=ROWS // 2)),
                (
                    "the batch is cut in half, so the updates are different, and the list still "
                    "grows: it only takes twice as many steps until the card is full."
                ),
            ),
            Mistake(
                "no gradients",
                LEAK.with_fix(_trains(_numbers, grad=False)),
                (
                    "no_grad around a training step leaves backward nothing to go through: the "
                    "graph is needed until line 6, and something else is kept."
                ),
            ),
            *LEAK.wrong_lines(),
        ),
    ),
)
