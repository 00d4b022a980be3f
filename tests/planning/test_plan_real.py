"""The search finds what trying every recipe finds, also with the bytes of real predictions. These
are not as even as a formula's: small tensors, few layers and few tokens have bytes of their own.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace
from functools import cache
from itertools import product

import pytest
from support.families import tiny_config
from support.nightly import TURN, each
from support.plans import brute_force, check
from transformers import LlamaConfig

from gradmem_lib import Recipe, plan, predict
from gradmem_lib.planning.bounds import bound_by_known, bound_by_saved, bound_by_sizes
from gradmem_lib.planning.candidates import Candidates
from gradmem_lib.planning.cards import Card
from gradmem_lib.planning.search import Search
from gradmem_lib.planning.work import count

CARD = Card("a card", 2**40, 100e12, 20e12, 1e12, (8, 6))
OLD = Card("an old card", 2**40, 60e12, 8e12, 0.3e12, (7, 5), bus=15e9)
FAST = Card("a fast card", 2**40, 900e12, 60e12, 3e12, (9, 0), bus=63e9, nvlink=450e9)

# Of the precisions and optimizers of a question, so many are drawn: all of them take minutes.
DRAWN = 2
# Family, what differs from the family's tiny config, card, rows of a card, method, target, tokens
# of a row, cards, margin.
QUESTIONS = [
    ("llama", {"num_hidden_layers": 3}, CARD, 3, "qlora", "cpu", 16, 1, 0.0),
    ("gpt2", {"vocab_size": 3000}, FAST, 3, "lora", "cuda", 33, 1, 0.03),
    ("qwen3", {"vocab_size": 1000}, OLD, 5, "lora", "cpu", 7, 1, 0.0),
    ("bert", {"num_hidden_layers": 4}, OLD, 3, "qlora", "cpu", 16, 4, 0.0),
    ("vit", {}, CARD, 3, "qlora", "cuda", None, 1, 0.03),
    ("t5", {}, CARD, 3, "qlora", "cuda", 48, 1, 0.03),
    ("whisper", {}, CARD, 1, "full", "cpu", 20, 1, 0.0),
    ("qwen3_moe", {}, CARD, 3, "lora", "cuda", 16, 1, 0.03),
    ("mixtral", {}, OLD, 8, "qlora", "cpu", 33, 1, 0.0),
    ("gemma2", {}, FAST, 3, "qlora", "cuda", 16, 2, 0.045),
    ("swin", {}, CARD, 1, "full", "cuda", None, 1, 0.0),
    ("llama", {"vocab_size": 1000}, CARD, 2, "full", "cpu", 60, 2, 0.0),
]


@pytest.mark.parametrize("question", each(12, QUESTIONS), ids=lambda question: question[0])
def test_the_best_found_is_the_best_of_all_by_real_predictions(question, monkeypatch):
    """On cards of several sizes, from one byte too small to ample, with a few kinds of recipes."""
    family, changed, card, rows, method, target, seq_len, cards, margin = question
    config = tiny_config(family)
    for name, value in changed.items():
        setattr(config, name, value)

    all_families = Candidates.families

    def few_families(search, method):
        found = list(all_families(search, method))
        return random.Random(f"{family} {TURN}").sample(found, min(DRAWN, len(found)))

    monkeypatch.setattr(Candidates, "families", few_families)

    @cache
    def answer(**asked):
        return predict(config, **asked)

    def remembered(given, **asked):
        return answer(**asked)

    sizes = {"seq_len": seq_len, "cards": cards, "margin": margin}
    everything = brute_force(config, remembered, card, rows, method, target, **sizes)

    def predicted_for_plan(given, ranks=None, **asked):
        if ranks is not None:  # one card has none
            asked["ranks"] = ranks
        return remembered(given, **asked)

    monkeypatch.setattr("gradmem_lib.planning.search.predict", predicted_for_plan)
    needs = sorted({option.needs for option in everything})
    draw = random.Random(family)
    sizes_of_cards = [needs[0] - 1]
    for needed in [needs[0], *draw.choices(needs, k=6), needs[-1]]:
        sizes_of_cards.append(needed + math.ceil(margin * needed))
    chosen = set()
    for nbytes in sizes_of_cards:
        made = plan(
            config,
            card=replace(card, nbytes=nbytes),
            global_batch=rows * cards,
            method=method,
            target=target,
            **sizes,
        )
        check(everything, nbytes, made)
        chosen.add(made.best and made.best.recipe)
    assert len(chosen) > 1


PLAIN = Recipe(precision="bf16", optimizer="adamw-fused", attention="fused")
IN_PIECES = replace(PLAIN, accumulation=3, checkpointing="per-layer")
QLORA = replace(PLAIN, lora_rank=16, quantized_base=True)
MIXED = replace(IN_PIECES, precision="autocast-bf16")
RECIPES = [
    PLAIN,
    IN_PIECES,
    replace(PLAIN, checkpointing="attention"),
    replace(PLAIN, checkpointing="elementwise"),
    replace(PLAIN, checkpointing="elementwise", lora_rank=16),
    replace(PLAIN, checkpointing="first-1", accumulation=3),
    # its small tensors have states in float32
    replace(IN_PIECES, optimizer="adamw-8bit"),
    replace(IN_PIECES, optimizer="adafactor-torch"),
    # the last layer runs again in the one, and not in the other
    replace(QLORA, every_n_layers=2),
    replace(QLORA, checkpointing="first-2"),
    replace(QLORA, checkpointing="per-layer"),
    # a chunk makes a second gradient of the head, which is more than the logits of 48 tokens
    MIXED,
    replace(MIXED, chunked_loss=True),
    replace(PLAIN, accumulation=3),
    replace(PLAIN, accumulation=3, chunked_loss=True),
    replace(PLAIN, chunked_loss=True),
    replace(PLAIN, precision="autocast-bf16"),
]


SMALL = LlamaConfig(
    hidden_size=48,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    vocab_size=80,
)


def test_what_one_recipe_says_of_another_is_no_more_than_that_one_needs():
    search = Search(count(SMALL), CARD, 16, 3, "cpu")
    options = [search.option(recipe) for recipe in RECIPES]
    for option in options:
        assert bound_by_sizes(search, option.recipe) <= option.prediction.peak.total, option.recipe
    for known, other in product(options, options):
        for bound in (bound_by_known, bound_by_saved):
            least = bound(search, other.recipe, known)
            assert least <= other.prediction.peak.total, (bound, known.recipe, other.recipe)


def test_what_a_forward_saves_tells_most_of_what_more_rows_and_fewer_layers_need():
    search = Search(count(SMALL), CARD, 160, 3, "cpu")
    in_three = replace(PLAIN, accumulation=3)
    for known in (in_three, replace(in_three, chunked_loss=True)):
        for change, share in (
            ({}, 0.7),
            ({"checkpointing": "first-1"}, 0.7),
            ({"precision": "autocast-bf16"}, 0.7),
        ):
            recipe = replace(PLAIN, **change)
            peak = search.option(recipe).prediction.peak.total
            least = bound_by_saved(search, recipe, search.option(known))
            assert share * peak < least < peak
            assert bound_by_sizes(search, recipe) < 0.9 * least


@pytest.mark.parametrize("lora_rank", [None, 16])
def test_the_results_of_products_are_counted_where_only_they_stay(lora_rank):
    search = Search(count(SMALL), CARD, 160, 3, "cpu")
    recipe = replace(PLAIN, checkpointing="elementwise", chunked_loss=True, lora_rank=lora_rank)
    peak = search.option(recipe).prediction.peak.total
    assert 0.6 * peak < bound_by_sizes(search, recipe) < peak
