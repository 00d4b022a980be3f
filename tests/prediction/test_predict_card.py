"""Predictions for a card: what its kernels keep, and what its allocator reserves."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from support.predicted import BATCH, SEQ, config

from gradmem_lib import Recipe, predict
from gradmem_lib.model.classes import model_class
from gradmem_lib.prediction import allocator
from gradmem_lib.prediction.extrapolation import BYTES
from gradmem_lib.prediction.trace import traced


def on_card(family: str, **settings):
    return predict(
        config(family), batch_size=BATCH, seq_len=SEQ, target="cuda", recipe=Recipe(**settings)
    )


def test_cuda_counts_whole_blocks():
    prediction = on_card("gpt2", precision="bf16", checkpointing="per-layer")
    assert not (prediction.timeline.rows[:, BYTES] % 512).any()
    on_cpu = predict(
        config("gpt2"), batch_size=BATCH, seq_len=SEQ, target="cpu", recipe=Recipe(precision="bf16")
    )
    assert prediction.peak.by_category["parameters"] > on_cpu.peak.by_category["parameters"]


def test_step_counters_stay_on_the_host_unless_fused():
    plain, fused = (
        on_card("llama", optimizer=name).current.by_category for name in ("adamw", "adamw-fused")
    )
    tensors = sum(1 for _ in model_class(config("llama"))(config("llama")).parameters())
    assert fused["optimizer"] - plain["optimizer"] == 512 * tensors


def live(requests: list[int]) -> list[int]:
    """The bytes that are held after each request."""
    sizes, total, held = [], 0, []
    for request in requests:
        sizes += [request] if request >= 0 else []
        total += request if request >= 0 else -sizes[-1 - request]
        held.append(total)
    return held


@pytest.mark.parametrize(("k", "some"), [(1, None), (2, None), (5, None), (5, "first-1")])
def test_what_is_asked_of_the_allocator_is_what_the_timeline_holds(k, some):
    recipe = Recipe(precision="bf16", optimizer="adamw-foreach", accumulation=k, checkpointing=some)
    predicted = predict(config("gpt2"), batch_size=2 * k, seq_len=SEQ, target="cuda", recipe=recipe)
    held = live(predicted.requests())
    assert (max(held), held[-1]) == (predicted.peak.total, predicted.current.total)
    every = traced(predicted._question, None).requests
    assert len(every) > len(predicted.requests()) or k <= 2
    assert predicted.replay_allocator() == allocator.replayed(every)


def test_the_target_is_the_card_where_there_is_one(monkeypatch):
    for card, target in ((False, "cpu"), (True, "cuda")):
        cuda = SimpleNamespace(
            is_available=lambda card=card: card
        )  # asked by predict alone: PyTorch itself would look for the card
        monkeypatch.setattr(
            "gradmem_lib.prediction.predict.torch", SimpleNamespace(**vars(torch) | {"cuda": cuda})
        )
        assert predict(config("gpt2"), batch_size=2, seq_len=8).target == target
