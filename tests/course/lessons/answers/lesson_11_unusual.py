"""Answers to the puzzles of lesson 11 that nobody had in mind when its checks were written."""

from gradmem_lib import Recipe

RIGHT, WRONG = {}, {}
BF16 = {"precision": "bf16", "optimizer": "adamw-fused"}
AGAIN, CHUNKS = {"checkpointing": "per-layer"}, {"chunked_loss": True}
LORA = BF16 | {"lora_rank": 16}
QLORA = LORA | {"quantized_base": True}

RIGHT["11.1"] = {
    "QLoRA, one row at a time": Recipe(**QLORA | AGAIN | CHUNKS | {"accumulation": 4}),
}
WRONG["11.1"] = {
    "a batch of 8": (LORA | {"accumulation": 8}, "a divisor of 4"),
    "a list of pairs": (list((LORA | AGAIN).items()), "a dictionary of"),
    "a sharded card": (BF16 | {"sharding": "fsdp"}, "several cards"),
}
WRONG["11.12"] = {
    "nothing": ("nothing", "name of one category"),
    "two": ("gradients and optimizer", "name of one category"),
    "number": (3, "name of one category"),
    "everything": ({"gradients": True}, "name of one category"),
}
RIGHT["11.12"] = {"capitals": "GRADIENTS"}
