"""Pictures of optimizers at work: paths over a two-dimensional surface, and curves of a training
loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from .style import GRID, INK, joined, new_figure, picture_bundle, show_bundle, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# Okabe and Ito's colours, which colour-blind readers can tell apart. Each line also has its own
# mark. The course's update rules have the same colours in every picture.
STYLES = {
    "SGD": (INK, "-", "o"),
    "momentum": ("#0072b2", "-", "s"),
    "second moment": ("#d55e00", "-", "^"),
    "Adam": ("#009e73", "-", "D"),
    "AdamW": ("#cc79a7", "--", "v"),
    "": ("#b08a2e", ":", "x"),
}


def plot_paths(
    surface: Callable[[torch.Tensor], torch.Tensor],
    paths: Mapping[str, torch.Tensor],
    *,
    title: str = "",
    marks: Mapping[str, Sequence[float]] | None = None,
) -> Figure:
    """Draw the path of each update rule over the contours of ``surface``.

    Args:
        surface: heights (...,) of points (..., 2).
        paths: for each name, the points (steps + 1, 2) that were visited, the start first.
        title: a heading.
        marks: points with a name, such as the minimum.
    """
    marks = dict(marks or {})
    every = torch.cat([path.detach().double().cpu() for path in paths.values()])
    every = torch.cat(
        [every, torch.tensor([list(map(float, at)) for at in marks.values()]).double().view(-1, 2)]
    )
    low, high = every.amin(0), every.amax(0)
    margin = 0.12 * (high - low).clamp_min(0.5)
    x, y = (
        torch.linspace(float(a), float(b), 160)
        for a, b in zip(low - margin, high + margin, strict=True)
    )
    grid = torch.stack(torch.meshgrid(x, y, indexing="xy"), dim=-1)
    heights = surface(grid.double()).detach()
    with style():
        figure = new_figure(7.8, 3.2)
        axes = figure.add_axes((0.06, 0.11, 0.68, 0.76))
        levels = heights.min() + (heights.max() - heights.min()) * torch.linspace(0.02, 1, 10) ** 2
        axes.contour(x, y, heights, levels=levels.tolist(), colors=GRID, linewidths=0.7, zorder=1)
        for name, path in paths.items():
            color, dash, mark = STYLES.get(name, STYLES[""])
            points = path.detach().double().cpu()
            axes.plot(*points.T, color=color, linestyle=dash, linewidth=0.9, zorder=2)
            axes.plot(*points.T, color=color, linestyle="", marker=mark, markersize=2.6, zorder=3)
            axes.plot(
                *points[-1:].T,
                color=color,
                linestyle="",
                marker=mark,
                markersize=7,
                zorder=4,
                label=name,
            )
        for name, at in marks.items():
            axes.plot(*at, marker="+", markersize=11, color=INK, linestyle="", zorder=5)
            axes.annotate(
                name,
                at,
                xytext=(7, -13),
                textcoords="offset points",
                color=INK,
                fontsize=8,
            )
        axes.set_xlim(float(x[0]), float(x[-1]))
        axes.set_ylim(float(y[0]), float(y[-1]))
        figure.text(0.06, 0.92, title, fontsize=11, fontweight="bold")
        figure.legend(
            loc="upper left",
            bbox_to_anchor=(0.75, 0.89),
            frameon=False,
            title="ends at",
            alignment="left",
        )
    return figure


def plot_losses(
    curves: Mapping[str, Sequence[float]], *, title: str = "", smooth: int = 1
) -> Figure:
    """Draw training losses, one curve for each name.

    Each point is the mean of the last ``smooth`` steps.
    """
    with style():
        figure = new_figure(7.8, 2.7)
        axes = figure.add_axes((0.06, 0.17, 0.68, 0.68))
        for name, losses in curves.items():
            color, dash, mark = STYLES.get(name, STYLES[""])
            mean = [
                sum(losses[max(0, i + 1 - smooth) : i + 1]) / min(i + 1, smooth)
                for i in range(len(losses))
            ]
            every = max(1, len(mean) // 8)
            steps = range(1, len(mean) + 1)
            axes.plot(
                steps,
                mean,
                color=color,
                linestyle=dash,
                marker=mark,
                markevery=every,
                markersize=4,
                label=name,
            )
        axes.set_xlabel("step")
        axes.spines[["top", "right"]].set_visible(False)
        figure.text(0.06, 0.92, title, fontsize=11, fontweight="bold")
        figure.legend(loc="upper left", bbox_to_anchor=(0.75, 0.88), frameon=False)
    return figure


def show_paths(
    surface: Callable[[torch.Tensor], torch.Tensor],
    paths: Mapping[str, torch.Tensor],
    *,
    title: str = "",
    marks: Mapping[str, Sequence[float]] | None = None,
) -> None:
    """Display ``plot_paths`` with words for those who do not see it."""
    ends = "; ".join(
        f"{name} ends at ({float(p[-1, 0]):.2f}, {float(p[-1, 1]):.2f})"
        for name, p in paths.items()
    )
    points = "".join(
        f" {name} is at ({at[0]:.2f}, {at[1]:.2f})." for name, at in (marks or {}).items()
    )
    start = next(iter(paths.values()))[0]
    words = (
        f"Paths over a contour map, from ({float(start[0]):.2f}, {float(start[1]):.2f}): "
        f"{ends}.{points}"
    )
    _show(plot_paths(surface, paths, title=title, marks=marks), title, words)


def show_losses(curves: Mapping[str, Sequence[float]], *, title: str = "", smooth: int = 1) -> None:
    """Display ``plot_losses`` with words for those who do not see it."""
    ends = "; ".join(
        f"{name} from {losses[0]:.2f} to {losses[-1]:.2f}" for name, losses in curves.items()
    )
    _show(
        plot_losses(curves, title=title, smooth=smooth),
        title,
        f"Training loss over the steps: {ends}.",
    )


def _show(figure: Figure, title: str, words: str) -> None:
    text = joined("Descent plot", title)
    show_bundle(*picture_bundle(figure, joined(title, words), text))
