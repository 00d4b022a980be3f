"""Pairs of a measured and a predicted size, one bar inside the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .picture import Picture
from .style import COLORS, style

LINE, HEAD, FOOT = 0.2, 0.45, 0.42  # inches


def off_by(measured: int, predicted: int) -> str:
    """The error of the predicted size: "+2.3%", "0.0%"."""
    words = f"{predicted / measured - 1:+.1%}"
    return "0.0%" if words[1:] == "0.0%" else words


@style()
def plot_pairs(groups: Mapping[str, Sequence[tuple[str, int, int]]], *, title: str) -> Picture:
    """Draw, under each heading, its pairs (name, measured bytes, predicted bytes), with the error
    of the prediction.
    """
    words = "; ".join(
        f"{heading}, {name}: {measured / 1e9:.2f} GB measured, {predicted / 1e9:.2f} GB predicted"
        for heading, pairs in groups.items()
        for name, measured, predicted in pairs
    )
    rows = sum(1 + len(pairs) for pairs in groups.values())
    foot = HEAD + LINE * rows
    picture = Picture(8.6, foot + FOOT, title, alt=f"{title}. {words}.")
    axes = picture.panel(0.42, 0.99, HEAD, foot)
    looks = {
        "measured": {"color": COLORS["other"], "height": 0.78},
        "predicted": {"color": COLORS["parameters"], "height": 0.32},
    }
    row = 0
    for heading, pairs in groups.items():
        picture.write(0.012, HEAD + LINE * (row + 0.5), heading, fontweight="bold")
        for name, measured, predicted in pairs:
            row += 1
            picture.write(0.412, HEAD + LINE * (row + 0.5), name, ha="right", fontsize=8)
            sizes = (measured / 1e9, predicted / 1e9)
            for size, look in zip(sizes, looks.values(), strict=True):
                axes.barh(row, size, **look)
            axes.text(max(sizes), row, f" {off_by(measured, predicted)}", va="center", fontsize=8)
        row += 1
    axes.set(ylim=(rows - 0.5, -0.5), yticks=[])
    axes.margins(x=0.12)
    axes.set_xlabel("GB (10⁹ bytes)")
    for place, name in enumerate(looks):
        picture.entry(0.76 + 0.12 * place, 0.22, name, {"facecolor": looks[name]["color"]})
    return picture
