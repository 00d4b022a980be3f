"""Answers to the puzzles of lesson 11 that nobody had in mind when its checks were written."""

from types import MappingProxyType

import numpy as np

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
_ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RIGHT["11.1"] |= {
    "numpy's numbers": LORA | {"lora_rank": np.int64(16), "accumulation": np.float64(4)},
    "a mapping": MappingProxyType(LORA | {"accumulation": 4}),
    "all linear layers by name": LORA | AGAIN | {"lora_targets": _ALL, "accumulation": 4},
}
WRONG["11.1"] |= {
    "some linear layers by name": (LORA | {"lora_targets": _ALL[:4]}, "on every linear layer"),
}
RIGHT["11.12"] |= {"a sentence": "The gradients."}
