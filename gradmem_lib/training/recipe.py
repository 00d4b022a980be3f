"""A recipe: every decision that changes a training step's memory, in one place.

The command line reads the fields and their defaults, and does not wait for torch: it is imported
where a dtype is asked for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..names import (
    ATTENTION,
    COMPUTE_DTYPES,
    FLASH_KERNELS,
    OFFLOAD,
    PRECISIONS,
    QUANTIZED,
    SELECTIVE,
    SHARDING,
    check_choice,
    is_flash,
)
from ..optimizers import OPTIMIZERS
from ..techniques.schedules import checked_schedule
from ..units import check_positive_int

if TYPE_CHECKING:
    import torch

ALL_LINEAR = "all-linear"  # PEFT's word
SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True)
class Recipe:
    """How a model is trained, as far as memory is concerned. Impossible combinations raise
    ``ValueError``, which says what to do.

    Attributes:
        precision: a key of ``PRECISIONS``, or ``None`` to train a module in the dtypes that it has.
        optimizer: a key of ``OPTIMIZERS``; ``momentum`` is for SGD. Or any class of optimizers, or
            a ``functools.partial`` of it with settings besides its rate and decay. It is called
            with parameters and ``lr=``, and steps one parameter after another if it may choose
            (``foreach=True`` is such a setting).
        in_backward: step each parameter as soon as its gradient is complete, and free the gradient
            at once.
        attention: ``"fused"``, ``"eager"``, or ``None`` to leave the model's attention as it is.
            transformers' ``"sdpa"`` is the fused one; ``"flash_attention_2"``,
            ``"flash_attention_3"`` and kernels of the hub (``"owner/kernel"``) are predicted
            without their package, and a training needs it.
        checkpointing: ``None``, ``"per-layer"``, ``"sqrt"``, ``"best"``, ``"first-k"`` (which
            ``fit`` finds), a segment's number of layers, or a list of these (``checkpoint_layers``
            explains each); or a key of ``SELECTIVE`` for a part of each layer.
        layers: where the layers of a model are that is not one of transformers', for checkpoints
            and shards: the names of its ``nn.ModuleList``s and ``nn.Sequential``s of layers, such
            as ``("down", "up")``. A list of which there is no module is a tuple of the layers'
            names: ``(("encoder", "decoder"),)`` is one list of two layers. Empty: they are found
            (those of transformers; and an ``nn.Sequential`` is its own list).
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
        lora_alpha: the additions are multiplied by ``lora_alpha / lora_rank``; ``None`` is twice
            the rank. ``lora_dropout`` is the share of their inputs that training leaves out. Both
            are spelled and computed as in PEFT, whose default for alpha is 8.
        quantized_base: keep the linear layers that LoRA freezes in 4 bits (QLoRA; see
            ``quantized.py``): a key of ``QUANTIZED``, ``True`` for ``"nf4-double"``, or a
            ``BitsAndBytesConfig``, which tells ``compute_dtype`` too (by its own defaults, FP4 and
            float32). A mixture's experts are not linear layers, and do not change. ``precision``
            is for all else: the norms, the tables, the head, and what passes from layer to layer.
            PEFT's ``prepare_model_for_kbit_training`` makes these float32: choose ``"float32"`` for
            a loop without autocast, and ``"autocast-bf16"`` or ``"autocast-fp16"`` for one with it.
            With ``"bf16"``, all of these have 16 bits, as without that call.
        compute_dtype: what the layers in 4 bits multiply in: ``"float32"``, ``"bf16"``,
            ``"fp16"``; ``None``: autocast's dtype, or else that of what they are given.
        chunked_loss: compute the loss ``CHUNK_TOKENS`` tokens at a time, so that the logits never
            exist as a whole.
    """

    precision: str | None = "float32"
    optimizer: Any = "adamw"
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
    quantized_base: bool | str = False
    chunked_loss: bool = False
    lora_alpha: float | None = None
    lora_dropout: float = 0.0
    layers: tuple[str | tuple[str, ...], ...] = ()
    compute_dtype: str | None = None

    def __post_init__(self) -> None:
        check_choice("precision", self.precision, (*PRECISIONS, None))
        self._check_attention()
        check_choice("offload", self.offload, (*OFFLOAD, None))
        check_choice("sharding", self.sharding, (*SHARDING, None))
        check_positive_int("accumulation", self.accumulation, 4)
        for name, example in (("lora_rank", 16), ("every_n_layers", 2)):
            if getattr(self, name) is not None:
                check_positive_int(name, getattr(self, name), example)
        self._check_quantized()
        for name, share in (("momentum", 0.9), ("lora_dropout", 0.05)):
            given = getattr(self, name)
            if not _is_number(given) or not 0 <= given < 1:
                raise ValueError(
                    f"{name}={given!r}: give a number from 0 to below 1, such as {share}"
                )
        for switch in ("in_backward", "chunked_loss"):
            if not isinstance(getattr(self, switch), bool):
                raise ValueError(
                    f"{switch}={getattr(self, switch)!r}: it is a switch, give True or False"
                )
        targets = (
            (self.lora_targets,) if isinstance(self.lora_targets, str) else tuple(self.lora_targets)
        )
        if targets == (ALL_LINEAR,) and self.lora_rank is not None:
            targets = ()
        object.__setattr__(self, "lora_targets", targets)
        object.__setattr__(self, "layers", _names_of_lists(self.layers))
        if self.checkpointing is not None:
            schedule = checked_schedule(self.checkpointing, "checkpointing", tuple(SELECTIVE))
            object.__setattr__(self, "checkpointing", schedule)
        self._check_optimizer()
        self._check_combinations()
        self._check_sharding()

    def _check_attention(self) -> None:
        if self.attention == ATTENTION["fused"].in_transformers:
            object.__setattr__(self, "attention", "fused")
        if not isinstance(self.attention, str) or not is_flash(self.attention):
            check_choice("attention", self.attention, (*ATTENTION, *FLASH_KERNELS, None))
        elif self.precision == "float32":
            raise ValueError(
                f"attention={self.attention!r} takes 16 bits, and precision='float32' gives it "
                "more: choose precision='autocast-bf16', or attention='fused'"
            )

    def _check_quantized(self) -> None:
        """Read a ``BitsAndBytesConfig``, and refuse what no base in few bits has."""
        if hasattr(self.quantized_base, "to_dict"):
            storage, compute_dtype = _of_bitsandbytes(self.quantized_base.to_dict())
            if self.compute_dtype not in (None, compute_dtype):
                raise ValueError(
                    f"compute_dtype={self.compute_dtype!r}, and the config that is given as "
                    f"quantized_base computes in {compute_dtype!r}: give one of the two"
                )
            object.__setattr__(self, "quantized_base", storage)
            object.__setattr__(self, "compute_dtype", compute_dtype)
        if not isinstance(self.quantized_base, bool):
            check_choice("quantized_base", self.quantized_base, QUANTIZED)
        check_choice("compute_dtype", self.compute_dtype, (*COMPUTE_DTYPES, None))
        if self.compute_dtype is not None and not self.quantized_base:
            raise ValueError(
                f"compute_dtype={self.compute_dtype!r} is what a base in few bits multiplies in: "
                "give quantized_base too, such as 'nf4', or leave it out and choose a precision"
            )

    def _check_optimizer(self) -> None:
        """Refuse what the optimizer's row does not allow."""
        row = OPTIMIZERS[self.optimizer]
        if self.momentum and not row.takes_momentum:
            takers = [repr(name) for name, other in OPTIMIZERS.items() if other.takes_momentum]
            raise ValueError(
                f"momentum={self.momentum} is not for {self.optimizer!r}: leave it out (for a "
                f"class, use functools.partial), or choose optimizer={' or '.join(takers)}"
            )
        exact = self.precision is not None and PRECISIONS[self.precision].exact_weights
        if row.rounds_by_chance and exact:
            raise ValueError(
                f"{self.optimizer} rounds bf16 weights by chance, and precision={self.precision!r} "
                "keeps exact ones: choose precision='bf16' with it, or optimizer='adamw'"
            )
        if self.with_masters and row.master is None:
            raise ValueError(
                row.no_master
                or f"{self.precision} is written for AdamW, and optimizer={self.optimizer!r}: "
                "choose an AdamW, or another precision"
            )
        if self.fully_sharded and not row.steps_shards:
            raise ValueError(
                f"{self.optimizer} may need whole weights, or means over rows and columns, and "
                f"sharding={self.sharding!r} leaves each rank some of the rows: choose "
                "sharding='zero1' with it, or optimizer='adamw'"
            )
        copies = self.sharding is not None and not self.shards_states
        if row.rounds_by_chance and copies:
            raise ValueError(
                f"{self.optimizer} rounds by chance, and with sharding={self.sharding!r} each "
                "rank's copy of the weights would be rounded its own way: choose sharding='zero1', "
                "where one rank rounds each weight for all"
            )

    def _check_combinations(self) -> None:
        if self.in_backward:
            self._check_in_backward()
        self._check_lora()
        if self.quantized_base and self.lora_rank is None:
            raise ValueError(
                f"quantized_base={self.quantized_base!r} keeps frozen weights in 4 bits, which "
                "cannot be trained and are written out in the dtype of what they multiply: give "
                "lora_rank too, such as 16"
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

    def _check_in_backward(self) -> None:
        """Refuse what needs all gradients before the first parameter is stepped."""
        for needs_all, option in (
            (self.accumulation > 1, f"accumulation={self.accumulation}"),
            (self.scales_loss, f"precision={self.precision!r}"),
            (self.sharding is not None and not self.fully_sharded, f"sharding={self.sharding!r}"),
        ):
            if needs_all:
                raise ValueError(
                    "in_backward=True steps each parameter as soon as its gradient is complete, "
                    f"and with {option} the gradient is not final then: choose one of the two"
                )

    def _check_lora(self) -> None:
        if self.lora_alpha is not None and (
            not _is_number(self.lora_alpha) or not 0 < self.lora_alpha < math.inf
        ):
            raise ValueError(
                f"lora_alpha={self.lora_alpha!r}: give a positive number, such as twice the rank"
            )
        for name in ("lora_targets", "lora_alpha", "lora_dropout"):
            given = getattr(self, name)
            if self.lora_rank is None and given not in ((), None, 0):
                raise ValueError(f"{name}={given} without a rank: give lora_rank, such as 16")

    def _check_sharding(self) -> None:
        if self.sharding is not None and self.chunked_loss:
            raise ValueError(
                "chunked_loss goes around the model's own call, in which gradients are averaged "
                "and weights gathered over the ranks: leave it out with "
                f"sharding={self.sharding!r}, and raise accumulation where the logits are too large"
            )
        if self.fully_sharded and self.with_masters and self.lora_rank is not None:
            raise ValueError(
                f"{self.precision} with sharding={self.sharding!r} shards float32 weights, also "
                "frozen ones, and gathers them in bf16, also the scales of a 4-bit base: choose "
                "precision='bf16', or None and a model in bf16, whose additions are float32"
            )
        if self.fully_sharded and self.checkpointing == "best":
            raise ValueError(
                "'best' finds a schedule by measuring one layer alone, whose weights are cut over "
                f"the ranks with sharding={self.sharding!r}: choose checkpointing='per-layer', "
                "'sqrt' or a list of segment lengths"
            )
        if self.offload == "parameters" and self.sharding != "fsdp":
            raise ValueError(
                "offload='parameters' keeps the shards of fully_shard on the host, and "
                f"sharding={self.sharding!r}: choose sharding='fsdp' with it"
            )

    @property
    def storage(self) -> str | None:
        """The key of ``QUANTIZED`` for the frozen linear layers, if they are kept in few bits."""
        return "nf4-double" if self.quantized_base is True else self.quantized_base or None

    @property
    def fully_sharded(self) -> bool:
        """Whether each rank keeps only a part of every weight."""
        return self.sharding is not None and SHARDING[self.sharding].weights

    @property
    def shards_states(self) -> bool:
        """Whether each rank keeps only a part of the optimizer's states."""
        return self.sharding is not None and SHARDING[self.sharding].states

    @property
    def shards_only_states(self) -> bool:
        """Whether each rank has all weights, and steps some of them for all ranks (ZeRO 1)."""
        return self.shards_states and not self.fully_sharded

    @property
    def with_masters(self) -> bool:
        """Whether updates go to float32 copies of weights in 16 bits."""
        return self.precision is not None and PRECISIONS[self.precision].master > 0

    @property
    def keeps_masters(self) -> bool:
        """Whether the optimizer keeps these copies.

        Weights that are cut over the ranks are float32 themselves.
        """
        return self.with_masters and not self.fully_sharded

    @property
    def scales_loss(self) -> bool:
        """Whether small gradients would round to zero, so that the loss has to be scaled."""
        return self.precision is not None and PRECISIONS[self.precision].scaled

    @property
    def offloads_shards(self) -> bool:
        """Whether shards of weights, gradients and states are on the host."""
        return self.offload is not None and OFFLOAD[self.offload].shards

    @property
    def checkpoint_interval(self) -> int | None:
        """n, if one in every n layers is recomputed; ``None`` for segments, parts of layers and no
        checkpoints.
        """
        return self.every_n_layers or (1 if self.checkpointing == "per-layer" else None)

    @property
    def dtype_of_products(self) -> torch.dtype | None:
        """The dtype that the base in few bits multiplies in; ``None``: that of what it is given."""
        return None if self.compute_dtype is None else _dtype(self.compute_dtype)

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        if self.precision is None or not PRECISIONS[self.precision].autocast:
            return None
        return _dtype(PRECISIONS[self.precision].narrow)

    @property
    def weight_dtype(self) -> torch.dtype | None:
        """The dtype that weights are cast to; ``None``: they keep theirs."""
        if self.precision is None:
            return None
        row = PRECISIONS[self.precision]
        if row.weight == 4:
            return _dtype("float32")
        if self.with_masters and self.fully_sharded:  # each rank's shards are the exact weights
            return _dtype("float32")
        return _dtype(row.narrow)

    @property
    def gathered_dtype(self) -> torch.dtype | None:
        """The dtype that computes with weights that are cut over the ranks; ``None``: their own."""
        return _dtype(PRECISIONS[self.precision].narrow) if self.with_masters else None

    def micro_batch(self, batch_size: int) -> int:
        """Rows in one forward pass. Raises ``ValueError`` if the batch cannot be cut evenly."""
        check_positive_int("batch_size", batch_size, 8)
        if batch_size % self.accumulation:
            raise ValueError(
                f"batch_size={batch_size} cannot be cut into equal micro-batches by "
                f"accumulation={self.accumulation}: give a multiple of {self.accumulation}, or "
                "another accumulation (the last batch of a DataLoader is as large as the others "
                "with drop_last=True)"
            )
        return batch_size // self.accumulation


def _dtype(name: str) -> torch.dtype:
    """The dtype that the rows of ``PRECISIONS`` call ``name``."""
    import torch

    return getattr(torch, SHORT_DTYPES.get(name, name))


def _of_bitsandbytes(config: dict) -> tuple[str, str | None]:
    """The key of ``QUANTIZED``, and the name of the dtype that computes, of a
    ``BitsAndBytesConfig``.
    """
    if not config.get("load_in_4bit"):
        raise ValueError(
            "the config given as quantized_base does not load in 4 bits, and no other quantized "
            f"base can be predicted: choose one of {', '.join(map(repr, QUANTIZED))}"
        )
    storage = config["bnb_4bit_quant_type"]
    if config["bnb_4bit_use_double_quant"]:
        storage += "-double"
    short = {long: short for short, long in SHORT_DTYPES.items()}
    dtype = config["bnb_4bit_compute_dtype"]
    return storage, short.get(dtype, dtype)


def _names_of_lists(given: Any) -> tuple[str | tuple[str, ...], ...]:
    """The names of lists of layers, as tuples. Raises ``TypeError`` for something else."""
    if not isinstance(given, tuple | list):
        given = (given,)
    names: list[str | tuple[str, ...]] = []
    for one in given:
        if isinstance(one, str):
            names.append(one)
            continue
        is_list = isinstance(one, tuple | list)
        if not is_list or not one or not all(isinstance(name, str) for name in one):
            raise TypeError(
                f"layers={given!r}: give the names of lists of layers, such as ('down', 'up'), or "
                "tuples of the names of layers"
            )
        names.append(tuple(one))
    return tuple(names)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
