"""The benchmark of optimizers: its bytes against closed forms."""

from __future__ import annotations

import sys

import pytest
import torch


@pytest.fixture
def benchmark(load, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    return load("optimizers")


def test_states_and_temporaries_are_what_closed_forms_say(benchmark):
    on = benchmark.subject(True, 1)
    on.loss(on.batches[0]).backward()
    rows = {
        name: benchmark.step_bytes(on.model, made(on.matrices, lr=1e-3))
        for name, (made, _) in benchmark.OPTIMIZERS.items()
    }
    weights, count = sum(p.nbytes for p in on.matrices), len(on.matrices)
    states = {name: row["state bytes"] for name, row in rows.items()}
    extra = {name: row["temporaries of a step, bytes"] for name, row in rows.items()}
    assert (
        states["adamw"]
        == states["adamw-foreach"]
        == states["adamw-fused"]
        == 2 * weights + 4 * count
    )
    assert (
        states["lion"] == states["sgd, momentum 0.9"] == states["muon"] == weights
        and states["sgd"] == 0
    )
    assert (
        extra["adamw-foreach"] == weights
        and extra["adamw-fused"] == extra["sgd"] == extra["adamw-8bit"] == 0
    )
    largest = max(p.nbytes for p in on.matrices)
    assert extra["lion"] == 2 * largest  # the blend, and its sign
    assert (
        extra["adamw"] == 3 * largest
    )  # the root, what it is divided to, and the last parameter's, which its name still holds


def test_the_last_layers_behind_stored_states_are_the_whole_model(benchmark):
    from gradmem_lib.course.material import models

    on = benchmark.subject(True, 2)
    whole = models.tiny_llama(layers=3, hidden=64, heads=4, intermediate=96, vocab=512)
    for batch in [*on.batches, *on.held_out]:
        with torch.no_grad():
            assert on.loss(batch).item() == pytest.approx(
                whole(input_ids=batch[1], labels=batch[1]).loss.item(), rel=1e-6
            )
    assert len(on.matrices) == 14 and all(p.requires_grad for p in on.matrices)


def test_a_run_trains_and_the_next_starts_where_it_did(benchmark):
    on = benchmark.subject(True, 3)
    on.held_out = on.batches  # random tokens have nothing to generalize
    before = on.held_out_loss()
    for made, rates in benchmark.OPTIMIZERS.values():
        assert not rates or benchmark.trained(on, made, rates[2]) < before
    on.reset()
    assert on.held_out_loss() == before
