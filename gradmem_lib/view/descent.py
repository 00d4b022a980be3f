"""Pictures of optimizers at work: paths over a two-dimensional surface, and curves of a training
loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from matplotlib.axes import Axes

from .picture import Picture
from .style import GRID, INK, joined, style

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


Points = Mapping[str, Sequence[float]]
Paths = Mapping[str, torch.Tensor]
Surface = Callable[[torch.Tensor], torch.Tensor]


@style()
def plot_paths(
    surface: Surface, paths: Paths, *, title: str = "", marks: Points | None = None
) -> Picture:
    """Draw the path of each update rule over the contours of ``surface``.

    Args:
        surface: heights (...,) of points (..., 2).
        paths: for each name, the points (steps + 1, 2) that were visited, the start first.
        title: a heading.
        marks: points with a name, such as the minimum.
    """
    marks = dict(marks or {})
    visited = {name: path.detach().double().cpu() for name, path in paths.items()}
    picture, axes = _sheet(3.2, title, _paths_in_words(visited, marks))
    for name, points in visited.items():
        color, dash, mark = STYLES.get(name, STYLES[""])
        look = {"color": color, "marker": mark, "markersize": 2.6, "linewidth": 0.9, "zorder": 2}
        axes.plot(*points.T, linestyle=dash, **look)
        end = look | {"markersize": 7, "zorder": 4}
        axes.plot(*points[-1:].T, linestyle="", label=name, **end)
    for name, at in marks.items():
        axes.plot(*at, marker="+", markersize=11, color=INK, linestyle="", zorder=5)
        axes.annotate(name, at, xytext=(12, -30), textcoords="offset points", fontsize=8)
    axes.margins(0.1)
    x = torch.linspace(*axes.get_xlim(), 160)
    y = torch.linspace(*axes.get_ylim(), 160)
    axes.autoscale(False)  # the contours fill the axes
    grid = torch.stack(torch.meshgrid(x, y, indexing="xy"), dim=-1)
    heights = surface(grid.double()).detach()
    levels = heights.min() + (heights.max() - heights.min()) * torch.linspace(0.02, 1, 10) ** 2
    axes.contour(x, y, heights, levels=levels.tolist(), colors=GRID, linewidths=0.7, zorder=1)
    _legend(picture, "ends at")
    return picture


@style()
def plot_losses(curves: Points, *, title: str = "", smooth: int = 1) -> Picture:
    """Draw training losses, one curve for each name.

    Each point is the mean of the last ``smooth`` steps.
    """
    ends = "; ".join(
        f"{name} from {losses[0]:.2f} to {losses[-1]:.2f}" for name, losses in curves.items()
    )
    picture, axes = _sheet(2.7, title, f"Training loss over the steps: {ends}.")
    for name, losses in curves.items():
        color, dash, mark = STYLES.get(name, STYLES[""])
        mean = []
        for step in range(1, len(losses) + 1):
            last = losses[max(0, step - smooth) : step]
            mean.append(sum(last) / len(last))
        look = {"color": color, "linestyle": dash, "marker": mark, "markersize": 4}
        every = max(1, len(mean) // 8)
        axes.plot(range(1, len(mean) + 1), mean, markevery=every, label=name, **look)
    axes.set_xlabel("step")
    _legend(picture)
    return picture


def _sheet(height: float, title: str, words: str) -> tuple[Picture, Axes]:
    """A picture of curves, with room for a legend beside them."""
    text = joined("Descent plot", title)
    picture = Picture(7.8, height, title, alt=joined(title, words), text=text)
    axes = picture.panel(0.06, 0.74, 0.42, height - 0.42)
    axes.grid(False)
    axes.spines["left"].set_visible(True)
    return picture, axes


def _legend(picture: Picture, title: str = "") -> None:
    corner = (0.75, 0.88)
    picture.legend(loc="upper left", bbox_to_anchor=corner, title=title, alignment="left")


def _paths_in_words(visited: Mapping[str, torch.Tensor], marks: Points) -> str:
    def place(at) -> str:
        return f"({float(at[0]):.2f}, {float(at[1]):.2f})"

    ends = "; ".join(f"{name} ends at {place(points[-1])}" for name, points in visited.items())
    named = "".join(f" {name} is at {place(at)}." for name, at in marks.items())
    start = next(iter(visited.values()))[0]
    return f"Paths over a contour map, from {place(start)}: {ends}.{named}"


def show_paths(
    surface: Surface, paths: Paths, *, title: str = "", marks: Points | None = None
) -> None:
    """Display ``plot_paths`` in a notebook."""
    plot_paths(surface, paths, title=title, marks=marks).display()


def show_losses(curves: Points, *, title: str = "", smooth: int = 1) -> None:
    """Display ``plot_losses`` in a notebook."""
    plot_losses(curves, title=title, smooth=smooth).display()
