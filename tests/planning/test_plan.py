"""The plan: what it recommends fits, and what it refuses does not."""

from __future__ import annotations

import pytest
import torch
from support.predicted import tiny
from torch import nn

from gradmem_lib import BudgetExceeded, MemoryTracker, Recipe, plan, predict, prepare, step
from gradmem_lib.planning import search
from gradmem_lib.prediction import allocator
from gradmem_lib.prediction.question import CannotTrace


def small():
    model = tiny()
    model.config.max_position_embeddings = 256
    return model


@pytest.fixture(scope="module")
def config():
    return small().config


def needs(config, recipe) -> int:
    """Predicted anew, by the whole trace."""
    sizes = {"batch_size": 4, "seq_len": 128}
    return predict(config, recipe=recipe, target="cpu", full=True, **sizes).peak.total


def track(recipe, budget):
    """Two real steps, the second under the budget."""
    with torch.random.fork_rng():
        model, optimizer, undo = prepare(small(), recipe)
        ids = torch.randint(0, 512, (4, 128))
        batch = {"input_ids": ids, "labels": ids}
        step(model, optimizer, batch, recipe)
        try:
            with MemoryTracker(model, optimizer, budget=budget, live=False) as tracker:
                step(model, optimizer, batch, recipe)
        finally:
            undo.close()
    return tracker


def test_the_best_fits_and_the_next_faster_one_does_not(config):
    """On a card on which QLoRA has to give something up."""
    plain = Recipe(precision="bf16", lora_rank=16, quantized_base=True, optimizer="adamw-fused")
    card = needs(config, plain) // 2
    tight = plan(config, card=card, seq_len=128, global_batch=4, method="qlora", target="cpu")
    best, faster = tight.best, tight.next_faster
    assert best.recipe.accumulation * best.micro_batch == 4
    assert best.needs == needs(config, best.recipe) == card - best.spare <= card
    assert faster.seconds < best.seconds
    assert faster.needs == needs(config, faster.recipe) > card
    assert track(best.recipe, card).peak.total == best.needs
    with pytest.raises(BudgetExceeded):
        track(faster.recipe, card)


def test_families_that_may_be_fastest_are_searched_first(config, spy, monkeypatch):
    """They rule out most of the others, which have the same first answer in any order."""
    question = {"card": "540 MiB", "seq_len": 128, "global_batch": 64}
    asked = spy(search, "predict")
    best = plan(config, **question).best.recipe
    predicted = asked.call_count
    monkeypatch.setattr(
        search.Search, "_least_seconds", lambda search, family: 0
    )  # as they are listed
    assert plan(config, **question).best.recipe == best
    assert predicted < 2 / 3 * (asked.call_count - predicted)


def test_whatever_is_listed_for_a_card_was_replayed(config):
    made = plan(config, card="600 MiB", seq_len=128, global_batch=64, target="cuda")
    assert len(made.fits) >= 2
    for option in made.fits:
        reserved = max(option.prediction.replay_allocator(), option.prediction.peak.total)
        assert option.needs == reserved + allocator.workspace() + allocator.CONTEXT


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"card": "Voodoo 2"}, "no card is known"),
        ({"method": ""}, "method='' is not known: choose one of None, 'full', 'lora'"),
        ({"global_batch": 2.5}, "give a whole number of rows"),
        ({"global_batch": 0}, "at least 1"),
        ({"seq_len": 100_000}, "beyond the 256 positions"),
        ({"seq_len": None}, "number of tokens"),
        ({"target": "tpu"}, "target='tpu'"),
        ({"target": None}, "target=None is not known"),
        ({"cards": 3}, "is not dealt evenly to 3 cards"),
        ({"cards": 0}, "cards=0: give a whole number of cards"),
        ({"machines": 2}, "machines=2 are planned where each has two cards or more"),
        ({"machines": 0, "cards": 2}, "machines=0: give a whole number of machines"),
        ({"machines": 2, "cards": 3}, "global_batch=8 is not dealt evenly to 6 cards"),
        ({"network": 1e9}, "with machines=2 or more"),
        ({"machines": 2, "cards": 2, "network": 0}, "give a number above 0"),
        ({"machines": 2, "cards": 2, "network": "100 Gbit"}, "network='100 Gbit' is how many"),
        ({"machines": 2, "cards": 2, "network": True}, "network=True is how many"),
        ({"machines": 2, "cards": 2, "network": float("inf")}, "network=inf is how many"),
    ],
)
def test_bad_input_is_a_sentence(config, changes, says):
    asked = {
        "card": "1 GiB",
        "seq_len": 16,
        "global_batch": 8,
        "method": "qlora",
        "target": "cpu",
    } | changes
    with pytest.raises(ValueError, match=says):
        plan(config, **asked)


def with_frozen_layers(model):
    model.model.layers[0].requires_grad_(False)


def with_another_head(model):
    model.lm_head = nn.Linear(model.config.hidden_size, model.config.vocab_size)  # with a bias


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (with_frozen_layers, ValueError, "some are frozen or different: predict each recipe"),
        (with_another_head, ValueError, "some are frozen or different"),
        (lambda model: model.gradient_checkpointing_enable(), RuntimeError, "checkpointed already"),
        (lambda model: model.compile(), RuntimeError, "compiled"),
    ],
)
def test_a_model_that_is_not_its_configs_is_refused(change, error, says):
    model, asked = small(), {"card": "8 MiB", "seq_len": 16, "global_batch": 2, "target": "cpu"}
    of_config = plan(model.config, **asked).best.needs
    assert plan(model, **asked).best.needs == of_config
    change(model)
    with pytest.raises(error, match=says):
        plan(model, **asked)


def test_lora_freezes_what_it_is_given_frozen_or_not():
    model, asked = (
        small(),
        {"card": "8 MiB", "seq_len": 16, "global_batch": 2, "target": "cpu", "method": "lora"},
    )
    before = plan(model, **asked).best.needs
    with_frozen_layers(model)
    assert plan(model, **asked).best.needs == before


def test_a_model_that_cannot_run_is_refused_after_two_predictions(spy):
    """Three heads of keys cannot serve eight of queries."""
    asked = spy(search, "predict")
    config = tiny(layers=9, heads=8).config
    config.num_key_value_heads = 3
    with pytest.raises(CannotTrace, match="Number of heads"):
        plan(config, card="1 GiB", seq_len=64, global_batch=4, method="any")
    assert asked.call_count == 2


def test_a_family_that_cannot_be_predicted_is_ruled_out_and_the_others_are_tried(
    config, monkeypatch
):
    def all_but_the_fastest(*args, recipe, **kwargs):
        if recipe.precision == "bf16":
            raise CannotTrace("some operation reads values")
        return predict(*args, recipe=recipe, **kwargs)

    monkeypatch.setattr("gradmem_lib.planning.search.predict", all_but_the_fastest)
    made = plan(config, card="1 GiB", seq_len=8, global_batch=1, method="lora", target="cpu")
    assert made.best.recipe.precision in ("float32", "autocast-bf16")
    [out] = made.ruled_out
    assert (out.recipe.precision, out.why) == ("bf16", "some operation reads values")
