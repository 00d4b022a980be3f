"""A recipe on a card: one bar of bytes by category, and the bytes that are left or missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..names import CATEGORIES
from .bars import plot_bar
from .template import html_from

PAGE = """
<div style='overflow-x:auto'>
  {% if fit.held and fit.is_right is not none %}
    {% set sign, color = ("✓", "#12806a") if fit.is_right else ("✕", "#c4312b") %}
    {% set look = "display:inline-block; width:22px; margin-right:6px; border-radius:11px" %}
    {% set look = look + "; text-align:center; color:#fff; background:" + color %}
    {% set words = "right" if fit.is_right else "not yet" %}
    <b role='img' aria-label='{{ words }}' style='{{ look }}'>{{ sign }}</b>
  {% endif %}
  <b>{{ fit.title }}</b>
  {{ bar | safe }}
  {% for words in fit.words %}<div>{{ words }}</div>{% endfor %}
</div>
"""


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

    def __repr__(self) -> str:
        return "\n".join([self.title, *self.words])

    def _repr_html_(self) -> str:
        picture = plot_bar("at the peak", self.parts(), self.card, self.nbytes)
        return html_from(PAGE, fit=self, bar=picture.svg(self.title))
