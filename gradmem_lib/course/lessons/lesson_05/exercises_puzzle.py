"""Lesson 05's puzzle: lesson 00's run with every weight trained, on its card."""

from ...judge.exercise import Exercise
from ...learner.bargains import Bargain, by_recipe, calls_of_layers
from ...material.first_run import CARD

SWITCHES = Bargain(
    {
        "optimizer": "adafactor-torch",
        "in_backward": True,
        "checkpointing": "per-layer",
        "chunked_loss": True,
    },
    by_recipe(
        "tiny Llama",
        "optimizer accumulation checkpointing chunked_loss in_backward",
        calls_of_layers,
        {"batch_size": 16, "seq_len": 128, "target": "cpu"},
        precision="bf16",
    ),
    CARD,
    16,
    "calls of layers",
)

WITH_SWITCHES = Exercise(
    "5.12",
    SWITCHES.best,
    SWITCHES.cases,
    """
    {}
        nothing is switched on, so all 16 rows and their logits are there at once.
    {"checkpointing": "per-layer", "chunked_loss": True, "accumulation": 4}
        AdamW's states are as large as weights and gradients together, and another optimizer keeps
        almost none.
    {"optimizer": "adafactor-torch", "checkpointing": "per-layer", "accumulation": 4}
        the logits of four rows are there at once: the loss in chunks takes them away.
    {"optimizer": "adafactor-torch", "checkpointing": "per-layer", "chunked_loss": True}
        it is close: all gradients wait for the step. A smaller micro-batch makes the rest smaller,
        or the gradients need not wait.
    dict(optimizer="adafactor-torch", checkpointing="per-layer", chunked_loss=True, accumulation=4)
        it fits, but 4 micro-batches in which each of 4 layers runs twice are 32 calls: larger
        micro-batches need fewer.
    """,
    afterwards=SWITCHES.compared,
)
