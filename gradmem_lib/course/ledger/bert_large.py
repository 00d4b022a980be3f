"""The BERT-large table of 2022, and how to reproduce its figures without the card that it was
measured on.

Transformers' documentation (v4.18, "Performance and Scalability") trained bert-large-uncased as a
sequence classifier on 512 rows of 512 tokens on a V100 with 16 GB, nine ways, and printed what NVML
said after each run: everything that the process held on the card. That is the driver's context, and
every segment that PyTorch's allocator had ever taken from the driver. NVML's "MB" are MiB, and so
are this module's.

``predicted`` is today's step. ``replayed`` are the first steps of a cold start, with switches for
four things that the software of January 2022 did differently: tools/record_bert_large.py runs them
on fake tensors, and keeps their bytes in ``bert_large.json``.
"""

from __future__ import annotations

import json
import textwrap
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ...prediction import allocator
from ...prediction.predict import Prediction, predict
from ...training.recipe import Recipe
from ...units import MiB

SOURCE = (
    "Transformers documentation v4.18, Performance and Scalability; Tesla V100-SXM2 16 GB, "
    "January 2022"
)
SAMPLES = SEQ_LEN = 512
BATCH_SIZE = 4  # rows of one optimizer step, in every run
CONTEXT_MIB, LOADED_MIB = 1343, 2631  # after a tensor of one number, and after the model was loaded
RECORD = Path(__file__).with_name("bert_large.json")


@dataclass(frozen=True)
class Run:
    """One run of the table: its ``recipe``, and the published figures: ``seconds`` for 512 rows,
    ``per_second`` (rows a second), and ``mib`` (all MiB on the card).
    """

    name: str
    recipe: Recipe
    seconds: float
    per_second: float
    mib: int


def _run(name: str, seconds: float, per_second: float, mib: int, **changes) -> Run:
    return Run(name, Recipe(attention="eager", **changes), seconds, per_second, mib)


_CUT = {"accumulation": 4}
_CHECKPOINTED = {**_CUT, "checkpointing": "per-layer"}
_ALL = {**_CHECKPOINTED, "precision": "autocast-fp16"}
RUNS = (
    _run("batch 4", 57.82, 8.86, 14949),
    _run("1 x 4", 66.03, 7.75, 8681, **_CUT),
    _run("1 x 4, checkpointing", 85.47, 5.99, 6775, **_CHECKPOINTED),
    _run("batch 4, fp16", 27.46, 18.64, 13939, precision="autocast-fp16"),
    _run("1 x 4, checkpointing, fp16", 50.76, 10.09, 7275, **_ALL),
    _run("batch 4, Adafactor", 64.31, 7.96, 12295, optimizer="adafactor"),
    _run("1 x 4, checkpointing, fp16, Adafactor", 56.54, 9.06, 4847, **_ALL, optimizer="adafactor"),
    _run("batch 4, 8-bit Adam", 55.95, 9.15, 13085, optimizer="adamw-8bit"),
    _run(
        "1 x 4, checkpointing, fp16, 8-bit Adam", 49.46, 10.35, 5363, **_ALL, optimizer="adamw-8bit"
    ),
)


def config():
    """bert-large-uncased with a head of two classes, as a transformers config."""
    from transformers import BertConfig

    sizes = {
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
    }
    return BertConfig(
        vocab_size=30522, num_labels=2, architectures=["BertForSequenceClassification"], **sizes
    )


def model(device: str = "meta"):
    """The model of ``config()``, with random weights; on "meta", without memory."""
    from transformers import BertForSequenceClassification

    with torch.device(device):
        return BertForSequenceClassification(config())


def batch(rows: int = BATCH_SIZE, device: str = "meta") -> dict[str, Tensor]:
    """Token ids (rows, 512) and a class for each row, as the documentation's data set has them;
    without values on "meta".
    """
    ids = torch.randint(100, 30000, (rows, SEQ_LEN), device=device)
    return {"input_ids": ids, "labels": torch.zeros(rows, dtype=torch.long, device=device)}


def loaded() -> int:
    """Bytes that the allocator takes from the driver for the weights alone."""
    return allocator.replayed(
        tensor.nbytes for tensor in [*model().parameters(), *model().buffers()]
    )


@cache
def predicted(run: Run) -> Prediction:
    """The second or later step of ``run`` with today's software, on a card."""
    return predict(config(), batch=batch(), recipe=run.recipe, target="cuda")


class Replayed(NamedTuple):
    """Bytes: the most live bytes, and all that the allocator had reserved at the end."""

    live: int
    reserved: int


# Each stage has one thing more as it was in 2022 than the stage before it. Gradients zeroed: they
# are set to zero after a step and stay, as ``zero_grad`` did until PyTorch 2.0. GELU in float32:
# autocast runs it so, as up to PyTorch 1.9 (pull request 59639 took it off the list). Softmax and
# AdamW: those of 2022. "today" has none of them.
STAGES = ("today", "gradients zeroed", "softmax input", "GELU in float32", "old AdamW")


def replayed(run: Run) -> dict[str, Replayed]:
    """The record of ``run``: live and reserved bytes at each stage from today's software to that of
    2022.
    """
    found = json.loads(RECORD.read_text(encoding="utf-8"))["replayed"][run.name]
    return {stage: Replayed(**values) for stage, values in found.items()}


CAUSES = {
    "today": (
        "most bytes alive in a later step with today's software and the same (eager) attention"
    ),
    "zeroed": (
        "gradients were set to zero after a step, not freed: they are there while "
        "activations pile up"
    ),
    "softmax": (
        "until PyTorch 1.11 softmax kept its input for backward, one more copy of the "
        "scores in each layer"
    ),
    "GELU": "up to PyTorch 1.9 autocast ran GELU in float32, and its input was kept so",
    "AdamW": "transformers' own AdamW had one temporary of a parameter's size, torch's has two",
    "cached": "blocks that the allocator holds and nothing uses; NVML counts them",
    "context": (
        "the driver's own: as published, less the segment of 2 MiB that the first tensor was put in"
    ),
}

LEFT = (
    "published less the sum: libraries had memory of their own then, beside PyTorch's allocator, "
    "and the replay's idle blocks are not exactly those of the card"
)


@dataclass(frozen=True)
class Row:
    """One run beside what explains its published figure. All in MiB.

    ``parts``: by name in ``CAUSES``, in order; they add up to ``total``.
    """

    run: Run
    parts: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def difference(self) -> float:
        """Published less explained."""
        return self.run.mib - self.total


def rows() -> list[Row]:
    """The table's rows."""
    found = []
    for run in RUNS:
        at = replayed(run)
        last = at[STAGES[-1]]
        live = [at[stage].live / MiB for stage in STAGES]
        parts = {
            "today": live[0],
            "zeroed": live[1] - live[0],
            "softmax": live[2] - live[1],
            "GELU": live[3] - live[2],
            "AdamW": live[4] - live[3],
            "cached": (last.reserved - last.live) / MiB,
            "context": CONTEXT_MIB - allocator.SMALL_SEGMENT / MiB,
        }
        found.append(Row(run, parts))
    return found


def table() -> str:
    """The rows as plain text, with a line on what each column is."""
    lines = [["MiB", *CAUSES, "sum", "published", "left"]]
    for row in rows():
        numbers = [*row.parts.values(), row.total, row.run.mib, row.difference]
        name = row.run.name.replace(", checkpointing", " + ckpt")
        lines.append([name, *(f"{round(value):,}" for value in numbers)])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    printed = [
        line[0].ljust(widths[0])
        + "".join(f" {c:>{w}}" for c, w in zip(line[1:], widths[1:], strict=True))
        for line in lines
    ]
    says = CAUSES | {"left": LEFT}
    return "\n".join(
        [*printed, "", *(textwrap.fill(f"{n}: {what}.", 100) for n, what in says.items())]
    )
