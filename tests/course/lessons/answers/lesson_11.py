"""Answers to lesson 11's puzzles: recipes that fit in other ways than the planner's, and tempting
ones that do not.
"""

from dataclasses import replace

from gradmem_lib import Recipe
from gradmem_lib.course import puzzle

BF16 = {"precision": "bf16", "optimizer": "adamw-fused"}
LORA = BF16 | {"lora_rank": 16}
QLORA = LORA | {"quantized_base": True}
AGAIN = {"checkpointing": "per-layer"}
HOST, CHUNKS = {"offload": "activations"}, {"chunked_loss": True}
IN_BACKWARD = {"precision": "bf16", "in_backward": True, "optimizer": "adafactor-torch"}
FSDP = {"sharding": "fsdp"}


def rows(n):
    return {"accumulation": n}


RIGHT = {
    f"11.{i}": {
        "the planner's": puzzle(f"11.{i}").best()[0],
        "as a dict": vars(puzzle(f"11.{i}").best()[0]),
    }
    for i in range(1, 12)
}
RIGHT["11.1"] |= {
    "16 bits": Recipe(**LORA, accumulation=4),
    "4 bits": Recipe(**QLORA, accumulation=4, chunked_loss=True),
    "every weight": Recipe(**IN_BACKWARD, **AGAIN, **CHUNKS),
    "a higher rank": replace(Recipe(**LORA | AGAIN | CHUNKS | rows(4)), lora_rank=32),
}
RIGHT["11.2"] |= {"in chunks": BF16 | {"optimizer": "adafactor-torch"} | AGAIN | CHUNKS | rows(8)}
RIGHT["11.3"] |= {"moved": IN_BACKWARD | AGAIN | CHUNKS | {"offload": "boundaries"}}
RIGHT["11.4"] |= {
    "in chunks": LORA | AGAIN | CHUNKS | rows(8),
    "one by one": LORA | {"optimizer": "adamw"} | AGAIN | rows(8),
}
RIGHT["11.5"] |= {"two rows": QLORA | HOST | rows(4), "in chunks": QLORA | HOST | CHUNKS | rows(8)}
RIGHT["11.6"] |= {"each layer": QLORA | {"every_n_layers": 1} | CHUNKS | rows(8)}
RIGHT["11.7"] |= {"one by one": LORA | {"optimizer": "adamw"} | AGAIN | CHUNKS | rows(8)}
RIGHT["11.8"] |= {"all of it moved": QLORA | HOST | CHUNKS}
RIGHT["11.9"] |= {"in chunks": LORA | AGAIN | CHUNKS | rows(8)}
RIGHT["11.10"] |= {"in two": BF16 | FSDP | AGAIN | rows(2)}
RIGHT["11.11"] |= {"shards on the host": QLORA | FSDP | AGAIN | {"offload": "parameters"} | rows(2)}
RIGHT["11.12"] = {"by name": "gradients", "one": "gradient", "a capital": " Gradients"}

_OWN = {
    "plain SGD": ({**BF16, "optimizer": "sgd"}, "SGD"),
    "rank 4": ({**LORA, "lora_rank": 4}, "rank 16"),
    "two layers of each": ({**LORA, "lora_targets": ("q_proj", "v_proj")}, "every linear layer"),
    "a word": ("bf16", "but 'bf16' was given"),
    "no such option": ({"rank": 16}, "no 'rank'"),
}
_ONE_CARD = {"cut": ({**BF16, **FSDP}, "several cards")}
_CARDS = {"alone": (BF16, "how they share")}
_FULL = {"adapters": (LORA | AGAIN, "every weight")}
WRONG = {f"11.{i}": _OWN | (_ONE_CARD if i < 10 else _CARDS) for i in range(1, 12)}
WRONG["11.1"] = WRONG["11.1"] | {
    "float32": (Recipe(), "the weights alone"),
    "every weight": (Recipe(**BF16), "weights and gradients alone"),
    "every weight, in pieces": (
        Recipe(**BF16 | AGAIN | CHUNKS | rows(4)),
        "weights and gradients alone",
    ),
    "all rows": (Recipe(**LORA), "activations"),
}
WRONG["11.2"] = WRONG["11.2"] | _FULL
WRONG["11.3"] = (
    WRONG["11.3"] | _FULL | {"accumulated": (IN_BACKWARD | rows(8), "choose one of the two")}
)
WRONG["11.4"] = WRONG["11.4"] | {"4 bits": (QLORA | AGAIN | rows(8), "4 bits")}
WRONG["11.5"] = WRONG["11.5"] | {
    "checkpoints": (QLORA | {"every_n_layers": 2} | rows(8), "no layer may run twice")
}
WRONG["11.6"] = WRONG["11.6"] | {
    "moved": (QLORA | AGAIN | CHUNKS | {"offload": "boundaries"} | rows(8), "nothing may wait")
}
WRONG["11.7"] = WRONG["11.7"] | {"4 bits": (QLORA | AGAIN | rows(8), "4 bits")}
WRONG["11.8"] = WRONG["11.8"] | {
    "in pieces": (
        QLORA | AGAIN | rows(4),
        "the 1 row cannot be cut into 4 micro-batches: leave accumulation=1",
    )
}
WRONG["11.10"] = (
    WRONG["11.10"]
    | _FULL
    | {"8-bit states": ({**BF16, **FSDP, "optimizer": "adamw-8bit"}, "whole weights")}
)
WRONG["11.11"] = WRONG["11.11"] | {"in chunks": (QLORA | FSDP | CHUNKS, "refuses chunked_loss")}
WRONG["11.12"] = {
    "weights": ("parameters", "the parameters alone fit"),
    "states": ("optimizer", "very small"),
    "activations": ("activations", "one row at a time"),
    "temporaries": ("temporaries", "in place"),
    "other": ("other", "allocator's idle blocks"),
    "a recipe": (Recipe(), "You gave a value of type Recipe"),
    "a list": (["gradients"], "the name of one category"),
    "logits": ("logits", "You gave 'logits'"),
}
