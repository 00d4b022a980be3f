"""Lesson 11's puzzles on one card, from half a GiB to eight: what is trained, in how many bits, and
what is kept.
"""

from .recipe_puzzle import AGAIN, BF16, BROKEN, LORA, QLORA, WHY, puzzle_exercise

FLOAT32_FROZEN = "the weights alone do not fit: autocast leaves them in float32, frozen or not."
_STEPS = (
    "Recipe refuses in_backward together with accumulation: a gradient that is freed cannot "
    "be added to."
)
_LOGITS = (
    "the head makes the peak: the logits of a micro-batch have one number for each token and each "
    "word."
)
IN_BACKWARD = BF16 | {"in_backward": True}

EXERCISES = (
    puzzle_exercise(
        "11.1",
        1,
        2,
        "the first look: weights, gradients, states, and what rows cost",
        ("the default", {}, WHY["weights"]),
        ("every weight", BF16, WHY["gradients"]),
        ("mixed precision", LORA | {"precision": "autocast-bf16"}, FLOAT32_FROZEN),
        ("all rows at once", LORA, WHY["kept"]),
        ("4 bits under autocast", QLORA | {"precision": "autocast-bf16"}, WHY["kept"]),
        (
            "three pieces",
            LORA | {"accumulation": 3},
            "accumulation=3 does not cut 4 rows evenly: choose a divisor of 4.",
        ),
    ),
    puzzle_exercise(
        "11.2",
        2,
        2,
        "which optimizer's states a small card has room for",
        ("AdamW", BF16 | AGAIN | {"accumulation": 8}, WHY["states"]),
        (
            "states in 8 bits",
            BF16 | AGAIN | {"optimizer": "adamw-8bit", "accumulation": 8},
            WHY["states"],
        ),
        (
            "mixed precision",
            BF16
            | AGAIN
            | {"precision": "autocast-bf16", "optimizer": "adafactor-torch", "accumulation": 8},
            WHY["gradients"],
        ),
        (
            "nothing runs again",
            BF16 | {"optimizer": "adafactor-torch", "accumulation": 8},
            WHY["kept"],
        ),
        ("adapters", LORA | {"accumulation": 8}, BROKEN["full"]),
        (
            "in backward, accumulated",
            IN_BACKWARD | AGAIN | {"optimizer": "adafactor-torch", "accumulation": 8},
            _STEPS,
        ),
    ),
    puzzle_exercise(
        "11.3",
        2,
        2,
        "gradients that never wait, and states that hardly are",
        (
            "accumulated",
            BF16 | AGAIN | {"optimizer": "adafactor-torch", "accumulation": 8},
            WHY["gradients"],
        ),
        ("AdamW in backward", IN_BACKWARD | AGAIN, WHY["states"]),
        ("8 bits in backward", IN_BACKWARD | AGAIN | {"optimizer": "adamw-8bit"}, WHY["states"]),
        (
            "mixed precision",
            IN_BACKWARD | AGAIN | {"precision": "autocast-bf16", "optimizer": "adafactor-torch"},
            WHY["weights"],
        ),
        ("nothing runs again", IN_BACKWARD | {"optimizer": "adafactor-torch"}, WHY["kept"]),
        ("adapters", LORA | AGAIN, BROKEN["full"]),
    ),
    puzzle_exercise(
        "11.4",
        2,
        2,
        "what is left of a card that is full of frozen weights",
        ("4 bits", QLORA | AGAIN | {"accumulation": 8}, BROKEN["16 bits"]),
        (
            "mixed precision",
            LORA | AGAIN | {"precision": "autocast-bf16", "accumulation": 8},
            FLOAT32_FROZEN,
        ),
        ("nothing runs again", LORA | {"accumulation": 8}, WHY["kept"]),
        ("all rows at once", LORA | AGAIN, WHY["beside"]),
        (
            "every weight",
            BF16 | AGAIN | {"optimizer": "adafactor-torch", "accumulation": 8},
            WHY["gradients"],
        ),
        (
            "parts of layers",
            LORA | {"checkpointing": "attention", "accumulation": 8},
            WHY["beside"],
        ),
    ),
    puzzle_exercise(
        "11.5",
        2,
        3,
        "moving instead of computing again",
        ("checkpoints", QLORA | AGAIN | {"accumulation": 8}, BROKEN["once"]),
        ("in 16 bits", LORA | {"offload": "activations", "accumulation": 8}, WHY["weights"]),
        ("kept", QLORA | {"accumulation": 8}, WHY["kept"]),
        ("all rows at once", QLORA | {"offload": "activations"}, WHY["head"]),
        (
            "inputs of checkpoints",
            QLORA | {"offload": "boundaries", "accumulation": 8},
            (
                "offload='boundaries' moves the inputs of checkpointed layers, but this recipe "
                "has no checkpoints, so Recipe refuses."
            ),
        ),
    ),
    puzzle_exercise(
        "11.6",
        2,
        3,
        "the smallest card, where every part counts",
        ("the whole loss", QLORA | AGAIN | {"accumulation": 8}, _LOGITS),
        ("in 16 bits", LORA | AGAIN | {"accumulation": 8}, WHY["weights"]),
        (
            "to the host",
            QLORA | {"offload": "activations", "chunked_loss": True, "accumulation": 8},
            BROKEN["on the card"],
        ),
        (
            "one layer in two",
            QLORA | {"every_n_layers": 2, "chunked_loss": True, "accumulation": 8},
            WHY["beside"],
        ),
        ("nothing runs again", QLORA | {"chunked_loss": True, "accumulation": 8}, WHY["kept"]),
        ("all rows at once", QLORA | AGAIN | {"chunked_loss": True}, WHY["beside"]),
    ),
)
