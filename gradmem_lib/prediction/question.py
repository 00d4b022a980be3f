"""What is asked of a prediction: a model without memory, a recipe, sizes and a target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ..training.recipe import Recipe
from .extrapolation import repeated_layers


class CannotTrace(RuntimeError):
    """The model decides something by the values in its tensors, and fake tensors have none."""


@dataclass(eq=False)
class Source:
    """A model without memory, and the list of its repeated layers, if there is one."""

    skeleton: nn.Module
    title: str
    key: str | None
    layers: nn.Module | None = field(init=False)

    def __post_init__(self) -> None:
        self.layers = repeated_layers(self.skeleton)


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
        if self.source.key is None or self.batch is not None or self.loss is not None:
            return None
        return self.source.key, self.recipe, self.batch_size, self.seq_len, self.target
