"""Lesson 05's answers about transformers' switches: what ``Trainer``, fp16, the cache and checkpointing's arguments really do.

A tiny Llama is trained for a step with each of them; larger models are predicted for a CUDA card, as in ``lesson_05``.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial

import torch
from torch.utils.checkpoint import checkpoint

from ...measure.tracker import MemoryTracker
from ...planning.cards import CARDS
from ...techniques import accounting
from ...techniques.shapes import SHAPES
from .. import models
from . import Finding, answers, bert_large
from .lesson_01 import gb
from .lesson_05 import activations, predicted, recipe


@contextmanager
def _quiet():
    """No warnings, no log of transformers' and no bars: they would be part of every notebook that shows a claim."""
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


def _tiny():
    return models.tiny_llama(layers=4, hidden=64, heads=4, intermediate=172, vocab=512)


def _ids() -> torch.Tensor:
    return torch.randint(0, 512, (2, 32), generator=torch.Generator().manual_seed(0))


def _trainer(change: Callable = lambda model: None, **arguments):
    """A ``Trainer`` of a tiny Llama after one step on the CPU with these ``TrainingArguments``."""
    from transformers import PrinterCallback, Trainer, TrainingArguments

    model = _tiny()
    change(model)
    with _quiet(), tempfile.TemporaryDirectory() as folder:
        fixed = {"max_steps": 1, "per_device_train_batch_size": 2, "use_cpu": True, "disable_tqdm": True}
        given = TrainingArguments(
            output_dir=folder, report_to="none", save_strategy="no", **fixed, **arguments
        )
        data = [{"input_ids": row, "labels": row} for row in _ids()]
        trainer = Trainer(model=model, args=given, train_dataset=data)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return trainer


def _switched_on(trainer) -> str:
    """Which layers' ``gradient_checkpointing`` is on, as text."""
    layers = trainer.model.model.layers
    on = [i for i, layer in enumerate(layers) if layer.gradient_checkpointing]
    return f"layers {', '.join(map(str, on))} of {len(layers)}" if on else "no layer"


def _error(run: Callable) -> str:
    """What ``run`` raises, as text, or nothing."""
    try:
        run()
    except (TypeError, ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _dtypes(**arguments) -> dict[str, str]:
    """The dtypes that one step of the ``Trainer`` on a float32 model leaves."""
    seen: set[torch.dtype] = set()

    def watch(model):
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(lambda p: seen.add(p.grad.dtype))

    trainer = _trainer(watch, **arguments)
    states = {t.dtype for state in trainer.optimizer.state.values() for t in state.values()}
    kinds = {"weights": {p.dtype for p in trainer.model.parameters()}, "gradients": seen, "states": states}
    return {name: ", ".join(sorted(str(d).removeprefix("torch.") for d in d_)) for name, d_ in kinds.items()}


@answers("C11")
def fp16_halves() -> Finding:
    figures: dict[str, int | float | str] = {}
    ratios = {}
    for checkpointing in (None, "per-layer"):
        full, half = (
            predicted(
                "Llama-3.2-1B", 1, 2048, recipe(precision=precision, checkpointing=checkpointing)
            ).peak.total
            for precision in ("float32", "autocast-fp16")
        )
        ratios[checkpointing] = half / full
        how = "every layer checkpointed" if checkpointing else "no checkpoint"
        figures[f"Llama-3.2-1B, 1 x 2048, {how}: peak in float32 / with fp16"] = f"{full:,} / {half:,}"
    at = {run.name: bert_large.replayed(run)["today"].live for run in bert_large.RUNS}
    for name in ("batch 4", "1 x 4, checkpointing"):
        figures[f"BERT-large, {name}: peak in float32 / with fp16"] = (
            f"{at[name]:,} / {at[f'{name}, fp16']:,}"
        )
    # float16 has no kernels for all of it on the CPU; bf16=True takes the same path through the Trainer.
    figures |= {f"{name} after a Trainer step with bf16=True": d for name, d in _dtypes(bf16=True).items()}
    scaler, weight = torch.amp.GradScaler("cpu"), torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    scaler.scale(weight.float().sum()).backward()
    refused = _error(lambda: scaler.unscale_(torch.optim.SGD([weight], lr=0.1)))
    figures["the loss scaler, given weights in float16"] = refused
    more = at["1 x 4, checkpointing, fp16"] / at["1 x 4, checkpointing"] - 1
    return Finding(
        "does not hold" if min(ratios.values()) > 0.55 else "holds only if",
        "fp16=True is autocast: weights, gradients and Adam's states stay in float32, and a float16 copy of the weights joins them. Only "
        f"activations shrink. A 1.2B Llama on 1 x 2,048 tokens needs {1 - ratios[None]:.0%} less; with checkpointing its peak is "
        f"{ratios['per-layer']:.2f} times what it was; and BERT-large, checkpointed and on one row at a time, needs {more:.0%} more (the "
        "published table has it too: 6,775 MB without fp16, 7,275 with it).",
        figures,
        needs="a card to be seen running; the bytes are predicted",
    )


def _loaded_dtype() -> str:
    with _quiet(), tempfile.TemporaryDirectory() as folder:
        saved = models.tiny_llama(
            layers=1, hidden=16, heads=2, intermediate=32, vocab=64, dtype=torch.float16
        )
        saved.save_pretrained(folder)
        return str(type(saved).from_pretrained(folder).dtype).removeprefix("torch.")


@answers("C12")
def one_row_32_times() -> Finding:
    shape = SHAPES["Llama-2-7B"]
    # Two micro-batches stand for 32: the second one has all that the later ones have.
    found = predicted(
        "Llama-2-7B", 2, 2048, recipe(precision="autocast-fp16", checkpointing="per-layer", accumulation=2)
    )
    resident = sum(accounting.resident_bytes(shape, "autocast-bf16", "adamw").values())
    copies = 2 * (shape.parameters - shape.embedding_parameters)  # the embedding is looked up, not multiplied
    cards = [card.name for card in CARDS.values() if card.nbytes >= found.peak.total]
    return Finding(
        "does not hold",
        f"Weights, gradients and Adam's states stay in float32 and take {gb(resident)} before the first token; one row of 2,048 tokens, "
        f"checkpointed, brings it to {gb(found.peak.total)}, for autocast keeps a float16 copy of the weights ({gb(copies)}) until forward "
        f"ends. All three techniques work on activations alone. Of the cards that the "
        f"course knows, {' and '.join(cards) or 'none'} has room. And a checkpoint that is loaded in float16, as transformers 5 does by "
        "itself, stops at the loss scaler, which refuses gradients in float16.",
        {
            "weights, gradients and Adam states": resident,
            "1 row of 2048 accumulated, each layer checkpointed, fp16: peak": found.peak.total,
            "the same: activations at most, float16 weights among them": activations(found),
            "float16 weights": copies,
            "dtype that from_pretrained gives a checkpoint in float16": _loaded_dtype(),
            "cards with room, by name": ", ".join(cards) or "none",
        },
        needs="a card of that size to be seen running; the bytes are predicted",
    )


def _by_hand(reentrant: bool, model) -> None:
    """torch's ``checkpoint`` around every layer, as one would write it without knowing of the cache."""
    model.enable_input_require_grads()
    for layer in model.model.layers:
        forward = layer.forward

        def rerun(x, *args, forward=forward, **kwargs):
            return checkpoint(partial(forward, **kwargs), x, *args, use_reentrant=reentrant)

        layer.forward = rerun


def _cached_step(use_cache: bool, change: Callable = lambda model: None) -> tuple[int, torch.Tensor]:
    """Peak in bytes and gradient of a step, with the key-value cache on or off."""
    model, ids = _tiny(), _ids()
    model.config.use_cache = use_cache
    change(model)
    with _quiet(), MemoryTracker(model, live=False) as tracker:
        model(input_ids=ids, labels=ids).loss.backward()
    return tracker.peak.total, torch.cat([p.grad.flatten() for p in model.parameters()])


@answers("C43")
def cache_off() -> Finding:
    enable = lambda model: model.activation_checkpointing_enable()  # noqa: E731
    (off, reference), (on, gradient) = _cached_step(False, enable), _cached_step(True, enable)
    same = on == off and torch.equal(gradient, reference)

    def wrong(reentrant: bool) -> float:
        found = _cached_step(True, partial(_by_hand, reentrant))[1]
        return ((found - reference).norm() / reference.norm()).item()

    by_hand = {reentrant: wrong(reentrant) for reentrant in (True, False)}
    trainer = _trainer(lambda model: setattr(model.config, "use_cache", True))
    return Finding(
        "holds only if" if same and by_hand[True] > 0.1 else "holds",
        "you write the checkpoints yourself. transformers' own layers leave the cache out while they checkpoint, with one warning: peak "
        "and gradient are the same whatever use_cache says, and its Trainer sets use_cache to False in any case. With torch's reentrant "
        f"checkpoint around each layer, the second run finds the first one's keys in the cache, which no gradient flows through: it is off "
        f"by {by_hand[True]:.0%} of its length, without a word.",
        {
            "checkpointing as transformers does it: peak, use_cache=False": off,
            "checkpointing as transformers does it: peak, use_cache=True": on,
            "gradients equal in every bit": "yes" if torch.equal(gradient, reference) else "no",
            "config.use_cache, set to True, after a Trainer was made": str(trainer.model.config.use_cache),
            "torch's checkpoint by hand, reentrant, use_cache=True: gradient off by": f"{by_hand[True]:.0%}",
            "the same, use_reentrant=False: gradient off by": f"{by_hand[False]:.0%}",
        },
    )


def _kind(**kwargs) -> str:
    """Which of torch's two checkpoints a model uses after ``activation_checkpointing_enable(kwargs)``."""
    model, ids = _tiny(), _ids()
    with _quiet():
        model.activation_checkpointing_enable(kwargs or None)
        todo, seen = [model(input_ids=ids, labels=ids).loss.grad_fn], set()
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            todo += [before for before, _ in node.next_functions]
    return "reentrant" if any("CheckpointFunction" in type(n).__name__ for n in seen) else "not reentrant"


@answers("C46")
def checkpointing_kwargs() -> Finding:
    def given(**kwargs):
        return _trainer(activation_checkpointing=True, activation_checkpointing_kwargs=kwargs)

    second = _switched_on(given(every_n_layers=2))
    swallowed = _switched_on(given(use_reentrant=False, modules=["self_attn"]))
    refused = _error(lambda: given(modules=["self_attn"]))
    kinds = {"nothing": _kind(), "preserve_rng_state=True": _kind(preserve_rng_state=True)}
    return Finding(
        "does not hold" if swallowed == "layers 0, 1, 2, 3 of 4" else "holds",
        "It takes every_n_layers (one layer in so many), offload, and what torch's checkpoint takes; no key names modules. An unknown key is "
        "an error or, next to use_reentrant=False, handed on to the layers, which swallow it: every layer is checkpointed as before. And any "
        "key of torch's without use_reentrant brings the reentrant checkpoint back.",
        {
            "every_n_layers=2 switches on": second,
            "use_reentrant=False, modules=['self_attn'] switches on": swallowed,
            "modules=['self_attn'] alone": refused,
        }
        | {f"kind of checkpoint with {name} given": kind for name, kind in kinds.items()},
    )


@answers("C47")
def checkpointing_auto() -> Finding:
    found = {value: _switched_on(_trainer(gradient_checkpointing=value)) for value in ("auto", "no", False)}
    always = found["auto"] == found["no"] != found[False]
    return Finding(
        "does not hold" if always else "holds",
        'Nobody looks at the memory. The value is asked whether it is true, which every string with letters in it is: "auto" switches '
        'checkpointing on always, and so does "no".',
        {f"gradient_checkpointing={value!r} switches on": on for value, on in found.items()},
    )


@answers("C56")
def max_seq_length() -> Finding:
    from transformers import TrainingArguments

    error = _error(lambda: TrainingArguments(output_dir="out", max_seq_length=4096))
    fields = [
        name for name in TrainingArguments.__dataclass_fields__ if "seq_len" in name or "max_length" in name
    ]
    return Finding(
        "does not hold" if error else "holds",
        "TrainingArguments raises a TypeError. Rows are as long as the tokenizer cuts them. It was an argument of the SFT trainer of another "
        "library, TRL, whose SFTConfig calls it max_length since (its issue 3910 and pull request 2895).",
        {
            "TrainingArguments(max_seq_length=4096)": error,
            "its fields about lengths": ", ".join(fields) or "none",
        },
    )
