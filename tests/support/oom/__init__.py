"""Small programs that need more memory than they should, each after a report of somebody who ran
out of memory; and programs that look like them, and must not be accused.

``PROGRAMS`` has all of them with what has to be said of each.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from gradmem_lib import MemoryTracker
from gradmem_lib.course.material import models

GROWS = "Bytes grow from step to step"
COLLECTED = "An evaluation collects its results"
UNUSED = "A forward's graph is never used"
ADDED_UP = "Losses are added up before one backward"
STAY = "Forwards stay in memory after their own backward"
COPIED = "The weights are there more than once"
SECOND = "A second model is in memory"
FIRST_STEP = "The first optimizer step makes its states"
WIDE = "Weights are wider than needed"
LOGITS = "The logits are the largest part"
SCORES = "Attention stores its scores"
IDLE = "Checkpointing is on and does nothing"
EVALUATION = "An evaluation is the peak"
IN_EACH_STEP = "A forward without gradients is the peak"
GENERATION = "Generation keeps keys and values"
FOR_NOBODY = "Gradients are computed for no optimizer"
DATA = "Data waits on the device"
ONE_STEP = "One step needs much more than the others"
TABLE = "The gradient of an embedding is the largest part"
EXPANDED = "One kind of tensor is the largest part"
GRADIENTS = "The gradients are there more than once"
DOUBLE = "Tensors are in float64"
STAYS = "Results of an evaluation stay during the training"
LEFT = "Tensors of the step before are still there"
TWICE = "Gradients keep graphs of their own"
ONE_LINE = "One line makes most of the peak"
WAIT = "Gradients wait during the next forward"
FULL = "A name keeps what many steps have made"
EXCEPTION = "An exception keeps the variables of its functions"


class Program(NamedTuple):
    """``causes``: all that are named, the first first. ``line``: a part of the line that makes the
    bytes of the first. ``says``: a part of its remedy.
    """

    run: Callable
    causes: tuple[str, ...]
    line: str
    says: str


PROGRAMS: dict[str, Program] = {}


def has(*causes: str, line: str = "", says: str = ""):
    """Puts a program down. Without ``causes``, it must not be accused of anything.

    It runs once in each of its ways, for all tests; ``__wrapped__`` runs it again.
    """

    def put_down(run):
        once = cache(run)
        PROGRAMS[run.__name__] = Program(once, causes, line, says)
        return once

    return put_down


STEPS = 8


class Net(nn.Module):
    """A body of 64 × 256 features."""

    def __init__(self, width: int = 256):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, width), nn.GELU(), nn.Linear(width, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, foreach=False)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)


def llama(**more) -> nn.Module:
    sizes = {"layers": 2, "hidden": 64, "heads": 4, "intermediate": 128, "vocab": 2048}
    return models.tiny_llama(**(sizes | more))


def rows(n: int = 2, tokens: int = 64, vocabulary: int = 2048) -> torch.Tensor:
    return torch.randint(0, vocabulary, (n, tokens), generator=torch.Generator().manual_seed(0))


def trained(model, optimizers, step, steps=STEPS):
    """``step(i)`` runs under a tracker."""
    with MemoryTracker(model, optimizers) as tracker:
        for i in range(steps):
            step(i)
    return tracker


def stepped(loss, optimizer):
    """The rest of a step."""
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def updated(loss, optimizer):
    """The rest of a step, in which no variable keeps its tensor."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def added_up(losses, optimizer, remedied):
    """One backward for all losses; ``remedied``: one for each."""
    summed = 0
    for loss in losses:
        if remedied:
            loss.backward()
        else:
            summed = summed + loss
        del loss
    if not remedied:
        summed.backward()
    optimizer.step()
    optimizer.zero_grad()


def trains(net, loss, make_optimizer=sgd, steps=3) -> MemoryTracker:
    """Each step: ``loss(i)``, its backward, and the optimizer's step."""
    optimizer = make_optimizer(net)
    return trained(net, optimizer, lambda i: stepped(loss(i), optimizer), steps)


def trained_with(keep, steps: int = STEPS) -> MemoryTracker:
    """Train ``Net``; after each step ``keep(i, net, x, y, out, loss)`` runs."""
    net, x, y = Net(), torch.randn(512, 64), torch.randn(512, 64)
    optimizer = adamw(net)
    with MemoryTracker(net, optimizer) as tracker:
        for i in range(steps):
            out = net(x)
            loss = F.mse_loss(out, y)
            stepped(loss, optimizer)
            keep(i, net, x, y, out, loss)
    return tracker
