"""The question to a prediction: a model without memory, a recipe, sizes and a target."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from ..model.description import Description
from ..model.wrappers import without_wrappers
from ..techniques.checkpointing import checkpoints_of
from ..training.recipe import Recipe
from .extrapolation import RepeatedLayers, repeated_layers
from .loop import Loop


class CannotTrace(RuntimeError):
    """The model decides something by the values in its tensors, and fake tensors have no values."""


@dataclass(eq=False)
class Source(Description):
    """The model of a prediction, with what its predictions share.

    ``short_traces``: traces of a few layers that several recipes share, by their questions.
    ``requests_need_all_layers``: traces of more layers did not prove a recipe's requests, so that
    other recipes do not try them. ``second_process``: see ``second_process.py``.
    """

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
        kind = type(without_wrappers(self.skeleton))
        patched = any("forward" in vars(module) for module in self.skeleton.modules())
        if patched or not kind.__module__.startswith("transformers."):
            return []
        repeated = repeated_layers(self.skeleton)
        return [several for several in repeated if len(several) in self.lengths]


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
