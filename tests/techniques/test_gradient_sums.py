"""Gradients of 16-bit weights that add up in float32, against sums of the same gradients in
float64; their bytes, measured and predicted.
"""

import copy

import pytest
import torch
from support.gradients import error, gradient
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradmem_lib import (
    MemoryTracker,
    Recipe,
    accumulate_gradients,
    next_token_loss,
    predict,
    prepare,
    split,
    step,
)
from gradmem_lib.compat.fake_ranks import fake_process_group
from gradmem_lib.course import models

PIECES, TOKENS = 16, 8


def small(dtype=torch.bfloat16):
    return models.tiny_gpt2(layers=1, hidden=32, heads=2, vocab=64, dtype=dtype)


def batch(rows=PIECES):
    ids = torch.randint(0, 64, (rows, TOKENS), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def summed_in_float64(model):
    """What each micro-batch's backward gives, added up by this test."""
    total = 0
    for micro in split(batch(), 1):
        loss, _ = next_token_loss(model, micro)
        (loss * (1 / (PIECES * (TOKENS - 1)))).backward()
        total = total + gradient(model)
        model.zero_grad()
    return total


def accumulated(model, **options):
    accumulate_gradients(
        split(batch(), 1),
        lambda micro: next_token_loss(model, micro),
        total_items=PIECES * (TOKENS - 1),
        model=model,
        **options,
    )
    return gradient(model)


def test_each_sum_is_rounded_once():
    dtype, model = torch.bfloat16, small()
    expected = summed_in_float64(model)
    plain = error(accumulated(model), expected)
    model.zero_grad()
    found = accumulated(model, float32_sums=True)
    assert {p.grad.dtype for p in model.parameters()} == {dtype}
    # Rounding to the nearest number is off by half a gap at most.
    assert ((found - expected).abs() <= 0.51 * torch.finfo(dtype).eps * expected.abs() + 1e-7).all()
    assert error(found, expected) < 0.6 * plain


def test_float32_weights_and_frozen_ones_are_left_as_they_are():
    mixed = nn.ModuleList([nn.Linear(3, 3).bfloat16(), nn.Linear(3, 1), nn.Linear(2, 2).bfloat16()])
    x = torch.randn(4, 3)

    def loss_and_count(rows):
        return mixed[1](mixed[0](rows.bfloat16()).float()).square().sum(), len(rows)

    accumulate_gradients(x.split(1), loss_and_count, total_items=4, model=mixed, float32_sums=True)
    assert mixed[0].weight.grad.dtype == torch.bfloat16
    assert mixed[1].weight.grad.dtype == torch.float32
    assert mixed[2].weight.grad is None  # not used


def test_everything_is_undone_after_ctrl_c():
    model = small()

    def interrupted(micro):
        if any(hasattr(p, "gradient_sum") for p in model.parameters()):
            raise KeyboardInterrupt
        return next_token_loss(model, micro)

    with pytest.raises(KeyboardInterrupt):
        accumulate_gradients(
            split(batch(), 1), interrupted, total_items=1, model=model, float32_sums=True
        )
    assert not any(hasattr(p, "gradient_sum") for p in model.parameters())
    model.zero_grad()
    expected = accumulated(small())
    assert torch.equal(accumulated(model), expected)


def test_the_bytes_are_predicted():
    model, rows = small(), batch(12)
    weights = sum(p.numel() for p in model.parameters())
    peaks = []
    for sums in (False, True):
        recipe = Recipe(precision="bf16", accumulation=2, float32_sums=sums)
        predicted = predict(
            copy.deepcopy(model), batch_size=12, seq_len=TOKENS, recipe=recipe, target="cpu"
        )
        prepared = prepare(copy.deepcopy(model), recipe)
        step(prepared.model, prepared.optimizer, rows, recipe)
        with MemoryTracker(prepared.model, prepared.optimizer, live=False) as tracker:
            step(prepared.model, prepared.optimizer, rows, recipe)
        assert predicted.peak == tracker.peak
        peaks.append(tracker.peak)
    gradients = [peak.by_category["gradients"] for peak in peaks]
    assert gradients == [2 * weights, 4 * weights]


def test_what_cannot_be_is_refused():
    model = small()
    with pytest.raises(ValueError, match="needs the total before the first backward"):
        accumulate_gradients([1], lambda m: m, model=model, float32_sums=True)
    with pytest.raises(ValueError, match="give model="):
        accumulate_gradients([1], lambda m: m, total_items=1, float32_sums=True)
    with fake_process_group(2, 0) as mesh:
        ddp = DistributedDataParallel(model, process_group=mesh.get_group())
        with pytest.raises(ValueError, match="several processes train together"):
            accumulate_gradients([1], lambda m: m, total_items=1, model=ddp, float32_sums=True)
    for other in ({"in_backward": True}, {"sharding": "ddp"}):
        with pytest.raises(ValueError, match="float32_sums=True adds up the gradients"):
            Recipe(precision="bf16", float32_sums=True, **other)
