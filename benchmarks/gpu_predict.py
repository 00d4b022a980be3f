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

import copy
import gc
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import torch
import transformers
from shared import parser, record, settings, words

from gradmem_lib.course.machine.compat import model_from_config
from gradmem_lib.measure.tracker import MemoryTracker
from gradmem_lib.model.classes import model_class
from gradmem_lib.model.inputs import example_batch
from gradmem_lib.model.known import known_model
from gradmem_lib.optimizers import OPTIMIZERS
from gradmem_lib.prediction import allocator, fakes
from gradmem_lib.prediction.predict import predict
from gradmem_lib.training.prepare import (
    Prepared,
    change_model,
    make_optimizer,
    prepare,
    set_checkpointing,
)
from gradmem_lib.training.recipe import Recipe
from gradmem_lib.training.step import step
from gradmem_lib.units import MiB, format_bytes

WARM_UP = 2  # steps
MOST = 0.92  # of the card; what is predicted to need more is left out
NO_CARD = "No CUDA card here: there is nothing to measure, and nothing was written."
TINY = {  # settings of a dry run's models, by the names of any family
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 3,
    "vocab_size": 128,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "image_size": 32,
    "patch_size": 8,
    "num_labels": 10,
}

FAMILIES = ("llama", "gqa", "qwen3", "gpt2", "bert", "vit")
# By a name of ours, a known model, or a Llama's sizes.
MODELS: dict[str, str | dict[str, int]] = {
    "llama": {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16},
    "gqa": {"hidden_size": 2048, "intermediate_size": 5632, "num_key_value_heads": 4},
    "qwen3": "Qwen3-0.6B",
    "gpt2": "GPT-2",
    "bert": "BERT-base",
    "vit": "ViT-base",
    "llama-1b": "Llama-3.2-1B",
    "llama-7b": "Llama-2-7B",
}


def config_of(model: str, tiny: bool):
    known = MODELS[model]
    if isinstance(known, str):
        config = known_model(known)[1]
    else:
        config = transformers.LlamaConfig(**known, num_hidden_layers=8)
    if not tiny:
        return config
    tied = getattr(config, "tie_word_embeddings", False)
    return type(config)(**TINY, tie_word_embeddings=tied, architectures=config.architectures)


# Where.


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
        self.start()

    def step(self, run: Prepared, batch, recipe: Recipe) -> None:
        step(run.model, run.optimizer, batch, recipe)
        torch.cuda.synchronize()

    def start(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def peak(self) -> dict[str, int]:
        """Since ``start``, in bytes."""
        return {
            "allocated": torch.cuda.max_memory_allocated(),
            "reserved": torch.cuda.max_memory_reserved(),
            "between steps": torch.cuda.memory_allocated(),
        }

    def left(self) -> int:
        """Bytes still allocated when the case is gone: cuBLAS's workspaces."""
        gc.collect()
        return torch.cuda.memory_allocated()


class DryRun:
    """The CPU with tiny models and ``MemoryTracker``, to see that every case works."""

    tiny, target, device, workspace = True, "cpu", "cpu", 0
    total = 24 * MiB

    def __init__(self):
        self.most, self.held = 0, 0

    def clear(self) -> None:
        gc.collect()

    def step(self, run: Prepared, batch, recipe: Recipe) -> None:
        with MemoryTracker(run.model, run.optimizer, live=False) as tracker:
            step(run.model, run.optimizer, batch, recipe)
        self.most, self.held = max(self.most, tracker.peak.total), tracker.current.total

    def start(self) -> None:
        self.most = 0

    def peak(self) -> dict[str, int]:
        return {"allocated": self.most, "reserved": self.most, "between steps": self.held}

    def left(self) -> int:
        return 0


def place_of(dry: bool) -> Card | DryRun | None:
    """Where to measure; ``None``, and a sentence, if there is nowhere."""
    if not dry and not torch.cuda.is_available():
        print(NO_CARD)
        return None
    transformers.utils.logging.set_verbosity_error()
    return DryRun() if dry else Card()


# Cases.


@dataclass(frozen=True)
class Case:
    """``seq_len`` is ``None`` for images."""

    model: str
    rows: int
    seq_len: int | None
    recipe: Recipe = field(default_factory=Recipe)

    def __str__(self) -> str:
        size, recipe = f"{self.rows}x{self.seq_len or 0}", self.recipe
        named = [self.model, size, str(recipe.precision), recipe.optimizer]
        return " ".join([*named, *words(recipe, "precision", "optimizer")])


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
LARGE = (  # what needs more than the card has is left out
    Case("llama-1b", 4, 2048, BF16),
    Case("llama-1b", 4, 4096, replace(BF16, checkpointing="per-layer")),
    Case("llama-7b", 2, 2048, replace(BF16, lora_rank=16, checkpointing="per-layer")),
    Case("vit", 128, None, Recipe(precision="autocast-bf16", optimizer="adamw-fused")),
    Case("bert", 64, 512, BF16),
    Case("gpt2", 16, 1024, Recipe(precision="autocast-bf16", optimizer="adamw-foreach")),
    Case("llama-1b", 4, 1024, Recipe(precision="float32-master", checkpointing="per-layer")),
    Case("llama-7b", 1, 2048, replace(BF16, in_backward=True, checkpointing="per-layer")),
)


def cases() -> list[Case]:
    found = []
    for rows, seq_len, recipe in EVERYWHERE:
        for model in FAMILIES:
            if model == "vit":
                found.append(Case(model, rows * 8, None, recipe))
            else:
                found.append(Case(model, rows, seq_len, recipe))
    return [*found, *LARGE, *ONCE, *OTHER_OPTIMIZERS]


# One case.


def built(config, recipe: Recipe, device: str) -> Prepared:
    """A model with random weights and its optimizer, never larger than ``recipe`` keeps it: as if
    loaded from a file of that form.
    """
    # born in its dtype: a cast would leave holes between the weights
    with torch.device("meta" if recipe.quantized_base else device):
        kind, dtype = model_class(config), recipe.weight_dtype
        model = model_from_config(kind, copy.deepcopy(config), dtype=dtype)
    if not recipe.quantized_base:
        return prepare(model, recipe)
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
    """Small numbers everywhere; of 4-bit layers random codes, and every block's magnitude
    the same.
    """
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


class TooSlow(Exception):
    """The time that is left does not suffice for the steps that are."""


def trained(case: Case, config, place, deadline: float) -> dict:
    """Peak bytes of a step after two that warm up.

    Everything it made is gone when it returns.
    """
    run = built(config, case.recipe, place.device)
    with run.undo:
        batch = example_batch(run.model, case.rows, case.seq_len)
        for left in range(WARM_UP, -1, -1):
            if not left:
                place.start()
            began = time.monotonic()
            place.step(run, batch, case.recipe)
            if left * (time.monotonic() - began) > deadline - time.monotonic():
                raise TooSlow
        return place.peak()


def outcome(run: Callable[[], dict]) -> dict:
    """What ``run`` finds, or in one word why not: ``out of memory``, ``left out`` for want of time,
    or ``error``. It is written down, and the next case may do.
    """
    try:
        return run()
    except torch.OutOfMemoryError as error:
        return {"out of memory": str(error).splitlines()[0]}
    except TooSlow:
        return {"left out": "its steps take longer than the time that is left"}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"}


def too_large(place, nbytes: int) -> dict:
    """Why a case that is predicted to need ``nbytes`` is left out, if it is."""
    if nbytes <= MOST * place.total:
        return {}
    room = format_bytes(place.total)
    return {"left out": f"needs {format_bytes(nbytes)}, the card has {room}"}


def predicted(case: Case, config, place) -> dict:
    """Bytes of the case's step. Those that are reserved need the full trace."""
    ask = {"batch_size": case.rows, "seq_len": case.seq_len, "recipe": case.recipe}
    found = predict(config, **ask, target="cuda", full=not place.tiny)
    reserved = {"reserved": found.replay_allocator() + place.workspace}
    if place.tiny:  # a dry run asks for the card's figures too
        if reserved["reserved"] < found.peak.total:
            raise AssertionError("less reserved than allocated")
        found, reserved = predict(config, **ask, target="cpu"), {}
    return {
        "tensors": found.peak.total,
        "allocated": found.peak.total + place.workspace,
        "between steps": found.current.total,
        **reserved,
    }


def measured(case: Case, place, deadline: float) -> dict:
    """One line of the results: figures, or why there are none."""
    row = {"case": str(case), "recipe": settings(case.recipe)}
    start, config = time.monotonic(), config_of(case.model, place.tiny)
    if place.tiny:
        case = replace(case, rows=min(case.rows, 8), seq_len=case.seq_len and case.seq_len // 32)
    row |= {"model": case.model, "rows": case.rows, "seq_len": case.seq_len}
    row["predicted"] = predicted(case, config, place)
    row["seconds to predict"] = round(time.monotonic() - start, 2)
    fakes.answers_by_settings.clear()
    row |= too_large(place, row["predicted"]["allocated"])
    if "left out" not in row:
        place.clear()
        found = outcome(lambda: trained(case, config, place, deadline))
        if "allocated" in found:
            row["measured"] = found | {"workspace": place.left()}
            row["error %"] = errors(row, case.recipe)
        else:
            row |= found
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
    """A line for each case, as it is finished; stops when the time is up."""
    deadline = time.monotonic() + seconds
    for i, case in enumerate(chosen):
        if time.monotonic() > deadline:
            print(f"Time is up: {len(chosen) - i} of {len(chosen)} cases were not begun.")
            return
        yield {"case": str(case)} | outcome(lambda case=case: measured(case, place, deadline))


def shown(row: dict) -> str:
    if "error %" not in row:
        [why] = [f"{k}: {row[k]}" for k in ("left out", "out of memory", "error") if k in row]
        return f"{row['case']:<86} {why}"
    figures = "  ".join(f"{name} {value:+.2f} %" for name, value in row["error %"].items())
    return f"{row['case']:<86} {format_bytes(row['measured']['allocated']):>11}  {figures}"


def summary(rows: list[dict]) -> dict:
    """Median and largest error of each figure, without sign, and how many cases had one."""
    done = [row for row in rows if "error %" in row]
    found = {"measured": len(done), "left out": sum("left out" in r for r in rows)}
    found["failed"] = len(rows) - sum(found.values())
    for name in ("allocated", "reserved", "tensors"):
        off = [(abs(row["error %"][name]), row["case"]) for row in done if name in row["error %"]]
        if off:
            largest, case = max(off)
            median = round(statistics.median(size for size, _ in off), 4)
            found[name] = {"median %": median, "largest %": largest, "largest in": case}
    return found


def main(arguments: list[str] | None = None) -> int:
    command = parser(__doc__)
    command.add_argument("--seconds", type=float, default=260, help="then nothing more begins")
    command.add_argument("--dry-run", action="store_true", help="tiny models; writes nothing")
    command.add_argument(
        "--only", nargs="+", help="cases with one of these words in their line; writes nothing"
    )
    options = command.parse_args(arguments)
    if (place := place_of(options.dry_run)) is None:
        return 0
    warnings.filterwarnings("ignore")
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
                "allocator settings": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""),
            }
            record("gpu_predict", results | {"summary": summary(rows), "cases": rows})
    found = summary(rows)
    print(f"{found['measured']} measured, {found['left out']} left out, {found['failed']} failed")
    for name in ("allocated", "reserved"):
        if name in found:
            print(
                f"{name}: median error {found[name]['median %']} %, largest "
                f"{found[name]['largest %']} % ({found[name]['largest in']})"
            )
    if not options.dry_run:
        return 0
    wrong = [row for row in rows if any(row.get("error %", {"": 1}).values())]
    print(f"Dry run: {len(wrong)} of {len(rows)} not as predicted, to the byte")
    return int(bool(wrong) or not rows)


if __name__ == "__main__":
    sys.exit(main())
