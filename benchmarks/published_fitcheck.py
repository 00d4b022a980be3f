"""FitCheck's measurements (``data/measurements``, 2026; one T4, torch 2.10 to 2.14, transformers
5.0 to 5.17): LoRA on queries, keys, values and outputs, AdamW (foreach), a checkpoint in each
layer.

Its loop is a function: the model's output lives until the step ends, and gradients are freed before
a forward. There is no autocast. What else it does otherwise than a ``Recipe`` of today:

- adapters are in float32 on a base in float16: ``Recipe(precision=None)``;
- a base in 4 bits is bitsandbytes' default, without double quantization, and
  ``prepare_model_for_kbit_training`` makes all else float32;
- rows are padded, so that their mask hides tokens: the fused attention then repeats the shared
  heads of keys and values, and takes the memory-efficient kernel;
- several runs were made in one process, and each began with what the ones before it had left: the
  table says what was there after loading, and the difference to this library's bytes of the model
  is added.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from gradmem_lib.course.ledger.published import Row
from gradmem_lib.model.configs import skeleton
from gradmem_lib.model.known import known_model
from gradmem_lib.prediction.allocator import replayed, workspace
from gradmem_lib.prediction.loop import Loop
from gradmem_lib.prediction.predict import Prediction, predict
from gradmem_lib.training.recipe import Recipe
from gradmem_lib.units import MiB

SOURCE = "FitCheck, LoRA, T4, 2026"
T4 = (7, 5)
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
# model | rows | tokens | attention | base | rank | MiB: allocated, reserved, after loading
TABLE = """
Qwen2.5-1.5B   |  2 | 1024 | eager | nf4  | 32 | 6838.5 |  7548 | 1643.9
Qwen2.5-1.5B   |  2 | 1024 | fused | nf4  | 32 | 6827.7 |  7400 | 1642.0
Qwen2.5-1.5B   |  1 | 2048 | eager | nf4  | 32 | 6850.0 |  7584 | 1647.4
TinyLlama-1.1B |  1 | 1024 | eager | nf4  | 32 | 2020.4 |  2356 | 1077.1
TinyLlama-1.1B |  1 | 1024 | fused | nf4  | 32 | 1843.1 |  2034 | 1071.6
TinyLlama-1.1B | 12 | 1024 | fused | nf4  | 32 | 9371.7 | 11258 | 1078.1
TinyLlama-1.1B |  4 | 1024 | eager | nf4  | 32 | 4589.6 |  6172 | 1074.1
Llama-3.2-1B   |  1 | 1024 | eager | nf4  | 16 | 3728.1 |  4058 | 1538.3
Llama-3.2-1B   |  1 | 1024 | fused | nf4  | 16 | 3723.1 |  4026 | 1537.3
SmolLM2-1.7B   |  4 | 1024 | eager | fp16 | 32 | 6536.7 |  7734 | 3312.2
Qwen2.5-1.5B   |  2 | 1024 | fused | fp16 | 32 | 7401.8 |  7766 | 2978.5
"""


@dataclass(frozen=True)
class Run:
    """A row of the table. ``allocated`` (the most), ``reserved`` and ``loaded`` are MiB."""

    model: str
    rows: int
    tokens: int
    attention: str
    base: str
    rank: int
    allocated: float
    reserved: float
    loaded: float

    def __str__(self) -> str:
        return f"{self.model}, {self.base}, {self.attention}, {self.rows} x {self.tokens:,}"


def runs() -> list[Run]:
    found = []
    for line in TABLE.strip().splitlines():
        model, rows, tokens, attention, base, rank, *mib = map(str.strip, line.split("|"))
        found.append(
            Run(model, int(rows), int(tokens), attention, base, int(rank), *map(float, mib))
        )
    return found


def predicted(run: Run) -> Prediction:
    config = known_model(run.model)[1]
    kind: dict[str, Any] = {
        "precision": "float32",
        "quantized_base": "nf4",
        "compute_dtype": "fp16",
    }
    given: Any = config
    if run.base == "fp16":
        kind = {"precision": None}
        given = skeleton(config).to(torch.float16)
    recipe = Recipe(
        optimizer="adamw-foreach",
        attention=run.attention,
        checkpointing="per-layer",
        lora_rank=run.rank,
        lora_targets=TARGETS,
        **kind,
    )
    ids = torch.zeros(run.rows, run.tokens, dtype=torch.long, device="meta")
    mask = torch.ones(run.rows, run.tokens, dtype=torch.long)
    mask[:, -1] = 0  # which tokens are hidden does not matter, only that some are
    kept: dict[str, Any] = {}

    def loss(model, batch):
        kept.clear()
        kept["outputs"] = model(**batch, use_cache=False)
        return kept["outputs"].loss

    return predict(
        given,
        batch={"input_ids": ids, "attention_mask": mask, "labels": ids},
        loss=loss,
        recipe=recipe,
        target="cuda",
        loop=Loop(zero_grad="before forward"),
    )


def figures(run: Run) -> dict[str, int]:
    """The predicted bytes, with cuBLAS's workspaces and what earlier runs had left."""
    found = predicted(run)
    left = round(run.loaded * MiB) - found.current.by_category["parameters"]
    one = workspace(T4) // 2
    return {
        "most allocated": found.peak.total + 2 * one + left,
        "reserved": replayed(found.requests(), held=(one, one, left)),
    }


def rows() -> Iterator[Row]:
    for run in runs():
        published = {"most allocated": run.allocated, "reserved": run.reserved}
        for what, nbytes in figures(run).items():
            yield Row(SOURCE, str(run), what, round(published[what] * MiB), nbytes)
