"""Run in every rank by the tests of ranks: what a tracker says of a step there."""

from __future__ import annotations

import warnings

from support.families import tiny_config
from support.predicted import config, tracked

from gradmem_lib.model.classes import model_class
from gradmem_lib.model.inputs import example_batch
from gradmem_lib.prediction.predict import predict
from gradmem_lib.training.prepare import cast_weights
from gradmem_lib.training.recipe import Recipe

ROWS, TOKENS = 4, 16  # of each rank


def config_of(family: str, layers: int = 3):
    found = (
        config(family, layers)
        if family in ("llama", "gpt2", "gqa", "tied", "bert", "gemma3")
        else tiny_config(family)
    )
    for name, value in vars(found).items():
        if "drop" in name and isinstance(value, float):
            setattr(found, name, 0.0)
    return found


def figures(found) -> tuple:
    """Of a tracker or a prediction."""
    return found.peak, found.peak_by_phase, found.current.by_category


def measured_here(cases: list[tuple[str, dict]]) -> list[tuple]:
    """In a rank: the figures of a second step, case by case."""
    warnings.filterwarnings("ignore")
    found = []
    for family, fields in cases:
        recipe = Recipe(**fields)
        cfg = config_of(family)
        model = model_class(cfg)(cfg)
        if recipe.weight_dtype is not None:
            cast_weights(model, recipe.weight_dtype)  # for a batch in that dtype
        found.append(figures(tracked(model, example_batch(model, ROWS, TOKENS), recipe)))
    return found


def predicted_for(family: str, fields: dict, ranks: int, rank: int, **more) -> tuple:
    return figures(
        predict(
            config_of(family),
            batch_size=ROWS,
            seq_len=TOKENS,
            recipe=Recipe(**fields),
            target="cpu",
            ranks=ranks,
            rank=rank,
            **more,
        )
    )
