"""What is asked of a prediction: a model without memory, a recipe, sizes and a target."""

import os
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
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
    """A model without memory, or a module as it was given: then ``key`` is ``None``."""

    skeleton: nn.Module
    title: str
    key: tuple | None

    @cached_property
    def layers(self) -> nn.Module | None:
        """The list of its repeated layers, if there is one. Segments that are on the model already need all of its layers."""
        return None if checkpoints_of(self.skeleton) else repeated_layers(self.skeleton)


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
        # What the modules run may be replaced while the process lives (patched kernels).
        code = frozenset(type(module).forward for module in self.source.skeleton.modules())
        sizes = self.batch_size, self.seq_len, self.target
        return self.source.key, code, self.recipe, sizes, _surroundings()


def _surroundings() -> tuple:
    """What is set for the whole process, outside any model, and changes what a step keeps."""
    return (
        fakes.settings(), losses.CHUNK_TOKENS, os.environ.get("TRANSFORMERS_SDPA_FORCE_GQA"),
        torch.is_autocast_cache_enabled(), compat.attention_functions(), _functions(F),
    )  # fmt: skip


def _functions(module) -> tuple:
    return tuple(value for value in vars(module).values() if callable(value))


def config_key(cls: type, config) -> tuple:
    """All that a config holds, private settings (which attention) included, and the code that ``cls`` is made of."""
    return cls, _functions(sys.modules[cls.__module__]), pickle.dumps(config)
