"""Lesson 10's puzzle: what eight cards send for a 13B that they share."""

from ...judge.exercise import Exercise, Unusable
from ...learner.bargains import Bargain, by_recipe

RANKS = 8
WEIGHTS = 2 * 13_015_864_320  # bytes in bf16


def sent(recipe, config) -> int:
    """GB that each card sends in an update, in a ring."""
    passes = {"ddp": 2, "zero1": 3}
    passes |= {"zero2": 2 * recipe.accumulation, "fsdp": 3 * recipe.accumulation}
    if recipe.sharding is None:
        raise Unusable("eight cards train together: choose how they share, by sharding")
    return round(passes[recipe.sharding] * WEIGHTS * (RANKS - 1) / RANKS / 1e9)


SHARING = Bargain(
    {"sharding": "fsdp", "accumulation": 4},
    by_recipe(
        "Llama-2-13B",
        "sharding accumulation",
        sent,
        {"batch_size": 8, "seq_len": 2048, "ranks": RANKS, "target": "cuda"},
        precision="float32-master",
        optimizer="adamw-fused",
    ),
    "78 GB",
    400,
    "GB sent by each card",
)

SHARED = Exercise(
    "10.8",
    SHARING.best,
    SHARING.cases,
    """
    {"sharding": "zero2"}
        all 8 rows go through at once, and keep all their activations until backward.
    {"sharding": "zero2", "accumulation": 4}
        whole weights wait until backward beside the activations of two rows: cut one of the two.
    {"sharding": "fsdp", "accumulation": 2}
        the activations of four rows are too many, whatever is cut of the weights.
    {"sharding": "fsdp", "accumulation": 8}
        it fits, but every micro-batch gathers all weights twice: larger micro-batches need fewer.
    """,
    afterwards=SHARING.compared,
)
