"""What a plan has found: the recipes that fit, fastest first, and why the others do not."""

import html
from dataclasses import dataclass
from typing import Any

from ..display import pictures
from .cards import Card
from .options import Option, RuledOut


@dataclass(frozen=True, eq=False)
class Plan:
    """What fits a card, fastest first by estimate, and what does not and why. Bytes everywhere.

    Attributes: ``fits`` (``Option``s, fastest first) and ``refused`` (``Option``s, by what they need) were predicted,
    ``ruled_out`` was not: weights, gradients and states alone are too much. ``advice``: where nothing fits, what would.
    """

    title: str
    card: Card
    seq_len: int
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

    @property
    def best(self) -> Option | None:
        """The fastest option, ``None`` where nothing fits."""
        return self.fits[0] if self.fits else None

    @property
    def closest(self) -> Option:
        """``best``, or where nothing fits what needs least."""
        return self.best or self.refused[0]

    @property
    def next_faster(self) -> Option | None:
        """The slowest of the options that would be faster than ``best``, and do not fit."""
        faster = [o for o in self.refused if self.best and o.seconds < self.best.seconds]
        return max(faster, key=lambda o: o.seconds, default=None)

    @property
    def code(self) -> str:
        """Python that trains by ``best``; empty where nothing fits. ``train_dataset`` is yours."""
        if self.best is None:
            return ""
        return pictures().plan_code(self.best, self.given, self.config, self.target)

    def __str__(self) -> str:
        return pictures().plan_text(self)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    def to_dict(self) -> dict:
        """Plain values for JSON."""
        return pictures().plan_dict(self)
