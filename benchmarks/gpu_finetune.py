"""What capped memory can really train, on a CUDA card; ``make gpu`` runs it.

    python benchmarks/gpu_finetune.py [--seconds 200]
    python benchmarks/gpu_finetune.py --dry-run    with tiny models on the CPU; writes nothing

A model of Llama-3.1-8B's shape under 24 GiB, and the BERT-large table of 2022. A cap is
``torch.cuda.set_per_process_memory_fraction``: on what PyTorch's allocator takes, without the
driver's own. Weights are random. Needs torch 2.11+ and transformers 5.17+ alone. Running out of
memory is a result, and what fails is written down. Without a card it says so and does nothing.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import transformers
from gpu_runs import TINY, Ask, parser, place_of, settings, too_large, tried, words
from shared import record

from gradmem_lib.course.ledger import bert_large
from gradmem_lib.model.known import known_model
from gradmem_lib.prediction import allocator
from gradmem_lib.prediction.predict import predict
from gradmem_lib.training.recipe import Recipe
from gradmem_lib.units import GiB, format_bytes


def needed(place, config, recipe: Recipe, rows: int, tokens: int) -> int:
    """Bytes that the training is predicted to have allocated."""
    says = predict(config, batch_size=rows, seq_len=tokens, recipe=recipe, target=place.target)
    return says.peak.total + place.workspace


# An 8B on 24 GiB, predicted and on a card.

CAP_8B, ROWS_8B, TOKENS_8B = 24 * GiB, 2, 2048
FULL, LORA, QLORA = "full fine-tuning", "LoRA", "QLoRA"
# What torchtune's documentation publishes for Llama-3.1-8B at 2 x 2048 on one card; taken as GiB.
TORCHTUNE = {FULL: 18.9, LORA: 16.2, QLORA: 7.4}
HF_WAY, OUR_WAY = "HF defaults", "ours"
TO_HF = "tokens/s to HF defaults"
_HF = Recipe(precision="bf16", optimizer="adamw-fused", checkpointing="per-layer")
_OURS = replace(_HF, chunked_loss=True)


SHARED = ("precision", "checkpointing")  # of all cases


class Case(NamedTuple):
    family: str
    way: str
    recipe: Recipe

    def __str__(self) -> str:
        return " ".join([self.family, self.way, *words(self.recipe, *SHARED)])


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


def eight_billion(place, deadline: float) -> Iterator[dict]:
    """A line for each case.

    Hugging Face's defaults run without the cap where they are predicted to pass it, for their rate.
    """
    config = known_model("Llama-3.1-8B")[1]
    if place.tiny:
        config = transformers.LlamaConfig(**TINY)
    cap, tokens = min(CAP_8B, place.whole), 32 if place.tiny else TOKENS_8B
    for case in cases_8b():
        if time.monotonic() > deadline:
            return
        row = {"family": case.family, "way": case.way, "recipe": settings(case.recipe)}
        row["predicted"] = needs = needed(place, config, case.recipe, ROWS_8B, tokens)
        row["cap"] = cap if case.way == OUR_WAY or needs <= cap else None
        why = too_large(place, needs)
        if row["cap"] is None and why:
            yield row | why
            continue
        ask = Ask(config, case.recipe, ROWS_8B, tokens, cap=row["cap"])
        row |= tried(place, ask, deadline)
        if row["cap"] and case.way == HF_WAY and "out of memory" in row:
            again = tried(place, replace(ask, cap=None), deadline)
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
    config, batch = bert_large.config(), bert_large.batch(device=place.device)
    if place.tiny:
        config = transformers.BertConfig(**TINY, architectures=config.architectures)
        batch["input_ids"] = batch["input_ids"][:, :32] % config.vocab_size
    for run in bert_large.RUNS:
        if time.monotonic() > deadline:
            return
        ask = Ask(config, run.recipe, bert_large.BATCH_SIZE, batch=batch)
        row = {"name": run.name, "published MiB": run.mib, "published samples/s": run.per_second}
        row |= tried(place, ask, deadline)
        if "rows/s" in row:
            row["samples/s"] = round(row.pop("rows/s"), 2)
        yield row


# All of it.

PARTS = {  # and by which share of the time each has to be through
    "Llama-3.1-8B": (eight_billion, 0.75),
    "BERT-large": (bert_rows, 1.0),
}


def shown(row: dict) -> str:
    """One line of a part's results."""
    bare = [str(row[k]) for k in ("family", "way", "name") if k in row]
    if "cap" in row:
        bare.append("no cap" if row["cap"] is None else f"cap {format_bytes(row['cap'])}")
    bare += [f"{k}={v}" for k, v in row.get("recipe", {}).items() if k not in SHARED]
    if "allocated" in row:
        figures = (
            f"{format_bytes(row['allocated'])} allocated, {format_bytes(row['reserved'])} reserved"
        )
        for name in ("tokens/s", "samples/s"):
            figures += f", {row[name]:,} {name}" if name in row else ""
    else:
        failed = [f"{k}: {row[k]}" for k in ("out of memory", "left out", "error") if k in row]
        figures = "; ".join(failed) or "none"
    return " ".join(bare) + ": " + figures


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


def shown_comparison(one: dict) -> str:
    return (
        f"{one['family']:<17} {one['allocated GiB']:6.2f} GiB allocated, "
        f"{one['reserved GiB']:6.2f} reserved; torchtune {one['torchtune GiB']}; "
        f"{one[TO_HF] or 'unknown'} times the tokens/s of HF defaults"
    )


def main(arguments: list[str] | None = None) -> int:
    options = parser(__doc__, seconds=200).parse_args(arguments)
    if (place := place_of(options.dry_run)) is None:
        return 0
    warnings.filterwarnings("ignore")

    def save(found: dict) -> None:
        if not options.dry_run:
            record("gpu_finetune", found)

    found = on_card(place, options.seconds, save)
    for one in found["8B against torchtune and HF defaults"]:
        print(shown_comparison(one))
    if not options.dry_run:
        ran = [row for row in found.get("BERT-large", []) if "allocated" in row]
        measured = {row["name"]: row["allocated"] for row in ran}
        print(bert_large.table(bert_large.rows(measured)))
        return 0
    rows = [row for name in PARTS for row in found[name]]
    failed = [row for row in rows if {"error", "left out"} & set(row)]
    both = [row for row in rows if "predicted" in row and "allocated" in row]
    off = [row for row in both if row["predicted"] != row["allocated"]]
    print(f"Dry run: {len(rows)} lines, {len(failed)} failed, {len(off)} not as predicted")
    return int(bool(failed or off))


if __name__ == "__main__":
    sys.exit(main())
