"""Runs and predictions that the answers to claims of several lessons share."""

import copy
import json
import warnings
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from functools import cache, partial

import torch
from torch.utils.checkpoint import checkpoint

from ....measure.tracker import MemoryTracker
from ....model.configs import find_model
from ....prediction.predict import Prediction, predict
from ....techniques.checkpointing import checkpoint_layers
from ....training.recipe import Recipe
from ...ledger.finding import Figures, each
from ...machine.course_files import course_folder
from ...material import accounting
from .hf_trainer import quiet_arguments
from .settings import quiet, tiny_llama


def recorded(name: str) -> dict:
    """What ``benchmarks/<name>.py`` wrote."""
    record = course_folder("benchmarks/results") / f"{name}.json"
    return json.loads(record.read_text(encoding="utf-8"))


def recorded_times(name: str, what: str, times: dict) -> Figures:
    """Relative times of ``recorded(name)`` as figures, with its clock, device and date."""
    found = recorded(name)
    where = found["where"]
    return each(f"{what} ({found['clock']}, {where['device']}, {where['date']})", times, "{:.2f}")


def gradient(model) -> torch.Tensor:
    """All gradients of a model in a row, which it then has no more."""
    found = torch.cat([p.grad.flatten() for p in model.parameters()])
    model.zero_grad()
    return found


def error(found: torch.Tensor, right: torch.Tensor) -> float:
    """The length of the difference, as a share of ``right``'s."""
    return ((found - right).norm() / right.norm()).item()


@cache
def predicted(model: str, rows: int, seq_len: int, **changes) -> Prediction:
    """A step on a card, in bf16 with fused AdamW but for the recipe's ``changes``."""
    recipe = Recipe(**{"precision": "bf16", "optimizer": "adamw-fused"} | changes)
    config = copy.deepcopy(find_model(model)[0])
    # Rows may be longer than the model was made for.
    config.max_position_embeddings = max(seq_len, config.max_position_embeddings)
    return predict(config, batch_size=rows, seq_len=seq_len, recipe=recipe, target="cuda")


def trio(seq_len: int = 2048, **changes) -> Prediction:
    """Llama-2-7B with checkpoints and one row at a time. Two micro-batches stand for any number:
    the second one has all that the later ones have.
    """
    together = {"checkpointing": "per-layer", "accumulation": 2}
    return predicted("Llama-2-7B", 2, seq_len, **together, **changes)


def activations(step: Prediction | MemoryTracker) -> int:
    """The most bytes of activations at any moment."""
    return max(step.timeline.by_category["activations"])


def resident(shape, precision: str) -> int:
    """Bytes of weights, gradients and AdamW's states, by the closed forms."""
    return sum(accounting.resident_bytes(shape, precision).values())


def peak_of(shape, rows: int, seq_len: int, precision: str = "bf16", checkpointing=None, **options):
    """The peak of a step by the closed forms."""
    options |= {"precision": precision, "checkpointing": checkpointing}
    return accounting.estimate(shape, batch_size=rows, seq_len=seq_len, **options)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@contextmanager
def silent():
    """No warnings, no log of transformers' and no bars: they would be part of every notebook that
    shows a claim.
    """
    from transformers.utils import logging

    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with quiet(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        if bars:
            logging.enable_progress_bar()


def tiny():
    return tiny_llama(4, 512)


def token_ids(rows: int = 2, seq_len: int = 32, vocab: int = 512) -> torch.Tensor:
    return torch.randint(0, vocab, (rows, seq_len), generator=torch.Generator().manual_seed(0))


def tracked_step(model, ids: torch.Tensor) -> MemoryTracker:
    """Forward and backward of ``model`` on ``ids``, tracked."""
    with MemoryTracker(model, live=False) as tracker:
        model(input_ids=ids, labels=ids).loss.backward()
    return tracker


def checkpointed(layers, every):
    """A block in which ``layers`` are checkpointed; as they are where ``every`` is None."""
    return nullcontext() if every is None else checkpoint_layers(layers, every)


def adam_step(dtype: torch.dtype, **options):
    """A weight in ``dtype`` after one real AdamW step on gradients of 1e-4, and the optimizer."""
    weight = torch.nn.Parameter(torch.ones(64, 64, dtype=dtype))
    optimizer = torch.optim.AdamW([weight], **options)
    weight.grad = torch.full_like(weight, 1e-4)
    optimizer.step()
    return weight, optimizer


def as_rows(ids: torch.Tensor) -> list[dict]:
    return [{"input_ids": row, "labels": row} for row in ids]


def trained(change: Callable = lambda model: None, **arguments):
    """A ``Trainer`` of a tiny Llama after one step on the CPU with these ``TrainingArguments``."""
    from transformers import Trainer

    model = tiny()
    change(model)
    with (
        silent(),
        quiet_arguments(max_steps=1, per_device_train_batch_size=2, **arguments) as args,
    ):
        trainer = Trainer(model, args, train_dataset=as_rows(token_ids()))
        trainer.train()
    return trainer


def switched_on(trainer) -> str:
    """Which layers' ``gradient_checkpointing`` is on, as text."""
    layers = trainer.model.model.layers
    on = [i for i, layer in enumerate(layers) if layer.gradient_checkpointing]
    return f"layers {', '.join(map(str, on))} of {len(layers)}" if on else "no layer"


def error_of(run: Callable) -> str:
    """What ``run`` raises, as text, or nothing."""
    try:
        run()
    except (TypeError, ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def checkpoint_by_hand(reentrant: bool, model) -> None:
    """torch's ``checkpoint`` around every layer, as one would write it without knowing of the
    cache.
    """
    model.enable_input_require_grads()
    for layer in model.model.layers:
        forward = layer.forward

        def rerun(x, *args, forward=forward, **kwargs):
            return checkpoint(partial(forward, **kwargs), x, *args, use_reentrant=reentrant)

        layer.forward = rerun
