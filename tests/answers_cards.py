"""Answers to the exercises of lesson 06 as people write them; see answers_numbers.py."""

from gradmem_lib import Recipe

RIGHT, WRONG = {}, {}


def _recipe(micro=1, **choices):
    usual = {
        "precision": "bf16",
        "optimizer": "adamw-fused",
        "checkpointing": "per-layer",
        "accumulation": 8 // micro,
    }
    return lambda: (Recipe(**{**usual, **choices}), micro)


RIGHT["6.5"] = {
    "one name": _recipe(lora_rank=8, lora_targets=("q_proj",)),
    "list": lambda: list(_recipe(lora_rank=16)()),
    "two rows": _recipe(2, lora_rank=16, chunked_loss=True),
}
WRONG["6.5"] = {
    "full": (_recipe(), "weights and gradients alone"),
    "one layer": (_recipe(lora_rank=16, lora_targets=("layers.0.self_attn.q_proj",)), "every layer"),
    "no checkpoints": (_recipe(lora_rank=16, checkpointing=None), "checkpointing='per-layer'"),
    "float32": (_recipe(lora_rank=16, precision="float32"), "25.10 GiB"),
    "small batch": (_recipe(lora_rank=16, accumulation=2), "global batch"),
    "recipe alone": (lambda: Recipe(precision="bf16"), "two things"),
    "a fraction": (lambda: (_recipe(lora_rank=16)()[0], 1.5), "whole number"),
}
