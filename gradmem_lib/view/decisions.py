"""One picture that leads from the parts of a peak to the next technique, drawn from the rules of
``diagnose``.
"""

from __future__ import annotations

from typing import Any

from ..measure.diagnosis import TECHNIQUES
from ..units import format_bytes, parse_bytes
from .diagnosis import diagnose
from .picture import Picture
from .style import look_of, style

PARTS = ("activations", "temporaries", "gradients", "optimizer", "parameters")
GROUPS = {  # by one of their phases
    "backward": ("peak in forward or backward", PARTS),
    "optimizer_step": ("in the optimizer's step", PARTS[1:]),
}
PART = {"layers": ", of the layers", "outside": ""}
LAST = 9.3  # the distance from the prices to the column of bytes


@style()
def show_decisions(run: Any = None, card: int | str | None = None) -> Picture:
    """Draw a row for each technique: the parts of a peak that it can shrink, in each phase, and its
    price.

    With ``run`` (as for ``diagnose``), each row also has the lowest peak that the technique can
    reach, and a mark if that fits ``card`` bytes.
    """
    found = None if run is None else diagnose(run)
    now = found and ("optimizer_step" if found.peak.phase == "optimizer_step" else "backward")
    capacity = -1 if card is None else parse_bytes(card)
    places = {("backward", part): float(n) for n, part in enumerate(PARTS)}
    places |= {("optimizer_step", part): len(PARTS) + 0.6 + n for n, part in enumerate(PARTS[1:])}
    right = max(places.values()) + 0.9
    height = 1.7 + 0.34 * len(TECHNIQUES)
    picture = Picture(11.6, height, alt=_words())
    ax = picture.panel(0.29, 0.98, 1.45, height - 0.05)
    ax.set(xlim=(-0.5, right + 6.6 + 2.8 * bool(found)), ylim=(len(TECHNIQUES) - 0.4, -0.6))
    ax.axis("off")
    for phase, (title, parts) in GROUPS.items():
        faded = 1 if now in (None, phase) else 0.6
        ax.text(places[phase, parts[0]] - 0.4, -3.35, title, fontweight="bold", alpha=faded)
        for part in parts:
            words = part
            if found and now == phase:
                words += f"  {format_bytes(found.peak.by_category[part])}"
            ax.text(places[phase, part], -0.62, words, rotation=38, fontsize=8, alpha=faded)
    for row, technique in enumerate(TECHNIQUES):
        if row % 2 == 0:
            band = {"xmin": -0.42, "color": "#80889622", "zorder": 0, "clip_on": False}
            ax.axhspan(row - 0.5, row + 0.5, **band)
        ax.text(-0.7, row, technique.name + PART.get(technique.part, ""), ha="right", va="center")
        for (phase, part), x in places.items():
            if phase in technique.shrinks.get(part, ()):
                faded = 1 if now in (None, phase) else 0.25
                ax.barh(row, 0.8, 0.72, left=x - 0.4, alpha=faded, **look_of(part))
        ax.text(right, row, technique.price, va="center")
        if found:
            lowest = found.lowest[technique.name]
            fits = lowest <= capacity
            ax.text(
                right + LAST,
                row,
                format_bytes(lowest) + " ✓" * fits,
                va="center",
                ha="right",
                fontweight="bold" if fits else "normal",
            )
    ax.text(right, -0.75, "its price", fontweight="bold")
    if found:
        ax.text(right + LAST, -0.75, "at best", fontweight="bold", ha="right")
    return picture


def _words() -> str:
    """The picture in words, for those who do not see it."""
    rows = []
    for technique in TECHNIQUES:
        where = []
        for phase, (title, parts) in GROUPS.items():
            shrinkable = [part for part in parts if phase in technique.shrinks.get(part, ())]
            if shrinkable:
                where.append(f"{title}: {', '.join(shrinkable)}")
        rows.append(f"{technique.name} ({'; '.join(where)}), at the price of {technique.price}")
    return f"Which technique can shrink which part of a peak, and its price. {'. '.join(rows)}."
