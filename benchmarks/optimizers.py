"""Optimizers on the matrices of SmolLM2-135M's last layers, on the CPU: bytes of states, bytes of a
step's temporaries, time of a step, and the loss on held-out text after as many updates at each of
three learning rates.

    python benchmarks/optimizers.py [--steps 8]
    python benchmarks/optimizers.py --dry-run    with a tiny model; writes nothing

Every run starts from the same float32 weights and sees the same rows in the same order. Steps are
timed on weights that all optimizers share, one after another in each round, as CPU time of one
thread: a ratio is one of AdamW's within its round.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable
from functools import partial

import torch
import transformers
from shared import CLOCK, in_turns, one_thread, parser, ratio, record, seconds

from gradmem_lib.course.lessons.lesson_09.exercises import Lion
from gradmem_lib.measure.tracker import MemoryTracker
from gradmem_lib.training.prepare import make_optimizer
from gradmem_lib.training.recipe import Recipe

ROWS, SEQ_LEN, HELD_OUT, ROUNDS, LAYERS = 4, 64, 16, 3, 6
BASE, TIME = "adamw", "time of a step, to AdamW's"
ADAM_RATES = (1e-4, 3e-4, 1e-3)


def _of(**choices) -> Callable:
    return lambda parameters, lr: make_optimizer(parameters, Recipe(**choices), lr)


# Name: how it is made of parameters and a rate, and three rates. Those of torch's Adafactor are
# relative to a weight's size.
OPTIMIZERS: dict[str, tuple[Callable, tuple[float, ...]]] = {
    BASE: (_of(optimizer=BASE), ADAM_RATES),
    "adamw-foreach": (_of(optimizer="adamw-foreach"), ()),  # the same update
    "adamw-fused": (_of(optimizer="adamw-fused"), ()),
    "adamw-8bit": (_of(optimizer="adamw-8bit"), ADAM_RATES),
    "adafactor": (_of(optimizer="adafactor"), ADAM_RATES),
    "adafactor-torch": (_of(optimizer="adafactor-torch"), (3e-4, 1e-3, 3e-3)),
    "lion": (Lion, ADAM_RATES),
    "sgd": (_of(optimizer="sgd"), (1e-2, 3e-2, 1e-1)),
    "sgd, momentum 0.9": (_of(optimizer="sgd", momentum=0.9), (1e-2, 3e-2, 1e-1)),
    "muon": (partial(torch.optim.Muon, weight_decay=0.0), (3e-3, 1e-2, 3e-2)),
}


class Subject:
    """The last layers of a model, whose matrices are trained, behind what its frozen layers make of
    the rows, once for all runs.
    """

    def __init__(
        self, model: torch.nn.Module, train: torch.Tensor, held_out: torch.Tensor, layers: int
    ):
        self.model, whole, norm = model.requires_grad_(False), model.model.layers, model.model.norm
        model.model.layers, model.model.norm = whole[:-layers], torch.nn.Identity()
        self.batches, self.held_out = self.behind_frozen(train), self.behind_frozen(held_out)
        model.model.layers, model.model.norm = whole[-layers:], norm
        self.matrices = [p.requires_grad_() for p in model.model.layers.parameters() if p.ndim == 2]
        self.start = [p.detach().clone() for p in self.matrices]

    @torch.no_grad()
    def behind_frozen(self, rows: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        inner = self.model.model
        return [(inner(input_ids=ids, use_cache=False)[0], ids) for ids in rows.split(ROWS)]

    def reset(self) -> None:
        with torch.no_grad():
            for p, old in zip(self.matrices, self.start, strict=True):
                p.copy_(old)

    def loss(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return self.model(inputs_embeds=batch[0], labels=batch[1], use_cache=False).loss

    @torch.no_grad()
    def held_out_loss(self) -> float:
        return statistics.mean(self.loss(batch).item() for batch in self.held_out)


def subject(dry: bool, steps: int) -> Subject:
    from gradmem_lib.course.material import models, texts

    if dry:
        tiny = {"layers": 3, "hidden": 64, "heads": 4, "intermediate": 96, "vocab": 512}
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, 512, (ROWS * (steps + 1), 16), generator=generator)
        return Subject(models.tiny_llama(**tiny), ids[ROWS:], ids[:ROWS], 2)
    model, tokenizer = models.smollm2()
    train, held_out = texts.datasets(
        tokenizer, seq_len=SEQ_LEN, rows=ROWS * steps, held_out=HELD_OUT
    )
    return Subject(model.train(), train.ids, held_out.ids, LAYERS)


def trained(on: Subject, made: Callable, lr: float) -> float:
    """The held-out loss after an update on each batch."""
    on.reset()
    optimizer = made(on.matrices, lr=lr)
    for batch in on.batches:
        on.loss(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return round(on.held_out_loss(), 4)


def step_bytes(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Of a second step: bytes of states, and what is there for a while beside all that stays."""
    optimizer.step()
    with MemoryTracker(model, optimizer, live=False) as tracker:
        optimizer.step()
    return {
        "state bytes": tracker.current.by_category["optimizer"],
        "temporaries of a step, bytes": tracker.peak.total - tracker.current.total,
    }


def table(dry: bool, steps: int) -> dict:
    """A row for each optimizer."""
    on = subject(dry, steps)
    before = round(on.held_out_loss(), 4)
    on.loss(on.batches[0]).backward()
    rows, timed = {}, {}
    for name, (made, _) in OPTIMIZERS.items():
        optimizer = made(on.matrices, lr=1e-9)
        rows[name] = step_bytes(on.model, optimizer)
        timed[name] = partial(seconds, optimizer.step)
    times = in_turns(timed, ROUNDS)
    timed.clear()
    on.model.zero_grad()
    parameters = sum(p.numel() for p in on.matrices)
    for name, (made, rates) in OPTIMIZERS.items():
        gc.collect()
        rows[name] |= {
            "state bytes a parameter": round(rows[name]["state bytes"] / parameters, 3),
            "largest matrices that fit into the temporaries": round(
                rows[name]["temporaries of a step, bytes"] / max(p.nbytes for p in on.matrices), 2
            ),
            TIME: ratio(times, name, BASE),
            "held-out loss, by learning rate": {f"{lr:g}": trained(on, made, lr) for lr in rates},
        }
        print(shown(name, rows[name]), flush=True)
    layers = f"{len(on.matrices) // 7} last layers of {'a tiny model' if dry else 'SmolLM2-135M'}"
    return {
        "what": (
            f"the matrices of the {layers}, float32, {steps} updates on {ROWS} x "
            f"{on.batches[0][1].shape[1]} tokens"
        ),
        "rows held out": sum(len(ids) for _, ids in on.held_out),
        "parameters": parameters,
        "clock": CLOCK,
        "rounds": ROUNDS,
        "held-out loss before": before,
        "optimizers": rows,
    }


def shown(name: str, row: dict) -> str:
    losses = "  ".join(
        f"{lr}: {loss:.3f}" for lr, loss in row["held-out loss, by learning rate"].items()
    )
    return (
        f"{name:<29} states {row['state bytes']:>13,}   temporaries "
        f"{row['temporaries of a step, bytes']:>13,}   time {row[TIME]:5.2f}x   loss {losses}"
    )


def main(arguments: list[str] | None = None) -> None:
    command = parser(__doc__)
    command.add_argument("--steps", type=int, default=8, help="updates of each run")
    command.add_argument("--dry-run", action="store_true", help="a tiny model; writes nothing")
    asked = command.parse_args(arguments)
    transformers.utils.logging.set_verbosity_error()
    with one_thread():
        found = table(asked.dry_run, asked.steps)
    if not asked.dry_run:
        record("optimizers", found)


if __name__ == "__main__":
    main()
