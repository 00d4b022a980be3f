"""A picture of ways to recompute: bytes kept against operations repeated, with a line through the
points that none beats.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from .style import COLORS, INK, new_figure, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# two labels touch within this share of the axes' width and these per cent of height
CLOSE = (0.24, 6.0)


def unbeaten(points: Mapping[str, tuple[float, float]]) -> list[str]:
    """The names that no other point beats (less of one quantity, and no more of the other), fewest
    operations first.
    """

    def beaten(point: tuple[float, float]) -> bool:
        return any(p != point and p[0] <= point[0] and p[1] <= point[1] for p in points.values())

    return sorted(
        (name for name, p in points.items() if not beaten(p)), key=lambda name: points[name][1]
    )


def show_frontier(points: Mapping[str, tuple[float, float]], *, title: str = "") -> Figure:
    """Draw ``points``, from name to (bytes kept, operations of a step): the bytes as a share of the
    largest, against the operations in excess of the fewest.
    """
    most, fewest = (f(p[i] for p in points.values()) for i, f in enumerate((max, min)))
    shares = {
        name: (100 * (operations / fewest - 1), 100 * saved / most)
        for name, (saved, operations) in points.items()
    }
    line = unbeaten(points)
    words = "; ".join(
        f"{n}: {y:.0f}% of the bytes, {x:+.1f}% operations" for n, (x, y) in shares.items()
    )
    alt = f"{title}. {words}. No other way beats {', '.join(line)}."
    with style():
        figure = new_figure(7.8, 4.0, alt=alt)
        axes = figure.add_axes((0.09, 0.13, 0.88, 0.75))
        width = 1.35 * max(x for x, _ in shares.values()) or 1
        axes.set(xlim=(-0.03 * width, width), ylim=(0, 108))
        axes.step(
            *zip(*(shares[n] for n in line), strict=True), where="post", color=INK, linewidth=1
        )
        placed: list[tuple[float, float]] = []
        for (x, y), names in sorted(_same(shares).items(), key=lambda item: item[0][1]):
            best = names[0] in line
            look = {"facecolor": COLORS["activations"] if best else "none", "edgecolor": INK}
            axes.scatter([x], [y], s=42, zorder=3, marker="o" if best else "s", **look)
            up = y + 3.2
            while any(abs(x - a) < CLOSE[0] * width and abs(up - b) < CLOSE[1] for a, b in placed):
                up += 1
            placed.append((x, up))
            axes.text(
                x + 0.012 * width,
                up,
                ", ".join(names),
                va="center",
                fontsize=8.5,
            )
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=INK, length=3, labelsize=8)
        axes.set_xlabel("operations more, % of a step", color=INK)
        axes.set_ylabel("bytes kept, % of the most", color=INK)
        figure.text(0.02, 0.94, title, fontsize=11, fontweight="bold")
        figure.text(0.98, 0.94, "filled: nothing beats it", fontsize=8.5, color=INK, ha="right")
    return figure


def _same(shares: Mapping[str, tuple[float, float]]) -> dict[tuple[float, float], list[str]]:
    """Names grouped by their place."""
    places: dict[tuple[float, float], list[str]] = {}
    for name, at in shares.items():
        places.setdefault(at, []).append(name)
    return places
