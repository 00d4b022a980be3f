"""The only spelling of categories, phases, precisions, optimizers, attention, checkpointing and
sharding.
"""

CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "temporaries", "other")
PHASES = ("idle", "forward", "backward", "optimizer_step")
PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS, TEMPORARIES, OTHER = range(len(CATEGORIES))
IDLE, FORWARD, BACKWARD, OPTIMIZER_STEP = range(len(PHASES))
PRECISIONS = {
    "float32": "everything in float32",
    "bf16": "weights, gradients, optimizer states and activations in bf16",
    "autocast-bf16": "float32 weights, gradients and states; matrix products in bf16",
    "autocast-fp16": "the same with float16, and a scaled loss",
    "float32-master": "bf16 weights and gradients; the optimizer keeps float32 weights and states",
}
OPTIMIZERS = {
    "adamw": "AdamW, one parameter after another",
    "adamw-foreach": "AdamW on all parameters at once, with a temporary copy of the model",
    "adamw-fused": "AdamW in one kernel, in place",
    "adamw-8bit": "AdamW with one byte for each number of its states",
    "adamw-stochastic": (
        "AdamW on bf16 weights and states, computed in float32 and rounded "
        "stochastically: no update is lost on average"
    ),
    "adafactor": (
        "row and column sums in place of the second moment, by transformers: with float32 copies "
        "of a tensor"
    ),
    "adafactor-torch": (
        "the same by torch.optim: with one copy of a tensor, in its own dtype, and "
        "a relative learning rate"
    ),
    "sgd": "no state; one state with momentum",
}
# one kernel that never stores the scores; one operation after another
ATTENTION = ("fused", "eager")
CHECKPOINTING = ("per-layer", "sqrt", "best")
SELECTIVE = {
    "attention": "the attention of each layer is recomputed",
    "mlp": "the MLP of each layer is recomputed",
    "elementwise": "all of each layer but matrix products and fused attention is recomputed",
}
OFFLOAD = {
    "activations": "all that autograd saves, except parameters and buffers",
    "boundaries": "the inputs of checkpoints",
    "parameters": (
        "with sharding='fsdp': shards of weights, gradients and states; the optimizer's "
        "step runs on the host"
    ),
}
SHARDING = {
    "ddp": (
        "each rank has a copy of everything, and gradients are averaged (DistributedDataParallel)"
    ),
    "zero1": "the same, with optimizer states sharded over the ranks (ZeroRedundancyOptimizer)",
    "zero2": (
        "states, gradients and weights are sharded; gathered weights stay until backward "
        "(fully_shard, no resharding)"
    ),
    "fsdp": (
        "the same, but a layer's gathered weights are freed after the layer, also in forward "
        "(fully_shard; ZeRO 3)"
    ),
}
IGNORED = -100  # a label that does not count


def check_choice(what: str, value, names) -> None:
    """Raise ``ValueError`` for a ``value`` that is not one of ``names``."""
    if value not in names:
        raise ValueError(
            f"{what}={value!r} is not known: choose one of {', '.join(map(repr, names))}"
        )
