"""The benchmark of optimizers: its bytes against closed forms, and a dry run from a plain checkout."""

from __future__ import annotations

import sys

import pytest
import torch
from benchmark_runs import FOLDER, from_a_plain_checkout

from gradmem_lib.course import models


@pytest.fixture
def benchmark(load, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    return load("optimizers")


@pytest.fixture
def measured(benchmark):
    model = models.tiny_llama(layers=1, hidden=64, heads=4, intermediate=96, vocab=512)
    ids = torch.zeros(1, 8, dtype=torch.long)
    model(input_ids=ids, labels=ids).loss.backward()
    rows = {
        name: benchmark.step_bytes(model, made(model, 1e-3))
        for name, (made, _) in benchmark.OPTIMIZERS.items()
    }
    return model, rows


def test_states_and_temporaries_are_what_closed_forms_say(measured):
    model, rows = measured
    weights, tensors = sum(p.nbytes for p in model.parameters()), len(list(model.parameters()))
    states = {name: row["state bytes"] for name, row in rows.items()}
    extra = {name: row["temporaries of a step, bytes"] for name, row in rows.items()}
    assert states["adamw"] == states["adamw-foreach"] == states["adamw-fused"] == 2 * weights + 4 * tensors
    assert states["lion"] == states["sgd, momentum 0.9"] == weights and states["sgd"] == 0
    assert (
        extra["adamw-foreach"] == weights and extra["adamw-fused"] == extra["sgd"] == extra["adamw-8bit"] == 0
    )
    largest = max(p.nbytes for p in model.parameters())
    assert extra["lion"] == 2 * largest  # the blend, and its sign
    vectors = sum(p.nbytes for p in model.parameters() if p.ndim == 1)
    edges = model.lm_head.weight.nbytes + model.model.embed_tokens.weight.nbytes
    matrices = weights - vectors - edges
    others = sum(p.ndim == 1 for p in model.parameters()) + 2
    assert states["muon, and adamw for the rest"] == matrices + 2 * (vectors + edges) + 4 * others


def test_a_ratio_is_one_of_adamws_within_its_round(benchmark, monkeypatch):
    clock = iter([0, 1, 1, 4, 4, 14, 14, 34, 34, 36, 36, 56])  # rounds of (1, 3), (10, 20), (2, 20)
    monkeypatch.setattr(benchmark.time, "process_time", lambda: next(clock))
    steps = {benchmark.BASE: lambda: None, "other": lambda: None}
    assert benchmark.step_times(steps, rounds=3) == {benchmark.BASE: 1.0, "other": 3.0}


def test_a_run_trains(benchmark):
    fresh, batches, _ = benchmark.data(True, 3)
    held_out = batches.flatten(0, 1)  # what it trains on: random tokens have nothing to generalize
    before = benchmark.loss_on(fresh(), held_out)
    for made, rates in benchmark.OPTIMIZERS.values():
        assert benchmark.trained(fresh, made, 10 * rates[2], batches, held_out) < before


def test_the_dry_run_starts_from_a_plain_checkout_and_writes_nothing(tmp_path):
    written = FOLDER / "results" / "optimizers.json"
    before = written.stat().st_mtime_ns if written.exists() else None
    printed = from_a_plain_checkout(tmp_path, "optimizers.py", "--dry-run", "--steps", "1")
    assert printed.count(" states ") == 10 and "muon" in printed and "wrote" not in printed
    assert (written.stat().st_mtime_ns if written.exists() else None) == before
