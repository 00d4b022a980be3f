"""Pairs of a measured and a predicted size, one bar inside the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from .style import COLORS, INK, new_figure, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LINE, HEAD, FOOT = 0.2, 0.45, 0.42  # inches


def off_by(measured: int, predicted: int) -> str:
    """The error of the predicted size: "+2.3%", "0.0%"."""
    words = f"{predicted / measured - 1:+.1%}"
    return "0.0%" if words[1:] == "0.0%" else words


def plot_pairs(groups: Mapping[str, Sequence[tuple[str, int, int]]], *, title: str) -> Figure:
    """Draw, under each heading, its pairs (name, measured bytes, predicted bytes), with the error
    of the prediction.
    """
    height = HEAD + FOOT + LINE * sum(1 + len(pairs) for pairs in groups.values())
    words = "; ".join(
        f"{heading}, {name}: {measured / 1e9:.2f} GB measured, {predicted / 1e9:.2f} GB predicted"
        for heading, pairs in groups.items()
        for name, measured, predicted in pairs
    )
    top = 1.12 * max(max(sizes) for pairs in groups.values() for _, *sizes in pairs) / 1e9
    with style():
        figure = new_figure(8.6, height, alt=f"{title}. {words}.")
        axes = figure.add_axes((0.42, FOOT / height, 0.57, 1 - (HEAD + FOOT) / height))
        top_row = 0
        for heading, pairs in groups.items():
            axes.annotate(
                heading,
                (-0.715, top_row),
                xycoords=("axes fraction", "data"),
                va="center",
                fontsize=8.5,
                fontweight="bold",
            )
            for row, (name, measured, predicted) in enumerate(pairs, top_row + 1):
                axes.annotate(
                    name,
                    (-0.015, row),
                    xycoords=("axes fraction", "data"),
                    ha="right",
                    va="center",
                    fontsize=8,
                )
                axes.barh(row, measured / 1e9, 0.78, color=COLORS["other"], label="measured")
                axes.barh(row, predicted / 1e9, 0.32, color=COLORS["parameters"], label="predicted")
                axes.text(
                    max(measured, predicted) / 1e9 + top / 100,
                    row,
                    off_by(measured, predicted),
                    va="center",
                    fontsize=8,
                )
            top_row += 1 + len(pairs)
        axes.set(xlim=(0, top), ylim=(top_row - 0.4, -0.6), yticks=[])
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(colors=INK, length=3, labelsize=8)
        axes.set_xlabel("GB (10⁹ bytes)", color=INK, fontsize=8.5)
        figure.text(
            0.012, 1 - 0.2 / height, title, fontsize=11, fontweight="bold", va="center_baseline"
        )
        handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
        figure.legend(
            handles.values(), handles, ncols=2, frameon=False, fontsize=8.5, loc="upper right"
        )
    return figure
