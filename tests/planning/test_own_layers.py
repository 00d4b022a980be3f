"""Layers of modules of one's own: which ones a forward shows to be such that they may run again,
and what their checkpoints need.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.nightly import each
from support.own_models import OWN_MODELS
from support.predicted import assert_same, tracked

from gradmem_lib.compat import tree_map
from gradmem_lib.planning.own_layers import find_own_layers
from gradmem_lib.planning.rows import rows_like
from gradmem_lib.prediction.predict import predict
from gradmem_lib.training.recipe import Recipe

ROWS = 4


def rows_of(batch, rows: int = ROWS, dtype: torch.dtype | None = None):
    """Real rows like those of ``batch``."""
    return tree_map(lambda t: torch.zeros(t.shape, dtype=t.dtype), rows_like(batch, rows, dtype))


@pytest.mark.parametrize("name", OWN_MODELS)
def test_the_lists_of_layers_are_found_in_the_order_of_their_calls(name):
    build, batch, loss, lists = OWN_MODELS[name]
    assert find_own_layers(build(), batch, loss) == (lists, [])


SCHEDULES = ["per-layer", "first-1", "first-3", 2]
CASES = [
    (name, schedule, accumulation)
    for name in OWN_MODELS
    for schedule in SCHEDULES
    for accumulation in (1, 2)
]


@pytest.mark.parametrize(("name", "schedule", "accumulation"), each(8, CASES))
def test_checkpoints_of_named_lists_are_predicted_to_the_byte(name, schedule, accumulation):
    build, batch, loss, lists = OWN_MODELS[name]
    recipe = Recipe(checkpointing=schedule, layers=lists, accumulation=accumulation)
    rows = rows_of(batch)
    asked = {"batch": rows, "loss": loss, "recipe": recipe, "target": "cpu"}
    if schedule == 2 and name in ("unet", "pairs"):  # something happens between the layers
        with pytest.raises(RuntimeError, match="was given something else than the output of layer"):
            predict(build(), **asked)
        with pytest.raises(RuntimeError, match="was given something else than the output of layer"):
            tracked(build(), rows, recipe, loss)
        return
    predicted = predict(build(), **asked)
    assert_same(predicted, tracked(build(), rows, recipe, loss))
    assert predict(build(), full=True, **asked).peak == predicted.peak
    plain = predict(build(), **asked | {"recipe": replace(recipe, checkpointing=None)})
    assert predicted.peak_by_phase["forward"] < plain.peak_by_phase["forward"]
