"""Fine-tuning three ways on the CPU, and on a CUDA card what capped memory can really train.

    python benchmarks/finetune.py [--steps 16]         SmolLM2-135M on real text: naive, Hugging Face's defaults, ours
    python benchmarks/finetune.py --gpu [--seconds 200]   on a card, random weights; make gpu runs it
    --dry-run                                          either with tiny models on the CPU; writes nothing

On the CPU each way is a fresh model in the same process, trained by ``Trainer`` on the same rows in the same order, with the
same tracker on it. What it also predicts for a card needs none.

On a card: a model of Llama-3.1-8B's shape under 24 GiB; the BERT-large table of 2022; the largest model and the longest
sequence under 8, 12, 16 and 24 GiB. A cap is ``torch.cuda.set_per_process_memory_fraction``: on what PyTorch's allocator takes,
without the driver's own. Needs torch 2.11+ and transformers 5.17+ alone. Running out of memory is a result, and what fails is
written down. Without a card it says so and does nothing.
"""

from __future__ import annotations

import argparse
import copy
import gc
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import gpu_predict  # puts the plain checkout on the path, too
import torch
import transformers
from gpu_predict import TINY, WARM_UP, TooSlow
from record import record

from gradmem_lib.compat import model_from_config
from gradmem_lib.course.claims import bert_large
from gradmem_lib.measure.tracker import MemoryTracker
from gradmem_lib.planning.models import known_model
from gradmem_lib.prediction import allocator
from gradmem_lib.prediction.configs import example_batch, model_class
from gradmem_lib.prediction.predict import predict
from gradmem_lib.training.prepare import Prepared, change_model, make_optimizer, prepare, set_checkpointing
from gradmem_lib.training.recipe import Recipe
from gradmem_lib.training.step import step
from gradmem_lib.units import GiB, KiB, MiB, format_bytes

NO_CARD = "No CUDA card here: no fine-tuning was measured, and nothing was written."

BATCH, SEQ_LEN = 8, 128  # of the CPU part: rows of one optimizer step, tokens in a row
HELD_OUT = 16
NAIVE_RATE = 5e-5  # TrainingArguments' default
OUR_RATE = 1e-3  # LoRA's, by common practice an order of magnitude above full fine-tuning's
QUARTER, ONE_PERCENT = 0.25, 1.01


def settings(recipe: Recipe) -> dict:
    """What differs from ``Recipe()``."""
    plain = asdict(Recipe())
    return {name: value for name, value in asdict(recipe).items() if value != plain[name]}


# --- CPU: three ways --------------------------------------------------------------------------------

COMBINED = Recipe(precision="bf16", optimizer="adamw-8bit", lora_rank=16, chunked_loss=True)
NAIVE, DEFAULTS, OURS = "naive", "HF defaults, checkpointing, accumulation", "ours"


def candidates() -> list[Recipe]:
    """The combined recipe's forms, by how much is computed again, then by how small the micro-batches are."""
    pieces = [n for n in range(1, BATCH + 1) if BATCH % n == 0]
    return [replace(COMBINED, checkpointing=c, accumulation=n) for c in (None, "per-layer") for n in pieces]


def first_that_fits(forms: Sequence[Recipe], needs: Callable[[Recipe], int], room: float) -> Recipe:
    """The first that is predicted to need at most ``room`` bytes, else the one that needs least."""
    return next((form for form in forms if needs(form) <= room), None) or min(forms, key=needs)


def cpu_data(dry: bool, steps: int):
    """(make a fresh model, training rows, held-out rows)."""
    from gradmem_lib.course import models, texts

    class Noted(texts.Rows):
        """Rows that note in which order they were asked for."""

        def __getitem__(self, index):
            self.__dict__.setdefault("order", []).append(index)
            return super().__getitem__(index)

    if dry:
        ids = torch.randint(
            0, 512, (BATCH * steps + HELD_OUT, SEQ_LEN), generator=torch.Generator().manual_seed(0)
        )
        train, held_out = ids[:-HELD_OUT], texts.Rows(ids[-HELD_OUT:])
        tiny = {"layers": 2, "hidden": 64, "heads": 4, "intermediate": 96, "vocab": 512}
        return lambda: models.tiny_llama(**tiny), lambda: Noted(train), held_out
    _, tokenizer = models.smollm2()
    train, held_out = texts.datasets(tokenizer, seq_len=SEQ_LEN, rows=BATCH * steps, held_out=HELD_OUT)
    return lambda: models.smollm2()[0], lambda: Noted(train.ids), held_out


@torch.no_grad()
def loss_on(model, rows) -> float:
    """Mean loss of ``rows``, four at a time."""
    model.eval()
    losses = [
        float(model(input_ids=ids, labels=ids).loss) * len(ids)
        for ids in (rows.ids[i : i + 4] for i in range(0, len(rows), 4))
    ]
    model.train()
    return sum(losses) / len(rows)


def trainer_of(way: str, model, recipe: Recipe, rows, folder: str, steps: int, memory):
    """A ``Trainer`` of ``way``. Ours brings a ``MemoryCallback`` of its own; the others get ``memory``."""
    from gradmem_lib.training.trainer import checkpointing_argument, make_trainer

    common = {"max_steps": steps, "logging_strategy": "no"}
    if way == OURS:
        return make_trainer(
            model, recipe, batch_size=BATCH, train_dataset=rows, output_dir=folder, live=False,
            progress=False, learning_rate=OUR_RATE, **common,
        )  # fmt: skip
    cut = {"per_device_train_batch_size": BATCH}
    if way == DEFAULTS:
        cut = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": BATCH}
        cut[checkpointing_argument()] = True
    arguments = transformers.TrainingArguments(
        folder, **common, **cut, learning_rate=NAIVE_RATE, report_to="none", save_strategy="no",
        disable_tqdm=True, use_cpu=True, dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = transformers.Trainer(model, arguments, train_dataset=rows, callbacks=[memory])
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def trained_on_cpu(way: str, recipe: Recipe, fresh, rows, held_out, steps: int) -> dict:
    """One way from a fresh model to its held-out loss."""
    from gradmem_lib.training.trainer import MemoryCallback

    class Clock(transformers.TrainerCallback):
        def __init__(self):
            self.seconds: list[float] = []

        def on_step_begin(self, args, state, control, **kwargs):
            self.began = time.perf_counter()

        def on_step_end(self, args, state, control, **kwargs):
            self.seconds.append(time.perf_counter() - self.began)

    model, clock, own = fresh(), Clock(), MemoryCallback(live=False)
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(way, model, recipe, rows, folder, steps, own)
        before = loss_on(model, held_out)
        trainer.add_callback(clock)
        with own:
            trainer.train()
    memory = trainer.memory if way == OURS else own
    median = statistics.median(clock.seconds[1:] or clock.seconds)  # the first makes the optimizer's states
    return {
        "peak bytes": memory.peak.total,
        "at the peak": memory.peak.by_category,
        "phase of the peak": memory.peak.phase,
        "seconds a step, median": round(median, 3),
        "tokens/s": round(BATCH * SEQ_LEN / median, 2),
        "held-out loss before": round(before, 4),
        "held-out loss after": round(loss_on(model, held_out), 4),
        "learning rate": trainer.args.learning_rate,
    }


def three_ways(dry: bool, steps: int) -> dict:
    """The CPU part's results."""
    fresh, train_rows, held_out = cpu_data(dry, steps)
    config = copy.deepcopy(fresh().config)

    def needs(recipe: Recipe) -> int:
        return predict(config, batch_size=BATCH, seq_len=SEQ_LEN, recipe=recipe, target="cpu").peak.total

    plain = needs(Recipe())
    ours = first_that_fits(candidates(), needs, QUARTER * plain)
    predicted = {
        NAIVE: plain,
        DEFAULTS: needs(Recipe(checkpointing="per-layer", accumulation=BATCH)),
        OURS: needs(ours),
    }
    found, orders = {}, []
    for way, says in predicted.items():
        gc.collect()
        rows = train_rows()
        found[way] = trained_on_cpu(way, ours, fresh, rows, held_out, steps) | {"predicted bytes": says}
        orders.append(rows.order)
        print(shown_way(way, found[way]), flush=True)
    return {
        "what": f"Trainer on {'a tiny model' if dry else 'SmolLM2-135M'}, {BATCH} x {SEQ_LEN} tokens a step",
        "steps": steps,
        "our recipe": settings(ours),
        "ways": found,
        "to naive": {way: ratios(result, found[NAIVE]) for way, result in found.items()},
        "holds": held(found[NAIVE], found[OURS])
        | {"same rows in the same order": all(o == orders[0] for o in orders)},
    }


def ratios(result: dict, naive: dict) -> dict[str, float]:
    return {name: round(result[name] / naive[name], 4) for name in ("peak bytes", "tokens/s")}


def held(naive: dict, ours: dict) -> dict[str, bool]:
    """What the course promises of the combined recipe."""
    loss = "held-out loss after"
    return {
        "peak at most a quarter of naive's": ours["peak bytes"] <= QUARTER * naive["peak bytes"],
        "held-out loss within 1 % of naive's": ours[loss] <= ONE_PERCENT * naive[loss],
    }


def shown_way(way: str, result: dict) -> str:
    return (
        f"{way:<42} {format_bytes(result['peak bytes']):>10} (predicted {format_bytes(result['predicted bytes'])})  "
        f"{result['tokens/s']:8.1f} tokens/s  held-out loss {result['held-out loss before']} -> {result['held-out loss after']}"
    )


# --- an 8B on 24 GiB, predicted and on a card ---------------------------------------------------------

CAP_8B, ROWS_8B, TOKENS_8B = 24 * GiB, 2, 2048
FULL, LORA, QLORA = "full fine-tuning", "LoRA", "QLoRA"
# What torchtune's documentation publishes for Llama-3.1-8B at 2 x 2048 on one card; taken as GiB.
TORCHTUNE = {FULL: 18.9, LORA: 16.2, QLORA: 7.4}
HF_WAY, OUR_WAY = "HF defaults", "ours"
TO_HF = "tokens/s to HF defaults"
_HF = Recipe(precision="bf16", optimizer="adamw-fused", checkpointing="per-layer")
_OURS = replace(_HF, chunked_loss=True)


class Case(NamedTuple):
    family: str
    way: str
    recipe: Recipe

    def __str__(self) -> str:
        words = (
            f"{k}={v}" for k, v in settings(self.recipe).items() if k not in ("precision", "checkpointing")
        )
        return " ".join([self.family, self.way, *words])


def cases_8b() -> list[Case]:
    """Ours next to Hugging Face's defaults, of each family what is likeliest to reach torchtune's figure first."""

    def pair(rank: int, accumulation: int, quantized: bool, with_hf: bool = True) -> list[Case]:
        family, low = QLORA if quantized else LORA, {"lora_rank": rank, "quantized_base": quantized}
        ours = Case(family, OUR_WAY, replace(_OURS, accumulation=accumulation, **low))
        return [ours, *([Case(family, HF_WAY, replace(_HF, **low))] if with_hf else [])]

    def full(optimizer: str) -> Case:
        return Case(FULL, OUR_WAY, replace(_OURS, optimizer=optimizer, in_backward=True))

    found = [full("adafactor-torch"), Case(FULL, HF_WAY, _HF), *pair(8, 2, False), *pair(8, 2, True)]
    found += [*pair(8, 1, False, False), *pair(8, 1, True, False), full("sgd")]
    for accumulation in (2, 1):
        for quantized in (False, True):
            found += pair(16, accumulation, quantized, with_hf=accumulation == 2)
    return found


def predicted_for_card() -> list[dict]:
    """The 8B's cases without a card: live bytes of the tensors and cuBLAS's workspace.

    Neither what the allocator holds beyond, nor what a kernel takes and returns: writing a 4-bit matrix out does.
    """
    config, found = known_model("Llama-3.1-8B")[1], []
    for case in cases_8b():
        live = predict(
            config, batch_size=ROWS_8B, seq_len=TOKENS_8B, recipe=case.recipe, target="cuda"
        ).peak.total
        needs, target = live + allocator.workspace(), TORCHTUNE[case.family]
        found.append(
            {
                "family": case.family,
                "way": case.way,
                "recipe": settings(case.recipe),
                "live bytes": live,
                "live bytes and workspace": needs,
                "torchtune GiB": target,
                "at most torchtune's": needs <= target * GiB,
            }
        )
        print(f"{case!s:<92} {needs / GiB:6.2f} GiB, torchtune {target}", flush=True)
    return found


# --- two places to run ----------------------------------------------------------------------------------


class Card(gpu_predict.Card):
    """A CUDA card; ``capped`` makes it a small one."""

    def __init__(self):
        super().__init__()
        self.whole = torch.cuda.get_device_properties(0).total_memory

    @contextmanager
    def capped(self, cap: int | None) -> Iterator[None]:
        """At most ``cap`` bytes for PyTorch's allocator; ``None`` leaves it the card."""
        try:
            if cap is not None:
                torch.cuda.set_per_process_memory_fraction(min(1.0, cap / self.whole))
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)

    def step(self, run: Prepared, batch, recipe: Recipe) -> None:
        step(run.model, run.optimizer, batch, recipe)
        torch.cuda.synchronize()

    def start(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def peak(self) -> dict[str, int]:
        return {
            "allocated": torch.cuda.max_memory_allocated(),
            "reserved": torch.cuda.max_memory_reserved(),
        }


class DryRun(gpu_predict.DryRun):
    """The CPU and tiny models; a cap is ``MemoryTracker``'s budget, and passing it an out-of-memory error as on a card."""

    workspace, whole = 0, 24 * MiB

    def __init__(self):
        self.cap, self.most = None, 0

    @contextmanager
    def capped(self, cap: int | None) -> Iterator[None]:
        self.cap = cap
        try:
            yield
        finally:
            self.cap = None

    def step(self, run: Prepared, batch, recipe: Recipe) -> None:
        with MemoryTracker(run.model, run.optimizer, budget=self.cap, live=False) as tracker:
            step(run.model, run.optimizer, batch, recipe)
        self.most = max(self.most, tracker.peak.total)

    def start(self) -> None:
        self.most = 0

    def peak(self) -> dict[str, int]:
        return {"allocated": self.most, "reserved": self.most}


# --- one run ----------------------------------------------------------------------------------------------


def built(config, recipe: Recipe, device: str) -> Prepared:
    """A model with random weights and its optimizer, never larger than ``recipe`` keeps it: as if loaded from a file of that form."""
    if not recipe.quantized_base:
        with torch.device(device):
            model = model_from_config(model_class(config), copy.deepcopy(config), dtype=recipe.weight_dtype)
        return prepare(model, recipe)
    with torch.device("meta"):
        model = model_from_config(model_class(config), copy.deepcopy(config), dtype=recipe.weight_dtype)
    change_model(model, recipe)
    model.to_empty(device=device)
    model.tie_weights()
    fill(model)
    undo = ExitStack()
    set_checkpointing(model, recipe, undo)
    trained = [p for p in model.parameters() if p.requires_grad]
    return Prepared(model, make_optimizer(trained, recipe, 1e-4), undo)


@torch.no_grad()
def fill(model) -> None:
    """Small numbers everywhere; of 4-bit layers random codes, and every block's magnitude the same."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        own = name.rpartition(".")[2]
        if not tensor.is_floating_point():
            tensor.random_()
        elif own in ("scales", "offset"):
            tensor.fill_(0.0 if own == "scales" else 0.04)
        elif "inv_freq" in own:
            tensor.uniform_(0, 1)
        else:
            tensor.normal_(0, 0.02)


@dataclass
class Ask:
    """A training to be tried: ``build`` makes model and optimizer, ``batch`` its example."""

    recipe: Recipe
    rows: int
    build: Callable[[], Prepared]
    batch: Callable[[Prepared], Any]
    cap: int | None = None
    warm_up: int = WARM_UP
    steps: int = 3


def ask_for(place, config, recipe: Recipe, rows: int, tokens: int, **more) -> Ask:
    return Ask(
        recipe,
        rows,
        lambda: built(config, recipe, place.device),
        lambda run: example_batch(run.model, rows, tokens),
        **more,
    )


def trained(place, ask: Ask, deadline: float) -> dict:
    """Peak bytes of later steps, and rows a second by their median. Everything it made is gone when it returns."""
    with ExitStack() as stack:
        stack.enter_context(place.capped(ask.cap))
        run = ask.build()
        stack.enter_context(run.undo)
        batch, seconds = ask.batch(run), []
        for left in range(ask.warm_up + ask.steps, 0, -1):
            if left == ask.steps:
                place.start()
            began = time.monotonic()
            place.step(run, batch, ask.recipe)
            seconds.append(time.monotonic() - began)
            if (left - 1) * seconds[-1] > deadline - time.monotonic():
                raise TooSlow
        median = statistics.median(seconds[ask.warm_up :])
        return place.peak() | {"seconds a step": round(median, 4), "rows/s": ask.rows / median}


def tried(place, ask: Ask, deadline: float) -> dict:
    """``trained``, or in one word why not: ``out of memory``, ``left out`` for want of time, or ``error``."""
    place.clear()
    try:
        return trained(place, ask, deadline)
    except torch.OutOfMemoryError as error:
        return {"out of memory": str(error).splitlines()[0]}
    except TooSlow:
        return {"left out": "its steps take longer than the time that is left"}
    except Exception as error:  # written down; the next case may do
        return {"error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}


def needed(place, config, recipe: Recipe, rows: int, tokens: int) -> int:
    """Bytes that the training is predicted to have allocated."""
    says = predict(config, batch_size=rows, seq_len=tokens, recipe=recipe, target=place.target)
    return says.peak.total + place.workspace


# --- 1: the 8B --------------------------------------------------------------------------------------------


def tiny_8b():
    return transformers.LlamaConfig(**TINY | {"num_key_value_heads": 2})


def eight_billion(place, deadline: float) -> Iterator[dict]:
    """A line for each case. Hugging Face's defaults run without the cap where they are predicted to pass it, for their rate."""
    config = tiny_8b() if place.tiny else known_model("Llama-3.1-8B")[1]
    cap, tokens = min(CAP_8B, place.whole), 32 if place.tiny else TOKENS_8B
    for case in cases_8b():
        if time.monotonic() > deadline:
            return
        row = {"family": case.family, "way": case.way, "recipe": settings(case.recipe)}
        row["predicted"] = needs = needed(place, config, case.recipe, ROWS_8B, tokens)
        row["cap"] = cap if case.way == OUR_WAY or needs <= cap else None
        if row["cap"] is None and needs > gpu_predict.MOST * place.total:
            yield row | {"left out": f"needs {format_bytes(needs)}, the card has {format_bytes(place.total)}"}
            continue
        row |= tried(place, ask_for(place, config, case.recipe, ROWS_8B, tokens, cap=row["cap"]), deadline)
        if row["cap"] and case.way == HF_WAY and "out of memory" in row:
            again = tried(place, ask_for(place, config, case.recipe, ROWS_8B, tokens), deadline)
            row |= {"under the cap": row.pop("out of memory"), "cap": None} | again
        if "rows/s" in row:
            row["tokens/s"] = round(row.pop("rows/s") * tokens, 1)
        yield row


def compared(rows: list[dict]) -> list[dict]:
    """Of each of ours that ran: whether torchtune's figure is reached, and its rate to Hugging Face's of the same rank."""

    def rank(row: dict):
        return row["family"], row["recipe"].get("lora_rank")

    rates = {rank(row): row["tokens/s"] for row in rows if row.get("way") == HF_WAY and "tokens/s" in row}
    found = []
    for row in rows:
        if row.get("way") != OUR_WAY or "tokens/s" not in row:
            continue
        target = TORCHTUNE[row["family"]]
        one = {"family": row["family"], "recipe": row["recipe"], "torchtune GiB": target}
        for name in ("allocated", "reserved"):
            one[f"{name} GiB"] = round(row[name] / GiB, 2)
            one[f"reached, {name}"] = row[name] <= target * GiB
        hf = rates.get(rank(row))
        found.append(one | {TO_HF: round(row["tokens/s"] / hf, 3) if hf else None})
    return found


# --- 2: BERT-large -----------------------------------------------------------------------------------------


def bert_rows(place, deadline: float) -> Iterator[dict]:
    """A line for each run of the table, without a cap."""
    config = bert_large.config()
    if place.tiny:
        config = transformers.BertConfig(**TINY, architectures=config.architectures)

    def batch(run: Prepared):
        whole = bert_large.batch(device=place.device)
        if not place.tiny:
            return whole
        return {"input_ids": whole["input_ids"][:, :32] % config.vocab_size, "labels": whole["labels"]}

    for run in bert_large.RUNS:
        if time.monotonic() > deadline:
            return
        recipe = run.recipe
        ask = Ask(
            recipe, bert_large.BATCH_SIZE, lambda recipe=recipe: built(config, recipe, place.device), batch
        )
        row = {"name": run.name, "published MiB": run.mib, "published samples/s": run.per_second}
        row |= tried(place, ask, deadline)
        if "rows/s" in row:
            row["samples/s"] = round(row.pop("rows/s"), 2)
        yield row


# --- 3: how large, how long ----------------------------------------------------------------------------

CAPS = (24 * GiB, 16 * GiB, 12 * GiB, 8 * GiB)
TINY_CAPS = (2 * MiB, 512 * KiB)
ROWS, TOKENS = 4, 512  # of the largest model's batch
# Of the cap: what the first try may be predicted to need (the allocator holds more than it gives), and beyond what none is tried.
MARGIN, SURELY = 0.94, 1.02
WAYS = {
    "naive float32": Recipe(optimizer="adamw-fused"),
    "HF defaults": Recipe(
        precision="autocast-bf16", optimizer="adamw-fused", checkpointing="per-layer", accumulation=ROWS
    ),
    "ours, full": replace(_OURS, optimizer="adafactor-torch", in_backward=True),
    "ours, LoRA": replace(_OURS, lora_rank=16, accumulation=ROWS),
    "ours, QLoRA": replace(_OURS, lora_rank=16, accumulation=ROWS, quantized_base=True),
}
# (hidden size, layers) of Llama shapes, each a third to a half larger than the one before; 4096 x 32 is Llama-2-7B's,
# 5120 x 40 nearly the 13B's and 6656 x 60 LLaMA-33B's.
LADDER = (
    (512, 8), (768, 12), (1024, 16), (1024, 24), (1536, 20), (2048, 16), (2048, 24), (2560, 24), (2560, 32),
    (3072, 32), (3584, 32), (4096, 32), (4608, 36), (5120, 40), (6144, 44), (6656, 60),
)  # fmt: skip
TINY_LADDER = ((32, 2), (64, 2), (64, 4), (128, 3))
LENGTHS = tuple(sorted({2**n for n in range(8, 18)} | {3 * 2**n for n in range(7, 16)}))
TINY_LENGTHS = (16, 32, 48, 64)


def llama(hidden: int, layers: int, vocab: int = 32000):
    """A Llama of that width and depth, its MLP 8/3 as wide, rounded up to 256 (a quarter of it for tiny ones)."""
    unit = 256 if hidden >= 512 else 32
    return transformers.LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=max(4, hidden // (64 if hidden < 2048 else 128)),
        intermediate_size=-(-hidden * 8 // 3 // unit) * unit,
        vocab_size=vocab,
        max_position_embeddings=2048,
    )


def parameters(config) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in model_class(config)(config).parameters())


class OutOfTime(Exception):
    """A question could not be followed to its end."""


def largest(sizes: Sequence, needs: Callable, works: Callable, cap: int) -> int | None:
    """The index of the largest of ``sizes`` (increasing) that ``works``; ``None`` if none does.

    ``needs(size)``, bytes and increasing, chooses the first try, ``works(size)`` tries. From there upwards until one fails or
    surely would, or downwards until one does not.
    """
    low, high = 0, len(sizes)  # all below low are predicted to fit, none from high on
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if needs(sizes[middle]) <= MARGIN * cap else (low, middle)
    found = low - 1
    if found >= 0 and not works(sizes[found]):
        while found >= 0:
            found -= 1
            if found >= 0 and works(sizes[found]):
                return found
        return None
    while found + 1 < len(sizes) and needs(sizes[found + 1]) <= SURELY * cap and works(sizes[found + 1]):
        found += 1
    return found if found >= 0 else None


@dataclass
class Question:
    """``sizes`` in increasing order; ``config(size)`` and ``batch(size)``, its (rows, tokens). Predictions serve all caps."""

    name: str
    sizes: Sequence
    config: Callable[[Any], Any]
    batch: Callable[[Any], tuple[int, int]]
    predictions: dict = field(default_factory=dict)

    def recipe(self, way: str, size) -> Recipe:
        recipe = WAYS[way]
        return replace(recipe, accumulation=min(recipe.accumulation, self.batch(size)[0]))

    def predicted(self, place, way: str, size) -> int:
        if (way, size) not in self.predictions:
            found = needed(place, self.config(size), self.recipe(way, size), *self.batch(size))
            self.predictions[way, size] = found
        return self.predictions[way, size]

    def answer(self, place, way: str, cap: int, deadline: float) -> dict:
        """The largest size that ``way`` trains under ``cap``, and what is known of the next one."""
        outcomes: dict[Any, dict] = {}

        def needs(size) -> int:
            if time.monotonic() > deadline:
                raise OutOfTime
            return self.predicted(place, way, size)

        def works(size) -> bool:
            # The first step makes the optimizer's states, the second has them.
            more = {"cap": cap, "warm_up": 1, "steps": 1}
            ask = ask_for(place, self.config(size), self.recipe(way, size), *self.batch(size), **more)
            outcomes[size] = tried(place, ask, deadline)
            if "left out" in outcomes[size]:
                raise OutOfTime
            return "allocated" in outcomes[size]

        row = {"question": self.name, "cap": cap, "way": way}
        try:
            index = largest(self.sizes, needs, works, cap)
        except OutOfTime:
            row["unfinished"] = "the time was up: a larger one may do"
            index = max((self.sizes.index(s) for s, o in outcomes.items() if "allocated" in o), default=None)
        if index is not None:
            size = self.sizes[index]
            row |= {"largest": size, "predicted": self.predicted(place, way, size)} | outcomes[size]
            row["tokens/s"] = round(row.pop("rows/s") * self.batch(size)[1], 1)
            if self.name == "largest model":
                row["parameters"] = parameters(self.config(size))
        if "unfinished" not in row:
            row["next"] = self._next(place, index, way, outcomes)
        return row

    def _next(self, place, index: int | None, way: str, outcomes: dict) -> dict | None:
        """Why no larger one: it was tried, or is predicted to need too much; ``None`` at the end of the sizes."""
        after = 0 if index is None else index + 1
        if after == len(self.sizes):
            return None
        size = self.sizes[after]
        known = {k: v for k, v in outcomes.get(size, {}).items() if k in ("out of memory", "error")}
        return {"size": size, "predicted": self.predicted(place, way, size)} | known


def questions(place) -> list[Question]:
    if place.tiny:
        ladder, lengths, vocab, batch = TINY_LADDER, TINY_LENGTHS, 128, (ROWS, 16)
        one = llama(64, 2, vocab)
    else:
        ladder, lengths, vocab, batch = LADDER, LENGTHS, 32000, (ROWS, TOKENS)
        one = known_model("Llama-3.2-1B")[1]
    return [
        Question("largest model", ladder, lambda size: llama(*size, vocab), lambda size: batch),
        Question("longest sequence", lengths, lambda size: one, lambda size: (1, size)),
    ]


def how_large(place, deadline: float) -> Iterator[dict]:
    """A line for each question, cap and way."""
    for question in questions(place):
        for cap in TINY_CAPS if place.tiny else CAPS:
            if cap > place.total:
                yield {"question": question.name, "cap": cap, "left out": "the card has less"}
                continue
            for way in WAYS:
                if time.monotonic() > deadline:
                    return
                yield question.answer(place, way, cap, deadline)


# --- all of it on a card --------------------------------------------------------------------------------

PARTS = {  # and by which share of the time each has to be through
    "Llama-3.1-8B": (eight_billion, 0.45),
    "BERT-large": (bert_rows, 0.6),
    "how large, how long": (how_large, 1.0),
}


def shown(row: dict) -> str:
    """One line of a part's results."""
    bare = [str(row[k]) for k in ("family", "way", "name", "question") if k in row]
    if "cap" in row:
        bare.append("no cap" if row["cap"] is None else f"cap {format_bytes(row['cap'])}")
    bare += [f"{k}={v}" for k, v in row.get("recipe", {}).items() if k not in ("precision", "checkpointing")]
    if "largest" in row:
        bare.append(
            f"{row['largest']}" + (f", {row['parameters']:,} parameters" if "parameters" in row else "")
        )
    if "allocated" in row:
        figures = f"{format_bytes(row['allocated'])} allocated, {format_bytes(row['reserved'])} reserved"
        for name in ("tokens/s", "samples/s"):
            figures += f", {row[name]:,} {name}" if name in row else ""
    else:
        failed = [f"{k}: {row[k]}" for k in ("out of memory", "left out", "error") if k in row]
        figures = "; ".join(failed) or "none"
    return " ".join(bare) + ": " + figures + (" (time was up)" if "unfinished" in row else "")


def on_card(place, seconds: float, save: Callable[[dict], None]) -> dict:
    """All parts, saved after every line. Parts that their time was too short for are named."""
    began, found = time.monotonic(), {}
    for name, (part, share) in PARTS.items():
        found[name] = rows = []
        deadline = began + share * seconds
        try:
            for row in part(place, deadline):
                rows.append(row)
                print(shown(row), flush=True)
                save(results(found, place))
        except Exception as error:  # after some errors a card refuses everything; the next part may do
            rows.append({"name": name, "error": f"{type(error).__name__}: {error}"})
            print(f"Stopped. {shown(rows[-1])}", flush=True)
            save(results(found, place))
        if time.monotonic() > deadline:
            print(f"The time for {name} was up: there may be more to measure. Give more --seconds.")
            found.setdefault("time was up in", []).append(name)
            if any(found[done] for done in PARTS if done in found):
                save(results(found, place))
    return results(found, place)


def results(found: dict[str, list], place) -> dict:
    return {
        "what": "steps under capped memory, random weights; bytes are torch.cuda's figures",
        "card bytes": place.whole,
        "allocator settings": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""),
        "8B against torchtune and HF defaults": compared(found.get("Llama-3.1-8B", [])),
        **found,
    }


def measured_bert(found: dict) -> dict[str, int]:
    """As ``bert_large.rows`` takes it."""
    return {row["name"]: row["allocated"] for row in found.get("BERT-large", []) if "allocated" in row}


def shown_comparison(one: dict) -> str:
    return (
        f"{one['family']:<17} {one['allocated GiB']:6.2f} GiB allocated, {one['reserved GiB']:6.2f} reserved; torchtune "
        f"{one['torchtune GiB']}; {one[TO_HF] or 'unknown'} times the tokens/s of HF defaults"
    )


def run_card_part(dry: bool, seconds: float) -> int:
    if not dry and not torch.cuda.is_available():
        print(NO_CARD)
        return 0
    place = DryRun() if dry else Card()
    found = on_card(
        place, seconds, (lambda found: None) if dry else (lambda found: record("gpu_finetune", found))
    )
    for one in found["8B against torchtune and HF defaults"]:
        print(shown_comparison(one))
    if not dry:
        print(bert_large.table(bert_large.rows(measured_bert(found))))
        return 0
    rows = [row for name in PARTS for row in found[name]]
    failed = [row for row in rows if {"error", "left out", "unfinished"} & set(row)]
    off = [r for r in rows if "predicted" in r and "allocated" in r and r["predicted"] != r["allocated"]]
    print(f"Dry run: {len(rows)} lines, {len(failed)} failed, {len(off)} not as predicted")
    return int(bool(failed or off))


def run_cpu_part(dry: bool, steps: int) -> int:
    found = three_ways(dry, steps)
    for name, ok in found["holds"].items():
        print(f"{name}: {'yes' if ok else 'NO'}")
    if dry:
        return 0
    what = "Llama-3.1-8B, 2 x 2048 tokens a step: predicted live bytes of the tensors and cuBLAS's workspace"
    print(f"For a card, {what}")
    record("finetune", found | {"predicted for a card": {"what": what, "cases": predicted_for_card()}})
    return 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=16, help="optimizer steps of each way on the CPU")
    parser.add_argument("--gpu", action="store_true", help="the part for a CUDA card")
    parser.add_argument(
        "--seconds", type=float, default=200, help="on a card: after so many, nothing more begins"
    )
    parser.add_argument("--dry-run", action="store_true", help="tiny models, on the CPU; writes nothing")
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore")
    transformers.utils.logging.set_verbosity_error()
    if options.gpu:
        return run_card_part(options.dry_run, options.seconds)
    return run_cpu_part(options.dry_run, options.steps)


if __name__ == "__main__":
    sys.exit(main())
