"""Runs and predictions that the answers to claims of several lessons share."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from functools import cache, partial

import torch
from torch.utils.checkpoint import checkpoint

from ....planning.models import find_model
from ....prediction.predict import Prediction, predict
from ....training.recipe import Recipe
from ...material import models


def recipe(**changes) -> Recipe:
    return Recipe(**({"precision": "bf16", "optimizer": "adamw-fused"} | changes))


@cache
def predicted(model: str, rows: int, seq_len: int, recipe: Recipe) -> Prediction:
    return predict(
        find_model(model)[0], batch_size=rows, seq_len=seq_len, recipe=recipe, target="cuda"
    )


def activations(prediction: Prediction) -> int:
    """The most bytes of activations at any moment."""
    return max(prediction.timeline.by_category["activations"])


@contextmanager
def silent():
    """No warnings, no log of transformers' and no bars: they would be part of every notebook that
    shows a claim.
    """
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def tiny():
    return models.tiny_llama(layers=4, hidden=64, heads=4, intermediate=172, vocab=512)


def token_ids() -> torch.Tensor:
    return torch.randint(0, 512, (2, 32), generator=torch.Generator().manual_seed(0))


def trained(change: Callable = lambda model: None, **arguments):
    """A ``Trainer`` of a tiny Llama after one step on the CPU with these ``TrainingArguments``."""
    from transformers import PrinterCallback, Trainer, TrainingArguments

    model = tiny()
    change(model)
    with silent(), tempfile.TemporaryDirectory() as folder:
        fixed = {
            "max_steps": 1,
            "per_device_train_batch_size": 2,
            "use_cpu": True,
            "disable_tqdm": True,
        }
        given = TrainingArguments(
            output_dir=folder, report_to="none", save_strategy="no", **fixed, **arguments
        )
        data = [{"input_ids": row, "labels": row} for row in token_ids()]
        trainer = Trainer(model=model, args=given, train_dataset=data)
        trainer.remove_callback(PrinterCallback)
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


@cache
def c12_prediction(precision: str) -> Prediction:
    """C12's own example. Two micro-batches stand for 32: the second one has all that the later ones
    have.
    """
    way = recipe(precision=precision, checkpointing="per-layer", accumulation=2)
    return predicted("Llama-2-7B", 2, 2048, way)


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
