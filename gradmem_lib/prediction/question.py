"""What is asked of a prediction: a model without memory, a recipe, sizes and a target."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .. import compat
from ..techniques import losses
from ..techniques.checkpointing import checkpoints_of
from ..training.recipe import Recipe
from . import fakes
from .extrapolation import repeated_layers


class CannotTrace(RuntimeError):
    """The model decides something by the values in its tensors, and fake tensors have none."""


@dataclass(eq=False)
class Source:
    """A model without memory, and the list of its repeated layers, if there is one."""

    skeleton: nn.Module
    title: str
    key: tuple | None
    layers: nn.Module | None = field(init=False)

    def __post_init__(self) -> None:
        # Segments that are on the model already need all of its layers.
        self.layers = None if checkpoints_of(self.skeleton) else repeated_layers(self.skeleton)
        self._kinds = {type(module) for module in self.skeleton.modules()}

    def code(self) -> tuple:
        """What the modules run, which may be replaced while the process lives (patched kernels)."""
        return tuple(kind.forward for kind in self._kinds)


@dataclass(frozen=True)
class Question:
    source: Source
    recipe: Recipe
    batch_size: int
    seq_len: int | None
    target: str
    batch: Any
    loss: Callable | None

    @property
    def key(self):
        """Hashable, or ``None`` where the same question may have another answer next time."""
        if self.source.key is None or self.batch is not None or self.loss is not None or compat.in_a_mode():
            return None
        sizes = self.batch_size, self.seq_len, self.target
        return self.source.key, self.source.code(), self.recipe, sizes, surroundings()


def surroundings() -> tuple:
    """What is set for the whole process, outside any model, and changes what a step keeps."""
    return (
        fakes.settings(), losses.CHUNK_TOKENS, os.environ.get("TRANSFORMERS_SDPA_FORCE_GQA"),
        torch.is_autocast_cache_enabled(),
        compat.attention_functions(), tuple(f for f in vars(F).values() if callable(f)),
    )  # fmt: skip


def config_key(cls: type, config) -> tuple:
    """All that a config holds, private settings (which attention) included, and the code that ``cls`` is made of."""
    return cls, tuple(v for v in vars(sys.modules[cls.__module__]).values() if callable(v)), _frozen(config)


def _frozen(value):
    if isinstance(value, dict):
        return tuple((name, _frozen(v)) for name, v in sorted(value.items(), key=lambda item: repr(item[0])))
    if isinstance(value, (list, tuple)):
        return tuple(map(_frozen, value))
    if isinstance(value, (int, float, str, type(None))):
        return type(value), value  # 1, 1.0 and True are equal, and do not mean the same
    if hasattr(value, "to_dict"):
        return type(value), _frozen(vars(value))
    return repr(value)
