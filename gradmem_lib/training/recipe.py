"""A recipe: every decision that changes a training step's memory, in one place."""

from dataclasses import dataclass

import torch

from ..names import ATTENTION, OFFLOAD, OPTIMIZERS, PRECISIONS, SELECTIVE, SHARDING, check_choice
from ..techniques.schedules import checked_schedule
from ..units import check_positive_int


@dataclass(frozen=True)
class Recipe:
    """How a model is trained, as far as memory is concerned. Impossible combinations raise
    ``ValueError``, which says what to do.

    Attributes:
        precision: a key of ``PRECISIONS``, or ``None`` to train a module in the dtypes that it has.
        optimizer: a key of ``OPTIMIZERS``; ``momentum`` is for SGD.
        in_backward: step each parameter as soon as its gradient is complete, and free the gradient
            at once.
        attention: ``"fused"``, ``"eager"``, or ``None`` to leave the model's attention as it is.
        checkpointing: ``None``, ``"per-layer"``, ``"sqrt"``, ``"best"``, ``"first-k"`` (which
            ``fit`` finds), a segment's number of layers, or a list of these (``checkpoint_layers``
            explains each); or a key of ``SELECTIVE`` for a part of each layer.
        every_n_layers: checkpoint one in every n layers and keep the others, as transformers does.
        offload: a key of ``OFFLOAD``: what is stored outside the device's memory until its backward
            or its step.
        sharding: a key of ``SHARDING``: how several processes train one model, each on its own
            rows. ``None``: one process.
        accumulation: the number of micro-batches in a batch. Their gradients add up before one
            optimizer step.
        lora_rank: train low-rank additions of this rank and freeze all else. ``lora_targets`` are
            the last parts of the names of the linear layers that get one; empty means all but the
            output layer. They have the dtype of the weights, or with ``precision=None`` the dtype
            that PEFT chooses: float32, also on weights in 16 bits.
        quantized_base: keep the linear layers that LoRA freezes in 4 bits (QLoRA; see
            ``quantized.py``). A mixture's experts are not linear layers, and do not change.
        chunked_loss: compute the loss ``CHUNK_TOKENS`` tokens at a time, so that the logits never
            exist as a whole.
    """

    precision: str | None = "float32"
    optimizer: str = "adamw"
    momentum: float = 0.0
    in_backward: bool = False
    attention: str | None = "fused"
    checkpointing: str | int | tuple | None = None
    every_n_layers: int | None = None
    offload: str | None = None
    sharding: str | None = None
    accumulation: int = 1
    lora_rank: int | None = None
    lora_targets: tuple[str, ...] = ()
    quantized_base: bool = False
    chunked_loss: bool = False

    def __post_init__(self) -> None:
        check_choice("precision", self.precision, (*PRECISIONS, None))
        check_choice("optimizer", self.optimizer, OPTIMIZERS)
        check_choice("attention", self.attention, (*ATTENTION, None))
        check_choice("offload", self.offload, (*OFFLOAD, None))
        check_choice("sharding", self.sharding, (*SHARDING, None))
        check_positive_int("accumulation", self.accumulation, 4)
        for name, example in (("lora_rank", 16), ("every_n_layers", 2)):
            if getattr(self, name) is not None:
                check_positive_int(name, getattr(self, name), example)
        for switch in ("in_backward", "quantized_base", "chunked_loss"):
            if not isinstance(getattr(self, switch), bool):
                raise ValueError(
                    f"{switch}={getattr(self, switch)!r}: it is a switch, give True or False"
                )
        targets = (
            (self.lora_targets,) if isinstance(self.lora_targets, str) else tuple(self.lora_targets)
        )
        object.__setattr__(self, "lora_targets", targets)
        if self.checkpointing is not None:
            schedule = checked_schedule(self.checkpointing, "checkpointing", tuple(SELECTIVE))
            object.__setattr__(self, "checkpointing", schedule)
        self._check_combinations()
        self._check_sharding()

    def _check_combinations(self) -> None:
        if not isinstance(self.momentum, int | float) or not 0 <= self.momentum < 1:
            raise ValueError(
                f"momentum={self.momentum}: give a number from 0 to below 1, such as 0.9"
            )
        if self.momentum and self.optimizer != "sgd":
            raise ValueError(
                f"momentum={self.momentum} is not for {self.optimizer!r}: leave it out, or "
                "choose optimizer='sgd'"
            )
        if self.in_backward and self.accumulation > 1:
            raise ValueError(
                "in_backward=True frees each gradient as soon as it is complete, and "
                f"accumulation={self.accumulation} adds them up over several backward passes: "
                "choose one of the two. With in_backward, cut the batch itself"
            )
        if self.in_backward and self.precision == "autocast-fp16":
            raise ValueError(
                "in_backward=True steps before the scaled gradients of autocast-fp16 could be "
                "checked and unscaled: choose precision='autocast-bf16', which needs no scaling"
            )
        if self.optimizer == "adamw-stochastic" and self.precision not in ("bf16", None):
            raise ValueError(
                f"adamw-stochastic rounds bf16 weights by chance, and precision={self.precision!r} "
                "keeps exact ones: choose precision='bf16' with it, or optimizer='adamw'"
            )
        if self.precision == "float32-master" and not self.optimizer.startswith("adamw"):
            raise ValueError(
                f"float32-master is written for AdamW, and optimizer={self.optimizer!r}: "
                "choose an AdamW, or another precision"
            )
        if self.precision == "float32-master" and self.optimizer == "adamw-8bit":
            raise ValueError(
                "8-bit states and a float32 copy of the weights pull in opposite directions: "
                "choose optimizer='adamw' with float32-master, or precision='bf16' with adamw-8bit"
            )
        if self.lora_rank is None and self.lora_targets:
            raise ValueError(
                f"lora_targets={self.lora_targets} without a rank: give lora_rank, such as 16"
            )
        if self.quantized_base and (self.lora_rank is None or self.autocast_dtype is not None):
            raise ValueError(
                "quantized_base=True keeps frozen weights in 4 bits, which cannot be trained and "
                "are written out in the dtype of what they multiply: give lora_rank too, such as "
                "16, and precision='bf16' or 'float32'"
            )
        if self.every_n_layers is not None and self.checkpointing is not None:
            raise ValueError(
                f"checkpointing={self.checkpointing!r} and every_n_layers={self.every_n_layers} "
                "are two ways to checkpoint: give one instead of the other. every_n_layers=1 is "
                "per-layer"
            )
        layers = self.every_n_layers or (self.checkpointing not in (None, *SELECTIVE))
        if self.offload == "boundaries" and not layers:
            raise ValueError(
                "offload='boundaries' moves the inputs of checkpointed layers, and "
                f"checkpointing={self.checkpointing!r} has none: choose checkpointing='per-layer' "
                "with it, or offload='activations'"
            )
        if self.offload == "activations" and self.checkpointing == "best":
            raise ValueError(
                "'best' finds a schedule by what layers keep, and with offload='activations' they "
                "keep nothing: choose checkpointing='per-layer', or offload='boundaries'"
            )

    def _check_sharding(self) -> None:
        if self.sharding in ("ddp", "zero1") and self.in_backward:
            raise ValueError(
                f"in_backward=True steps each parameter before sharding={self.sharding!r} has "
                "averaged its gradient over the ranks: choose sharding='fsdp' with it"
            )
        if self.sharding is not None and self.chunked_loss:
            raise ValueError(
                "chunked_loss goes around the model's own call, in which gradients are averaged "
                "and weights gathered over the ranks: leave it out with "
                f"sharding={self.sharding!r}, and raise accumulation where the logits are too large"
            )
        if self.fully_sharded and self.precision == "float32-master" and self.lora_rank is not None:
            raise ValueError(
                f"float32-master with sharding={self.sharding!r} shards float32 weights, also "
                "frozen ones, and gathers them in bf16, also the scales of a 4-bit base: choose "
                "precision='bf16', or None and a model in bf16, whose additions are float32"
            )
        if self.fully_sharded and self.checkpointing == "best":
            raise ValueError(
                "'best' finds a schedule by measuring one layer alone, whose weights are cut over "
                f"the ranks with sharding={self.sharding!r}: choose checkpointing='per-layer', "
                "'sqrt' or a list of segment lengths"
            )
        if self.fully_sharded and self.optimizer.startswith(
            ("adafactor", "adamw-8bit", "adamw-stochastic")
        ):
            raise ValueError(
                f"{self.optimizer} works on whole weights, or takes means over rows and columns, "
                f"and sharding={self.sharding!r} leaves each rank some of the rows: choose "
                "sharding='zero1' with it, or optimizer='adamw'"
            )
        if self.sharding == "ddp" and self.optimizer == "adamw-stochastic":
            raise ValueError(
                "adamw-stochastic rounds by chance, and with sharding='ddp' each rank's copy of "
                "the weights would be rounded its own way: choose sharding='zero1', where one "
                "rank rounds each weight for all"
            )
        if self.offload == "parameters" and self.sharding != "fsdp":
            raise ValueError(
                "offload='parameters' keeps the shards of fully_shard on the host, and "
                f"sharding={self.sharding!r}: choose sharding='fsdp' with it"
            )

    @property
    def fully_sharded(self) -> bool:
        """Whether each rank keeps only a part of every weight."""
        return self.sharding in ("zero2", "fsdp")

    @property
    def checkpoint_interval(self) -> int | None:
        """n, if one in every n layers is recomputed; ``None`` for segments, parts of layers and no
        checkpoints.
        """
        return self.every_n_layers or (1 if self.checkpointing == "per-layer" else None)

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        return {"autocast-bf16": torch.bfloat16, "autocast-fp16": torch.float16}.get(self.precision)

    @property
    def weight_dtype(self) -> torch.dtype | None:
        """The dtype that weights are cast to; ``None``: they keep theirs.

        With shards, float32-master holds float32 weights.
        """
        dtype = torch.float32 if self.fully_sharded else torch.bfloat16
        return {None: None, "bf16": torch.bfloat16, "float32-master": dtype}.get(
            self.precision, torch.float32
        )

    def micro_batch(self, batch_size: int) -> int:
        """Rows in one forward pass. Raises ``ValueError`` if the batch cannot be cut evenly."""
        check_positive_int("batch_size", batch_size, 8)
        if batch_size % self.accumulation:
            raise ValueError(
                f"a batch of {batch_size} cannot be cut into {self.accumulation} equal "
                f"micro-batches: give a batch_size that is a multiple of {self.accumulation}, or "
                "another accumulation"
            )
        return batch_size // self.accumulation
