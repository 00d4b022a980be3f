"""A loss in chunks does the same for each chunk: few chunks are traced, and stand for all."""

from collections.abc import Iterator
from typing import Self
from unittest.mock import patch

from ..techniques import losses
from .marks import Marks

# The first chunk, two that have to be alike, and the last one, which may have fewer tokens.
TRACED_CHUNKS = 4


class FewChunks:
    """While its block runs, a loss in chunks computes ``TRACED_CHUNKS`` of its chunks.

    ``num_losses``: how many losses were computed so far. ``left_out``: for each of them, the number
    of chunks that it did not compute.
    """

    def __init__(self, marks: Marks):
        self.marks = marks
        self.left_out: list[int] = []
        self._patch = patch.object(losses, "starts_of_chunks", self._starts)

    def __enter__(self) -> Self:
        self._patch.start()
        return self

    def __exit__(self, *error) -> None:
        self._patch.stop()

    @property
    def num_losses(self) -> int:
        return len(self.left_out)

    def _starts(self, num_rows: int, tokens: int) -> Iterator[int]:
        starts = list(range(0, num_rows, tokens))
        traced = starts
        if len(starts) > TRACED_CHUNKS:
            traced = [*starts[: TRACED_CHUNKS - 1], starts[-1]]
        self.left_out.append(len(starts) - len(traced))
        for number, start in enumerate(traced):
            self.marks.begin_chunk(number)
            yield start
        self.marks.end_chunks()
