"""Every type of transformers models that can be made small by the names of its sizes, with drawn
depths, batch sizes and recipes: the short traces, the full trace and the tracker agree to the byte,
or there is a refusal in a sentence.

A few families each time. Every night all of them, each with three recipes and other draws.
"""

from __future__ import annotations

import contextlib
import random

import pytest
import torch
import transformers
from support.nightly import ALL, each
from support.predicted import RECIPES, assert_same, assert_short_is_full, measured, recipe_of
from support.shrunk import families, shrunk

from gradmem_lib import Recipe, predict
from gradmem_lib.prediction.question import CannotTrace

# The words of a refusal which says that the model itself fails: then it has to.
FAILS = "fails in its prediction"
# A real step in pieces counts the labels without the first of each row, and a prediction counts all
# of them: two bytes less for two rows, before the first forward, which is no peak.
COUNTS_OTHERWISE = {"mllama"}
# Of the types that have a head: how many are made small, at least.
MADE_SMALL = 200


def draws_of(family: str) -> random.Random:
    return random.Random(f"{family} {random.random() if ALL else 0}")


def check(family: str, layers: int, name: str, rows: int, tokens: int, target: str) -> None:
    case = family, layers, name, rows, tokens, target
    config, recipe = shrunk(family, layers), recipe_of(name)
    rows *= recipe.accumulation
    ask = {"batch_size": rows, "seq_len": tokens, "recipe": recipe, "target": target}
    try:
        short, _ = assert_short_is_full(config, **ask)
    except (ValueError, CannotTrace) as refusal:
        assert len(str(refusal)) > 50, case
        if FAILS in str(refusal):
            with pytest.raises(Exception):  # noqa: B017  any error of the model's own
                measured(config, recipe, rows, tokens)
        return
    if target == "cuda":
        return
    torch.manual_seed(0)
    tracker = measured(config, recipe, rows, tokens)
    if family in COUNTS_OTHERWISE:
        assert short.peak == tracker.peak, case
        assert short.peak_by_phase == tracker.peak_by_phase, case
    else:
        assert_same(short, tracker)


@pytest.mark.parametrize("family", each(90, families(), start=7))
def test_a_drawn_step_of_any_family_is_exact_or_refused(family):
    transformers.logging.set_verbosity_error()
    draws = draws_of(family)
    layers = draws.randint(5, 10)  # up to seven, most steps are traced in full
    try:
        shrunk(family, layers)
    except Exception as error:  # its config has rules of its own
        pytest.skip(f"{family} is not made small by the names of its sizes: {error}")
    for name in ["float32", *draws.sample(list(RECIPES), 2)]:
        rows, tokens = draws.randint(1, 4), draws.randint(8, 24)
        check(family, layers, name, rows, tokens, draws.choice(["cpu", "cuda"]))


@pytest.mark.skipif(not ALL, reason="makes every type: make nightly")
def test_most_types_are_made_small():
    """Otherwise the skips above would hide that none of them is tried."""
    made = 0
    for family in families():
        with contextlib.suppress(Exception):
            shrunk(family, 5)
            made += 1
    assert made >= MADE_SMALL


def test_a_model_that_lacks_an_input_is_refused_in_a_sentence():
    """GIT's own error compares two numbers of rows, and says neither where nor what to do."""
    transformers.logging.set_verbosity_error()
    with pytest.raises(ValueError, match=r"(?s)GitForCausalLM fails.*batch_size.*give batch="):
        predict(shrunk("git", 5), batch_size=2, seq_len=8, recipe=Recipe(attention=None))
