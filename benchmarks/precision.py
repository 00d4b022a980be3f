"""SmolLM2-135M trained by each of lesson 07's precisions, on the CPU: the losses of a few updates,
and the loss on rows that none of them trains on.

    python benchmarks/precision.py
    python benchmarks/precision.py --dry-run    with a tiny model; writes nothing

Sizes, rows, learning rate and seeds are those of lesson 07 in full, so the lesson may quote what is
recorded here.
"""

from __future__ import annotations

import argparse
import copy
import gc
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from record import record

# A plain checkout: the library is not installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gradmem_lib.training.prepare import prepare
from gradmem_lib.training.recipe import Recipe
from gradmem_lib.training.step import step

ROWS, SEQ_LEN, UPDATES, HELD_OUT = 2, 64, 8, 4
RATE = 1e-5
FLOAT32, MASTER, BY_CHANCE = "float32", "bf16, master", "bf16, by chance"
RECIPES = {
    FLOAT32: Recipe(),
    "autocast bf16": Recipe(precision="autocast-bf16"),
    "autocast float16": Recipe(precision="autocast-fp16"),
    "all bf16": Recipe(precision="bf16"),
    MASTER: Recipe(precision="float32-master"),
    BY_CHANCE: Recipe(precision="bf16", optimizer="adamw-stochastic"),
}


@dataclass
class Task:
    """What every recipe starts from."""

    model: torch.nn.Module  # in float32
    batches: list[dict[str, torch.Tensor]]  # one for each update: (rows, tokens)
    held_out: dict[str, torch.Tensor]


def task(dry: bool) -> Task:
    from gradmem_lib.course.material import models, texts

    if dry:
        model = models.tiny_llama(layers=1, hidden=32, heads=2, intermediate=48, vocab=128)
        chance = torch.Generator().manual_seed(0)
        ids = torch.randint(0, 128, (ROWS + HELD_OUT, 8), generator=chance)
        train, held_out = ids[:ROWS], ids[ROWS:]
    else:
        model, tokenizer = models.smollm2()
        rows = ROWS * UPDATES
        found = texts.datasets(tokenizer, seq_len=SEQ_LEN, rows=rows, held_out=HELD_OUT)
        train, held_out = (part.ids for part in found)
    batches = [{"input_ids": ids, "labels": ids} for ids in train.split(ROWS)]
    return Task(model, batches, {"input_ids": held_out, "labels": held_out})


def trained(on: Task, recipe: Recipe) -> dict:
    """The loss of each update, and the held-out loss after the last one."""
    torch.manual_seed(0)  # for the rounding by chance
    model = copy.deepcopy(on.model).to(recipe.weight_dtype)
    optimizer = prepare(model, recipe, lr=RATE).optimizer
    scaler = torch.amp.GradScaler("cpu") if recipe.precision == "autocast-fp16" else None
    losses = []
    for batch in on.batches:
        loss = step(model, optimizer, batch, recipe, scaler=scaler)
        losses.append(round(loss.item(), 4))
    return {"losses": losses, "held-out loss": held_out_loss(model, on)}


@torch.no_grad()
def held_out_loss(model: torch.nn.Module, on: Task) -> float:
    return round(model(**on.held_out, use_cache=False).loss.item(), 4)


def table(dry: bool) -> dict:
    """A row for each recipe."""
    on = task(dry)
    before = held_out_loss(on.model, on)
    rows = {}
    for name, recipe in RECIPES.items():
        rows[name] = trained(on, recipe)
        gc.collect()
        print(f"{name:<18}held out {rows[name]['held-out loss']:.4f}", flush=True)
    shape = on.batches[0]["input_ids"].shape
    subject = "a tiny model" if dry else "SmolLM2-135M"
    return {
        "what": f"{subject}, {len(on.batches)} updates on {shape[0]} x {shape[1]} tokens",
        "learning rate": RATE,
        "rows held out": HELD_OUT,
        "held-out loss before": before,
        "recipes": rows,
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dry-run", action="store_true", help="a tiny model; writes nothing")
    options = parser.parse_args(arguments)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    try:
        found = table(options.dry_run)
        if not options.dry_run:
            print("wrote", record("precision", found).name)
    finally:
        torch.set_num_threads(threads)
    return 0


if __name__ == "__main__":
    sys.exit(main())
