"""A recipe on a card: one bar of bytes by category, and the bytes that are left or missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..names import CATEGORIES
from .bars import plot_bar
from .picture import Picture
from .style import LIGHT, joined, style

# The verdict as a sign, in its colour, and as it is read out.
SIGNS = {True: ("✓", "#12806a", "right"), False: ("✕", "#c4312b", "not yet")}


@dataclass(frozen=True)
class MemoryFit:
    """How a recipe's bytes fit a card.

    ``held``: bytes at the peak by category, and the card's other bytes by name, which the bar shows
    as ``other``. ``nbytes``: the card's bytes. ``words``: sentences below the bar. ``is_right``:
    the verdict, shown as a sign beside a recipe that has bytes; ``None``: there is none. The text
    is the same in every run.
    """

    title: str
    card: str
    nbytes: int
    held: Mapping[str, int] = field(default_factory=dict)
    words: Sequence[str] = ()
    is_right: bool | None = None

    def parts(self) -> dict[str, int]:
        """``held`` summed into the categories that have a colour."""
        uncategorized = sum(n for name, n in self.held.items() if name not in CATEGORIES)
        parts = {name: self.held.get(name, 0) for name in CATEGORIES}
        return parts | {"other": parts["other"] + uncategorized}

    @style()
    def picture(self) -> Picture:
        """The bar between the title and the sentences."""
        picture = plot_bar("", self.parts(), self.card, self.nbytes, self.words)
        picture.alt = joined(self.title, picture.alt)
        x = 0.012
        if self.held and self.is_right is not None:
            sign, color, words = SIGNS[self.is_right]
            picture.alt = joined(words, picture.alt)
            plate = {"boxstyle": "circle,pad=0.2", "facecolor": color, "edgecolor": "none"}
            picture.write(0.016, 0.16, sign, color=LIGHT, bbox=plate)
            x = 0.045
        picture.write(x, 0.14, self.title, fontsize=9.5, fontweight="bold")
        picture.plain_text = repr(self)
        return picture

    def __repr__(self) -> str:
        return "\n".join([self.title, *self.words])

    def _repr_mimebundle_(self, include=None, exclude=None, **kwargs):
        return self.picture().bundle()
