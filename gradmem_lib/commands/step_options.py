"""The options that describe a training step, which ``predict`` and ``explain`` share.

Each is a field of ``Recipe`` or ``Loop`` by the same name, and has the field's default. What a
command line says of it stands in one table of words.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import fields
from types import NoneType
from typing import get_args, get_type_hints

from .. import names
from ..prediction.loop import Loop
from ..training.recipe import Recipe
from . import readers

MODEL = (
    "a well-known model (Qwen2.5-7B, GPT-2 XL, ...), a folder, a config.json, or a hub id "
    "(needs a network)"
)

# A field, the letter for its value, and its line of help, in which {} are the names of CHOICES. A
# switch, whose default is False, has no value.
RECIPE = """
precision       P      {}
optimizer       O      {}
momentum        M      of sgd
in_backward     -      step each parameter in backward and free its gradient
attention       A      {}, none, or a kernel, such as flash_attention_2
checkpointing   C      {}, first-5, layers in a segment (4), or segments (4,3,2)
every_n_layers  N      checkpoint one layer in N
layers          NAMES  only these lists of layers, such as model.decoder.layers
offload         O      moved away until backward: {}
sharding        S      over several processes: {}
accumulation    K      micro-batches that the batch is cut into
lora_rank       R      train low-rank additions and freeze the rest
lora_targets    NAMES  layers that get one, such as q_proj,v_proj, or all-linear
lora_alpha      A      their scale times the rank
lora_dropout    P      of their inputs
quantized_base  S      keep the frozen layers in 4 bits (with --lora-rank): {}; alone: nf4-double
compute_dtype   D      what these multiply in: {}
chunked_loss    -      never hold all logits at once
"""
LOOP = """
zero_grad       W      where the loop frees gradients: {}
keeps           K      what a variable of the loop holds until the next step: {}
clips           -      clip the norm of the gradients before the step
"""
CHOICES = {
    "precision": names.PRECISIONS,
    "optimizer": names.OPTIMIZERS,
    "attention": names.ATTENTION,
    "quantized_base": names.QUANTIZED,
    "compute_dtype": names.COMPUTE_DTYPES,
    "checkpointing": (*names.CHECKPOINTING, *names.SELECTIVE),
    "offload": names.OFFLOAD,
    "sharding": names.SHARDING,
    "zero_grad": names.ZERO_GRAD,
    "keeps": names.LOOP_KEEPS,
}
# Where the type of a field does not say how its value is written.
READERS = {
    "attention": readers.attention,
    "checkpointing": readers.schedule,
    "layers": readers.names,
    "lora_targets": readers.names,
    "quantized_base": readers.storage,
}


def add_step_options(add: Callable) -> None:
    """The length of a row, and all fields of ``Recipe`` and ``Loop``."""
    add("--seq-len", type=readers.count, metavar="N", help="tokens in a row (not for images)")
    _add_fields(add, Recipe, RECIPE)
    _add_fields(add, Loop, LOOP)


def _add_fields(add: Callable, settings: type, table: str) -> None:
    types = get_type_hints(settings)
    for row in table.strip().splitlines():
        name, metavar, words = row.split(maxsplit=2)
        option = "--" + name.replace("_", "-")
        default = getattr(settings, name)
        if metavar == "-":
            add(option, action="store_true", help=words)
            continue
        choices = map(readers.dashed, CHOICES.get(name, ()))
        may_stand_alone = {"nargs": "?", "const": True} if default is False else {}
        add(
            option,
            type=_reader(name, types[name]),
            default=default,
            metavar=metavar,
            help=words.format(", ".join(choices)),
            **may_stand_alone,
        )


def _reader(name: str, type_of_field: type) -> Callable:
    if name in READERS:
        return READERS[name]
    allowed = get_args(type_of_field) or (type_of_field,)  # int and None for int | None
    if name in CHOICES:
        return readers.one_of(CHOICES[name], or_none=NoneType in allowed)
    return readers.count if int in allowed else float


def chosen(settings: type, options: argparse.Namespace):
    """The ``Recipe`` or the ``Loop`` that the options describe."""
    return settings(**{field.name: getattr(options, field.name) for field in fields(settings)})
