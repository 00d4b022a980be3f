"""The options that describe a training step, which ``predict`` and ``explain`` share."""

from __future__ import annotations

from collections.abc import Callable

from ..names import (
    ATTENTION,
    CHECKPOINTING,
    LOOP_KEEPS,
    OFFLOAD,
    OPTIMIZERS,
    PRECISIONS,
    SELECTIVE,
    SHARDING,
    ZERO_GRAD,
)
from .readers import count, dashed, names, one_of, one_of_dashed, schedule

MODEL = (
    "a well-known model (Qwen2.5-7B, GPT-2 XL, ...), a folder, a config.json, or a hub id "
    "(needs a network)"
)


def add_recipe_options(add: Callable) -> None:
    """Every option but the first one is a field of ``Recipe``, by the same name."""
    add("--seq-len", type=count, metavar="N", help="tokens in a row (not for images)")
    add(
        "--precision",
        type=one_of(PRECISIONS, or_none=True),
        default="float32",
        metavar="P",
        help=", ".join(PRECISIONS),
    )
    add(
        "--optimizer",
        type=one_of(OPTIMIZERS),
        default="adamw",
        metavar="O",
        help=", ".join(OPTIMIZERS),
    )
    add("--momentum", type=float, default=0.0, metavar="M", help="of sgd")
    add(
        "--in-backward",
        action="store_true",
        help="step each parameter in backward and free its gradient",
    )
    add(
        "--attention",
        type=one_of(ATTENTION, or_none=True),
        default="fused",
        metavar="A",
        help=", ".join((*ATTENTION, "none")),
    )
    schedules = ", ".join((*CHECKPOINTING, *SELECTIVE))
    add(
        "--checkpointing",
        type=schedule,
        metavar="C",
        help=f"{schedules}, layers in a segment (4), or segments (4,3,2)",
    )
    add("--every-n-layers", type=count, metavar="N", help="checkpoint one layer in N")
    add(
        "--layers",
        type=names,
        default=(),
        metavar="NAMES",
        help="only these lists of layers, such as model.decoder.layers",
    )
    add(
        "--offload",
        type=one_of(OFFLOAD, or_none=True),
        metavar="O",
        help="moved away until backward: " + ", ".join(OFFLOAD),
    )
    add(
        "--sharding",
        type=one_of(SHARDING, or_none=True),
        metavar="S",
        help="over several processes: " + ", ".join(SHARDING),
    )
    add(
        "--accumulation",
        type=count,
        default=1,
        metavar="K",
        help="micro-batches that the batch is cut into",
    )
    add("--lora-rank", type=count, metavar="R", help="train low-rank additions and freeze the rest")
    add(
        "--lora-targets",
        type=names,
        default=(),
        metavar="NAMES",
        help="layers that get one, such as q_proj,v_proj, or all-linear",
    )
    add("--lora-alpha", type=float, metavar="A", help="their scale times the rank")
    add("--lora-dropout", type=float, default=0.0, metavar="P", help="of their inputs")
    add(
        "--quantized-base",
        action="store_true",
        help="keep the frozen layers in 4 bits (with --lora-rank)",
    )
    add("--chunked-loss", action="store_true", help="never hold all logits at once")
    add(
        "--float32-sums",
        action="store_true",
        help="add up gradients of 16 bits in float32 over the micro-batches",
    )


def add_loop_options(add: Callable) -> None:
    """Every option but the first one is a field of ``Loop``, by the same name."""
    add(
        "--rope-factor",
        type=float,
        metavar="F",
        help="RoPE scaling: the model takes F times as many tokens in a row as its config says",
    )
    places = ", ".join(dashed(name) for name in ZERO_GRAD)
    add(
        "--zero-grad",
        type=one_of_dashed(ZERO_GRAD),
        default=ZERO_GRAD[0],
        metavar="W",
        help=f"where the loop frees gradients: {places}",
    )
    add(
        "--keeps",
        type=one_of(LOOP_KEEPS, or_none=True),
        metavar="K",
        help="what a variable of the loop holds until the next step: " + ", ".join(LOOP_KEEPS),
    )
    add("--clips", action="store_true", help="clip the norm of the gradients before the step")
    add(
        "--shifted-logits",
        action="store_true",
        help="the loss of transformers before 4.45, with float32 copies of the logits",
    )
