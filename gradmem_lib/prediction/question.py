"""The question to a prediction: a model without memory, a recipe, sizes and a target."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from ..model.description import Description
from ..model.wrappers import inside_peft
from ..techniques.checkpointing import checkpoints_of
from ..training.recipe import Recipe
from .extrapolation import RepeatedLayers, repeated_layers
from .loop import Loop


class CannotTrace(RuntimeError):
    """The model decides something by the values in its tensors, and fake tensors have no values."""


@dataclass(eq=False)
class Source(Description):
    """The model of a prediction, with what its predictions share. ``title``: its name for readers.
    ``is_user_module``: it is the user's own module, and not built from a config.

    ``short_traces``: traces of a few layers that several recipes share, by their questions.
    ``requests_need_all_layers``: traces of more layers did not prove a recipe's requests, so that
    other recipes do not try them. ``second_process``: see ``second_process.py``.
    """

    title: str
    is_user_module: bool
    short_traces: dict["Question", Any] = field(default_factory=dict, repr=False)
    requests_need_all_layers: bool = False
    second_process: Any = field(default=None, repr=False)

    @cached_property
    def lists(self) -> list[RepeatedLayers]:
        """The lists of its repeated layers, if a few of them can stand for all. They cannot if the
        model has segments already, or if its user wrote, patched or edited the module: layers with
        the same tensors may then do different things, or not be called.
        """
        if checkpoints_of(self.skeleton):
            return []
        if not self.is_user_module:
            return repeated_layers(self.skeleton)
        kind = type(inside_peft(self.skeleton))
        patched = any("forward" in vars(module) for module in self.skeleton.modules())
        if patched or not kind.__module__.startswith("transformers."):
            return []
        lengths = set(_lengths(self.config))
        return [several for several in repeated_layers(self.skeleton) if len(several) in lengths]


def _lengths(config: Any) -> Iterator[int]:
    """The numbers of layers that a config names."""
    for name, value in vars(config).items():
        if hasattr(value, "to_dict"):  # the config of a part of the model
            yield from _lengths(value)
        elif type(value) is int and "layer" in name:
            yield value


class Kept(NamedTuple):
    """``count`` of the ``total`` layers of a list, which a short trace keeps. ``unit``: how many of
    them are repeated together. ``at_end``: the layers come after others of the same list, which a
    recipe treats in another way. ``recomputed``: they are among the first k of "first-k".
    """

    several: RepeatedLayers
    unit: int
    count: int
    total: int
    at_end: bool = False
    recomputed: bool = False


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
    loop: Loop = field(default_factory=Loop)
    kept: tuple[Kept, ...] = ()  # empty: all layers
