"""Lesson 06's puzzle: section 1's run on its card, by few predictions."""

from ...judge.exercise import Exercise
from ...learner.bargains import Bargain, by_recipe, calls_of_layers

RENTED = Bargain(
    {"checkpointing": "first-4"},
    by_recipe(
        "SmolLM2-135M",
        "accumulation checkpointing",
        calls_of_layers,
        {"batch_size": 4, "seq_len": 256, "target": "cuda"},
    ),
    "3.5 GiB",
    60,
    "calls of layers",
)

ON_THE_RENTED = Exercise(
    "6.8",
    RENTED.best,
    RENTED.cases,
    """
    {}
        this is the run that failed.
    {"accumulation": 4}
        it fits, but each of 30 layers is called four times: larger micro-batches need fewer calls.
    """,
    afterwards=RENTED.compared,
)
