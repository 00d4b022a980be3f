"""Predicted against measured on a CUDA card: the bytes that PyTorch's allocator counts, over many
models and recipes.

    make gpu                                     or: python benchmarks/gpu_predict.py [--seconds
    260] [--only WORDS] python benchmarks/gpu_predict.py --dry-run   tiny models on the CPU against
    MemoryTracker; writes nothing

Needs torch 2.11+ and transformers 5.17+ and nothing else of the course's environment. Every case is
a model with random weights, two steps to warm up and a third that is measured, on an allocator that
holds nothing from the case before. What fails is written down and the next case begins. Without a
card it says so and does nothing.
"""

from __future__ import annotations

import argparse
import copy
import gc
import os
import statistics
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
import transformers
from record import record

# A plain checkout: the library is not installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gradmem_lib.course.machine.compat import model_from_config
from gradmem_lib.measure.tracker import MemoryTracker
from gradmem_lib.optimizers import OPTIMIZERS
from gradmem_lib.prediction import allocator, fakes
from gradmem_lib.prediction.configs import example_batch, model_class
from gradmem_lib.prediction.predict import predict
from gradmem_lib.training.prepare import prepare
from gradmem_lib.training.recipe import Recipe
from gradmem_lib.training.step import step
from gradmem_lib.units import MiB, format_bytes

WARM_UP = 2
FILL = 0.75  # of the card, for the cases that fill it: what is reserved must fit as well
MOST = 0.92  # of the card; what is predicted to need more is left out
PHASES = {"forward": "forward", "backward": "backward", "step": "optimizer_step"}
NO_CARD = "No CUDA card here: there is nothing to measure, and nothing was written."

# Models: class of the config, its settings, and those of a tiny one for the dry run.

TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "vocab_size": 128,
    "max_position_embeddings": 128,
}
LLAMA_7B = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
}
MODELS = {
    "llama": (
        "LlamaConfig",
        {
            "hidden_size": 1024,
            "intermediate_size": 2816,
            "num_attention_heads": 16,
            "num_hidden_layers": 8,
        },
        TINY,
    ),
    "gqa": (
        "LlamaConfig",
        {
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_attention_heads": 32,
            "num_hidden_layers": 8,
            "num_key_value_heads": 4,
        },
        TINY | {"num_key_value_heads": 2},
    ),
    "qwen3": (
        "Qwen3Config",
        {
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_attention_heads": 16,
            "num_hidden_layers": 12,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
            "tie_word_embeddings": True,
        },
        TINY | {"num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": True},
    ),
    "gpt2": (
        "GPT2Config",
        {"n_positions": 2048},
        {
            "n_embd": 64,
            "n_layer": 3,
            "n_head": 4,
            "vocab_size": 128,
            "n_positions": 128,
            "bos_token_id": 0,
            "eos_token_id": 0,
        },
    ),
    "bert": ("BertConfig", {}, TINY),
    "vit": (
        "ViTConfig",
        {"num_labels": 1000},
        {k: v for k, v in TINY.items() if k not in ("vocab_size", "max_position_embeddings")}
        | {"image_size": 32, "patch_size": 8, "num_labels": 10},
    ),
    "llama-1b": (
        "LlamaConfig",
        {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_attention_heads": 32,
            "num_hidden_layers": 16,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
            "tie_word_embeddings": True,
            "max_position_embeddings": 8192,
        },
        TINY | {"num_key_value_heads": 2, "tie_word_embeddings": True},
    ),
    "llama-7b": ("LlamaConfig", LLAMA_7B | {"max_position_embeddings": 4096}, TINY),
}
FAMILIES = ("llama", "gqa", "qwen3", "gpt2", "bert", "vit")


def config_of(model: str, tiny: bool):
    name, full, small = MODELS[model]
    return getattr(transformers, name)(**(small if tiny else full))


# Cases.


@dataclass(frozen=True)
class Case:
    """``rows`` is a number of rows, or ``None`` for as many as the card holds.

    ``seq_len`` is ignored for images.
    """

    model: str
    rows: int | None
    seq_len: int
    recipe: Recipe = field(default_factory=Recipe)

    @property
    def settings(self) -> dict:
        """What differs from ``Recipe()``."""
        plain = asdict(Recipe())
        return {name: value for name, value in asdict(self.recipe).items() if value != plain[name]}

    def __str__(self) -> str:
        words = [
            f"{self.rows or 'full'}x{self.seq_len}",
            self.recipe.precision,
            self.recipe.optimizer,
        ]
        words += [
            f"{k}={v}" for k, v in self.settings.items() if k not in ("precision", "optimizer")
        ]
        return " ".join([self.model, *words])


# Each with every family: rows (for images eight times as many), tokens, recipe.
EVERYWHERE = (
    (4, 512, Recipe()),
    (8, 512, Recipe(precision="bf16", optimizer="adamw-fused")),
    (
        16,
        512,
        Recipe(precision="autocast-bf16", optimizer="adamw-fused", checkpointing="per-layer"),
    ),
    (2, 512, Recipe(precision="bf16", optimizer="adamw-fused", attention="eager")),
    (3, 500, Recipe(precision="autocast-bf16", optimizer="adamw-foreach")),
    (32, 128, Recipe(precision="float32-master")),
    (8, 256, Recipe(precision="autocast-fp16", optimizer="sgd", momentum=0.9)),
    (8, 512, Recipe(precision="bf16", optimizer="adamw-foreach", checkpointing="per-layer")),
)
BF16 = Recipe(precision="bf16", optimizer="adamw-fused")
ONCE = (
    Case("llama", 1, 2048, BF16),
    Case("llama", 8, 2048, BF16),
    Case("gqa", 2, 2048, replace(BF16, checkpointing=4)),
    Case("llama", 8, 1024, replace(BF16, checkpointing="sqrt")),
    Case("llama", 8, 1024, replace(BF16, every_n_layers=2)),
    Case("qwen3", 8, 1024, replace(BF16, chunked_loss=True)),
    Case("llama", 16, 512, Recipe(accumulation=4, precision="autocast-bf16")),
    Case("llama", 8, 512, replace(BF16, lora_rank=16)),
    Case(
        "gqa", 4, 1024, replace(BF16, lora_rank=16, quantized_base=True, checkpointing="per-layer")
    ),
    Case("gpt2", 8, 512, replace(BF16, lora_rank=8)),
    Case("llama", 4, 512, replace(BF16, in_backward=True)),
    Case("llama", 4, 512, replace(BF16, optimizer="adafactor-torch", in_backward=True)),
)
ABOVE = {recipe.optimizer for *_, recipe in EVERYWHERE} | {case.recipe.optimizer for case in ONCE}
OTHER_OPTIMIZERS = tuple(
    Case("llama", 4, 512, replace(BF16, optimizer=name)) for name in OPTIMIZERS if name not in ABOVE
)
AS_MANY_AS_IT_HOLDS = (
    Case("llama-1b", None, 2048, BF16),
    Case("llama-1b", None, 4096, replace(BF16, checkpointing="per-layer")),
    Case("llama-7b", None, 2048, replace(BF16, lora_rank=16, checkpointing="per-layer")),
    Case("vit", None, 0, Recipe(precision="autocast-bf16", optimizer="adamw-fused")),
    Case("bert", None, 512, BF16),
    Case("gpt2", None, 1024, Recipe(precision="autocast-bf16", optimizer="adamw-foreach")),
    Case("llama-1b", None, 1024, Recipe(precision="float32-master", checkpointing="per-layer")),
    Case("llama-7b", None, 2048, replace(BF16, in_backward=True, checkpointing="per-layer")),
)


def cases() -> list[Case]:
    found = [
        Case(model, rows * 8 if model == "vit" else rows, 0 if model == "vit" else seq_len, recipe)
        for rows, seq_len, recipe in EVERYWHERE
        for model in FAMILIES
    ]
    return [*found, *AS_MANY_AS_IT_HOLDS, *ONCE, *OTHER_OPTIMIZERS]


# Two places to measure.


class TooSlow(Exception):
    """The time that is left does not suffice for the steps that are."""


class Card:
    """A CUDA card, whose allocator counts."""

    tiny, target, device = False, "cuda", "cuda"

    def __init__(self):
        self.total = torch.cuda.mem_get_info()[0]
        self.workspace = allocator.workspace(torch.cuda.get_device_capability())

    def clear(self) -> None:
        """Nothing of the case before is left: no tensors, no cached segments, no cuBLAS
        workspace.
        """
        gc.collect()
        torch.cuda.synchronize()
        getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    def predicted(self, config, ask: dict) -> dict:
        found = predict(
            config, **ask, target="cuda", full=True
        )  # the reserved bytes need the full trace anyway
        return {
            "tensors": found.peak.total,
            "allocated": found.peak.total + self.workspace,
            "reserved": found.replay_allocator() + self.workspace,
            "between steps": found.current.total,
            "by phase": {name: found.peak_by_phase[name] for name in PHASES.values()},
        }

    def measured(self, run, batch, recipe: Recipe) -> dict:
        torch.cuda.synchronize()
        peaks, reserved, part = dict.fromkeys(PHASES, 0), 0, "forward"

        def mark(next_part: str | None) -> None:
            nonlocal part, reserved
            peaks[part] = max(peaks[part], torch.cuda.max_memory_allocated())
            reserved = max(reserved, torch.cuda.max_memory_reserved())
            torch.cuda.reset_peak_memory_stats()
            part = next_part

        torch.cuda.reset_peak_memory_stats()
        step(run.model, run.optimizer, batch, recipe, mark=mark)
        mark(None)
        torch.cuda.synchronize()
        return {
            "allocated": max(peaks.values()),
            "reserved": reserved,
            "between steps": torch.cuda.memory_allocated(),
            "by phase": {PHASES[part]: peak for part, peak in peaks.items()},
        }

    def left(self) -> int:
        """Bytes still allocated when the case is gone: cuBLAS's workspaces."""
        gc.collect()
        return torch.cuda.memory_allocated()


class DryRun:
    """The CPU with tiny models and ``MemoryTracker``, to see that every case works.

    Asks for the card's figures too.
    """

    tiny, target, device, total = True, "cpu", "cpu", 24 * MiB

    def clear(self) -> None:
        gc.collect()

    def predicted(self, config, ask: dict) -> dict:
        card = predict(config, **ask, target="cuda")
        if card.replay_allocator() < card.peak.total:
            raise AssertionError("less reserved than allocated")
        found = predict(config, **ask, target="cpu")
        return {
            "tensors": found.peak.total,
            "allocated": found.peak.total,
            "between steps": found.current.total,
        }

    def measured(self, run, batch, recipe: Recipe) -> dict:
        with MemoryTracker(run.model, run.optimizer, live=False) as tracker:
            step(run.model, run.optimizer, batch, recipe)
        return {"allocated": tracker.peak.total, "between steps": tracker.current.total}

    def left(self) -> int:
        return 0


# One case.


def with_rows(case: Case, config, place) -> Case:
    """The case with as many rows as fill the card, by prediction.

    The peak is the largest of several moments that each grow evenly with the rows, so between two
    numbers of rows it stays below the straight line: what the line allows fits.
    """

    def peak(rows: int) -> int:
        ask = {"batch_size": rows, "seq_len": case.seq_len or None, "recipe": case.recipe}
        return predict(config, **ask, target=place.target).peak.total

    room = int(FILL * place.total)
    rows, needs = 1, peak(1)
    while needs < room:
        more, would_need = 4 * rows, peak(4 * rows)
        if would_need > room:
            for _ in range(2):
                rows += (more - rows) * (room - needs) // (would_need - needs)
                needs = peak(rows)
            break
        rows, needs = more, would_need
    return replace(case, rows=rows)


def measure(case: Case, config, place, deadline: float) -> dict:
    """Build, warm up, measure. Everything it made is gone when it returns."""
    # born in its dtype: a cast would leave holes between the weights
    with torch.device(place.device):
        model = model_from_config(
            model_class(config), copy.deepcopy(config), dtype=case.recipe.weight_dtype
        )
    run = prepare(model, case.recipe)
    try:
        batch = example_batch(run.model, case.rows, case.seq_len or None)
        for left in range(WARM_UP, 0, -1):
            start = time.monotonic()
            float(step(run.model, run.optimizer, batch, case.recipe))  # waits for the card
            if left * (time.monotonic() - start) > deadline - time.monotonic():
                raise TooSlow
        return place.measured(run, batch, case.recipe)
    finally:
        run.undo.close()


def tried(case: Case, place, deadline: float) -> dict:
    """One line of the results: figures, or why there are none."""
    row = {"case": str(case), "recipe": case.settings}
    start = time.monotonic()
    place.clear()
    try:
        config = config_of(case.model, place.tiny)
        if place.tiny:
            case = replace(case, rows=case.rows and min(case.rows, 8), seq_len=case.seq_len // 32)
        if case.rows is None:
            case = with_rows(case, config, place)
        row |= {"model": case.model, "rows": case.rows, "seq_len": case.seq_len or None}
        ask = {"batch_size": case.rows, "seq_len": case.seq_len or None, "recipe": case.recipe}
        row["predicted"] = place.predicted(config, ask)
        row["seconds to predict"] = round(time.monotonic() - start, 2)
        fakes.answers_by_settings.clear()
        if row["predicted"]["allocated"] > MOST * place.total:
            room = format_bytes(place.total)
            return row | {
                "left out": (
                    f"needs {format_bytes(row['predicted']['allocated'])}, the card has {room}"
                )
            }
        row["measured"] = measure(case, config, place, deadline)
    except TooSlow:
        row["left out"] = "its steps take longer than the time that is left"
    except Exception as error:  # written down; the next case may do
        row["error"] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    else:
        row["measured"]["workspace"] = place.left()
        row["error %"] = errors(row, case.recipe)
    row["seconds"] = round(time.monotonic() - start, 2)
    return row


def errors(row: dict, recipe: Recipe) -> dict[str, float]:
    """Predicted over measured, minus one, in percent."""
    says, is_so = row["predicted"], row["measured"]
    found = {"allocated": percent(says["allocated"], is_so["allocated"])}
    found["tensors"] = percent(says["tensors"], is_so["allocated"] - is_so["workspace"])
    # quantizing leaves holes where the weights were
    if "reserved" in says and not recipe.quantized_base:
        found["reserved"] = percent(says["reserved"], is_so["reserved"])
    return found


def percent(says: int, is_so: int) -> float:
    return round(100 * (says / is_so - 1), 4)


# All cases.


def rows_of(chosen: list[Case], place, seconds: float) -> Iterator[dict]:
    """A line for each case, as it is finished; stops when the time is up, or when the card answers
    no more.
    """
    deadline = time.monotonic() + seconds
    for i, case in enumerate(chosen):
        if time.monotonic() > deadline:
            print(f"Time is up: {len(chosen) - i} of {len(chosen)} cases were not begun.")
            return
        try:
            yield tried(case, place, deadline)
        except (
            RuntimeError
        ) as error:  # clearing failed: after some errors a card refuses everything
            print(
                f"The card answers no more ({str(error).splitlines()[0]}): {len(chosen) - i} "
                "cases were not run."
            )
            return


def shown(row: dict) -> str:
    if "error %" not in row:
        return f"{row['case']:<86} {row.get('error') or 'left out: ' + row['left out']}"
    figures = "  ".join(f"{name} {value:+.2f} %" for name, value in row["error %"].items())
    return f"{row['case']:<86} {format_bytes(row['measured']['allocated']):>11}  {figures}"


def summary(rows: list[dict]) -> dict:
    """Median and largest error of each figure, without sign, and how many cases had one."""
    done = [row for row in rows if "error %" in row]
    found = {"measured": len(done), "left out": sum("left out" in r for r in rows)}
    found["failed"] = sum("error" in r for r in rows)
    for name in ("allocated", "reserved", "tensors"):
        off = [(abs(row["error %"][name]), row["case"]) for row in done if name in row["error %"]]
        if off:
            largest, case = max(off)
            median = round(statistics.median(size for size, _ in off), 4)
            found[name] = {"median %": median, "largest %": largest, "largest in": case}
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seconds", type=float, default=260, help="after so many, no further case begins"
    )
    parser.add_argument(
        "--only", nargs="+", help="cases with one of these words in their line; writes nothing"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="tiny models, on the CPU; writes nothing"
    )
    options = parser.parse_args(arguments)
    if not options.dry_run and not torch.cuda.is_available():
        print(NO_CARD)
        return 0
    warnings.filterwarnings("ignore")
    transformers.utils.logging.set_verbosity_error()
    place = DryRun() if options.dry_run else Card()
    rows = []
    chosen = [
        c for c in cases() if not options.only or any(word in str(c) for word in options.only)
    ]
    for row in rows_of(chosen, place, options.seconds):
        rows.append(row)
        print(shown(row), flush=True)
        if not options.dry_run and not options.only:
            results = {
                "what": "predicted (target cuda) against torch.cuda's figures, one step",
                "card bytes": place.total,
            }
            results["allocator settings"] = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
            record("gpu_predict", results | {"summary": summary(rows), "cases": rows})
    found = summary(rows)
    print(f"{found['measured']} measured, {found['left out']} left out, {found['failed']} failed")
    for name in ("allocated", "reserved"):
        if name in found:
            print(
                f"{name}: median error {found[name]['median %']} %, largest "
                f"{found[name]['largest %']} % ({found[name]['largest in']})"
            )
    if options.dry_run:
        wrong = [row["case"] for row in rows if any(row.get("error %", {"": 1}).values())]
        print(
            "Dry run: "
            + (f"{len(wrong)} not as predicted" if wrong else "all as predicted, to the byte")
        )
        return int(bool(wrong) or not rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
