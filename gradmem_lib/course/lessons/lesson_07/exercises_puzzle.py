"""Lesson 07's puzzle: an update in which nothing is lost, on a small card."""

from ...judge.exercise import Exercise, Unusable
from ...learner.bargains import Bargain, by_recipe, calls_of_layers

run = by_recipe(
    "SmolLM2-135M",
    "precision optimizer accumulation checkpointing",
    calls_of_layers,
    {"batch_size": 8, "seq_len": 128, "target": "cpu"},
)


def losing_nothing(choice):
    """The prediction of an update, and its calls of layers."""
    found = run(choice)
    stochastic = choice.get("optimizer") == "adamw-stochastic"
    if choice.get("precision") == "bf16" and not stochastic:
        raise Unusable("small updates are lost where bf16 weights are rounded to the nearest")
    return found


UNROUNDED = Bargain(
    {"precision": "bf16", "optimizer": "adamw-stochastic", "checkpointing": "first-19"},
    losing_nothing,
    "1.6 GiB",
    60,
    "calls of layers",
)

LOSING_NOTHING = Exercise(
    "7.7",
    UNROUNDED.best,
    UNROUNDED.cases,
    """
    {"checkpointing": "per-layer"}
        in float32, weights, gradients and states alone are more than the card: 16 bytes for each
        parameter.
    {"precision": "float32-master", "optimizer": "adamw-fused", "checkpointing": "per-layer"}
        a master copy loses no update, but keeps 16 bytes for each parameter, as float32 does.
    {"precision": "autocast-bf16", "optimizer": "adamw-fused", "checkpointing": "per-layer"}
        autocast keeps weights, gradients and states in float32.
    {"precision": "bf16", "optimizer": "adamw-stochastic"}
        no update is lost, and the activations of 8 rows do not fit beside the rest.
    {"precision": "bf16", "optimizer": "adamw-stochastic", "accumulation": 4}
        it fits, but each of 30 layers is called four times: checkpoints call it twice at most.
    """,
    afterwards=UNROUNDED.compared,
)
