"""What lesson 10 says in figures and comparisons that none of its cells prints."""

from __future__ import annotations

import pytest
from support.lesson_text import Lesson
from torch import nn

from gradmem_lib import Recipe, known_model, predict
from gradmem_lib.course.lessons.lesson_10 import exercises
from gradmem_lib.course.material import models
from gradmem_lib.planning.cards import CARDS
from gradmem_lib.prediction.configs import skeleton
from gradmem_lib.units import GiB

NF4 = 0.5 + 1 / 64 + 4 / (64 * 256)  # bytes a weight
TWO_RANKS = {"batch_size": 2, "seq_len": 32, "ranks": 2}


@pytest.fixture(scope="module")
def said() -> Lesson:
    return Lesson("10")


def llama():
    return models.tiny_llama(layers=8, hidden=64, heads=4, intermediate=172, vocab=257)


def test_zero_cuts_the_largest_part_first(said):
    weights, gradients, states = exercises.bytes_per_rank(1_000, 1, "ddp")
    assert said.says(f"{weights / 1e3:.0f}, {gradients / 1e3:.0f} and {states / 1e3:.0f} bytes a")
    assert said.says("ZeRO cuts the largest part first.")
    cut = exercises.bytes_per_rank(1_000, 2, "zero1")
    assert cut == (weights, gradients, states / 2) and states > max(weights, gradients)


def test_the_largest_part_of_a_step_under_fsdp(said):
    peak = predict(llama().config, recipe=Recipe(sharding="fsdp"), target="cpu", **TWO_RANKS).peak
    assert said.says(f"in section 2, the peak was {peak.total / 1e6:.1f} MB.")
    assert said.says("The largest part of this peak is activations, so add checkpoints.")
    assert max(peak.by_category, key=peak.by_category.get) == "activations"


def test_the_budgets_of_both_exercises(said):
    model, ids = exercises.wrap_setting()
    layers = ("one", "two", "three", "four", "five", "six")[len(model.model.layers) - 1]
    assert ids[:2].shape == (2, 32)
    assert said.says(
        f"A forward and a backward of a tiny Llama of {layers} layers, 2 rows of 32 tokens, on one "
        f"of 2 ranks may take **{exercises.WRAP_CARD:,} bytes**."
    )
    side = exercises.SIDE
    assert exercises.LAYERS == 6
    assert said.says(
        f"six layers of {side} x {side} on 4 ranks may take **{exercises.SHARD_CARD:,} bytes"
    )
    whole = 6 * side * side * 4
    assert whole + whole / 4 > exercises.SHARD_CARD  # all of them whole, beside the shards


def test_an_h100s_link_and_its_computing(said):
    assert said.says("An H100's link is much faster, but so is its computing.")
    slow, fast = CARDS["RTX 4090 24GB"], CARDS["H100 80GB"]
    assert fast.link > 5 * slow.link and fast.half > 5 * slow.half


def test_the_base_of_a_70b_on_two_cards(said):
    model = skeleton(known_model("Llama-2-70B")[1])
    every = sum(p.numel() for p in model.parameters())
    linear = sum(
        module.weight.numel()
        for module in model.model.layers.modules()
        if isinstance(module, nn.Linear)
    )
    assert said.says(
        f"{2 * every / 1e9:.0f} GB in bf16, {NF4 * linear / 1e9:.0f} GB in 4 bits, half of that on "
        "each card if they are cut."
    )
    card = CARDS[exercises.TWO_CARDS]
    assert said.says("In bf16, half of the base alone is too large.") and every > card.nbytes
    ((peak,),) = said.figures(r"Prediction 10.f\n.*\n +predicted +([\d.]+) GiB")
    assert said.says("Most of the peak is the base: each rank keeps half of the 4-bit weights")
    assert 0.5 < NF4 * linear / 2 / (peak * GiB) < 1
    assert said.says("with a row of 1,024 tokens on each.") and exercises.TOKENS == 1024
    assert said.says(f"adapters of rank {exercises.two_cards().lora_rank} on every linear layer")


def test_what_shards_on_the_host_move(said):
    """A unit's shard goes to the card before its forward and before its backward. The rest of the
    model is gathered once, since backward begins where forward ends.
    """
    assert said.says(
        "Then each micro-batch moves a rank's shards to the card twice, in forward and in "
        "backward, and its gradients back."
    )
    model = llama()
    shard = sum(p.nbytes for p in model.parameters()) / 2
    layers = sum(p.nbytes for p in model.model.layers.parameters()) / 2
    recipe = Recipe(sharding="fsdp", offload="parameters")
    found = predict(model.config, recipe=recipe, target="cuda", **TWO_RANKS)
    to_the_card = shard + layers
    assert found.offload_traffic_bytes == pytest.approx(to_the_card + shard, rel=1e-3)
