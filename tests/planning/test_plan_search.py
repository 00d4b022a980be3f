"""The search finds what trying every recipe finds."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
from support.families import OLDER
from support.nightly import ALL
from support.plans import brute_force, check

from gradmem_lib import MemorySnapshot, Recipe, plan
from gradmem_lib.course import models
from gradmem_lib.names import CATEGORIES, PHASES, SELECTIVE
from gradmem_lib.planning.bounds import bound_by_known, bound_by_sizes
from gradmem_lib.planning.cards import Card, find_card
from gradmem_lib.planning.held import (
    resident_bytes,
    saved_bytes_per_token,
)
from gradmem_lib.planning.options import EQUAL_TIME, ordered
from gradmem_lib.planning.recomputed import recompute_fraction
from gradmem_lib.planning.search import Search
from gradmem_lib.planning.work import count
from gradmem_lib.prediction.question import CannotTrace
from gradmem_lib.units import MiB

LLAMA = dict(layers=2, hidden=32, heads=4, intermediate=64, vocab=256)
CARD = Card("a card", 2**40, 100e12, 20e12, 1e12, (8, 6))


def pretended(work):
    """A model of memory in place of a prediction: four moments of a step, by counted sizes."""

    def answer(config, *, batch_size, seq_len, recipe, target, ranks=1):
        tokens = batch_size // recipe.accumulation * seq_len
        held = resident_bytes(work, recipe, ranks)
        layers = 3.0 * tokens * work.linear_widths
        kept = (
            1 - recompute_fraction(work, recipe)
        ) * layers + 2 * tokens * work.sized.head_entries / work.sized.vocabulary
        layer = layers / work.layers
        loss = (1 if recipe.chunked_loss else 8) * tokens * work.sized.vocabulary
        before = held["gradients"] if recipe.accumulation > 1 else 0
        scratch = (
            4 * max(map(np.prod, work.sized.trained_shapes)) * (recipe.optimizer != "adamw-fused")
        )
        moments = [  # phase, gradients, activations, temporaries
            ("forward", before, kept + loss, 0),
            ("backward", max(before, held["gradients"] // 2), kept / 2 + layer, loss / 2),
            ("backward", held["gradients"], layer, layer),
            ("optimizer_step", held["gradients"], 0, scratch),
        ]
        samples = []
        for time, (phase, gradients, kept, extra) in enumerate(moments):
            parts = [held["parameters"], gradients, held["optimizer"], kept, extra, 64]
            parts = [int(part) for part in parts]
            samples.append([time, PHASES.index(phase), sum(parts), *parts])
        rows = np.array(samples)
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


@pytest.mark.parametrize("number", range(120 if ALL else 4))
def test_random_questions_get_the_fastest_of_all_recipes(number, monkeypatch):
    """On cards from too small to ample, with bytes from a formula, so that every recipe can be
    tried.
    """
    sizes, asked = random_question(number)
    config = models.tiny_llama(**sizes).config
    formula, predicted = pretended(count(config)), []

    def answer(*args, **kwargs):
        predicted.append(kwargs["recipe"])
        return formula(*args, **kwargs)

    monkeypatch.setattr("gradmem_lib.planning.search.predict", answer)
    rows, cards = asked["global_batch"] // asked["cards"], asked["cards"]
    sized = asked["method"], "cpu", asked["seq_len"], cards
    everything = brute_force(config, formula, CARD, rows, *sized)
    needs = sorted({option.needs for option in everything})
    tried = [needs[0] - 1, *random.Random(number).choices(needs, k=3), needs[-1]]
    for nbytes in tried:
        check(everything, nbytes, plan(config, card=replace(CARD, nbytes=nbytes), **asked))
    if len(everything) > 50:
        assert len(predicted) < len(everything) * len(tried) / 3  # most without a prediction


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


@pytest.fixture(scope="module")
def work():
    return count(models.tiny_llama(**LLAMA).config)


@pytest.fixture
def searching(work, monkeypatch):
    """A search with bytes from a formula, of 4 rows on each of its cards."""
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
    assert least == beside_gradients
    assert least <= search.option(BF16).prediction.peak.total


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


@pytest.mark.parametrize(
    ("card", "precisions"), [("T4", ["autocast-fp16", "bf16"]), ("L4", ["bf16"])]
)
def test_a_base_in_4_bits_gets_float16_where_bf16_is_slow(searching, card, precisions):
    families = searching(card=find_card(card)).families("qlora")
    assert [family.precision for family in families] == precisions


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


HELD = {"temporaries": 0, "parameters": 3 * MiB, "gradients": 2 * MiB, "optimizer": 4 * MiB}
EXCESS = {
    2: "weights (3.00 MiB) alone are 1.00 MiB more than the card has",
    4: "weights (3.00 MiB) and gradients (2.00 MiB) alone are 1.00 MiB more than the card has",
    5: "weights (3.00 MiB) and gradients (2.00 MiB) and optimizer states (4.00 MiB) alone "
    "are 4.00 MiB more than the card has",
}


@pytest.mark.parametrize(("mib", "says"), EXCESS.items())
def test_what_is_too_many_is_named_as_far_as_it_is_needed(mib, says, searching, monkeypatch):
    search = searching(card=replace(CARD, nbytes=mib * MiB))
    monkeypatch.setattr(search, "residents", lambda recipe: HELD)
    assert search._describe_excess(BF16) == says


@pytest.fixture
def line_of(searching, monkeypatch):
    """A search of a line of recipes by the numbers 0, 1, ... on a card of 100 bytes: ``live`` are
    their bytes, ``reserved`` what the allocator adds. With it come those that were asked for.
    """

    def made(live, reserved=None, inputs=5):
        search = searching(card=replace(CARD, nbytes=100))
        search.available = 100
        known = {}

        def option(k):
            peak = SimpleNamespace(peak=SimpleNamespace(total=live[k]))
            fits = live[k] + (reserved or {}).get(k, 0) <= 100
            known[k] = SimpleNamespace(fits=fits, prediction=peak, recipe=k)
            return known[k]

        monkeypatch.setattr(search, "option", option)
        monkeypatch.setattr(search, "may_fit", lambda k: True)
        monkeypatch.setattr(search, "_known", known)
        monkeypatch.setattr(search, "_bytes_of_inputs", lambda k: inputs)
        found = search._first_that_fits(list(range(len(live))))
        return found and found.recipe, set(known)

    return made


def test_the_fewest_layers_are_found_by_bisection(line_of):
    """Also where a checkpoint of the last layer saves less than its input takes, and where the
    allocator reserves more than its share for some.
    """
    for fewest in range(39):
        for last, fragments in ((0, 0), (3, 0), (0, 2)):
            live = [102 - 2 * (k - fewest + 1) for k in range(40)]
            live[-1] += last
            reserved = {k: 60 for k in range(fewest, fewest + fragments)}
            fits = [k for k, n in enumerate(live) if n + reserved.get(k, 0) <= 100]
            found, asked = line_of(live, reserved, inputs=last)
            assert found == min(fits, default=None)
            assert len(asked) <= 9 + fragments


LINES = [
    ([90, 80, 70], {0}),  # of a short line, the fastest is asked first
    ([98, 96, 94, 92, 90], {4, 0}),  # all fit: no other is asked
    ([130, 120, 110, 101, 104], {4, 3, 2}),  # the inputs of checkpoints need 5
    ([130, 120, 110, 101, 106], {4}),  # what comes before needs at least 101
]


@pytest.mark.parametrize(("live", "asked"), LINES)
def test_a_line_is_asked_no_more_than_it_has_to_be(live, asked, line_of):
    assert line_of(live) == (0 if live[0] <= 100 else None, asked)


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
    best = search._fastest(replace(BF16, accumulation=1), math.inf, offloads=False)
    assert "attention" in {recipe.checkpointing for recipe in asked}
    assert (best.recipe.checkpointing == "attention") == sooner


@pytest.mark.parametrize(
    "fits",
    [
        lambda recipe: True,
        lambda recipe: recipe.offload == "activations",
        lambda recipe: recipe.offload or (recipe.precision == "bf16" and recipe.checkpointing),
    ],
    ids=["all", "what moves activations", "either"],
)
def test_what_moves_activations_is_asked_only_where_it_may_be_the_first_answer(
    fits, work, monkeypatch
):
    search, asked = Search(work, CARD, 64, 4, "cuda"), {}
    monkeypatch.setattr(search, "may_fit", lambda recipe: True)

    def option(recipe):
        if recipe.every_n_layers:
            raise CannotTrace("one layer in two reads values")
        peak = SimpleNamespace(total=0 if fits(recipe) else 2**50)
        fields = {"recipe": recipe, "seconds": search.seconds(recipe), "fits": bool(fits(recipe))}
        asked[recipe] = SimpleNamespace(**fields, needs=0, prediction=SimpleNamespace(peak=peak))
        return asked[recipe]

    monkeypatch.setattr(search, "option", option)
    search.find(["full"])
    found = [one for one in asked.values() if one.fits]
    families = [replace(f, chunked_loss=c) for f in search.families("full") for c in search.losses]
    for family in families:
        for recipe in search.variants(family):
            if not recipe.every_n_layers:
                option(recipe)
    first = ordered([one for one in asked.values() if one.fits])[0]
    assert ordered(found)[0].seconds == first.seconds
    in_place = [one.seconds for one in found if one.recipe.offload is None]
    slowest = EQUAL_TIME * min(in_place, default=math.inf)
    assert all(one.seconds <= slowest for one in found if one.recipe.offload)


def test_whichever_optimizer_is_searched_first_the_answer_is_that_of_all(work, monkeypatch):
    search = Search(work, CARD, 64, 4, "cpu")
    families = [f for f in search.families("full") if f.precision == "bf16" and not f.in_backward]
    monkeypatch.setattr(search, "families", lambda method: families)
    monkeypatch.setattr(search, "_may_hold", lambda family: True)
    for times in product((1.0, 1.05, 1.12, 1.15, 1.3), repeat=len(families)):
        options = {}
        for family, seconds in zip(families, times, strict=True):
            fields = {"recipe": family, "seconds": seconds, "needs": 0, "micro_batch": 1}
            options[family] = SimpleNamespace(**fields, fits=True)

        def fastest(family, limit, offloads, best=None, options=options):
            option = options[family]
            if option.seconds < limit:
                search._known[family] = best = option
            return best

        search._known.clear()
        monkeypatch.setattr(search, "_fastest", fastest)
        monkeypatch.setattr(search, "_least_seconds", lambda f, options=options: options[f].seconds)
        search.find(["full"])
        assert search.fits()[0] is ordered(list(options.values()))[0], times


@pytest.mark.parametrize(
    "cards, fits, asks",
    [(1, False, {"boundaries"}), (2, False, {"boundaries", "parameters"}), (2, True, set())],
)
@pytest.mark.parametrize("method", ["full", "lora"])
def test_what_moves_to_the_host_where_nothing_fits(method, cards, fits, asks, work, monkeypatch):
    """Inputs of checkpoints on any number of cards; of several, what they share.

    Neither where there is no room for a context.
    """
    # as of a model whose loss is not taken in pieces
    work = replace(work)
    work.__dict__["chunked"] = False
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
