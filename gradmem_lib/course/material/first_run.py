"""Lesson 00's last run, which each lesson of part one meets again with what it has taught."""

from typing import Any

import torch

from ...measure.tracker import MemoryTracker
from ...training.prepare import prepare
from ...training.recipe import Recipe
from ...training.step import step
from ...units import parse_bytes
from . import models

CARD = "48 MiB"


def first_run(**changes: Any) -> None:
    """Make two updates of 16 rows of 128 tokens on the tiny Llama by ``Recipe(**changes)``. Print
    the highest moment of each phase, and how far the highest of all is from a card of 48 MiB.
    """
    ids = torch.randint(0, 8192, (16, 128), generator=torch.Generator().manual_seed(0))
    recipe = Recipe(**changes)
    llama, optimizer, _ = prepare(models.tiny_llama(), recipe)
    with MemoryTracker(llama, optimizer, live=False) as tracker:
        for _ in range(2):  # the first one creates the optimizer's states
            step(llama, optimizer, {"input_ids": ids, "labels": ids}, recipe)

    highest = []
    for phase in ("forward", "backward", "optimizer_step"):
        highest.append(f"{phase} {tracker.peak_by_phase[phase] / 2**20:.1f} MiB")
    print(", ".join(highest))
    over = (tracker.peak.total - parse_bytes(CARD)) / 2**20
    verdict = f"{over:.1f} MiB too much" if over > 0 else "fits"
    print(f"card {CARD}: {verdict}")
