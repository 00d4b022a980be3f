"""The memory of several ranks side by side, which report from their own processes."""

from __future__ import annotations

from .live import Moving


class RankPictures:
    """The pictures of one ``run_ranks``: the first tracker of every rank is in one picture, the
    second in the next.

    Use it as a context: at its end, each picture becomes a finished one. With ``GRADMEM_LIVE=0``
    pictures appear only then.
    """

    def __init__(self, ranks: int):
        self.ranks = ranks
        self.pictures: dict[int, Moving] = {}

    def __enter__(self) -> RankPictures:
        return self

    def __exit__(self, *exc) -> None:
        for number in sorted(self.pictures):
            self.pictures[number].stop()

    def on_report(self, rank: int, number: int, action: str, *what) -> None:
        """Called when ``rank`` reports about its tracker ``number``.

        ``action`` and what comes with it: "start" (title, budget), "push" (a frame), "finish" (a
        timeline).
        """
        if action == "start" and number not in self.pictures:
            self.pictures[number] = Moving(*what, ranks=self.ranks)
            self.pictures[number].start()
        elif action == "push":
            self.pictures[number].draw(rank, *what)
        elif action == "finish":
            self.pictures[number].timelines[rank] = what[0]
