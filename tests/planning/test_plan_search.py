"""The search finds what trying every recipe finds."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
from support.families import OLDER
from support.nightly import ALL, each
from support.plans import brute_force, check

from gradmem_lib.course.material import models
from gradmem_lib.measure.timeline import MemorySnapshot
from gradmem_lib.names import CATEGORIES, PHASES, SELECTIVE
from gradmem_lib.planning.bounds import bound_by_known, bound_by_sizes
from gradmem_lib.planning.cards import Card
from gradmem_lib.planning.held import (
    resident_bytes,
    saved_by_forward_per_token,
    saved_bytes_per_token,
)
from gradmem_lib.planning.plan import plan
from gradmem_lib.planning.recomputed import recompute_fraction
from gradmem_lib.planning.search import Search
from gradmem_lib.planning.work import count
from gradmem_lib.prediction.predict import predict
from gradmem_lib.training.recipe import Recipe
from gradmem_lib.units import MiB

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


@pytest.mark.parametrize("method", ["qlora", "lora", "full"])
def test_the_best_found_is_the_best_of_all(method, predicted, monkeypatch):
    """On cards of every size from too small to ample, so that each step of the search is the one
    that decides.
    """
    if method != "qlora" and not ALL:
        pytest.skip("many predictions: make nightly")
    if method == "full":
        monkeypatch.setattr(
            "gradmem_lib.planning.candidates.OPTIMIZERS", ("adamw-fused", "adafactor-torch")
        )
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
        layers = 3.0 * tokens * work.linear_widths
        kept = (
            1 - recompute_fraction(work, recipe)
        ) * layers + 2 * tokens * work.head / work.vocabulary
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
                [
                    i,
                    PHASES.index(phase),
                    0,
                    held["parameters"],
                    gradients,
                    held["optimizer"],
                    kept,
                    extra,
                    64,
                ]
                for i, (phase, gradients, kept, extra) in enumerate(moments)
            ],
            dtype=np.int64,
        )
        rows[:, 2] = rows[:, 3:].sum(axis=1)
        at = rows[rows[:, 2].argmax()]
        peak = MemorySnapshot(
            int(at[2]), dict(zip(CATEGORIES, at[3:].tolist(), strict=True)), PHASES[at[1]]
        )
        return SimpleNamespace(
            target=target,
            timeline=SimpleNamespace(rows=rows),
            peak=peak,
            offload_traffic_bytes=0,
            notes=(),
        )

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
def test_the_best_found_is_the_best_of_all_on_every_card(
    method, seq_len, cards, predicted, monkeypatch
):
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
    assert len(asked) < len(everything) * plans / 3  # most of it without a prediction


def every_recipe(family: Recipe, layers: int, rows: int) -> set[Recipe]:
    """For one card, written down in another way than the search does it."""
    ways = [{}, {"checkpointing": "per-layer"}, *({"checkpointing": part} for part in SELECTIVE)]
    ways += [{"checkpointing": f"first-{k}"} for k in range(1, layers)]
    if not OLDER:
        ways.append({"every_n_layers": 2})
    return {
        replace(family, accumulation=n, chunked_loss=chunked, **way)
        for way in ways
        for n in range(1, rows + 1)
        for chunked in (False, True)
        if rows % n == 0 and not (family.in_backward and n > 1)
    }


@pytest.mark.parametrize("method", ["full", "lora"])
def test_the_recipes_that_are_searched_are_all_that_there_are(method):
    config = models.tiny_llama(**LLAMA | {"layers": 5}).config
    search = Search(count(config), CARD, 16, 6, "cpu")
    for family in search.families(method):
        found = []
        for chunked in (False, True):
            found += search.variants(replace(family, chunked_loss=chunked))
        assert len(found) == len(set(found)) and set(found) == every_recipe(family, 5, 6)


def random_question(number: int) -> tuple[dict, dict]:
    """The sizes of a model, and what is asked of a plan for it."""
    draw = random.Random(number)
    sizes = LLAMA | {
        "layers": draw.randint(2, 12),
        "hidden": draw.choice([16, 32, 64]),
        "intermediate": draw.choice([32, 64, 256]),
        "vocab": draw.choice([64, 256, 4096]),
    }
    cards = draw.choice([1, 1, 1, 2, 4])
    asked = {
        "seq_len": draw.choice([4, 16, 128]),
        "global_batch": cards * draw.choice([1, 2, 4, 6, 12]),
        "method": draw.choice(["full", "lora", "qlora"]),
        "cards": cards,
        "target": "cpu",
    }
    return sizes, asked


@pytest.mark.parametrize("number", range(120 if ALL else 30))
def test_random_questions_get_the_fastest_of_all_recipes(number, monkeypatch):
    """On three cards each, with bytes from a formula, so that every recipe can be tried."""
    sizes, asked = random_question(number)
    config = models.tiny_llama(**sizes).config
    formula = pretended(count(config))
    monkeypatch.setattr("gradmem_lib.planning.search.predict", formula)
    rows, cards = asked["global_batch"] // asked["cards"], asked["cards"]
    sized = asked["method"], "cpu", asked["seq_len"], cards
    everything = brute_force(config, formula, CARD, rows, *sized)
    needs = sorted({option.needs for option in everything})
    draw = random.Random(number)
    for nbytes in [needs[0] - 1, *(draw.choice(needs) for _ in range(3))]:
        check(everything, nbytes, plan(config, card=replace(CARD, nbytes=nbytes), **asked))


def test_the_layers_run_again_are_as_few_as_really_fit():
    """Predicted by itself, one layer less needs more than there is."""
    config = models.tiny_llama(**LLAMA | {"layers": 6}).config
    sizes = {"batch_size": 2, "seq_len": 64, "target": "cpu"}
    recipe = plan(
        config, card=2**40, method="qlora", seq_len=64, global_batch=2, target="cpu"
    ).best.recipe
    halves = replace(recipe, accumulation=2)
    most, least = (
        predict(config, recipe=replace(halves, checkpointing=how), **sizes).peak.total
        for how in (None, "per-layer")
    )
    best = plan(
        config,
        card=(3 * most + least) // 4,
        method="qlora",
        seq_len=64,
        global_batch=2,
        target="cpu",
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
            least = bound_by_known(search, other.recipe, known)
            assert least <= 1.01 * other.prediction.peak.total, (known.recipe, other.recipe)


@pytest.fixture
def searching(predicted, monkeypatch):
    """A search with bytes from a formula, of 4 rows on each of its cards."""
    work = count(predicted[0])
    monkeypatch.setattr("gradmem_lib.planning.search.predict", pretended(work))
    return lambda seq_len=64, cards=1, card=CARD: Search(
        work, card, seq_len, 4 * cards, "cpu", cards
    )


BF16 = Recipe(precision="bf16", optimizer="adamw-fused", attention="fused")


@pytest.mark.parametrize("pieces, others", [(1, (2, 4)), (2, (4,)), (4, (4,))])
def test_one_cut_in_pieces_says_what_more_pieces_need(pieces, others, searching):
    """All but what does not shrink with them (64 bytes and what is rounded), gradients waiting at
    every moment.
    """
    search = searching()
    known = search.option(replace(BF16, accumulation=pieces))
    for n in others:
        recipe = replace(BF16, accumulation=n)
        peak = search.option(recipe).prediction.peak.total
        least = bound_by_known(search, recipe, known)
        assert peak - 70 <= least <= peak
        rows = known.prediction.timeline.rows.copy()
        known.prediction.timeline.rows[1, 4] += 2**30  # those that are about to be cut
        assert bound_by_known(search, recipe, known) == least
        known.prediction.timeline.rows[:] = rows


def test_one_cut_in_pieces_says_of_the_whole_what_it_has_beside_gradients(searching):
    search = searching()
    known = search.option(replace(BF16, accumulation=4))
    rows = known.prediction.timeline.rows
    beside_gradients = (rows[:, 2] - rows[:, 4]).max()
    least = bound_by_known(search, BF16, known)
    # What a forward saves for the other rows comes on top.
    saved = saved_by_forward_per_token(search.work, BF16)
    assert beside_gradients < least <= beside_gradients + 3 * search.units * saved
    assert least <= search.option(BF16).prediction.peak.total


def test_another_optimizers_states_are_exchanged_and_its_step_says_nothing(searching):
    search = searching(seq_len=1)
    known = search.option(replace(BF16, optimizer="adafactor-torch"))
    other = search.option(BF16)
    assert (
        known.prediction.peak.phase == "optimizer_step"
        and other.prediction.peak.phase == "backward"
    )
    assert (
        bound_by_known(search, BF16, known)
        == other.prediction.peak.total
        > known.prediction.peak.total
    )
    back = bound_by_known(search, known.recipe, other)
    assert (
        back
        == max(row[2] for row in known.prediction.timeline.rows[:3])
        < known.prediction.peak.total
    )


def test_by_its_sizes_a_recipe_in_pieces_holds_gradients_while_it_keeps_activations(searching):
    search = searching(seq_len=4096)
    held = resident_bytes(search.work, BF16)
    for n in (1, 4):
        recipe = replace(BF16, accumulation=n)
        kept = saved_bytes_per_token(search.work, recipe) * 4096 * 4 / n
        assert kept > held["gradients"]
        waiting = held["gradients"] * (n > 1)
        assert (
            bound_by_sizes(search, recipe)
            == held["parameters"] + held["optimizer"] + waiting + kept
        )


def test_by_its_sizes_autocast_holds_its_copies_of_trained_matrices(searching):
    """At the end of a forward there are all of them, beside gradients that wait."""
    search = searching(seq_len=16)
    work, recipe = search.work, replace(BF16, precision="autocast-bf16", accumulation=4)
    everything = sum(resident_bytes(work, recipe).values())
    least = bound_by_sizes(search, recipe)
    assert (
        everything + 2 * work.trained_matrices
        <= least
        <= search.option(recipe).prediction.peak.total
    )
    for one in (replace(recipe, precision="bf16"), replace(recipe, lora_rank=8)):
        saved = saved_bytes_per_token(work, one) * 16
        assert bound_by_sizes(search, one) == sum(resident_bytes(work, one).values()) + saved


def test_the_lightest_is_the_lightest_of_all(searching):
    """One that steps after backward, and one that steps in it, by trying every way of every
    family.
    """
    for methods in (["full"], ["lora", "full"], ["qlora"]):
        search = searching()
        every = [way for m in methods for f in search.families(m) for way in search.variants(f)]
        kinds = sorted({way.in_backward for way in every})
        bytes_of = {
            k: [sum(search.residents(w).values()) for w in every if w.in_backward == k]
            for k in kinds
        }
        found = search.least_resident_recipes(methods)
        assert [recipe.in_backward for recipe in found] == kinds
        assert [sum(search.residents(recipe).values()) for recipe in found] == [
            min(bytes_of[k]) for k in kinds
        ]


def test_what_would_just_hold_the_weights_and_states_is_not_ruled_out_by_them(searching):
    families = list(searching().families("full"))
    held = [
        min(sum(searching().residents(way).values()) for way in searching().variants(f))
        for f in families
    ]
    search = searching(card=replace(CARD, nbytes=min(held)))
    search.find(["full"])
    assert not search.fits()
    assert [r.recipe for r in search.ruled_out] == [
        f for f, h in zip(families, held, strict=True) if h > min(held)
    ]


@pytest.mark.parametrize(
    "mib, says",
    [
        (2, "weights 3.00 MiB alone, and the card has 2.00 MiB"),
        (
            4,
            "weights 3.00 MiB and gradients 2.00 MiB alone are 5.00 MiB, and the card has 4.00 MiB",
        ),
        (
            5,
            (
                "weights 3.00 MiB and gradients 2.00 MiB and optimizer states 4.00 MiB alone are "
                "9.00 MiB"
            ),
        ),
    ],
)
def test_what_is_too_many_is_named_as_far_as_it_is_needed(mib, says, searching, monkeypatch):
    search = searching(card=replace(CARD, nbytes=mib * MiB))
    held = {"parameters": 3 * MiB, "gradients": 2 * MiB, "optimizer": 4 * MiB}
    monkeypatch.setattr(search, "residents", lambda recipe: held)
    assert search._describe_excess(BF16).startswith(says)
    held["gradients"] = 0
    assert "gradients" not in search._describe_excess(BF16)


@pytest.mark.parametrize("layers", [8, 40])
def test_the_fewest_layers_are_found_by_bisection(layers, searching, monkeypatch):
    """Also where a checkpoint of the last layer saves less than its input takes, and where the
    allocator reserves more than its share for some.
    """
    for fewest in range(layers - 1):
        for last_needs_more, fragments in ((0, 0), (150, 0), (0, 2)):
            search = searching(card=replace(CARD, nbytes=1000 * (layers - fewest) + 50))
            search.available = search.card.nbytes
            asked = []

            def option(
                k, a=asked, n=fewest, more=last_needs_more, f=fragments, room=search.available
            ):
                a.append(k)
                live = 1000 * (layers - k) + (1000 + more if k == layers - 1 else 0)
                needs = live + (500 if n <= k < n + f else 0)
                peak = SimpleNamespace(peak=SimpleNamespace(total=live))
                fits = needs <= room
                return SimpleNamespace(fits=fits, prediction=peak, recipe=k)

            monkeypatch.setattr(search, "option", option)
            monkeypatch.setattr(search, "may_fit", lambda k: True)
            monkeypatch.setattr(search, "_known", {k: option(k) for k in range(layers)})
            monkeypatch.setattr(search, "_bytes_of_inputs", lambda k, more=last_needs_more: more)
            asked.clear()
            found = search._first_that_fits(list(range(layers)))
            first = next((k for k in range(layers) if option(k).fits), None)
            assert (found and found.recipe) == first
            assert len(set(asked)) <= 9 + fragments + layers


@pytest.mark.parametrize(
    ("live", "asked"),
    [
        ([90, 80, 70], {0}),  # of a short line, the fastest is asked first
        ([98, 96, 94, 92, 90], {4, 0}),  # all fit: no other is asked
        ([130, 120, 110, 101, 104], {4, 3, 2}),  # the inputs of checkpoints need 5
        ([130, 120, 110, 101, 106], {4}),  # what comes before needs at least 101
    ],
    ids=["fastest first", "all fit", "a little too large", "far too large"],
)
def test_a_line_is_asked_no_more_than_it_has_to_be(live, asked, searching, monkeypatch):
    search = searching(card=replace(CARD, nbytes=100))
    search.available = 100
    known = {}

    def option(k):
        peak = SimpleNamespace(peak=SimpleNamespace(total=live[k]))
        known[k] = SimpleNamespace(fits=live[k] <= 100, prediction=peak, recipe=k)
        return known[k]

    monkeypatch.setattr(search, "option", option)
    monkeypatch.setattr(search, "may_fit", lambda k: True)
    monkeypatch.setattr(search, "_known", known)
    monkeypatch.setattr(search, "_bytes_of_inputs", lambda k: 5)
    found = search._first_that_fits(list(range(len(live))))
    assert set(known) == asked
    assert (found and found.recipe) == (0 if live[0] <= 100 else None)


@pytest.mark.parametrize("sooner", [True, False])
def test_what_moves_more_than_its_sizes_say_has_to_be_faster_still(sooner, searching, monkeypatch):
    """How much is moved is known once it is predicted, and with it the time."""
    search = searching(seq_len=1024)
    monkeypatch.setattr(search, "alternatives", [{"checkpointing": "attention"}])
    real, asked = search.option, []
    per_layer = search.seconds(replace(BF16, checkpointing="per-layer", accumulation=4))

    def option(recipe):
        asked.append(recipe)
        found = real(recipe)
        is_part = recipe.checkpointing == "attention"
        seconds = found.seconds
        if is_part:
            seconds = per_layer * (0.5 if sooner else 2)
        fits = is_part or (recipe.checkpointing == "per-layer" and recipe.accumulation == 4)
        return replace(found, seconds=seconds, card_bytes=2**40 if fits else 0)

    monkeypatch.setattr(search, "option", option)
    best = search._fastest(replace(BF16, accumulation=1), math.inf)
    assert "attention" in {recipe.checkpointing for recipe in asked}
    assert (best.recipe.checkpointing == "attention") == sooner


def test_master_weights_are_for_those_that_gather_and_train_all_of_them(searching):
    search = searching(cards=2)
    for method, masters in (("full", {"zero2", "fsdp"}), ("lora", set())):
        family = next(f for f in search.families(method) if f.precision == "autocast-bf16")
        found = {(way.sharding, way.precision) for way in search.variants(family)}
        assert {how for how, precision in found if precision == "float32-master"} == masters
        assert {how for how, precision in found if precision == "autocast-bf16"} == {
            way.sharding for way in search.variants(family)
        } - masters


@pytest.mark.parametrize(
    "cards, fits, asks",
    [(1, False, {"boundaries"}), (2, False, {"boundaries", "parameters"}), (2, True, set())],
)
@pytest.mark.parametrize("method", ["full", "lora"])
def test_what_moves_to_the_host_where_nothing_fits(
    method, cards, fits, asks, predicted, monkeypatch
):
    """Inputs of checkpoints on any number of cards; of several, what they share.

    Neither where there is no room for a context.
    """
    # as of a model whose loss is not taken in pieces
    work = replace(count(predicted[0]), chunked=False)
    for nbytes, asks_here in ((2**31, asks), (2**20, set())):
        search, asked = Search(work, replace(CARD, nbytes=nbytes), 64, 4 * cards, "cuda", cards), []
        monkeypatch.setattr(
            search, "option", lambda recipe, a=asked: a.append(recipe) or SimpleNamespace(fits=fits)
        )
        search._try_host_offload([method])
        lightest = search.least_resident_recipes([method])
        assert [recipe for recipe in asked if not recipe.offload] == lightest
        assert {recipe.offload for recipe in asked} - {None} == asks_here
        moved = [recipe for recipe in asked if recipe.offload]
        assert all(r.checkpointing == "per-layer" and r.every_n_layers is None for r in moved)
        assert all(r.sharding == "fsdp" for r in moved if r.offload == "parameters")
