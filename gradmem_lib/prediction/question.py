"""The question to a prediction: a model without memory, a recipe, sizes and a target."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn

from ..compat import inside_peft
from ..techniques.checkpointing import checkpoints_of
from ..training.recipe import Recipe
from .extrapolation import repeated_layers


class CannotTrace(RuntimeError):
    """The model decides something by the values in its tensors, and fake tensors have no values."""


@dataclass(eq=False)
class Source:
    """A model without memory: a skeleton of a config, or (``is_user_module``) the user's module."""

    skeleton: nn.Module
    title: str
    is_user_module: bool

    @cached_property
    def layers(self) -> nn.Module | None:
        """The list of its repeated layers, if a few of them can stand for all. They cannot if the
        model has segments already, or if its user wrote or patched the module: layers with the same
        tensors may then do different things, or not be called.
        """
        theirs = type(inside_peft(self.skeleton)).__module__.startswith("transformers.")
        own = self.is_user_module and (
            not theirs or any("forward" in vars(m) for m in self.skeleton.modules())
        )
        return None if own or checkpoints_of(self.skeleton) else repeated_layers(self.skeleton)


@dataclass(frozen=True)
class Question:
    source: Source
    recipe: Recipe
    batch_size: int
    seq_len: int | None
    target: str
    batch: Any
    loss: Callable | None
    ranks: int
    rank: int
