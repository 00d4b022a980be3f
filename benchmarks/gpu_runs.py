"""What the fine-tuning of ``gpu_finetune.py`` runs on, and how one training is tried: on a card, or
in a dry run without one.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import gpu_predict  # puts the plain checkout on the path, too
import torch
import transformers
from gpu_predict import WARM_UP, TooSlow

from gradmem_lib.course.machine.compat import model_from_config
from gradmem_lib.measure.tracker import MemoryTracker
from gradmem_lib.prediction.configs import example_batch, model_class
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
from gradmem_lib.units import MiB


def settings(recipe: Recipe) -> dict:
    """What differs from ``Recipe()``."""
    plain = asdict(Recipe())
    return {name: value for name, value in asdict(recipe).items() if value != plain[name]}


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
    """The CPU and tiny models; a cap is ``MemoryTracker``'s budget, and passing it an out-of-memory
    error as on a card.
    """

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


def built(config, recipe: Recipe, device: str) -> Prepared:
    """A model with random weights and its optimizer, never larger than ``recipe`` keeps it: as if
    loaded from a file of that form.
    """
    if not recipe.quantized_base:
        with torch.device(device):
            model = model_from_config(
                model_class(config), copy.deepcopy(config), dtype=recipe.weight_dtype
            )
        return prepare(model, recipe)
    with torch.device("meta"):
        model = model_from_config(
            model_class(config), copy.deepcopy(config), dtype=recipe.weight_dtype
        )
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
    """Peak bytes of later steps, and rows a second by their median.

    Everything it made is gone when it returns.
    """
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
    """``trained``, or in one word why not: ``out of memory``, ``left out`` for want of time, or
    ``error``.
    """
    place.clear()
    try:
        return trained(place, ask, deadline)
    except torch.OutOfMemoryError as error:
        return {"out of memory": str(error).splitlines()[0]}
    except TooSlow:
        return {"left out": "its steps take longer than the time that is left"}
    except Exception as error:  # written down; the next case may do
        return {
            "error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        }


def needed(place, config, recipe: Recipe, rows: int, tokens: int) -> int:
    """Bytes that the training is predicted to have allocated."""
    says = predict(config, batch_size=rows, seq_len=tokens, recipe=recipe, target=place.target)
    return says.peak.total + place.workspace


def llama(hidden: int, layers: int, vocab: int = 32000):
    """A Llama of that width and depth, its MLP 8/3 as wide, rounded up to 256 (a quarter of it for
    tiny ones).
    """
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
