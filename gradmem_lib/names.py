"""The only spelling of categories, phases, precisions, optimizers, attention, checkpointing and sharding."""

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
    "adamw-8bit": "AdamW whose states take one byte a number",
    "adamw-stochastic": "AdamW on bf16 weights and states, computed in float32 and rounded by chance, so that no update is lost on average",
    "adafactor": "row and column sums in place of the second moment, as transformers has it: with float32 copies of a tensor",
    "adafactor-torch": "the same, as torch.optim has it: one copy of a tensor, in its own dtype; a relative learning rate",
    "sgd": "no state, or one with momentum",
}
ATTENTION = ("fused", "eager")  # one kernel that never stores the scores; one operation after another
CHECKPOINTING = ("per-layer", "sqrt", "best")
SELECTIVE = {
    "attention": "of each layer, attention runs again",
    "mlp": "of each layer, the MLP runs again",
    "elementwise": "of each layer, all but matrix products and fused attention runs again",
}
OFFLOAD = {
    "activations": "all that autograd saves, but parameters and buffers",
    "boundaries": "the inputs of checkpoints",
    "parameters": "with sharding='fsdp': shards of weights, gradients and states, which the optimizer steps on the host",
}
SHARDING = {
    "ddp": "each rank has a copy of everything, and gradients are averaged (DistributedDataParallel)",
    "zero1": "the same, with optimizer states cut over the ranks (ZeroRedundancyOptimizer)",
    "zero2": "states, gradients and weights are cut; gathered weights stay until backward (fully_shard, no resharding)",
    "fsdp": "the same, and a layer's gathered weights are freed after it, in forward too (fully_shard; ZeRO 3)",
}
IGNORED = -100  # a label that does not count


def choose(what: str, value, names) -> None:
    """``ValueError`` for a ``value`` that is none of ``names``."""
    if value not in names:
        raise ValueError(f"{what}={value!r} is not known: choose one of {', '.join(map(repr, names))}")
