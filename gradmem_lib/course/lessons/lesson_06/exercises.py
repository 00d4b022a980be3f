"""Lesson 06's exercise about a 7B: a recipe that fits a card which nobody needs to own."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, lru_cache

from ....training.recipe import Recipe
from ...judge.compare import describe, plain
from ...judge.exercise import Exercise, Mistake
from ..shared.settings import quietly

MODEL_7B, CARD_7B, TOKENS_7B, BATCH_7B = "Llama-2-7B", "RTX 4090 24GB", 2048, 8


@cache
def _sizes():
    from ....planning.cards import find_card
    from ....planning.models import known_model
    from ....planning.work import count

    config = known_model(MODEL_7B)[1]
    return config, count(config), find_card(CARD_7B)


@lru_cache(maxsize=32)
def on_card(recipe: Recipe, micro_batch: int):
    """What ``recipe`` needs for the exercise's 7B, as ``plan``'s ``Option``: with ``needs``,
    ``spare`` (bytes) and ``why_not()``.

    The allocator's part is the rough one that ``plan`` begins with.
    """
    from ....planning.cost import seconds_per_token
    from ....planning.held import overhead_of_prediction
    from ....planning.options import Option
    from ....prediction.predict import predict

    config, work, card = _sizes()
    prediction = predict(
        config,
        batch_size=micro_batch * recipe.accumulation,
        seq_len=TOKENS_7B,
        recipe=recipe,
        target="cuda",
    )
    parts = overhead_of_prediction(prediction, card.capability, replay=False)
    seconds = seconds_per_token(work, recipe, card, micro_batch, TOKENS_7B)
    return Option(recipe, micro_batch, seconds, card.nbytes, prediction, parts)


def what_is_wrong(recipe: Recipe, micro_batch: int) -> str:
    """The kind of mistake in a recipe for the exercise's 7B, in a few words; empty where there is
    none.
    """
    from ....planning.held import resident_bytes

    if micro_batch * recipe.accumulation != BATCH_7B:
        return "another batch"
    if recipe.lora_rank is not None:
        return "few weights"
    _, work, card = _sizes()
    resident = resident_bytes(work, recipe)
    if resident["parameters"] > card.nbytes:
        return "float32 weights"
    if resident["parameters"] + resident["gradients"] > card.nbytes:
        return "weights and gradients"
    if sum(resident.values()) > card.nbytes:
        return "states"
    return "" if on_card(recipe, micro_batch).fits else _beside_the_weights(recipe, micro_batch)


def _beside_the_weights(recipe: Recipe, micro_batch: int) -> str:
    """What is in the way of a recipe whose weights, gradients and states would fit."""
    if recipe.checkpointing is None and recipe.every_n_layers is None:
        return "no checkpointing"
    if not recipe.chunked_loss and on_card(replace(recipe, chunked_loss=True), micro_batch).fits:
        return "logits"
    return f"this {on_card(recipe, micro_batch).why_not()}"


_IN_THE_WAY = {
    "weights and gradients": (
        "weights and gradients alone do not fit: they take 12.55 GiB each in bf16, and "
        "accumulation keeps the gradients from one micro-batch to the next, however "
        "small it is; step in backward, so that no gradient waits."
    ),
    "states": (
        "each gradient is freed after its step, but AdamW's states stay: with the weights "
        "they do not fit on the card; choose an optimizer that keeps next to nothing."
    ),
    "float32 weights": (
        "the weights alone are 25.10 GiB in float32, and autocast does not change "
        "that; precision='bf16' halves them."
    ),
    "no checkpointing": (
        "the weights fit, but the activations of 32 layers do not: checkpointing='per-layer'."
    ),
    "logits": (
        "weights and checkpoints fit, but the logits of all rows, their copies and their gradient "
        "do not: chunked_loss=True makes them piece by piece."
    ),
    "another batch": "the global batch has changed: micro-batch x accumulation must make 8 rows.",
    "few weights": (
        "LoRA freezes the weights and trains adapters, but here every weight must be "
        "trained: leave lora_rank out."
    ),
}


def recipe_7b() -> tuple[Recipe, int]:
    """A recipe that trains every weight of a 7B on a card of 24 GB, and the rows of a
    micro-batch.
    """
    recipe = Recipe(
        precision="bf16",
        optimizer="adafactor-torch",
        in_backward=True,
        checkpointing="per-layer",
        chunked_loss=True,
    )
    return recipe, 8


def _recipe(micro_batch=1, **choices):
    given = dict(
        precision="bf16", optimizer="adamw-fused", checkpointing="per-layer", chunked_loss=True
    )

    def wrong():
        return Recipe(**(given | {"accumulation": BATCH_7B // micro_batch} | choices)), micro_batch

    return wrong


_IN_BACKWARD = {"optimizer": "adafactor-torch", "in_backward": True}


@quietly
def _observe_7b(candidate):
    given = candidate()
    if not isinstance(given, (tuple, list)) or len(given) != 2 or not isinstance(given[0], Recipe):
        raise TypeError(
            "return two things, the recipe and the rows of a micro-batch: return Recipe(...), 1"
        )
    recipe, micro_batch = given
    micro_batch = plain(micro_batch)
    if isinstance(micro_batch, float) and micro_batch.is_integer():
        micro_batch = int(micro_batch)
    if isinstance(micro_batch, bool) or not isinstance(micro_batch, int) or micro_batch < 1:
        raise TypeError(
            "the rows of a micro-batch must be a whole number, at least 1, not "
            f"{describe(micro_batch)}"
        )
    fits = (
        recipe,
        micro_batch,
    ) == recipe_7b()  # asked by a test, so that a first check predicts one recipe, not two
    return {"what stands in the way": "" if fits else what_is_wrong(recipe, micro_batch)}


def _explain_7b(got, expected):
    what = got["what stands in the way"]
    return _IN_THE_WAY.get(what, what)


EXERCISES = (
    Exercise(
        id="6.5",
        title="a 7B on a card of 24 GB",
        difficulty=3,
        minutes=8,
        trains="finding what stands in the way, and the one change that moves it",
        reference=recipe_7b,
        observe=_observe_7b,
        explain=_explain_7b,
        mistakes=(
            Mistake("full, accumulated", _recipe(), _IN_THE_WAY["weights and gradients"]),
            Mistake("states", _recipe(8, in_backward=True), _IN_THE_WAY["states"]),
            Mistake("few weights", _recipe(lora_rank=16), _IN_THE_WAY["few weights"]),
            Mistake(
                "float32 weights",
                _recipe(8, precision="autocast-bf16", **_IN_BACKWARD),
                _IN_THE_WAY["float32 weights"],
            ),
            Mistake(
                "no checkpointing",
                _recipe(8, checkpointing=None, **_IN_BACKWARD),
                _IN_THE_WAY["no checkpointing"],
            ),
            Mistake(
                "in backward, accumulated",
                _recipe(in_backward=True, optimizer="adafactor"),
                (
                    "Recipe refuses in_backward together with accumulation: a gradient that is "
                    "freed cannot be added to; with in_backward all 8 rows go at once."
                ),
            ),
        ),
    ),
)
