"""How fast ``predict`` answers for large models, in how much memory, and how far off other ways to
tell are.

    python benchmarks/predict.py [--models Llama-2-7B Llama-2-70B GPT-3] [--limit 300]

For each model, in a fresh process: the first answer, later ones with other settings, the resident
memory they need. For the smallest, the same question to PyTorch's own MemTracker under fake
tensors. Then the full trace of several recipes, the answer put together from short traces beside
it, and the published formulas, each with its error against the full trace.

Seconds are wall time and, since the machine may be busy with other things, CPU time of the process.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import cache

import numpy as np
import psutil
import torch
from record import record

from gradmem_lib.compat.transformers_models import attention_by_values
from gradmem_lib.course.material.shapes import SHAPES, Shape
from gradmem_lib.prediction import fakes
from gradmem_lib.prediction.configs import example_batch, model_class
from gradmem_lib.prediction.predict import predict
from gradmem_lib.training.prepare import prepare, set_attention
from gradmem_lib.training.recipe import Recipe
from gradmem_lib.units import format_bytes

# Batch 1 and the longest sequence that each was trained on. No dropout: Llama has none, and on a
# CPU, where the trace is exact, there is no fused attention with it. Formulas that count its masks
# (3 of Korthikanti's 34 bytes) are that much too high.
SEQ_LEN = {"Llama-2-7B": 4096, "Llama-2-70B": 4096, "GPT-3": 2048}
BATCH = 1
BF16 = Recipe(precision="bf16", optimizer="adamw-fused")
MASTER = Recipe(precision="float32-master")
SETTINGS = {
    "bf16": BF16,
    "bf16, eager attention": replace(BF16, attention="eager"),
    "bf16, per-layer": replace(BF16, checkpointing="per-layer"),
    "float32-master": MASTER,
    "float32-master, per-layer": replace(MASTER, checkpointing="per-layer"),
    "autocast-bf16": Recipe(precision="autocast-bf16", optimizer="adamw-fused"),
}
LATER = {  # changes that a slider makes, each a question not asked before
    "half the sequence": (BF16, 2),
    "per-layer": (replace(BF16, checkpointing="per-layer"), 1),
    "segments of four": (replace(BF16, checkpointing=4), 1),
    "plain AdamW": (replace(BF16, optimizer="adamw"), 1),
    "8-bit AdamW": (replace(BF16, optimizer="adamw-8bit"), 1),
    "LoRA of rank 16": (replace(BF16, lora_rank=16), 1),
    "chunked loss": (replace(BF16, chunked_loss=True), 1),
    "autocast-bf16": (SETTINGS["autocast-bf16"], 1),
    "eager attention": (SETTINGS["bf16, eager attention"], 1),
}
MEM_TRACKER_MODEL = "Llama-2-7B"
CLOCKS = ("seconds", "CPU seconds")


def config_of(name: str):
    shape = SHAPES.get(name)
    if name == "GPT-3":
        h = 12288
        shape = Shape(
            name,
            50257,
            h,
            96,
            96,
            96,
            4 * h,
            tied=True,
            gated=False,
            norm="layer",
            biases=True,
            positions=2048,
        )
    return shape.config(positions=4096)


# How fast, in how much memory; each in a process of its own.


def highest_resident() -> int:
    """The most bytes of memory that this process has had resident."""
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024


def timed(run: Callable[[], object]) -> dict:
    gc.collect()
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    spent = (time.perf_counter() - wall, time.process_time() - cpu)
    return {clock: round(t, 3) for clock, t in zip(CLOCKS, spent, strict=True)}


def answers(name: str) -> dict:
    """First and later answers in this process, which must have made none yet."""
    config, seq_len = config_of(name), SEQ_LEN[name]

    def ask(recipe: Recipe, divide: int = 1) -> None:
        predict(config, batch_size=BATCH, seq_len=seq_len // divide, recipe=recipe, target="cpu")

    before = psutil.Process().memory_info().rss
    found = {"first answer": timed(lambda: ask(BF16))}
    later = {change: timed(lambda asked=asked: ask(*asked)) for change, asked in LATER.items()}
    found["later answers"] = later
    for what, of in {"median": statistics.median, "longest": max}.items():
        found[f"later answers, {what}"] = {
            clock: of(t[clock] for t in later.values()) for clock in CLOCKS
        }
    found["resident bytes before"] = before
    found["resident bytes gained"] = highest_resident() - before
    return found


def mem_tracker(name: str, without_mask: bool) -> dict:
    """PyTorch's MemTracker on the same step under fake tensors, the way its documentation shows:
    two steps, the second with the optimizer's states there. ``without_mask``: with the attention
    that ``predict`` gives a fake model, since transformers' own builds a mask under fake tensors
    that no real run has.
    """
    from torch.distributed._tools.mem_tracker import MemTracker

    from gradmem_lib.compat.fake_tensors import FakeTensorMode

    found = {}

    def run() -> None:
        hidden = attention_by_values() if without_mask else nullcontext()
        with hidden as attention, FakeTensorMode(allow_non_fake_inputs=True):
            config = config_of(name)
            model = model_class(config)(copy.deepcopy(config))
            model, optimizer, _ = prepare(model, BF16)
            if attention is not None:
                set_attention(model, attention)
            batch = example_batch(model, BATCH, SEQ_LEN[name])
            tracker = MemTracker()
            tracker.track_external(model, optimizer, batch["input_ids"])
            with tracker:
                for first in (True, False):
                    model(**batch).loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    if first:
                        tracker.reset_mod_stats()
            (device,) = (
                d
                for d, snapshot in tracker.get_tracker_snapshot("peak").items()
                if snapshot["Total"]
            )
            found["peak"] = tracker.get_tracker_snapshot("peak")[device]["Total"]

    before = psutil.Process().memory_info().rss
    return timed(run) | found | {"resident bytes gained": highest_resident() - before}


def in_a_process(*arguments: str, limit: float) -> dict:
    """What this script prints last when it runs with ``arguments``; says so if it takes longer than
    ``limit`` seconds.
    """
    try:
        done = subprocess.run(
            [sys.executable, __file__, *arguments], stdout=subprocess.PIPE, text=True, timeout=limit
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {limit:g} seconds"}
    if done.returncode:
        return {"error": f"ended with status {done.returncode}"}
    return json.loads(done.stdout.strip().splitlines()[-1])


# Published formulas. Each gives bytes for one device without parallelism: s tokens, b rows, h
# hidden, f MLP width, a heads, L layers, v vocabulary.


def states_per_parameter(recipe: Recipe) -> int:
    """Weights, gradients and Adam's states of the recipe, for formulas that are about activations
    alone.
    """
    return 8 if recipe.precision == "bf16" else 16


def accelerate_estimate(shape: Shape, recipe: Recipe, s: int, b: int) -> float:
    """accelerate's ``estimate-memory``, by its own functions: the largest of its figures for
    training with Adam.
    """
    from accelerate.commands.estimate import estimate_training_usage

    return max(estimate_training_usage(accelerate_size(shape.name), "bfloat16").values())


@cache
def accelerate_size(name: str) -> int:
    """Bytes of the model in float32, by accelerate's count."""
    from accelerate.utils import calculate_maximum_sizes

    config = config_of(name)
    with torch.device("meta"):
        return calculate_maximum_sizes(model_class(config)(config))[0]


def korthikanti(shape: Shape, recipe: Recipe, s: int, b: int) -> float:
    """Korthikanti et al. 2022, "Reducing activation recomputation in large transformer models"
    (arXiv 2205.05198).

    A layer keeps sbh(34 + 5as/h) (their equation 1), 34sbh if the attention's scores are not kept
    (section 5, as a fused kernel does), 2sbh if it is checkpointed (section 5); the input's dropout
    sbh, and final norm, output layer and loss 4sbh(1 + v/h) (section 4.3). About activations alone:
    the recipe's own states are added.
    """
    h, tokens = shape.hidden, s * b
    if recipe.checkpointing == "per-layer":
        layer = 2 * tokens * h
    else:
        scores = 5 * shape.heads * s / h if recipe.attention == "eager" else 0
        layer = tokens * h * (34 + scores)
    ends = tokens * h + 4 * tokens * h * (1 + shape.vocab / h)
    return states_per_parameter(recipe) * shape.parameters + shape.layers * layer + ends


def megatron(shape: Shape, recipe: Recipe, s: int, b: int) -> float:
    """Megatron-LM's ``report_theoretical_memory`` (megatron/training/theoretical_memory_usage.py),
    no sequence parallelism.

    18 bytes for each parameter of the matrices, norms and tables (biases and learned positions are
    left out); activations 34sbh a layer, 8sb for ids and positions, sbh for dropout, 2s b(v + h)
    for the output layer, all times 1.05. It has no case for full recomputation or for unfused
    attention.
    """
    h, tokens = shape.hidden, s * b
    blocks = shape.layers * (sum(shape.matrices.values()) + 2 * shape.norm_parameters)
    tables = shape.embedding_parameters * (1 if shape.tied else 2)
    activations = (
        34 * tokens * h * shape.layers + 8 * tokens + tokens * h + 2 * tokens * (shape.vocab + h)
    )
    return 18 * (blocks + tables + shape.norm_parameters) + 1.05 * activations


def eleutherai(shape: Shape, recipe: Recipe, s: int, b: int) -> float:
    """EleutherAI's "Transformer Math 101" (blog.eleuther.ai/transformer-math, 2023), training
    memory.

    Weights 2 bytes a parameter, AdamW 12, gradients 2 (its lesser case); activations sbhL(10 + 24 +
    5as/h) without recomputation, sbhL(10 + 24) without the scores, 2sbhL with full recomputation.
    Nothing for the output layer.
    """
    h, tokens = shape.hidden, s * b
    if recipe.checkpointing == "per-layer":
        factor = 2
    else:
        factor = 34 + (5 * shape.heads * s / h if recipe.attention == "eager" else 0)
    return (2 + 12 + 2) * shape.parameters + tokens * h * shape.layers * factor


FORMULAS = {
    "accelerate": accelerate_estimate,
    "Korthikanti": korthikanti,
    "Megatron-LM": megatron,
    "EleutherAI": eleutherai,
}


def against_formulas(name: str) -> dict:
    """For each setting: the full trace, the short traces' answer, every formula's figure and its
    error against the former.
    """
    config, seq_len = config_of(name), SEQ_LEN[name]
    shape = Shape.from_config(config, name)
    found = {}
    for setting, recipe in SETTINGS.items():
        fakes.answers_by_settings.clear()
        ask = {"batch_size": BATCH, "seq_len": seq_len, "recipe": recipe}
        traces = {}
        seconds = timed(lambda: traces.update(full=predict(config, **ask, target="cpu", full=True)))  # noqa: B023
        full, short = traces["full"], predict(config, **ask, target="cpu")
        exact = full.peak.total
        row = {
            "exact": exact,
            "peak in": full.peak.phase,
            "full trace": seconds,
            "short traces": list(short.traced_layers),
            "short traces, bytes off": short.peak.total - exact,
            "short traces, same timeline": np.array_equal(short.timeline.rows, full.timeline.rows),
            "predicted for a card": predict(config, **ask, target="cuda").peak.total,
            "formulas": {},
        }
        print(f"{name}, {setting}: {format_bytes(exact)} in {full.peak.phase}")
        for formula, function in FORMULAS.items():
            says = round(function(shape, recipe, seq_len, BATCH))
            row["formulas"][formula] = {"bytes": says, "error %": percent(says, exact)}
            print(f"    {formula:<12} {format_bytes(says):>12}  {percent(says, exact):+7.1f} %")
        found[setting] = row
    return found


def percent(says: float, exact: int) -> float:
    return round(100 * (says / exact - 1), 2)


# All of it.


def sum_up_formulas(results: dict, rows: list[dict]) -> None:
    results["formulas, error %"] = {}
    for formula in FORMULAS:
        off = [abs(row["formulas"][formula]["error %"]) for row in rows]
        summary = {"median": round(statistics.median(off), 1), "largest": max(off)}
        results["formulas, error %"][formula] = summary
        print(f"{formula:<12} median error {summary['median']} %, largest {summary['largest']} %")


def sum_up_mem_tracker(results: dict) -> None:
    for way, found in results["MemTracker"].items():
        first = results["speed"][MEM_TRACKER_MODEL].get("first answer")
        if "peak" in found:
            found["bytes off"] = (
                found["peak"] - results["settings"][MEM_TRACKER_MODEL]["bf16"]["exact"]
            )
        if "peak" in found and first:
            found["CPU seconds / predict's first answer"] = round(
                found["CPU seconds"] / first["CPU seconds"], 1
            )
        print(f"MemTracker on {MEM_TRACKER_MODEL}, {way}: {found}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=SEQ_LEN, default=list(SEQ_LEN))
    parser.add_argument("--limit", type=float, default=300, help="seconds that MemTracker is given")
    parser.add_argument("--answers", choices=SEQ_LEN, help=argparse.SUPPRESS)
    parser.add_argument("--mem-tracker", choices=SEQ_LEN, help=argparse.SUPPRESS)
    parser.add_argument("--without-mask", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.answers:
        print(json.dumps(answers(arguments.answers)))
        return
    if arguments.mem_tracker:
        print(json.dumps(mem_tracker(arguments.mem_tracker, arguments.without_mask)))
        return

    results = {
        "what": (
            "bytes of one step, batch 1; error of each formula against the full trace (target cpu)"
        ),
        "sequence": SEQ_LEN,
        "seconds": (
            "wall time beside CPU time of one thread; the machine was shared with other work"
        ),
        "speed": {},
        "MemTracker": {},
    }
    for name in arguments.models:
        found = results["speed"][name] = in_a_process("--answers", name, limit=900)
        if "error" in found:
            print(f"{name}: {found['error']}")
            continue
        print(
            f"{name}: first answer {found['first answer']}, later ones median "
            f"{found['later answers, median']}, longest {found['later answers, longest']}, "
            f"{format_bytes(found['resident bytes gained'])} gained",
            flush=True,
        )
    if MEM_TRACKER_MODEL in arguments.models:
        for way, flags in {"as it is": (), "without the mask": ("--without-mask",)}.items():
            found = in_a_process("--mem-tracker", MEM_TRACKER_MODEL, *flags, limit=arguments.limit)
            results["MemTracker"][way] = found
    results["settings"] = {name: against_formulas(name) for name in arguments.models}
    rows = [row for model in results["settings"].values() for row in model.values()]
    sum_up_formulas(results, rows)
    sum_up_mem_tracker(results)
    worst = max(abs(row["short traces, bytes off"]) for row in rows)
    print(f"short traces against full ones: {worst} bytes off at most in {len(rows)} cases")
    print("wrote", record("predict", results).name)


if __name__ == "__main__":
    main()
