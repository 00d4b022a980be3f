"""The error when a budget is exceeded: which tensors hold the memory, and what helps."""

import textwrap
import traceback

import torch

from ..units import format_bytes
from .cause import within
from .diagnosis import Diagnosis
from .facts import Facts
from .timeline import Holder, MemorySnapshot


class BudgetExceeded(torch.OutOfMemoryError):
    """Raised when live bytes exceed the budget: an out-of-memory error that names the holders.

    Attributes: ``budget``; ``asked``, the bytes of the refused allocation; ``snapshot``, the live
    bytes with this allocation; ``everything``, the holders of all live storages, largest first;
    ``holders``, the first five of these; and ``facts``, which ``diagnose`` reads. ``what`` names
    the operation that allocates.
    """

    def __init__(
        self,
        budget: int,
        asked: int,
        what: str,
        snapshot: MemorySnapshot,
        live: list[Holder],
        facts: Facts,
    ):
        self.budget, self.asked, self.snapshot = budget, asked, snapshot
        self.everything, self.holders = live, live[:5]
        self.facts = facts
        found = Diagnosis(facts)
        enough = [name for name in found.helps if found.lowest[name] <= budget]
        not_enough = [name for name in found.lowest if name not in enough]
        lines = [
            f"out of budget by {snapshot.total - budget:,} bytes: {snapshot.total:,} live "
            f"({format_bytes(snapshot.total)}), {budget:,} allowed ({format_bytes(budget)})",
            f"  asked for {asked:,} bytes: {what}, {within(snapshot.moment or snapshot.phase)}",
            *(f"  {line}" for line in found.cause_lines()),
            "  live by category:",
            *(f"    {n:>16,} bytes  {name}" for name, n in snapshot.by_category.items() if n),
            "  largest holders:",
            *(
                f"    {n:>16,} bytes  {category:<12} {module}".rstrip()
                for (category, module), n in _largest(live)
            ),
            (
                "  What could bring this moment within the budget: "
                f"{'; '.join(enough) or 'none of these by itself'}."
            ),
            f"  What could not: {'; '.join(not_enough)}.",
            # accelerate looks for these words: its auto_find_batch_size then tries a smaller batch.
            "  A card of that size would be out of memory.",
        ]
        super().__init__("\n".join(map(_wrapped, lines)))


def _wrapped(line: str) -> str:
    """``line`` for a terminal or a narrow notebook: what goes on is indented."""
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    return textwrap.fill(
        line, 80, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _largest(live: list[Holder]) -> list[tuple[tuple[str, str], int]]:
    """The five largest sums of bytes by category and module, where modules end at three parts."""
    sums: dict[tuple[str, str], int] = {}
    for holder in live:
        key = (holder.category, ".".join(holder.module.split(".")[:3]))
        sums[key] = sums.get(key, 0) + holder.nbytes
    return sorted(sums.items(), key=lambda item: -item[1])[:5]


def release_traceback(error: BaseException | None) -> None:
    """Drop the frames (and so the tensors) that an exception keeps alive.

    This clears the local variables in the tracebacks of ``error`` and of its causes. Variables that
    a function closes over cannot be cleared, so the traceback is cut before the first function with
    such variables (in most cases inside PyTorch): frames further in would keep that function's
    frame.
    """
    seen = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        entry = error.__traceback__
        while entry is not None:
            if entry.tb_next is not None and entry.tb_next.tb_frame.f_code.co_freevars:
                entry.tb_next = None
            entry = entry.tb_next
        error = error.__cause__ or error.__context__
