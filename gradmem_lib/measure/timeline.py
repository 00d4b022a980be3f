"""The results of a measurement: live bytes at one moment, who holds a storage, and live bytes over
a whole run.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from ..names import CATEGORIES, MOMENT_OF_PHASE, MOMENTS, PHASES
from .paths import NOBODY, Held
from .source_lines import SourceLine

# Columns of a timeline's rows. The last two may be missing, as in predictions.
OP, PHASE, TOTAL, BY = 0, 1, 2, slice(3, 3 + len(CATEGORIES))
MOMENT, STEP = 3 + len(CATEGORIES), 4 + len(CATEGORIES)


@dataclass(frozen=True)
class MemorySnapshot:
    """Live bytes at one moment: their sum, their sum in each category, and the phase of
    the step.

    ``moment`` says more exactly where in the script that is (one of ``MOMENTS``; empty if it is not
    known, as in predictions), ``step`` how many optimizer steps were finished, and ``turn`` how
    many turns of forward and backward. Two snapshots are equal if their bytes and phases are.
    """

    total: int
    by_category: dict[str, int]
    phase: str
    moment: str = field(default="", compare=False)
    step: int = field(default=0, compare=False)
    turn: int = field(default=0, compare=False)

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {n:,}" for name, n in self.by_category.items() if n)
        return f"{self.total:,} bytes in {self.phase}" + (f" ({parts})" if parts else "")


class Holder(NamedTuple):
    """One storage: its bytes, category, the module or parameter it belongs to, and the operation
    that made it.

    ``dtype`` and ``shape`` are those of the first tensor that was seen in it. ``step``: how many
    optimizer steps were finished when it was made; -1 if it was there before it was first read or
    written. ``line``: the line of the user's script that made it, or read it first. ``turn``: how
    many turns were finished when it was made, or first read. ``expanded``: a forward has made it,
    and it is several times larger than all that the operation has read (and that was no weight).
    ``made_in``: the moment in which it was made, or first read. ``is_result``: an outermost module
    has returned it. ``computed_from``: "gradients" or "parameters" if it was made between steps, or
    with a graph outside of all modules, and nothing else went into it; otherwise empty. A copy of a
    gradient counts as a gradient. ``samples``: the recording's first sample with it, and the first
    one without it. ``updated``: the last step of an optimizer that has this weight, or this state,
    also after the peak; -1 if there was none. ``continues``: a part of it was joined before.
    ``in_parts``: parts of it were taken before later steps, as batches of a data set are.
    ``held``: who holds it, or those like it; ``None`` if that is not known.
    """

    nbytes: int
    category: str
    module: str
    op: str
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()
    step: int = 0
    line: SourceLine | None = None
    turn: int = 0
    expanded: bool = False
    made_in: str = ""
    is_result: bool = False
    computed_from: str = ""
    samples: tuple[int, int] = (0, 0)
    updated: int = -1
    continues: bool = False
    in_parts: bool = False
    held: Held | None = None

    @property
    def keeper(self) -> Held:
        """Who holds it; ``NOBODY`` if that is not known."""
        return self.held or NOBODY

    @property
    def first_sample(self) -> int:
        return self.samples[0]

    @property
    def end_sample(self) -> int:
        """The first sample without it."""
        return self.samples[1]

    @property
    def is_of_training(self) -> bool:
        """Whether it is a weight, a gradient or an optimizer's state."""
        return self.category in ("parameters", "gradients", "optimizer")

    def __repr__(self) -> str:
        """What a reader asks first; the other fields are for who looks for causes."""
        kind = str(self.dtype).removeprefix("torch.")
        return (
            f"Holder({self.nbytes:,} bytes, {self.category}, {kind} {list(self.shape)}, "
            f"module={self.module!r}, op={self.op!r}, line='{self.line or ''}')"
        )


class Block(NamedTuple):
    """A storage that a picture shows by itself. ``start``, ``stop``: the first row of its timeline
    that has it, and the first one after it. ``grows``: it is one of those that grow from step to
    step.
    """

    holder: Holder
    start: int
    stop: int
    grows: bool = False


@dataclass(eq=False, slots=True)
class ForwardPass:
    """One call of an outermost module.

    ``with_grad``: gradients were recorded. ``used``: a backward went through it. ``step``: how many
    optimizer steps were finished. ``live_before``, ``live_after``, ``peak``: live bytes when it
    began and when it ended, and the most in between. ``line``: the user's line that called it.
    ``first``, ``last``: autograd's numbers for the nodes of its graph, from the first one to the
    one after the last. ``chained``: it was given what an earlier operation with a gradient has
    computed. ``has_weights``: the module has parameters, or calls a module that has some, which may
    be seen only while the call runs; a loss such as ``nn.CrossEntropyLoss`` has none. ``turn``: how
    many turns were finished. ``differentiable``: the backward that used it has built a graph
    itself. ``called``: what is called, as long as it lives. ``for_no_optimizer``: it has parameters
    that need a gradient, and no optimizer has one of them. ``waits_for_step``: an optimizer has
    some of them, and none that has has stepped so far. ``used_in_turn``: the turn of the first
    backward that went through it; -1 if none has. ``training_mode``: the module's mode. ``number``:
    the same for all calls of one module. ``has_tracked_weights``: some of its weights are the
    tracked model's. ``first_sample``: the first sample of the recording that can have its bytes,
    ``end_sample`` the first one after it.
    """

    step: int
    with_grad: bool
    live_before: int
    line: Any
    first: int
    last: int = 0
    live_after: int = 0
    peak: int = 0
    used: bool = False
    chained: bool = False
    has_weights: bool = True
    turn: int = 0
    differentiable: bool = False
    called: weakref.ref[nn.Module] | None = None
    for_no_optimizer: bool = False
    waits_for_step: bool = False
    used_in_turn: int = -1
    training_mode: bool = True
    number: int = 0
    has_tracked_weights: bool = False
    first_sample: int = 0
    end_sample: int = 0

    @property
    def has_graph(self) -> bool:
        """Whether something in it needs a gradient.

        A Function of one's own counts its nodes under ``no_grad()`` too.
        """
        return self.with_grad and self.last > self.first

    @property
    def call(self) -> tuple:
        """The same for all calls of one module by one line in one mode: a function of a script that
        is used for the training and for an evaluation makes two kinds of calls.
        """
        return self.line, self.number, self.training_mode


class Timeline:
    """Live bytes over the operations of a run. Every list has one entry for each sample.

    ``rows`` is an int64 array (samples, 3 + 6 + 2): operation index, phase, total bytes, bytes by
    category, then moment and finished optimizer steps (these two may be missing). If a run has more
    samples than are kept, it is thinned evenly. Each sample that stays is the largest of its
    window, so no peak is lost.

    ``growing`` is an int64 array (samples, 6), or ``None`` if nothing grows. It has the part of the
    bytes by category that grows from step to step, as ``diagnose`` finds it. ``batches`` has pairs
    (operation, rows of a batch): the first pair is where training begins, and each other one is
    where the batch's size changes. It is empty if the size never changes. ``blocks``: the largest
    storages, if the run has ended.
    """

    def __init__(
        self,
        rows: np.ndarray,
        growing: np.ndarray | None = None,
        batches: Sequence[tuple[int, int]] = (),
        blocks: Sequence[Block] = (),
    ):
        self.rows, self.growing, self.batches, self.blocks = rows, growing, batches, blocks

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def events(self) -> list[int]:
        return self.rows[:, OP].tolist()

    @property
    def phases(self) -> list[str]:
        return [PHASES[code] for code in self.rows[:, PHASE]]

    @property
    def moments(self) -> list[str]:
        if self.rows.shape[1] <= MOMENT:
            return [MOMENTS[MOMENT_OF_PHASE[code]] for code in self.rows[:, PHASE]]
        return [MOMENTS[code] for code in self.rows[:, MOMENT]]

    @property
    def steps(self) -> list[int]:
        """How many optimizer steps were finished at each sample."""
        if self.rows.shape[1] <= STEP:
            return [0] * len(self.rows)
        return self.rows[:, STEP].tolist()

    @property
    def totals(self) -> list[int]:
        return self.rows[:, TOTAL].tolist()

    @property
    def by_category(self) -> dict[str, list[int]]:
        return dict(zip(CATEGORIES, self.rows[:, BY].T.tolist(), strict=True))

    @property
    def peak_index(self) -> int:
        """Index of the first largest sample. Raises ``ValueError`` on an empty timeline."""
        return int(self.rows[:, TOTAL].argmax())

    def decimate(self, max_points: int) -> Timeline:
        """At most ``max_points`` samples, each the largest of its window."""
        n = len(self.rows)
        if n <= max_points:
            return self
        kept = largest_of_windows(self.rows[:, TOTAL], -(-n // max_points))
        growing = None if self.growing is None else self.growing[kept]
        blocks = []
        for block in self.blocks:
            start, stop = np.searchsorted(kept, (block.start, block.stop)).tolist()
            if start < stop:
                blocks.append(block._replace(start=start, stop=stop))
        return Timeline(self.rows[kept], growing, self.batches, blocks)


def largest_of_windows(values: np.ndarray, window: int) -> np.ndarray:
    """The index of the first largest value in each window of ``window`` consecutive values."""
    starts = np.arange(0, len(values), window)
    padded = np.full(len(starts) * window, -1, dtype=np.int64)
    padded[: len(values)] = values
    return starts + padded.reshape(-1, window).argmax(axis=1)
