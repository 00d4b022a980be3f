"""Lesson 01's leak: a history that keeps tensors where numbers are enough."""

import torch
import torch.nn.functional as F

from ...judge.exercise import Exercise
from ..shared.leaks import leak_cases, new_net
from ..shared.settings import adamw, seeded

HISTORY_BUDGET = "2 MiB"
ROWS, BATCHES = 256, 24


def history_setting(batches: int = BATCHES) -> tuple:
    """A small network, its AdamW, and batches of 256 inputs with their targets.

    Four batches come again and again, so that the data itself does not grow.
    """
    with seeded(1):
        inputs = torch.randn(4, ROWS, 64)
    targets = inputs.roll(1, dims=2)
    net = new_net()
    return net, adamw(net), (list(zip(inputs, targets, strict=True)) * 6)[:batches]


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


LEAK = Exercise(
    "1.9",
    history_leak,
    leak_cases(
        line=9,
        setting=history_setting,
        size=BATCHES,
        budget=HISTORY_BUDGET,
        outside=600_000,  # the outputs of one batch as a list of Python's numbers are about 530 kB
    ),
    """
    (loss.item(), out.mean().item()) → (loss, out)
    return history → return [(loss.item(), out.mean().item()) for loss, out in history]
        tensors of every batch are still kept: detach() and del take away the graph or a name, and
        the list still holds the tensor. Keep numbers: .item().
    (loss.item(), out.mean().item()) → (loss.item(), out)
    return history → return [(loss, out.mean().item()) for loss, out in history]
        one of the pair is a number now, and the other still keeps 64 KiB of every batch. Keeping
        the loss is enough: here its storage is as large as the tensor that it was computed from.
    return 9 → return 4
        line 4 makes the outputs, and every step needs them: the next step's would take their place,
        if nothing else kept them.
    return 9 → return 5
        line 5 makes the loss, and every step needs it: the next step's would take its place, if
        nothing else kept it.
    return 9 → return 6
        line 6 frees what the graph has saved: look for what is still there after the step.
    return 9 → return 8
        line 8 frees the gradients: look for what is still there after the step.
    return 9 → return 10
        line 10 makes numbers, but only after the last batch: by then all tensors have been kept, by
        another line.
    return history → return history[-3:]
        only the last batches are returned: the script returns a pair of numbers for every batch.
    """,
)
