"""Optimizers on SmolLM2-135M, on the CPU: bytes of states, bytes of a step's temporaries, time of a step, and the loss on held-out
text after as many updates at each of three learning rates.

    python benchmarks/optimizers.py [--steps 12]
    python benchmarks/optimizers.py --dry-run    with a tiny model; writes nothing

Every run starts from the same float32 weights and sees the same rows in the same order. Steps are timed on weights that all
optimizers share, one after another in each round, as CPU time of one thread: a ratio is one of AdamW's within its round.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
import transformers
from record import record

from gradmem_lib.course.exercises.lesson_09 import Lion
from gradmem_lib.measure.tracker import MemoryTracker
from gradmem_lib.training.prepare import make_optimizer
from gradmem_lib.training.recipe import Recipe

ROWS, SEQ_LEN, HELD_OUT, ROUNDS = 4, 64, 16, 5
BASE, TIME = "adamw", "time of a step, to AdamW's"
ADAM_RATES = (1e-5, 1e-4, 3e-4)


class Muon(torch.optim.Optimizer):
    """torch's Muon for the layers' matrices, and AdamW for embeddings and vectors, which Muon is not for."""

    def __init__(self, model: torch.nn.Module, lr: float):
        embeddings = {id(p) for m in (model.get_input_embeddings(), model.get_output_embeddings()) for p in m.parameters()}  # fmt: skip
        matrices = [p for p in model.parameters() if p.ndim == 2 and id(p) not in embeddings]
        own = {id(p) for p in matrices}
        others = [p for p in model.parameters() if id(p) not in own]
        self.parts = (
            torch.optim.Muon(matrices, lr=lr, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=lr, foreach=False),
        )
        super().__init__(model.parameters(), {"lr": lr})

    def step(self, closure=None) -> None:
        for part in self.parts:
            part.step()


def _recipe(model: torch.nn.Module, lr: float, **choices) -> torch.optim.Optimizer:
    return make_optimizer(list(model.parameters()), Recipe(**choices), lr)


# Name: how it is made for a model at a rate, and three rates. torch's Adafactor takes one relative to a weight's size.
OPTIMIZERS: dict[str, tuple[Callable, tuple[float, float, float]]] = {
    name: (partial(_recipe, optimizer=name), rates)
    for name, rates in (
        (BASE, ADAM_RATES),
        ("adamw-foreach", ADAM_RATES),
        ("adamw-fused", ADAM_RATES),
        ("adamw-8bit", ADAM_RATES),
        ("adafactor", ADAM_RATES),
        ("adafactor-torch", (3e-4, 1e-3, 3e-3)),
        ("sgd", (1e-2, 1e-1, 3e-1)),
    )
} | {
    "sgd, momentum 0.9": (partial(_recipe, optimizer="sgd", momentum=0.9), (1e-3, 1e-2, 3e-2)),
    "lion": (lambda model, lr: Lion(model.parameters(), lr=lr), (1e-6, 1e-5, 3e-5)),
    "muon, and adamw for the rest": (Muon, ADAM_RATES),
}


def data(dry: bool, steps: int) -> tuple[Callable, torch.Tensor, torch.Tensor]:
    """(make a fresh model, token ids (steps, rows, tokens) to train on, held-out ids (rows, tokens))."""
    from gradmem_lib.course import models, texts

    if dry:
        tiny = {"layers": 1, "hidden": 64, "heads": 4, "intermediate": 96, "vocab": 512}
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, 512, (ROWS * steps + HELD_OUT, SEQ_LEN), generator=generator)
        return lambda: models.tiny_llama(**tiny), ids[:-HELD_OUT].view(steps, ROWS, -1), ids[-HELD_OUT:]
    tokenizer = models.smollm2()[1]
    train, held_out = texts.datasets(tokenizer, seq_len=SEQ_LEN, rows=ROWS * steps, held_out=HELD_OUT)
    return lambda: models.smollm2()[0].train(), train.ids.view(steps, ROWS, -1), held_out.ids


@torch.no_grad()
def loss_on(model: torch.nn.Module, ids: torch.Tensor) -> float:
    return float(model(input_ids=ids, labels=ids, use_cache=False).loss)


def trained(
    fresh: Callable, made: Callable, lr: float, batches: torch.Tensor, held_out: torch.Tensor
) -> float:
    """The held-out loss after an update on each batch."""
    gc.collect()
    model = fresh()
    optimizer = made(model, lr)
    for ids in batches:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        for p in model.parameters():
            p.grad = None
    return round(loss_on(model, held_out), 4)


def step_bytes(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Of a second step: bytes of states, and what is there for a while beside all that stays."""
    parts = list(getattr(optimizer, "parts", [optimizer]))
    optimizer.step()
    with MemoryTracker(model, parts, live=False) as tracker:
        optimizer.step()
    states, extra = tracker.current.by_category["optimizer"], tracker.peak.total - tracker.current.total
    return {"state bytes": states, "temporaries of a step, bytes": extra}


def step_times(steps: dict[str, Callable], rounds: int) -> dict[str, float]:
    """Median over rounds of each step's CPU time to that of ``BASE`` in the same round."""
    ratios: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        seconds = {}
        for name, step in steps.items():
            began = time.process_time()
            step()
            seconds[name] = time.process_time() - began
        for name in steps:
            ratios[name].append(seconds[name] / seconds[BASE])
    return {name: round(statistics.median(found), 2) for name, found in ratios.items()}


def table(dry: bool, steps: int) -> dict:
    """A row for each optimizer."""
    fresh, batches, held_out = data(dry, steps)
    model = fresh()
    before = round(loss_on(model, held_out), 4)
    model(input_ids=batches[0], labels=batches[0], use_cache=False).loss.backward()
    shared = {name: made(model, 1e-9) for name, (made, _) in OPTIMIZERS.items()}
    rows = {name: step_bytes(model, optimizer) for name, optimizer in shared.items()}
    times = step_times({name: optimizer.step for name, optimizer in shared.items()}, ROUNDS)
    parameters = sum(p.numel() for p in model.parameters())
    del shared, model
    for name, (made, rates) in OPTIMIZERS.items():
        losses = {f"{lr:g}": trained(fresh, made, lr, batches, held_out) for lr in rates}
        rows[name] |= {
            "state bytes a parameter": round(rows[name]["state bytes"] / parameters, 3),
            TIME: times[name],
            "held-out loss, by learning rate": losses,
        }
        print(shown(name, rows[name]), flush=True)
    return {
        "what": f"{'a tiny model' if dry else 'SmolLM2-135M'}, float32, {steps} updates on {ROWS} x {SEQ_LEN} tokens, loss on {HELD_OUT} rows",
        "parameters": parameters,
        "clock": "CPU time of one thread",
        "rounds": ROUNDS,
        "held-out loss before": before,
        "optimizers": rows,
    }


def shown(name: str, row: dict) -> str:
    losses = "  ".join(f"{lr}: {loss:.3f}" for lr, loss in row["held-out loss, by learning rate"].items())
    return (
        f"{name:<29} states {row['state bytes']:>13,}   temporaries {row['temporaries of a step, bytes']:>13,}   "
        f"time {row[TIME]:5.2f}x   loss {losses}"
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=12, help="updates of each run")
    parser.add_argument("--dry-run", action="store_true", help="a tiny model; writes nothing")
    options = parser.parse_args(arguments)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    try:
        found = table(options.dry_run, options.steps)
        if not options.dry_run:
            print("wrote", record("optimizers", found).name)
    finally:
        torch.set_num_threads(threads)
    return 0


if __name__ == "__main__":
    sys.exit(main())
