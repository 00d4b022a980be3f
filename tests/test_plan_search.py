"""The search finds what trying every recipe finds, and the estimates behind it are those made by hand."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cache

import pytest

from gradmem_lib.course import models
from gradmem_lib.planning.cards import Card
from gradmem_lib.planning.cost import beyond, count, seconds_per_token
from gradmem_lib.planning.options import EQUAL_TIME, Option, _changes
from gradmem_lib.planning.plan import plan
from gradmem_lib.planning.search import Search
from gradmem_lib.prediction.predict import predict

LLAMA = dict(layers=2, hidden=32, heads=4, intermediate=64, vocab=256)
CARD = Card("a card", 2**40, 100e12, 20e12, 1e12, (8, 6))


@pytest.fixture(scope="module")
def predicted():
    """``predict`` that remembers all its answers."""

    config = models.tiny_llama(**LLAMA).config

    @cache
    def answer(**asked):
        return predict(config, **asked)

    return config, lambda given, **asked: answer(**asked)


def brute_force(config, remembered, card: Card, rows: int, method: str, target: str) -> list[Option]:
    """Every recipe that the planner may propose, with every micro-batch."""
    search = Search(count(config), card, 16, rows, target)
    options = []
    for family in search.families(method):
        for recipe in search.ladder(family):
            for micro in search.micro_batches[-1:] if recipe.in_backward else search.micro_batches:
                recipe = replace(recipe, accumulation=rows // micro)
                found = remembered(config, batch_size=rows, seq_len=16, recipe=recipe, target=target)
                parts = beyond(found, card.capability)
                seconds = seconds_per_token(search.work, recipe, card, micro, 16)
                needs = found.peak.total + sum(parts.values())
                options.append(Option(recipe, method, micro, seconds, card.nbytes, found, parts, needs))
    return options


@pytest.mark.parametrize("method", ["lora", "full"])
def test_the_best_found_is_the_best_of_all(method, predicted, monkeypatch):
    """On cards of every size from too small to ample, so that each step of the search is the one that decides.

    Best: nothing that fits is faster by more than an estimate can tell, or as fast and closer to plain training.
    """
    if method == "full":
        if not os.environ.get("GRADMEM_ALL"):
            pytest.skip("a hundred predictions: make nightly")
        monkeypatch.setattr("gradmem_lib.planning.search.OPTIMIZERS", ("adamw-fused", "adafactor-torch"))
    config, remembered = predicted
    monkeypatch.setattr("gradmem_lib.planning.search.predict", remembered)
    everything = brute_force(config, remembered, CARD, 2, method, "cpu")
    sizes = sorted({option.needs for option in everything})
    chosen = set()
    for nbytes in [sizes[0] - 1, *sizes[:: max(1, len(sizes) // 25)], sizes[-1]]:
        card = replace(CARD, nbytes=nbytes)
        fits = [replace(o, card_bytes=nbytes) for o in everything if o.needs <= nbytes]
        made = plan(config, card=card, seq_len=16, global_batch=2, method=method, target="cpu")
        assert bool(made.best) == bool(fits), nbytes
        if not fits:
            assert min(everything, key=lambda o: o.needs).needs == made.closest.needs
            continue
        best = next(o for o in fits if (o.recipe, o.micro_batch) == (made.best.recipe, made.best.micro_batch))
        chosen.add(best.recipe)
        assert (made.best.needs, made.best.seconds) == (best.needs, best.seconds)
        assert best.seconds <= min(o.seconds for o in fits) * EQUAL_TIME, nbytes
        assert not [o for o in fits if o.seconds <= best.seconds and _changes(o) < _changes(best)], nbytes
        faster = made.next_faster
        assert faster is None or (faster.needs > nbytes and faster.seconds < best.seconds)
    assert len(chosen) > 3
