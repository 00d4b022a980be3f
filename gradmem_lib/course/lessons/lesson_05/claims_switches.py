"""Lesson 05's answers about transformers' switches: what ``Trainer``, fp16, the cache and
checkpointing's arguments really do.

A tiny Llama is trained for a step with each of them; larger models are predicted for a CUDA card,
as in lesson 06.
"""

import tempfile
from collections.abc import Callable
from functools import partial

import torch

from ....planning.cards import CARDS
from ....training.trainer_arguments import CHECKPOINTING_ARGUMENT
from ...ledger import Finding, answers
from ...ledger.finding import each, fits, gb, more, some, yes
from ...machine.compat import enable_checkpointing
from ...material.shapes import SHAPES
from ..shared.claim_runs import (
    activations,
    checkpoint_by_hand,
    error,
    error_of,
    gradient,
    name_of,
    resident,
    silent,
    switched_on,
    tiny,
    token_ids,
    tracked_step,
    trained,
    trio,
)


def _named_alone(on: str) -> bool:
    """Whether some layers stayed off when modules were named."""
    return on != "layers 0, 1, 2, 3 of 4"


def _loaded_dtype() -> str:
    with silent(), tempfile.TemporaryDirectory() as folder:
        saved = tiny().half()
        saved.save_pretrained(folder)
        return name_of(type(saved).from_pretrained(folder).dtype)


@answers("C12")
def one_row_32_times() -> Finding:
    shape = SHAPES["Llama-2-7B"]
    found = trio(precision="autocast-fp16")
    kept = resident(shape, "autocast-bf16")
    # the embedding is looked up, not multiplied
    copies = 2 * (shape.parameters - shape.embedding_parameters)
    cards = [card.name for card in CARDS.values() if card.nbytes >= found.peak.total]
    consumer = max(card.nbytes for card in CARDS.values() if card.name.startswith("RTX"))
    return Finding(
        own=fits("Llama-2-7B with all three", "to fit a consumer card", consumer, found.peak.total),
        beyond=fits("the same, before the first token", "to fit a consumer card", consumer, kept),
        says=f"""
            fails: All three reduce only activations; weights, gradients and Adam's states alone
                do not fit.
            holds: It fits the largest consumer card.
            why: Weights, gradients and states stay in float32. One row of 2,048 tokens and a
                float16 copy of the weights ({gb(copies)}) are added; autocast keeps this copy until
                forward ends. Of the cards that the course knows, {" and ".join(cards)}
                has room. If a model is saved in float16, transformers 5 also loads it in float16,
                and then the loss scaler refuses the float16 gradients.
            needs: a card of that size to see it run; the bytes are predicted
            """,
        figures={
            "weights, gradients and Adam states": kept,
            "1 row of 2048 accumulated, each layer checkpointed, fp16: peak": found.peak.total,
            "the same: activations at most, float16 weights among them": activations(found),
            "float16 weights": copies,
            "dtype that from_pretrained gives a checkpoint in float16": _loaded_dtype(),
        },
    )


def _cached_step(use_cache: bool, change: Callable):
    """Peak in bytes and gradient of a step, with the key-value cache on or off."""
    model = tiny()
    model.config.use_cache = use_cache
    change(model)
    with silent():
        peak = tracked_step(model, token_ids()).peak.total
    return peak, gradient(model)


def _eager_by_hand(model) -> None:
    model.set_attn_implementation("eager")
    checkpoint_by_hand(False, model)


@answers("C43")
def cache_off() -> Finding:
    off, reference = _cached_step(False, enable_checkpointing)
    on, cached = _cached_step(True, enable_checkpointing)
    by_hand = {}
    for kind in (True, False):
        left_off, right = _cached_step(False, partial(checkpoint_by_hand, kind))
        peak, found = _cached_step(True, partial(checkpoint_by_hand, kind))
        by_hand[kind] = error(found, right), peak / left_off
    stopped = error_of(lambda: _cached_step(True, _eager_by_hand))
    trainer = trained(lambda model: setattr(model.config, "use_cache", True))
    return Finding(
        own=(
            some("gradient's error with the cache on", error(cached, reference)),
            more("peak, cache on / off", on / off),
        ),
        where=some("gradient's error, reentrant by hand", by_hand[True][0]),
        says="""
            only if: you write the checkpoints by hand; transformers' layers skip the cache.
            holds: With the cache on, transformers' own checkpoints give wrong gradients or need
                more memory.
            fails: The cache does no harm in any of these ways.
            why: transformers warns once, and its Trainer sets use_cache to False unless you pass
                use_cache=True. With torch's checkpoint written by hand around each layer, the
                second run finds the keys of the first run in the cache. Eager attention, or a
                padding mask, then ends in an error. Fused attention without a mask runs on without
                a warning: with the reentrant kind the gradient is wrong, and with the other kind
                the peak is higher.
            """,
        figures={
            "checkpointing as transformers does it: peak, use_cache=False": off,
            "checkpointing as transformers does it: peak, use_cache=True": on,
            "gradients equal in every bit": torch.equal(cached, reference),
            "config.use_cache, set to True, after a Trainer was made": str(
                trainer.model.config.use_cache
            ),
            "by hand, eager attention, use_cache=True": stopped,
        }
        | each(
            "by hand, use_reentrant={}: gradient's error, peak with the cache / without",
            by_hand,
            "{:.1%}, {:.2f}",
        ),
    )


def _kind(**kwargs) -> str:
    """Which of torch's two checkpoints a model uses after
    ``activation_checkpointing_enable(kwargs)``: the reentrant one refuses ``torch.autograd.grad``.
    """
    model, ids = tiny(), token_ids()
    with silent():
        enable_checkpointing(model, kwargs or None)
        loss = model(input_ids=ids, labels=ids).loss
        refused = error_of(lambda: torch.autograd.grad(loss, model.get_input_embeddings().weight))
    return "reentrant" if refused else "not reentrant"


@answers("C46")
def checkpointing_kwargs() -> Finding:
    def given(**kwargs):
        name = CHECKPOINTING_ARGUMENT
        return switched_on(trained(**{name: True, f"{name}_kwargs": kwargs}))

    second = given(every_n_layers=2)
    swallowed = given(use_reentrant=False, modules=["self_attn"])
    refused = error_of(lambda: given(modules=["self_attn"]))
    kinds = {"nothing": _kind(), "preserve_rng_state=True": _kind(preserve_rng_state=True)}
    return Finding(
        own=(
            yes("a list of modules is taken", not refused),
            yes("it chooses, beside use_reentrant=False", _named_alone(swallowed)),
        ),
        beyond=yes("every_n_layers=2 chooses", _named_alone(second)),
        says="""
            fails: No key names modules: you can choose every n-th layer, but not the attention
                alone.
            holds: Only the named modules are checkpointed.
            why: The kwargs take every_n_layers, offload, and the keys of torch's checkpoint. An
                unknown key alone is an error. Together with use_reentrant=False, it is passed on to
                the layers, which ignore it: every layer is checkpointed as before. A key of torch's
                checkpoint without use_reentrant brings the reentrant kind back.
            """,
        figures={
            "every_n_layers=2 switches on": second,
            "use_reentrant=False, modules=['self_attn'] switches on": swallowed,
            "modules=['self_attn'] alone": refused,
        }
        | each("kind of checkpoint with {} given", kinds),
    )


@answers("C56")
def max_seq_length() -> Finding:
    from transformers import TrainingArguments

    error = error_of(lambda: TrainingArguments(output_dir="out", max_seq_length=4096))
    return Finding(
        own=yes("TrainingArguments takes max_seq_length", not error),
        says="""
            fails: TrainingArguments raises a TypeError; the tokenizer decides the rows' length.
            holds: TrainingArguments takes it.
            why: max_seq_length was an argument of the SFT trainer in another library, TRL.
                TRL's SFTConfig now calls it max_length (TRL's issue 3910 and pull request 2895).
            """,
        figures={"TrainingArguments(max_seq_length=4096)": error},
    )
