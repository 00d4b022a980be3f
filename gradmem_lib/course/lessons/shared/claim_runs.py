"""Runs and predictions that the answers to claims of several lessons share."""

from __future__ import annotations

import copy
import json
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
from ...machine.course_files import course_folder
from ...material import accounting, models


def recorded(name: str) -> dict | None:
    """What ``benchmarks/<name>.py`` wrote, or None where the course's folder has no record."""
    record = course_folder("benchmarks/results") / f"{name}.json"
    return json.loads(record.read_text(encoding="utf-8")) if record.is_file() else None


def where_recorded(found: dict) -> str:
    """A record's clock, device and date."""
    return f"{found['clock']}, {found['where']['device']}, {found['where']['date']}"


def gradient(model) -> torch.Tensor:
    """All gradients of a model in a row, which it then has no more."""
    found = torch.cat([p.grad.flatten() for p in model.parameters()])
    model.zero_grad()
    return found


def error(found: torch.Tensor, right: torch.Tensor) -> float:
    """The length of the difference, as a share of ``right``'s."""
    return ((found - right).norm() / right.norm()).item()


def recipe(**changes) -> Recipe:
    return Recipe(**({"precision": "bf16", "optimizer": "adamw-fused"} | changes))


@cache
def predicted(model: str, rows: int, seq_len: int, recipe: Recipe) -> Prediction:
    config = copy.deepcopy(find_model(model)[0])
    # Rows may be longer than the model was made for.
    config.max_position_embeddings = max(seq_len, config.max_position_embeddings)
    return predict(config, batch_size=rows, seq_len=seq_len, recipe=recipe, target="cuda")


def activations(prediction: Prediction) -> int:
    """The most bytes of activations at any moment."""
    return max(prediction.timeline.by_category["activations"])


def resident(shape, precision: str) -> int:
    """Bytes of weights, gradients and AdamW's states, by the closed forms."""
    return sum(accounting.resident_bytes(shape, precision).values())


def peak_of(shape, rows: int, seq_len: int, precision: str = "bf16", checkpointing=None):
    """The peak of a step by the closed forms."""
    return accounting.estimate(
        shape, batch_size=rows, seq_len=seq_len, precision=precision, checkpointing=checkpointing
    )


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@contextmanager
def seeded():
    """Random numbers from seed 0 in the block, and the outer ones go on after it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


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


def token_ids(rows: int = 2, seq_len: int = 32, vocab: int = 512) -> torch.Tensor:
    return torch.randint(0, vocab, (rows, seq_len), generator=torch.Generator().manual_seed(0))


def one_step(model, rows: list[dict], folder: str, **arguments):
    """A silent ``Trainer`` of ``model`` on the CPU, of one step where nothing else is said."""
    from transformers import PrinterCallback, Trainer, TrainingArguments

    fixed = {"max_steps": 1, "use_cpu": True, "disable_tqdm": True, "report_to": "none"}
    given = TrainingArguments(folder, save_strategy="no", **fixed | arguments)
    trainer = Trainer(model=model, args=given, train_dataset=rows, eval_dataset=rows)
    trainer.remove_callback(PrinterCallback)
    return trainer


def as_rows(ids: torch.Tensor) -> list[dict]:
    return [{"input_ids": row, "labels": row} for row in ids]


def trained(change: Callable = lambda model: None, **arguments):
    """A ``Trainer`` of a tiny Llama after one step on the CPU with these ``TrainingArguments``."""
    model = tiny()
    change(model)
    with silent(), tempfile.TemporaryDirectory() as folder:
        rows = as_rows(token_ids())
        trainer = one_step(model, rows, folder, per_device_train_batch_size=2, **arguments)
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
