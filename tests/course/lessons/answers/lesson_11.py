"""Answers to lesson 11's puzzles: recipes that fit in other ways than the planner's, and tempting
ones that do not.
"""

from types import MappingProxyType

import numpy as np

from gradmem_lib import Recipe
from gradmem_lib.course.lessons.lesson_11.exercises import (
    ADAFACTOR,
    AGAIN,
    BF16,
    CHUNKS,
    FSDP,
    LORA,
    QLORA,
)

IN_BACKWARD, HOST = ADAFACTOR | {"in_backward": True}, {"offload": "activations"}
BOUNDARIES = AGAIN | {"offload": "boundaries"}
ONE, TWO = {"accumulation": 8}, {"accumulation": 2}
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


RIGHT = {
    "11.1": [
        Recipe(**LORA, accumulation=4),
        QLORA | CHUNKS | {"accumulation": 4},
        BF16 | IN_BACKWARD | AGAIN | CHUNKS,
        LORA | AGAIN | CHUNKS | {"accumulation": 4, "lora_rank": 32},
        LORA | {"lora_rank": np.int64(16), "accumulation": np.float64(4)},
        MappingProxyType(LORA | {"accumulation": 4}),
        LORA | AGAIN | {"lora_targets": LINEAR, "accumulation": 4},
    ],
    "11.2": [BF16 | ADAFACTOR | AGAIN | CHUNKS | ONE],
    "11.3": [BF16 | IN_BACKWARD | BOUNDARIES | CHUNKS],
    "11.4": [LORA | {"optimizer": "adamw"} | AGAIN | ONE],
    "11.5": [QLORA | HOST | CHUNKS | ONE],
    "11.6": [QLORA | {"every_n_layers": 1} | CHUNKS | ONE],
    "11.7": [LORA | {"optimizer": "adamw"} | AGAIN | CHUNKS | ONE],
    "11.8": [QLORA | HOST | CHUNKS],
    "11.9": [LORA | AGAIN | CHUNKS | ONE],
    "11.10": [BF16 | FSDP | AGAIN | TWO],
    "11.11": [QLORA | FSDP | AGAIN | {"offload": "parameters"} | TWO],
    "11.12": ["gradient", " GRADIENTS", "The gradients."],
}
WRONG = {
    "11.1": [
        Recipe(**BF16 | AGAIN | CHUNKS, accumulation=4),
        LORA | {"optimizer": "sgd"},
        LORA | AGAIN | CHUNKS | {"accumulation": 4, "lora_rank": 15},
        LORA | AGAIN | {"lora_targets": LINEAR[:4], "accumulation": 4},
        LORA | AGAIN | FSDP | {"accumulation": 4},
        list((LORA | AGAIN).items()),
        LORA | {"rank": 16},
        Recipe,
    ],
    "11.3": [BF16 | IN_BACKWARD | AGAIN | ONE],
    "11.5": [QLORA | HOST | {"every_n_layers": 2} | ONE],
    "11.6": [QLORA | BOUNDARIES | CHUNKS | ONE],
    "11.8": [QLORA | BOUNDARIES | CHUNKS | {"accumulation": 4}],
    "11.10": [BF16 | FSDP | {"optimizer": "adamw-8bit"}, BF16 | FSDP | AGAIN | {"accumulation": 4}],
    "11.11": [QLORA | AGAIN | BOUNDARIES | TWO],
    "11.12": [Recipe(), ["gradients"], "logits", "gradients and optimizer", 3, {"gradients": True}],
}
