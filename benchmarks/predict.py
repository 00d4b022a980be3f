"""How fast ``predict`` answers for large models, and in how much memory.

    python benchmarks/predict.py [--models Llama-2-7B Llama-2-70B]

For each model, in a fresh process: the first answer, later ones with other settings, and the
resident memory they need. Seconds are wall time and, since the machine may be busy with other
things, CPU time of the process.
"""

from __future__ import annotations

import gc
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import psutil
from shared import parser, record

from gradmem_lib.course.material.shapes import SHAPES
from gradmem_lib.prediction.predict import predict
from gradmem_lib.training.recipe import Recipe
from gradmem_lib.units import format_bytes

MODELS = ("Llama-2-7B", "Llama-2-70B")
SEQ_LEN = 4096  # of batch 1: the longest sequence that they were trained on
BF16 = Recipe(precision="bf16", optimizer="adamw-fused")
LATER = {  # changes that a slider makes, each a question not asked before
    "half the sequence": (BF16, 2),
    "per-layer": (replace(BF16, checkpointing="per-layer"), 1),
    "segments of four": (replace(BF16, checkpointing=4), 1),
    "plain AdamW": (replace(BF16, optimizer="adamw"), 1),
    "8-bit AdamW": (replace(BF16, optimizer="adamw-8bit"), 1),
    "LoRA of rank 16": (replace(BF16, lora_rank=16), 1),
    "chunked loss": (replace(BF16, chunked_loss=True), 1),
    "autocast-bf16": (replace(BF16, precision="autocast-bf16"), 1),
    "eager attention": (replace(BF16, attention="eager"), 1),
}
CLOCKS = ("seconds", "CPU seconds")


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
    config = SHAPES[name].config(positions=SEQ_LEN)

    def ask(recipe: Recipe, divide: int = 1) -> None:
        predict(config, batch_size=1, seq_len=SEQ_LEN // divide, recipe=recipe, target="cpu")

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


def main(arguments: list[str] | None = None) -> None:
    command = parser(__doc__)
    command.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    command.add_argument("--here", action="store_true", help="one model, in this process")
    asked = command.parse_args(arguments)
    if asked.here:
        print(json.dumps(answers(asked.models[0])))
        return
    speed = {}
    for name in asked.models:
        words = [sys.executable, __file__, "--here", "--models", name]
        done = subprocess.run(words, stdout=subprocess.PIPE, text=True, timeout=900, check=True)
        found = speed[name] = json.loads(done.stdout.strip().splitlines()[-1])
        print(
            f"{name}: first answer {found['first answer']}, later ones median "
            f"{found['later answers, median']}, longest {found['later answers, longest']}, "
            f"{format_bytes(found['resident bytes gained'])} gained",
            flush=True,
        )
    record("predict", {"what": "a step's prediction, batch 1", "sequence": SEQ_LEN, "speed": speed})


if __name__ == "__main__":
    main()
