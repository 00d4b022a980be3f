"""What a batch's values hide: fused attention builds a mask where they hide something, and none
where they do not.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch
from support.families import OLDER, tiny_config
from support.nightly import each
from support.predicted import assert_predicted

from gradmem_lib import Recipe, predict
from gradmem_lib.model.classes import model_class
from gradmem_lib.prediction.question import CannotTrace

ROWS = 4  # so that a micro-batch of half of them has several
FULL = torch.ones(ROWS, 16, dtype=torch.int64)
HIDDEN = (torch.arange(16) < 10).long().expand(ROWS, 16)
ONE_PIECE = torch.cat([FULL[:2], HIDDEN[:2]])
POSITIONS = torch.arange(16).expand(ROWS, 16)
RECIPES = {
    "whole": Recipe(attention=None),
    "cut": Recipe(attention=None, accumulation=2, checkpointing="per-layer"),
}


def text_batch(**more) -> dict:
    torch.manual_seed(0)
    ids = torch.randint(3, 96, (ROWS, 16))
    return {"input_ids": ids, "labels": ids, **more}


def lm(family: str) -> torch.nn.Module:
    config = tiny_config(family)
    config.use_cache = False
    return model_class(config)(config)


# in steps in which every family, mask and recipe comes
@pytest.mark.parametrize(
    ("family", "mask", "recipe"),
    each(3, product(["llama", "gpt2", "modernbert", "gemma3_text"], [FULL, HIDDEN], RECIPES)),
)
def test_a_mask_of_hidden_tokens_is_predicted(family, mask, recipe):
    assert_predicted(lm(family), text_batch(attention_mask=mask), RECIPES[recipe])


@pytest.mark.parametrize(
    "positions", [POSITIONS, POSITIONS % 8], ids=["one sequence", "two sequences"]
)
def test_a_mask_between_packed_sequences_is_predicted(positions):
    assert_predicted(lm("llama"), text_batch(position_ids=positions), Recipe(attention=None))
    with_a_mask = text_batch(position_ids=positions, attention_mask=FULL)
    assert_predicted(lm("llama"), with_a_mask, Recipe(attention=None))


@pytest.mark.parametrize(
    ("family", "mask", "recipe"),
    [
        ("llama", ONE_PIECE, Recipe(accumulation=2)),
        ("bart", HIDDEN, Recipe()),  # its decoder makes a mask of its own, of ones
    ],
)
def test_a_batch_that_hides_tokens_in_a_part_is_refused(family, mask, recipe):
    with pytest.raises(CannotTrace, match="hidden tokens"):
        predict(lm(family), batch=text_batch(attention_mask=mask), recipe=recipe, target="cpu")


# Older versions draw for each of BART's layers whether it runs, which is refused.
@pytest.mark.parametrize(
    ("family", "mask"),
    each(3, product(["llama", "bert", *([] if OLDER else ["bart"]), "mpnet"], [FULL, HIDDEN])),
)
def test_eager_attention_leaves_a_mask_out_that_is_neither_causal_nor_hides(family, mask):
    """Under autocast, scores beside a mask are float32."""
    recipe = Recipe(
        attention=None if family == "mpnet" else "eager", precision="autocast-bf16", accumulation=2
    )
    assert_predicted(lm(family), text_batch(attention_mask=mask), recipe)


def test_a_mask_without_values_is_taken_to_hide_nothing():
    real, meta = text_batch(attention_mask=FULL), text_batch(attention_mask=FULL.to("meta"))
    assert (
        predict(lm("llama"), batch=meta, target="cpu").peak
        == predict(lm("llama"), batch=real, target="cpu").peak
    )
