"""Lesson 09's puzzle: adapters under 300 MiB, and as fast as that card allows."""

from ...judge.exercise import Exercise
from ...learner.bargains import Bargain, by_recipe, calls_of_layers

ADAPTERS = Bargain(
    {"quantized_base": True, "chunked_loss": True, "checkpointing": "first-26"},
    by_recipe(
        "SmolLM2-135M",
        "quantized_base chunked_loss accumulation checkpointing",
        calls_of_layers,
        {"batch_size": 8, "seq_len": 128, "target": "cpu"},
        precision="bf16",
        optimizer="adamw-8bit",
        lora_rank=16,
    ),
    "300 MiB",
    60,
    "calls of layers",
)

FAST_ADAPTERS = Exercise(
    "9.10",
    ADAPTERS.best,
    ADAPTERS.cases,
    """
    {"chunked_loss": True, "checkpointing": "per-layer"}
        the frozen weights in bf16 leave little of the card.
    {"quantized_base": True, "checkpointing": "per-layer"}
        the logits of 8 rows are there at once: the loss in chunks takes them away.
    {"quantized_base": True, "chunked_loss": True}
        without checkpoints, each layer keeps its activations of 8 rows until backward.
    {"quantized_base": True, "chunked_loss": True, "accumulation": 8}
        it fits, but each of 30 layers is called eight times: checkpoints call it twice at most.
    """,
    afterwards=ADAPTERS.compared,
)
