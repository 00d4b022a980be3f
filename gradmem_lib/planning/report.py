"""The result of a plan: the recipes that fit, fastest first, and why the others do not fit."""

import html
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from ..display import pictures
from ..training.recipe import Recipe
from .cards import Card
from .options import Option, RuledOut


@dataclass(frozen=True, eq=False)
class Plan:
    """The recipes that fit a card, fastest first by estimate, and those that do not, with the
    reasons. All sizes are bytes.

    Attributes: ``fits`` (``Option``s, fastest first) and ``refused`` (``Option``s, by needed bytes)
    were predicted. ``ruled_out`` was not predicted: weights, gradients and states alone are too
    much. ``advice``: if nothing fits, changes that would fit. ``margin``: the share of the needed
    bytes that stays free besides. ``unit``: what times are counted for, a token or a row.
    ``example``: rows of the inputs, if these are more than token ids with labels. ``loss``: the one
    that was given. ``notes``: sentences about the model. ``machines``: how many have so many cards.
    """

    title: str
    card: Card
    seq_len: int | None
    global_batch: int
    method: str
    target: str
    fits: list[Option]
    refused: list[Option]
    ruled_out: list[RuledOut]
    advice: list[str]
    given: Any
    config: Any
    cards: int = 1
    margin: float = 0.0
    unit: str = "token"
    example: Any = None
    loss: Any = None
    notes: list[str] = field(default_factory=list)
    machines: int = 1
    network: float | None = None  # bytes a second between machines; None for one machine

    @property
    def best(self) -> Option | None:
        """The fastest option; ``None`` if nothing fits."""
        return self.fits[0] if self.fits else None

    @cached_property
    def closest(self) -> Option:
        """``best``; if nothing fits, the option that needs the fewest bytes, replayed."""
        return self.best or self.refused[0].replayed()

    @cached_property
    def next_faster(self) -> Option | None:
        """Of the predicted options that would be faster than ``best`` but do not fit, the slowest
        one, replayed; those of its own micro-batch, method, precision, optimizer and loss come
        first.
        """
        if self.best is None:
            return None
        faster = [option for option in self.refused if option.seconds < self.best.seconds]

        def of_its_kind_then_slowest(option: Option) -> tuple[bool, float]:
            return self.is_of_the_best_ones_kind(option), option.seconds

        slowest = max(faster, key=of_its_kind_then_slowest, default=None)
        return None if slowest is None else slowest.replayed()

    def is_of_the_best_ones_kind(self, option: Option) -> bool:
        """Whether ``option`` differs from ``best`` only in what it recomputes or moves."""
        return self.best is not None and _kind(option) == _kind(self.best)

    @property
    def code(self) -> str:
        """A Python program that trains by ``best``; empty if nothing fits.

        Add your own ``train_dataset``, and ``loss`` if there was one.
        """
        if self.best is None:
            return ""
        return pictures().plan_code(
            self.best,
            self.given,
            self.config,
            self.target,
            example=self.example,
            with_loss=self.loss is not None,
        )

    def __str__(self) -> str:
        return pictures().plan_text(self)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    def to_dict(self) -> dict:
        """Plain values for JSON."""
        return pictures().plan_dict(self)


def _kind(option: Option) -> Recipe:
    """The option's recipe without what it recomputes or moves."""
    return replace(option.recipe, checkpointing=None, every_n_layers=None, offload=None)
