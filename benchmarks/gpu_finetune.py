"""What capped memory can really train, on a CUDA card; ``make gpu`` runs it.

    python benchmarks/gpu_finetune.py [--seconds 200]
    python benchmarks/gpu_finetune.py --dry-run    with tiny models on the CPU; writes nothing

A model of Llama-3.1-8B's shape under 24 GiB; the BERT-large table of 2022; the largest model and
the longest sequence under 8, 12, 16 and 24 GiB. A cap is
``torch.cuda.set_per_process_memory_fraction``: on what PyTorch's allocator takes, without the
driver's own. Weights are random. Needs torch 2.11+ and transformers 5.17+ alone. Running out of
memory is a result, and what fails is written down. Without a card it says so and does nothing.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import gpu_predict
import torch
import transformers
from gpu_predict import TINY
from gpu_runs import Ask, Card, DryRun, ask_for, built, llama, needed, parameters, settings, tried
from record import record

from gradmem_lib.course.ledger import bert_large
from gradmem_lib.planning.models import known_model
from gradmem_lib.prediction import allocator
from gradmem_lib.prediction.predict import predict
from gradmem_lib.training.prepare import Prepared
from gradmem_lib.training.recipe import Recipe
from gradmem_lib.units import GiB, KiB, MiB, format_bytes

NO_CARD = "No CUDA card here: no fine-tuning was measured, and nothing was written."

# An 8B on 24 GiB, predicted and on a card.

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
            f"{k}={v}"
            for k, v in settings(self.recipe).items()
            if k not in ("precision", "checkpointing")
        )
        return " ".join([self.family, self.way, *words])


def cases_8b() -> list[Case]:
    """Ours next to Hugging Face's defaults, of each family what is likeliest to reach torchtune's
    figure first.
    """

    def pair(rank: int, accumulation: int, quantized: bool, with_hf: bool = True) -> list[Case]:
        family, low = QLORA if quantized else LORA, {"lora_rank": rank, "quantized_base": quantized}
        ours = Case(family, OUR_WAY, replace(_OURS, accumulation=accumulation, **low))
        return [ours, *([Case(family, HF_WAY, replace(_HF, **low))] if with_hf else [])]

    def full(optimizer: str) -> Case:
        return Case(FULL, OUR_WAY, replace(_OURS, optimizer=optimizer, in_backward=True))

    found = [
        full("adafactor-torch"),
        Case(FULL, HF_WAY, _HF),
        *pair(8, 2, False),
        *pair(8, 2, True),
    ]
    found += [*pair(8, 1, False, False), *pair(8, 1, True, False), full("sgd")]
    for accumulation in (2, 1):
        for quantized in (False, True):
            found += pair(16, accumulation, quantized, with_hf=accumulation == 2)
    return found


def predicted_for_card() -> list[dict]:
    """The 8B's cases without a card: live bytes of the tensors and cuBLAS's workspace.

    Neither what the allocator holds beyond, nor what a kernel takes and returns: writing a 4-bit
    matrix out does.
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


def tiny_8b():
    return transformers.LlamaConfig(**TINY | {"num_key_value_heads": 2})


def eight_billion(place, deadline: float) -> Iterator[dict]:
    """A line for each case.

    Hugging Face's defaults run without the cap where they are predicted to pass it, for their rate.
    """
    config = tiny_8b() if place.tiny else known_model("Llama-3.1-8B")[1]
    cap, tokens = min(CAP_8B, place.whole), 32 if place.tiny else TOKENS_8B
    for case in cases_8b():
        if time.monotonic() > deadline:
            return
        row = {"family": case.family, "way": case.way, "recipe": settings(case.recipe)}
        row["predicted"] = needs = needed(place, config, case.recipe, ROWS_8B, tokens)
        row["cap"] = cap if case.way == OUR_WAY or needs <= cap else None
        if row["cap"] is None and needs > gpu_predict.MOST * place.total:
            yield row | {
                "left out": f"needs {format_bytes(needs)}, the card has {format_bytes(place.total)}"
            }
            continue
        row |= tried(
            place, ask_for(place, config, case.recipe, ROWS_8B, tokens, cap=row["cap"]), deadline
        )
        if row["cap"] and case.way == HF_WAY and "out of memory" in row:
            again = tried(place, ask_for(place, config, case.recipe, ROWS_8B, tokens), deadline)
            row |= {"under the cap": row.pop("out of memory"), "cap": None} | again
        if "rows/s" in row:
            row["tokens/s"] = round(row.pop("rows/s") * tokens, 1)
        yield row


def compared(rows: list[dict]) -> list[dict]:
    """Of each of ours that ran: whether torchtune's figure is reached, and its rate to Hugging
    Face's of the same rank.
    """

    def rank(row: dict):
        return row["family"], row["recipe"].get("lora_rank")

    rates = {
        rank(row): row["tokens/s"] for row in rows if row.get("way") == HF_WAY and "tokens/s" in row
    }
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


# BERT-large.


def bert_rows(place, deadline: float) -> Iterator[dict]:
    """A line for each run of the table, without a cap."""
    config = bert_large.config()
    if place.tiny:
        config = transformers.BertConfig(**TINY, architectures=config.architectures)

    def batch(run: Prepared):
        whole = bert_large.batch(device=place.device)
        if not place.tiny:
            return whole
        return {
            "input_ids": whole["input_ids"][:, :32] % config.vocab_size,
            "labels": whole["labels"],
        }

    for run in bert_large.RUNS:
        if time.monotonic() > deadline:
            return
        recipe = run.recipe
        ask = Ask(
            recipe,
            bert_large.BATCH_SIZE,
            lambda recipe=recipe: built(config, recipe, place.device),
            batch,
        )
        row = {"name": run.name, "published MiB": run.mib, "published samples/s": run.per_second}
        row |= tried(place, ask, deadline)
        if "rows/s" in row:
            row["samples/s"] = round(row.pop("rows/s"), 2)
        yield row


# How large, how long.

CAPS = (24 * GiB, 16 * GiB, 12 * GiB, 8 * GiB)
TINY_CAPS = (2 * MiB, 512 * KiB)
ROWS, TOKENS = 4, 512  # of the largest model's batch
# Of the cap: what the first try may be predicted to need (the allocator holds more than it gives),
# and beyond what none is tried.
MARGIN, SURELY = 0.94, 1.02
WAYS = {
    "naive float32": Recipe(optimizer="adamw-fused"),
    "HF defaults": Recipe(
        precision="autocast-bf16",
        optimizer="adamw-fused",
        checkpointing="per-layer",
        accumulation=ROWS,
    ),
    "ours, full": replace(_OURS, optimizer="adafactor-torch", in_backward=True),
    "ours, LoRA": replace(_OURS, lora_rank=16, accumulation=ROWS),
    "ours, QLoRA": replace(_OURS, lora_rank=16, accumulation=ROWS, quantized_base=True),
}
# (hidden size, layers) of Llama shapes, each a third to a half larger than the one before; 4096 x
# 32 is Llama-2-7B's, 5120 x 40 nearly the 13B's and 6656 x 60 LLaMA-33B's.
LADDER = (
    (512, 8),
    (768, 12),
    (1024, 16),
    (1024, 24),
    (1536, 20),
    (2048, 16),
    (2048, 24),
    (2560, 24),
    (2560, 32),
    (3072, 32),
    (3584, 32),
    (4096, 32),
    (4608, 36),
    (5120, 40),
    (6144, 44),
    (6656, 60),
)
TINY_LADDER = ((32, 2), (64, 2), (64, 4), (128, 3))
LENGTHS = tuple(sorted({2**n for n in range(8, 18)} | {3 * 2**n for n in range(7, 16)}))
TINY_LENGTHS = (16, 32, 48, 64)


class OutOfTime(Exception):
    """A question could not be followed to its end."""


def largest(sizes: Sequence, needs: Callable, works: Callable, cap: int) -> int | None:
    """The index of the largest of ``sizes`` (increasing) that ``works``; ``None`` if none does.

    ``needs(size)``, bytes and increasing, chooses the first try, ``works(size)`` tries. From there
    upwards until one fails or surely would, or downwards until one does not.
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
    while (
        found + 1 < len(sizes)
        and needs(sizes[found + 1]) <= SURELY * cap
        and works(sizes[found + 1])
    ):
        found += 1
    return found if found >= 0 else None


@dataclass
class Question:
    """``sizes`` in increasing order; ``config(size)`` and ``batch(size)``, its (rows, tokens).

    Predictions serve all caps.
    """

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
            ask = ask_for(
                place, self.config(size), self.recipe(way, size), *self.batch(size), **more
            )
            outcomes[size] = tried(place, ask, deadline)
            if "left out" in outcomes[size]:
                raise OutOfTime
            return "allocated" in outcomes[size]

        row = {"question": self.name, "cap": cap, "way": way}
        try:
            index = largest(self.sizes, needs, works, cap)
        except OutOfTime:
            row["unfinished"] = "the time was up: a larger one may do"
            index = max(
                (self.sizes.index(s) for s, o in outcomes.items() if "allocated" in o), default=None
            )
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
        """Why no larger one: it was tried, or is predicted to need too much; ``None`` at the end of
        the sizes.
        """
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


# All of it.

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
    bare += [
        f"{k}={v}"
        for k, v in row.get("recipe", {}).items()
        if k not in ("precision", "checkpointing")
    ]
    if "largest" in row:
        bare.append(
            f"{row['largest']}"
            + (f", {row['parameters']:,} parameters" if "parameters" in row else "")
        )
    if "allocated" in row:
        figures = (
            f"{format_bytes(row['allocated'])} allocated, {format_bytes(row['reserved'])} reserved"
        )
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
        except (
            Exception
        ) as error:  # after some errors a card refuses everything; the next part may do
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
    return {
        row["name"]: row["allocated"] for row in found.get("BERT-large", []) if "allocated" in row
    }


def shown_comparison(one: dict) -> str:
    return (
        f"{one['family']:<17} {one['allocated GiB']:6.2f} GiB allocated, "
        f"{one['reserved GiB']:6.2f} reserved; torchtune {one['torchtune GiB']}; "
        f"{one[TO_HF] or 'unknown'} times the tokens/s of HF defaults"
    )


def run_on_card(dry: bool, seconds: float) -> int:
    if not dry and not torch.cuda.is_available():
        print(NO_CARD)
        return 0
    place = DryRun() if dry else Card()
    found = on_card(
        place,
        seconds,
        (lambda found: None) if dry else (lambda found: record("gpu_finetune", found)),
    )
    for one in found["8B against torchtune and HF defaults"]:
        print(shown_comparison(one))
    if not dry:
        print(bert_large.table(bert_large.rows(measured_bert(found))))
        return 0
    rows = [row for name in PARTS for row in found[name]]
    failed = [row for row in rows if {"error", "left out", "unfinished"} & set(row)]
    off = [
        r
        for r in rows
        if "predicted" in r and "allocated" in r and r["predicted"] != r["allocated"]
    ]
    print(f"Dry run: {len(rows)} lines, {len(failed)} failed, {len(off)} not as predicted")
    return int(bool(failed or off))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seconds", type=float, default=200, help="after so many, nothing more begins"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="tiny models, on the CPU; writes nothing"
    )
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore")
    transformers.utils.logging.set_verbosity_error()
    return run_on_card(options.dry_run, options.seconds)


if __name__ == "__main__":
    sys.exit(main())
