"""The memory of several ranks side by side, on one scale: while they run, and afterwards as a still
picture.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..units import format_bytes
from .live import Moving, encode_frame, explorable, frame_peak, plain_text
from .style import joined, shortened, style
from .timeline import describe

if TYPE_CHECKING:
    from ..measure.timeline import Timeline
    from .picture import Picture

    Timelines = list[Timeline | None]  # of each rank; None: it was not measured


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
            picture = self.pictures[number]
            picture.moving.finish(picture.bundle)

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
        self.timelines: Timelines = [None] * ranks
        titles = [joined(f"rank {rank}", title, by=", ") for rank in range(ranks)]
        text = plain_text(joined(title, f"{ranks} ranks", by=", "))
        self.moving = Moving(titles, budget, text)
        self.moving.start()

    def push(self, rank: int, frame: bytes) -> None:
        """Draw the next frame of ``rank``, with all ranks on the scale of the largest."""
        views = self.moving.views
        for view in views:
            view.top = max(view.top, frame_peak(frame))
        if views:
            views[rank].frame = frame

    def bundle(self) -> tuple[dict, dict]:
        """The finished picture as a mimebundle."""
        highest = _highest(self.timelines)
        if not highest:
            words = "No rank has come to the end of its measurement."
            return {"text/html": f"<em>{words}</em>", "text/plain": self.moving.text}, {}
        picture = plot_ranks(self.timelines, title=self.title, budget=self.budget)
        picture.plain_text = self.moving.text
        common = {"budget": float(self.budget or 0), "top": float(highest), "small": True}
        frames = []
        for title, timeline in zip(self.moving.titles, self.timelines, strict=True):
            frame = encode_frame(timeline, None, None, finished=True)
            frames.append((frame, common | {"title": title}))
        return explorable(picture, frames)


def _highest(timelines: Timelines) -> int:
    """The highest peak of those that were measured; 0 if none was."""
    return max((max(t.totals) for t in timelines if t is not None and len(t)), default=0)


@style()
def plot_ranks(timelines: Timelines, *, title: str = "", budget: int | None = None) -> Picture:
    """Live bytes by category of several ranks side by side on one scale."""
    from .picture import Picture
    from .timeline_picture import draw_timeline

    words = []
    for rank, timeline in enumerate(timelines):
        words.append(f"Rank {rank}. {describe(timeline, title=title, budget=budget)}")
    heading = shortened(title or "Memory by category", 100)
    picture = Picture(8.6, 3.2, heading, alt=" ".join(words))
    highest = _highest(timelines)
    left, gap = 0.07, 0.022
    width = (0.985 - left + gap) / len(timelines)
    for rank, timeline in enumerate(timelines):
        start = left + rank * width
        ax = picture.panel(start, start + width - gap, 0.78, 2.4)
        picture.write(start, 0.5, f"rank {rank}", fontweight="bold")
        if timeline is None or not len(timeline):
            ax.set_axis_off()
            ax.text(0.5, 0.5, "not measured to its end", ha="center", transform=ax.transAxes)
            continue
        draw_timeline(ax, timeline, budget, highest=highest)
        peak = format_bytes(max(timeline.totals))
        picture.write(start + width - gap, 0.5, f"peak {peak}", ha="right")
        if rank:
            ax.set_ylabel("")
            ax.set_yticklabels([])
    picture.categories(left, 3.05)
    return picture
