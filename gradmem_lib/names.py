"""The only spelling of categories, phases, precisions, optimizers, attention, checkpointing and
sharding, with one row for each choice that is more than a name. ``optimizers.py`` has the rows of
the optimizers.
"""

from dataclasses import dataclass

from .optimizers import OPTIMIZERS as OPTIMIZERS
from .rows import Rows
from .rows import check_choice as check_choice

CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "temporaries", "other")
PHASES = ("idle", "forward", "backward", "optimizer_step")
PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS, TEMPORARIES, OTHER = range(len(CATEGORIES))
IDLE, FORWARD, BACKWARD, OPTIMIZER_STEP = range(len(PHASES))
# Where in a training script an operation stands. Each moment belongs to one of the phases.
MOMENTS = (
    "between steps",
    "training forward",
    "loss",
    "backward",
    "optimizer step",
    "evaluation or generation",
)
BETWEEN_STEPS, TRAINING_FORWARD, LOSS, IN_BACKWARD, IN_OPTIMIZER_STEP, EVALUATION = range(
    len(MOMENTS)
)
PHASE_OF_MOMENT = (IDLE, FORWARD, FORWARD, BACKWARD, OPTIMIZER_STEP, FORWARD)
# The moment of a phase where no more is known, as in predictions.
MOMENT_OF_PHASE = (BETWEEN_STEPS, TRAINING_FORWARD, IN_BACKWARD, IN_OPTIMIZER_STEP)


@dataclass(frozen=True)
class PrecisionSpec:
    """Bytes of one number in each role, under a precision.

    ``residual`` and ``compute`` are the widths of activations: between the blocks' linear layers,
    and inside them. ``master`` is the float32 copy of the weights that the optimizer keeps.
    ``narrow`` names the dtype of 2 bytes, if there is one. ``scaled``: small gradients would round
    to zero in that dtype, so the loss is scaled.
    """

    words: str
    weight: int
    gradient: int
    state: int
    residual: int
    compute: int
    master: int = 0
    narrow: str = "bf16"
    scaled: bool = False

    @property
    def autocast(self) -> bool:
        return self.residual != self.compute

    @property
    def exact_weights(self) -> bool:
        """Whether updates go to weights in float32, so that none is rounded away."""
        return self.weight == 4 or self.master == 4


PRECISIONS: dict[str, PrecisionSpec] = Rows(
    "precision",
    PrecisionSpec,
    {
        "float32": PrecisionSpec(
            "everything in float32",
            weight=4,
            gradient=4,
            state=4,
            residual=4,
            compute=4,
        ),
        "bf16": PrecisionSpec(
            "weights, gradients, optimizer states and activations in bf16",
            weight=2,
            gradient=2,
            state=2,
            residual=2,
            compute=2,
        ),
        "autocast-bf16": PrecisionSpec(
            "float32 weights, gradients and states; matrix products in bf16",
            weight=4,
            gradient=4,
            state=4,
            residual=4,
            compute=2,
        ),
        "autocast-fp16": PrecisionSpec(
            "the same with float16, and a scaled loss",
            weight=4,
            gradient=4,
            state=4,
            residual=4,
            compute=2,
            narrow="float16",
            scaled=True,
        ),
        "float32-master": PrecisionSpec(
            "bf16 weights and gradients; the optimizer keeps float32 weights and states",
            weight=2,
            gradient=2,
            state=4,
            residual=2,
            compute=2,
            master=4,
        ),
    },
)


@dataclass(frozen=True)
class QuantizedSpec:
    """``double``: the magnitudes of the blocks of weights are stored in 8 bits, too.
    ``bytes_each``: of a weight, with its part of these magnitudes. ``floating_point``: the 16
    values are those of FP4, and else those of NF4.
    """

    words: str
    bytes_each: float
    double: bool = False
    floating_point: bool = False


# How frozen weights are stored. bitsandbytes' own default is fp4.
QUANTIZED: dict[str, QuantizedSpec] = Rows(
    "quantized_base",
    QuantizedSpec,
    {
        "nf4": QuantizedSpec("NF4, and a float32 for every 64 weights", 0.5 + 4 / 64),
        "nf4-double": QuantizedSpec(
            "NF4, and a byte for every 64 weights", 0.5 + 1 / 64, double=True
        ),
        "fp4": QuantizedSpec(
            "FP4, and a float32 for every 64 weights", 0.5 + 4 / 64, floating_point=True
        ),
        "fp4-double": QuantizedSpec(
            "FP4, and a byte for every 64 weights",
            0.5 + 1 / 64,
            double=True,
            floating_point=True,
        ),
    },
)
COMPUTE_DTYPES = ("float32", "bf16", "fp16")


@dataclass(frozen=True)
class AttentionSpec:
    """``in_transformers``: the name that transformers has for it. ``keeps_scores``: the scores,
    (heads, tokens, tokens) for each row, are saved for backward.
    """

    words: str
    in_transformers: str
    keeps_scores: bool


ATTENTION: dict[str, AttentionSpec] = Rows(
    "attention",
    AttentionSpec,
    {
        "fused": AttentionSpec("one kernel that never stores the scores", "sdpa", False),
        "eager": AttentionSpec("one operation after another", "eager", True),
    },
)

# transformers' names of kernels from other packages.
FLASH_KERNELS = ("flash_attention_2", "flash_attention_3")


def is_flash(attention: str | None) -> bool:
    """Whether this is the name of a flash kernel from another package, or of one from the hub
    (``owner/kernel``). It saves what the fused one saves, takes 16 bits, and needs no mask.
    """
    return attention is not None and (attention in FLASH_KERNELS or "/" in attention)


CHECKPOINTING = ("per-layer", "sqrt", "best")


@dataclass(frozen=True)
class SelectiveSpec:
    """``attention``, ``mlp``: that module of each layer is recomputed as a whole. With neither, all
    of a layer is recomputed except its products.
    """

    words: str
    attention: bool = False
    mlp: bool = False

    @property
    def keeps_products(self) -> bool:
        return not (self.attention or self.mlp)


SELECTIVE: dict[str, SelectiveSpec] = Rows(
    "part",
    SelectiveSpec,
    {
        "attention": SelectiveSpec("the attention of each layer is recomputed", attention=True),
        "mlp": SelectiveSpec("the MLP of each layer is recomputed", mlp=True),
        "elementwise": SelectiveSpec(
            "all of each layer but matrix products and fused attention is recomputed"
        ),
    },
)


@dataclass(frozen=True)
class OffloadSpec:
    """What is stored outside the device's memory: of the tensors that autograd saves, those of
    ``boundaries`` (the inputs of checkpoints), or ``all_saved``; or the ``shards`` of weights,
    gradients and states.
    """

    words: str
    boundaries: bool = False
    all_saved: bool = False
    shards: bool = False


# Where a loop frees the gradients, and what a variable of it holds until the next step.
ZERO_GRAD = ("after step", "before forward", "before backward")
LOOP_KEEPS = ("loss", "outputs")


OFFLOAD: dict[str, OffloadSpec] = Rows(
    "offload",
    OffloadSpec,
    {
        "activations": OffloadSpec(
            "all that autograd saves, except parameters and buffers", all_saved=True
        ),
        "boundaries": OffloadSpec("the inputs of checkpoints", boundaries=True),
        "parameters": OffloadSpec(
            "with sharding='fsdp': shards of weights, gradients and states; the optimizer's "
            "step runs on the host",
            shards=True,
        ),
    },
)


@dataclass(frozen=True)
class ShardingSpec:
    """What each rank has only a part of: the optimizer's ``states``; gradients and ``weights`` too.
    ``frees_layers``: a layer's gathered weights are freed after the layer.
    """

    words: str
    states: bool = False
    weights: bool = False
    frees_layers: bool = False


SHARDING: dict[str, ShardingSpec] = Rows(
    "sharding",
    ShardingSpec,
    {
        "ddp": ShardingSpec(
            "each rank has a copy of everything, and gradients are averaged "
            "(DistributedDataParallel)"
        ),
        "zero1": ShardingSpec(
            "the same, with optimizer states sharded over the ranks (ZeroRedundancyOptimizer)",
            states=True,
        ),
        "zero2": ShardingSpec(
            "states, gradients and weights are sharded; gathered weights stay until backward "
            "(fully_shard, no resharding)",
            states=True,
            weights=True,
        ),
        "fsdp": ShardingSpec(
            "the same, but a layer's gathered weights are freed after the layer, also in forward "
            "(fully_shard; ZeRO 3)",
            states=True,
            weights=True,
            frees_layers=True,
        ),
    },
)

IGNORED = -100  # a label that does not count
