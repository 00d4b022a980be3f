"""The memory of several ranks side by side, on one scale: while they run, and afterwards as a still
picture.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..display import live_enabled
from ..names import CATEGORIES
from ..units import format_bytes
from .live import (
    WAIT,
    encode_frame,
    explorable_html,
    frame_peak,
    live,
    plain_text,
    widget_class,
)
from .place import place, still_html
from .style import draw_entry, joined, new_figure, picture_bundle, shortened, style
from .timeline import describe, draw_areas

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ..measure.timeline import Timeline


class RankPictures:
    """The pictures of one ``run_ranks``: the first tracker of every rank is in one picture, the
    second in the next.

    Use it as a context: at its end, each picture becomes a finished one. With ``GRADMEM_LIVE=0``
    pictures appear only then.
    """

    def __init__(self, ranks: int):
        self.ranks = ranks
        self.pictures: dict[int, _Picture] = {}

    def __enter__(self) -> RankPictures:
        return self

    def __exit__(self, *exc) -> None:
        for number in sorted(self.pictures):
            self.pictures[number].finish()

    def on_report(self, rank: int, number: int, action: str, *what) -> None:
        """Called when ``rank`` reports about its tracker ``number``.

        ``action`` and what comes with it: "start" (title, budget), "push" (a frame), "finish" (a
        timeline).
        """
        if action == "start" and number not in self.pictures:
            self.pictures[number] = _Picture(self.ranks, *what)
        elif action == "push":
            self.pictures[number].push(rank, *what)
        elif action == "finish":
            self.pictures[number].timelines[rank] = what[0]


class _Picture:
    """One tracker of each rank (the first ones, or the second ones, ...), with a common title and
    budget.
    """

    def __init__(self, ranks: int, title: str, budget: int | None):
        self.title, self.budget = title, budget
        self.timelines: list[Timeline | None] = [None] * ranks
        self.widgets, self.place, self.output = [], None, None
        self.words = plain_text(joined(title, f"{ranks} ranks", by=", "))
        if not live():
            return
        from IPython.display import display
        from ipywidgets import HBox, Layout

        start = {
            "budget": float(budget or 0),
            "small": True,
            "frame": encode_frame(None, None, None),
        }
        views = [
            widget_class()(
                title=_rank_title(rank, title),
                layout=Layout(flex="1 1 0%", min_width="195px"),
                **start,
            )
            for rank in range(ranks)
        ]
        self.widgets = [*views, HBox(views, layout=Layout(flex_flow="row wrap"))]
        self.place = place(self.widgets[-1], keep=True)
        shown = self.place.html(f"<em>{WAIT}</em>")
        data = {"text/html": shown, "text/plain": self.words}
        self.output = display(data, raw=True, display_id=True)

    def push(self, rank: int, frame: bytes) -> None:
        """Draw the next frame of ``rank``, with all ranks on the scale of the largest."""
        if self.widgets:
            top = max(self.widgets[0].top, frame_peak(frame))
            for view in self.widgets[:-1]:
                view.top = top
            self.widgets[rank].frame = frame

    def finish(self) -> None:
        """Replace the moving picture by the finished one."""
        from IPython.display import display

        if any(timeline is not None and len(timeline) for timeline in self.timelines):
            alt = " ".join(
                f"Rank {rank}. {describe(timeline, title=self.title, budget=self.budget)}"
                for rank, timeline in enumerate(self.timelines)
            )
            figure = plot_ranks(self.timelines, title=self.title, budget=self.budget)
            data, metadata = picture_bundle(figure, alt, self.words)
            if live_enabled():
                still = still_html((data, metadata), "")
                data["text/html"] = explorable_html(self._finished(), still)
        else:
            words = "No rank has come to the end of its measurement."
            data, metadata = {"text/html": f"<em>{words}</em>", "text/plain": self.words}, {}
        show = self.output.update if self.output is not None else display
        show(data, metadata=metadata, raw=True)
        for widget in [self.place, *self.widgets]:
            if widget is not None:
                widget.close()

    def _finished(self) -> list[tuple[bytes, dict]]:
        """The frame and the settings of each rank's picture, all on one scale."""
        settings = {
            "budget": float(self.budget or 0),
            "top": float(_highest(self.timelines)),
            "small": True,
        }
        pictures = []
        for rank, timeline in enumerate(self.timelines):
            own = {**settings, "title": _rank_title(rank, self.title)}
            pictures.append((encode_frame(timeline, None, None, finished=True), own))
        return pictures


def _highest(timelines: list[Timeline | None]) -> int:
    """The highest peak of those that were measured."""
    return max(max(t.totals) for t in timelines if t is not None and len(t))


def _rank_title(rank: int, title: str) -> str:
    return joined(f"rank {rank}", title, by=", ")


def plot_ranks(
    timelines: list[Timeline | None], *, title: str = "", budget: int | None = None
) -> Figure:
    """Live bytes by category of several ranks side by side on one scale; ``None`` stands for a rank
    that was not measured.
    """
    highest = _highest(timelines)
    left, right, gap = 0.07, 0.985, 0.022
    width = (right - left + gap) / len(timelines) - gap
    with style():
        figure = new_figure(8.6, 3.2)
        figure.text(
            left,
            0.93,
            shortened(title or "Memory by category", 100),
            fontsize=11,
            fontweight="bold",
            va="baseline",
        )
        for rank, timeline in enumerate(timelines):
            axes = figure.add_axes((left + rank * (width + gap), 0.25, width, 0.51))
            if timeline is None or not len(timeline):
                axes.set_axis_off()
                axes.text(
                    0.5, 0.5, "not measured to its end", ha="center", transform=axes.transAxes
                )
            else:
                draw_areas(axes, timeline, budget, None, highest)
                peak = format_bytes(max(timeline.totals))
                axes.set_title(f"peak {peak}", loc="right", pad=18, fontsize=8.5)
            axes.set_title(f"rank {rank}", loc="left", pad=18, fontsize=9, fontweight="bold")
            if rank:
                axes.set_ylabel("")
                axes.set_yticklabels([])
        for place, name in enumerate(CATEGORIES):
            x = left + place * (right - left) / len(CATEGORIES)
            draw_entry(figure, name, (x, 0.045), (0.021, 0.052), 0.029)
    return figure
