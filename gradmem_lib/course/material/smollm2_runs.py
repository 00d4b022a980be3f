"""The runs of lesson 05: SmolLM2, loaded again for each run and trained by a recipe, for several
updates or for one.
"""

from __future__ import annotations

import gc
import os
import time
from dataclasses import replace
from typing import NamedTuple

import torch
from transformers import TrainerCallback

from ...measure.timeline import MemorySnapshot
from ...training.recipe import Recipe
from ...training.trainer import make_trainer
from . import models

BATCH, SEQ_LEN = 8, 128  # rows of an update, tokens of a row


class Size(NamedTuple):
    """How long lesson 05 trains: updates of its longer runs, held-out rows, and whether an update
    is only one micro-batch.
    """

    updates: int
    held_out: int
    short: bool


LONG = Size(16, 16, False)


def size() -> Size:
    """The size for learners, or the short one of ``GRADMEM_SIZE=ci``."""
    return Size(1, 1, True) if os.environ.get("GRADMEM_SIZE") == "ci" else LONG


class Clock(TrainerCallback):
    """The seconds of each step."""

    def __init__(self):
        self.seconds: list[float] = []

    def on_step_begin(self, args, state, control, **more):
        self.began = time.perf_counter()

    def on_step_end(self, args, state, control, **more):
        self.seconds.append(time.perf_counter() - self.began)


class States(TrainerCallback):
    """Creates an optimizer's states before the first step, by a step on gradients of zero, which
    changes no weight (``Trainer`` has no weight decay by default). Then the first step needs as
    many bytes as any later one.

    ``kept``: these gradients stay, in place of those of earlier micro-batches.
    """

    def __init__(self, kept: bool):
        self.kept = kept

    def on_train_begin(self, args, state, control, model=None, optimizer=None, **more):
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        if not self.kept:
            optimizer.zero_grad()


class Run(NamedTuple):
    """A trained model, the peak, seconds and tokens of its last step, and the loss of each step."""

    model: torch.nn.Module
    peak: MemorySnapshot
    seconds: float
    tokens: int
    losses: list[float]


def train(recipe: Recipe, rows, *, updates: int = 1, whole: bool = False, **given) -> Run:
    """SmolLM2 trained by ``recipe`` on ``rows`` (of ``texts.datasets``); ``given`` is for
    ``make_trainer``.

    With one update, the optimizer has its states before it. In the short form, unless ``whole``,
    one micro-batch stands for all, and the gradients of earlier ones exist already: the peak is the
    same.
    """
    gc.collect()  # a Trainer refers to itself, and so keeps the last run's model alive
    last = size().short and not whole and recipe.accumulation > 1
    batch = BATCH // recipe.accumulation if last else BATCH
    torch.manual_seed(0)  # for adapters, which start from random numbers
    model, _ = models.smollm2(dtype=recipe.weight_dtype)
    clock = Clock()
    callbacks = [clock, States(last)] if updates == 1 else [clock]
    trainer = make_trainer(
        model,
        replace(recipe, accumulation=1) if last else recipe,
        batch_size=batch,
        train_dataset=rows,
        max_steps=updates,
        **{"live": False, "logging_steps": 1, "callbacks": callbacks} | given,
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return Run(model, trainer.memory.by_step[updates], clock.seconds[-1], batch * SEQ_LEN, losses)
