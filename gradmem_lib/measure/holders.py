"""A list of storages that shows itself as a table."""

from __future__ import annotations

from .timeline import Holder

HEADINGS = ("bytes", "category", "tensor", "module", "line", "held by")
SHOWN = 20  # rows; a run may have thousands of storages
WIDEST = (15, 12, 24, 24, 40, 32)  # letters of each column; the rest is cut


class Holders(list[Holder]):
    """Storages, in the order in which they were asked for."""

    def __repr__(self) -> str:
        if not self:
            return "no storages"
        lines = list(map(_line, zip(*self._columns(), strict=True)))
        return "\n".join([*lines, *self._rest()])

    def _rest(self) -> list[str]:
        """A sentence about what is not shown, or none."""
        rest = self[SHOWN:]
        if not rest:
            return []
        nbytes = sum(holder.nbytes for holder in rest)
        return [f"{len(rest):,} more have {nbytes:,} bytes together"]

    def _columns(self) -> list[list[str]]:
        """Each column that says anything, below its heading."""
        columns = []
        for number, column in enumerate(zip(*map(_cells, self[:SHOWN]), strict=True)):
            if any(column):
                columns.append(_padded([HEADINGS[number], *column], WIDEST[number]))
        return columns


def in_words(holder: Holder) -> dict[str, str]:
    """What a reader asks of a storage; empty where it is not known."""
    shape = " × ".join(map(str, holder.shape))
    dtype = str(holder.dtype or "").removeprefix("torch.")
    return {
        "tensor": f"{dtype} {shape}".strip(),
        "module": holder.module,
        "line": str(holder.line or ""),
        "held": str(holder.held or ""),
    }


def _cells(holder: Holder) -> tuple[str, ...]:
    return f"{holder.nbytes:,}", holder.category, *in_words(holder).values()


def _padded(cells: list[str], most: int) -> list[str]:
    """All as wide as the longest, at most ``most`` letters: the end of a path says more than its
    beginning, so it stays.
    """
    width = min(max(map(len, cells)), most)
    padded = []
    for cell in cells:
        if len(cell) > width:
            cell = "…" + cell[1 - width :]
        padded.append(cell.ljust(width))
    return padded


def _line(cells: tuple[str, ...]) -> str:
    nbytes, *others = cells
    return "  ".join([nbytes.strip().rjust(len(nbytes)), *others]).rstrip()
