"""A picture of ways to recompute: bytes kept against operations repeated, with a line through the
points that none beats.
"""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.axes import Axes

from .picture import Picture
from .style import COLORS, INK, style

# Two labels touch within this share of the axes' width and these per cent of height.
CLOSE_ACROSS, CLOSE_UP = 0.24, 6.0

Point = tuple[float, float]


def unbeaten(points: Mapping[str, Point]) -> list[str]:
    """The names that no other point beats (less of one quantity, and no more of the other), fewest
    operations first.
    """
    names = [name for name, point in points.items() if not _is_beaten(point, points)]
    return sorted(names, key=lambda name: points[name][1])


def _is_beaten(point: Point, points: Mapping[str, Point]) -> bool:
    for other in points.values():
        no_more = other[0] <= point[0] and other[1] <= point[1]
        if other != point and no_more:
            return True
    return False


@style()
def show_frontier(points: Mapping[str, Point], *, title: str = "") -> Picture:
    """Draw ``points``, from name to (bytes kept, operations of a step): the bytes as a share of the
    largest, against the operations in excess of the fewest.
    """
    shares = _shares(points)
    line = unbeaten(points)
    picture = Picture(7.8, 4.0, title, alt=_in_words(shares, line, title))
    picture.write(0.98, 0.22, "filled: nothing beats it", ha="right")
    axes = picture.panel(0.09, 0.97, 0.48, 3.48)
    # A third more than the widest point, for its label; any width if nothing is repeated.
    width = 1.35 * max(more for more, _ in shares.values()) or 1
    axes.set(xlim=(-0.03 * width, width), ylim=(0, 108))
    more, kept = zip(*(shares[name] for name in line), strict=True)
    axes.step(more, kept, where="post", color=INK, linewidth=1)
    _draw_points(axes, shares, line, width)
    axes.set_xlabel("operations more, % of a step")
    axes.set_ylabel("bytes kept, % of the most")
    return picture


def _shares(points: Mapping[str, Point]) -> dict[str, Point]:
    """By name: operations more than the fewest, and bytes of the most, both in per cent."""
    most = max(saved for saved, _ in points.values())
    fewest = min(operations for _, operations in points.values())
    shares = {}
    for name, (saved, operations) in points.items():
        shares[name] = (100 * (operations / fewest - 1), 100 * saved / most)
    return shares


def _in_words(shares: Mapping[str, Point], line: list[str], title: str) -> str:
    """The picture for those who do not see it."""
    words = []
    for name, (more, kept) in shares.items():
        words.append(f"{name}: {kept:.0f}% of the bytes, {more:+.1f}% operations")
    return f"{title}. {'; '.join(words)}. No other way beats {', '.join(line)}."


def _draw_points(axes: Axes, shares: Mapping[str, Point], line: list[str], width: float) -> None:
    """Points with their names, from the lowest up, so that a label gives way upwards."""
    placed: list[Point] = []
    by_height = sorted(_same(shares).items(), key=lambda item: item[0][1])
    for (x, y), names in by_height:
        color, marker = "none", "s"
        if names[0] in line:
            color, marker = COLORS["activations"], "o"
        axes.scatter(
            [x], [y], s=42, zorder=3, marker=marker, facecolor=color, edgecolor=INK, linewidth=1
        )
        label_y = y + 3.2
        for other_x, other_y in placed:  # from the lowest up
            if abs(x - other_x) < CLOSE_ACROSS * width and abs(label_y - other_y) < CLOSE_UP:
                label_y = other_y + CLOSE_UP
        placed = sorted([*placed, (x, label_y)], key=lambda at: at[1])
        axes.text(x + 0.012 * width, label_y, ", ".join(names), va="center")


def _same(shares: Mapping[str, Point]) -> dict[Point, list[str]]:
    """Names grouped by their place."""
    places: dict[Point, list[str]] = {}
    for name, at in shares.items():
        places.setdefault(at, []).append(name)
    return places
