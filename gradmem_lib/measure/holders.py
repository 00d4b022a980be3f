"""A list of storages that shows itself as a table, in a terminal and in a notebook."""

from __future__ import annotations

from html import escape

from .timeline import Holder

HEADINGS = ("bytes", "category", "tensor", "module", "line", "held by")
SHOWN = 20  # rows; a run may have thousands of storages
WIDEST = (15, 12, 24, 24, 40, 32)  # letters of each column in a terminal; the rest is cut


class Holders(list[Holder]):
    """Storages, in the order in which they were asked for."""

    def __repr__(self) -> str:
        if not self:
            return "no storages"
        lines = list(map(_line, zip(*self._columns(WIDEST), strict=True)))
        return "\n".join([*lines, *self._rest()])

    def _repr_html_(self) -> str:
        if not self:
            return repr(self)
        head, *body = zip(*self._columns(), strict=True)
        rows = [_html_row("th", head)]
        rows += [_html_row("td", row) for row in body]
        return f"<table>{''.join(rows)}</table>{''.join(self._rest())}"

    def _rest(self) -> list[str]:
        """A sentence about what is not shown, or none."""
        rest = self[SHOWN:]
        if not rest:
            return []
        nbytes = sum(holder.nbytes for holder in rest)
        return [f"{len(rest):,} more have {nbytes:,} bytes together"]

    def _columns(self, widest=()) -> list[list[str]]:
        """Each column that says anything, below its heading; padded where ``widest`` is given."""
        columns = []
        for number, column in enumerate(zip(*map(_cells, self[:SHOWN]), strict=True)):
            if any(column):
                cells = [HEADINGS[number], *column]
                if widest:
                    cells = _padded(cells, widest[number])
                columns.append(cells)
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


def _html_row(tag: str, cells: tuple[str, ...]) -> str:
    return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"
