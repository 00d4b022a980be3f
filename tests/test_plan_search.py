"""The search finds what trying every recipe finds."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
from families import OLDER
from nightly import ALL, each

from gradmem_lib.course import models
from gradmem_lib.measure.timeline import MemorySnapshot
from gradmem_lib.names import CATEGORIES, PHASES, SELECTIVE
from gradmem_lib.planning.cards import Card
from gradmem_lib.planning.cost import beyond, count, resident_bytes, run_again, seconds_per_token
from gradmem_lib.planning.options import EQUAL_TIME, Option, changes
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


def brute_force(
    config, remembered, card: Card, rows: int, method: str, target: str, seq_len=16, cards=1
) -> list[Option]:
    """Every recipe that the planner may propose, with every micro-batch."""
    search = Search(count(config), card, seq_len, rows * cards, target, cards)
    ranks = {"ranks": cards} if cards > 1 else {}
    options = []
    for family in search.families(method):
        for chunked in (False, True):
            for recipe in search.ways(replace(family, chunked_loss=chunked)):
                found = remembered(
                    config, batch_size=rows, seq_len=seq_len, recipe=recipe, target=target, **ranks
                )
                parts = beyond(found, card.capability)
                micro = rows // recipe.accumulation
                seconds = seconds_per_token(search.work, recipe, card, micro, seq_len, cards=cards)
                options.append(Option(recipe, micro, seconds, card.nbytes, found, parts, cards))
    return options


def check(everything: list[Option], nbytes: int, made) -> None:
    """Nothing that fits is faster than the plan's best by more than an estimate can tell, or as fast and closer to plain
    training. Optimizers in backward, which ``Trainer`` has not, are for where nothing else fits."""
    fits = [replace(o, card_bytes=nbytes) for o in everything if o.needs <= nbytes]
    fits = [o for o in fits if not o.recipe.in_backward] or fits
    assert bool(made.best) == bool(fits), nbytes
    if not fits:
        assert min(everything, key=lambda o: o.needs).needs == made.closest.needs
        return
    # A part of each layer that runs again is not in the table: it is taken where it is faster than anything there.
    best = next((o for o in fits if o.recipe == made.best.recipe), made.best)
    less = (
        (*SELECTIVE, "first-1") if OLDER else SELECTIVE
    )  # one layer in two is not among the older one's ways
    assert best in fits or (best.fits and best.recipe.checkpointing in less)
    assert (made.best.needs, made.best.seconds) == (best.needs, best.seconds)
    assert best.seconds <= min(o.seconds for o in fits) * EQUAL_TIME, nbytes
    least = changes(best.recipe)
    assert not [o for o in fits if o.seconds <= best.seconds and changes(o.recipe) < least], nbytes
    faster = made.next_faster
    assert faster is None or (faster.needs > nbytes and faster.seconds < best.seconds)


@pytest.mark.parametrize("method", ["qlora", "lora", "full"])
def test_the_best_found_is_the_best_of_all(method, predicted, monkeypatch):
    """On cards of every size from too small to ample, so that each step of the search is the one that decides."""
    if method != "qlora" and not ALL:
        pytest.skip("many predictions: make nightly")
    if method == "full":
        monkeypatch.setattr("gradmem_lib.planning.search.OPTIMIZERS", ("adamw-fused", "adafactor-torch"))
    config, remembered = predicted
    monkeypatch.setattr("gradmem_lib.planning.search.predict", remembered)
    rows = 4 if method == "qlora" and ALL else 2
    everything = brute_force(config, remembered, CARD, rows, method, "cpu")
    sizes = sorted({option.needs for option in everything})
    chosen = set()
    for nbytes in [sizes[0] - 1, *sizes[:: max(1, len(sizes) // 25)], sizes[-1]]:
        card = replace(CARD, nbytes=nbytes)
        made = plan(config, card=card, seq_len=16, global_batch=rows, method=method, target="cpu")
        check(everything, nbytes, made)
        chosen.add(made.best and made.best.recipe)
    assert len(chosen) > 3


def pretended(work):
    """A model of memory in place of a prediction: four moments of a step, by counted sizes."""

    def answer(config, *, batch_size, seq_len, recipe, target, ranks=1):
        tokens = batch_size // recipe.accumulation * seq_len
        held = resident_bytes(work, recipe, ranks)
        layers = 3.0 * tokens * work.passed
        kept = (1 - run_again(work, recipe)) * layers + 2 * tokens * work.head / work.vocabulary
        layer = layers / work.layers
        loss = (1 if recipe.chunked_loss else 8) * tokens * work.vocabulary
        before = held["gradients"] if recipe.accumulation > 1 else 0
        scratch = 4 * max(map(np.prod, work.sizes)) * (recipe.optimizer != "adamw-fused")
        moments = [  # phase, gradients, activations, temporaries
            ("forward", before, kept + loss, 0),
            ("backward", max(before, held["gradients"] // 2), kept / 2 + layer, loss / 2),
            ("backward", held["gradients"], layer, layer),
            ("optimizer_step", held["gradients"], 0, scratch),
        ]
        rows = np.array(
            [
                [i, PHASES.index(phase), 0, held["parameters"], gradients, held["optimizer"], kept, extra, 64]
                for i, (phase, gradients, kept, extra) in enumerate(moments)
            ],
            dtype=np.int64,
        )
        rows[:, 2] = rows[:, 3:].sum(axis=1)
        at = rows[rows[:, 2].argmax()]
        peak = MemorySnapshot(int(at[2]), dict(zip(CATEGORIES, at[3:].tolist(), strict=True)), PHASES[at[1]])
        return SimpleNamespace(target=target, timeline=SimpleNamespace(rows=rows), peak=peak, moved=0)

    return answer


@pytest.mark.parametrize(
    "method, seq_len, cards",
    each(
        2,
        [
            ("full", 4, 1),
            ("full", 200, 1),
            ("lora", 200, 1),
            ("lora", 4, 1),
            ("qlora", 4, 4),
            ("qlora", 200, 1),
            ("full", 200, 2),
            ("qlora", 4, 1),
        ],
    ),
)
def test_the_best_found_is_the_best_of_all_on_every_card(method, seq_len, cards, predicted, monkeypatch):
    """With bytes from a formula, so that hundreds of cards cost nothing."""
    config, _ = predicted
    asked = []

    def answer(*args, **kwargs):
        asked.append(kwargs["recipe"])
        return formula(*args, **kwargs)

    formula = pretended(count(config))
    monkeypatch.setattr("gradmem_lib.planning.search.predict", answer)
    everything = brute_force(config, formula, CARD, 12, method, "cpu", seq_len, cards)
    sizes = sorted({option.needs for option in everything})
    chosen, plans = set(), 0
    for nbytes in [sizes[0] - 1, *sizes[:: max(1, len(sizes) // 60)], sizes[-1]]:
        card = replace(CARD, nbytes=nbytes)
        made = plan(
            config,
            card=card,
            seq_len=seq_len,
            global_batch=12 * cards,
            method=method,
            target="cpu",
            cards=cards,
        )
        check(everything, nbytes, made)
        chosen.add(made.best and made.best.recipe)
        plans += 1
    assert len(chosen) > 5
    assert len(asked) < len(everything) * plans / 4  # most of it without a prediction


def first_k(made, layers: int, rows: int) -> list:
    """Of the best recipe's kind, each number of layers run again, in micro-batches as large and smaller."""
    plain = replace(made.best.recipe, checkpointing=None, every_n_layers=None)
    return [
        replace(plain, accumulation=n, checkpointing=f"first-{k}")
        for n in range(plain.accumulation, rows + 1)
        if rows % n == 0
        for k in range(1, layers)
    ]


@pytest.mark.parametrize("method, cards", [("full", 1), ("lora", 1), ("lora", 2)])
def test_no_smaller_number_of_layers_run_again_is_faster_and_fits(method, cards, monkeypatch):
    """On cards of every size, with bytes from a formula."""
    config, rows = models.tiny_llama(**LLAMA | {"layers": 7}).config, 4
    work = count(config)
    formula = pretended(work)
    monkeypatch.setattr("gradmem_lib.planning.search.predict", formula)
    everything = brute_force(config, formula, CARD, rows, method, "cpu", 200, cards)
    sizes = sorted({option.needs for option in everything})
    found = set()
    for nbytes in sizes[:: max(1, len(sizes) // 30)]:
        sized = {"seq_len": 200, "global_batch": rows * cards, "target": "cpu", "cards": cards}
        made = plan(config, card=replace(CARD, nbytes=nbytes), method=method, **sized)
        found.add(made.best.recipe.checkpointing)
        if made.best.recipe.checkpointing is None and made.best.recipe.every_n_layers is None:
            continue
        for recipe in first_k(made, 7, rows):
            needs = formula(
                config, batch_size=rows, seq_len=200, recipe=recipe, target="cpu", ranks=cards
            ).peak.total
            micro = rows // recipe.accumulation
            seconds = seconds_per_token(work, recipe, CARD, micro, 200, cards=cards)
            assert needs > nbytes or seconds >= made.best.seconds, (nbytes, made.best.recipe, recipe)
    assert len([way for way in found if str(way).startswith("first-")]) > (1 if OLDER else 2)


def test_the_layers_run_again_are_as_few_as_really_fit():
    """Predicted by itself, one layer less needs more than there is."""
    config = models.tiny_llama(**LLAMA | {"layers": 6}).config
    sizes = {"batch_size": 2, "seq_len": 64, "target": "cpu"}
    recipe = plan(config, card=2**40, method="qlora", seq_len=64, global_batch=2, target="cpu").best.recipe
    halves = replace(recipe, accumulation=2)
    most, least = (
        predict(config, recipe=replace(halves, checkpointing=how), **sizes).peak.total for how in (None, "per-layer")
    )  # fmt: skip
    best = plan(
        config, card=(3 * most + least) // 4, method="qlora", seq_len=64, global_batch=2, target="cpu"
    ).best
    k = int(best.recipe.checkpointing.removeprefix("first-"))
    needs = [
        predict(config, recipe=replace(best.recipe, checkpointing=f"first-{n}"), **sizes).peak.total
        for n in (k - 1, k)
    ]
    assert 1 < k < 6 and needs[1] == best.needs <= (3 * most + least) // 4 < needs[0]


def test_what_one_recipe_says_that_another_needs_at_least_it_really_needs():
    config = models.tiny_llama(layers=6, hidden=32, heads=4, intermediate=128, vocab=64).config
    search = Search(count(config), CARD, 64, 4, "cpu")
    ways = [{}, {"every_n_layers": 2}, *({"checkpointing": f"first-{k}"} for k in (1, 2, 4))]
    ways += [{"checkpointing": "per-layer"}, *({"checkpointing": part} for part in SELECTIVE)]
    base = next(iter(search.families("full")))
    options = [search.option(replace(base, accumulation=n, **way)) for way in ways for n in (1, 4)]
    for known in options:
        for other in options:
            least = search._least(other.recipe, known)
            assert least <= 1.01 * other.prediction.peak.total, (known.recipe, other.recipe)
