"""What ``gpu_predict.py`` and ``gpu_finetune.py`` run on, and how one training is tried: on a card,
or in a dry run without one.
"""

from __future__ import annotations

import copy
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import shared  # puts the plain checkout on the path, too
import torch
import transformers

from gradmem_lib.course.machine.compat import model_from_config
from gradmem_lib.measure.tracker import MemoryTracker
from gradmem_lib.model.classes import model_class
from gradmem_lib.model.inputs import example_batch
from gradmem_lib.prediction import allocator
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


def settings(recipe: Recipe) -> dict:
    """What differs from ``Recipe()``."""
    plain = asdict(Recipe())
    return {name: value for name, value in asdict(recipe).items() if value != plain[name]}


def words(recipe: Recipe, *without: str) -> list[str]:
    """The same as ``name=value``, but for those in ``without``."""
    return [f"{name}={value}" for name, value in settings(recipe).items() if name not in without]


class Card:
    """A CUDA card, whose allocator counts; ``capped`` makes it a small one."""

    tiny, target, device = False, "cuda", "cuda"

    def __init__(self):
        self.total = torch.cuda.mem_get_info()[0]
        self.whole = torch.cuda.get_device_properties(0).total_memory
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
    """The CPU with tiny models and ``MemoryTracker``, to see that every case works. A cap is the
    tracker's budget, and passing it an out-of-memory error as on a card.
    """

    tiny, target, device, workspace = True, "cpu", "cpu", 0
    total = whole = 24 * MiB

    def __init__(self):
        self.cap, self.most, self.held = None, 0, 0

    def clear(self) -> None:
        gc.collect()

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


def parser(doc: str | None, seconds: float):
    """The options that both scripts have."""
    command = shared.parser(doc)
    command.add_argument(
        "--seconds", type=float, default=seconds, help="after so many, nothing more begins"
    )
    command.add_argument(
        "--dry-run", action="store_true", help="tiny models, on the CPU; writes nothing"
    )
    return command


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


@dataclass
class Ask:
    """A training to be tried: of ``config``'s model on ``rows`` of ``tokens``, or on ``batch``."""

    config: Any
    recipe: Recipe
    rows: int
    tokens: int | None = None
    batch: Any = None
    cap: int | None = None
    warm_up: int = 2
    steps: int = 3


class TooSlow(Exception):
    """The time that is left does not suffice for the steps that are."""


def trained(place, ask: Ask, deadline: float) -> dict:
    """Peak bytes of later steps, and rows a second by their median.

    Everything it made is gone when it returns.
    """
    with ExitStack() as stack:
        stack.enter_context(place.capped(ask.cap))
        run = built(ask.config, ask.recipe, place.device)
        stack.enter_context(run.undo)
        batch, seconds = ask.batch, []
        if batch is None:
            batch = example_batch(run.model, ask.rows, ask.tokens)
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


def tried(place, ask: Ask, deadline: float) -> dict:
    place.clear()
    return outcome(lambda: trained(place, ask, deadline))


def too_large(place, nbytes: int) -> dict:
    """Why a case that is predicted to need ``nbytes`` is left out, if it is."""
    if nbytes <= MOST * place.total:
        return {}
    room = format_bytes(place.total)
    return {"left out": f"needs {format_bytes(nbytes)}, the card has {room}"}
