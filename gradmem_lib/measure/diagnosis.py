"""What stands in the way at a peak: which techniques could lower it, to what at best, and which cannot.

A technique is for some categories in some phases. Take all of their bytes away, at every moment of the run: the highest
total that is left is the lowest peak that it can reach with them, however well it works.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..names import CATEGORIES, PHASES
from ..units import format_bytes
from .timeline import Holder, MemorySnapshot

PASSES, STEP = ("idle", "forward", "backward"), ("optimizer_step",)
WORTH = 0.02  # of the peak; less is no reason to change a recipe


@dataclass(frozen=True)
class Technique:
    """``takes``: the phases in which it can shrink a category; ``part``: only what was made in the "layers", or "outside" them."""

    name: str
    price: str
    takes: Mapping[str, tuple[str, ...]]
    part: str = ""


OF_THE_BATCH = dict.fromkeys(("activations", "temporaries", "other"), PASSES)
OF_THE_TRAINED = {"gradients": PHASES, "optimizer": PHASES, "temporaries": STEP}
TECHNIQUES = (
    Technique("smaller micro-batches, or shorter rows", "little time, while they keep the card busy",
              OF_THE_BATCH),
    Technique("checkpointing", "up to a third more work (half if frozen)", {"activations": PASSES}, "layers"),
    Technique("moving activations off the card", "two trips over the bus", {"activations": PASSES}),
    Technique("the loss in chunks", "almost nothing", {"activations": PASSES, "temporaries": PASSES},
              "outside"),
    Technique("an optimizer that works in place (fused)", "nothing", {"temporaries": STEP}),
    Technique("8-bit or factored states", "approximate moments, another learning rate",
              {"optimizer": PHASES, "temporaries": STEP}),
    Technique("gradients that do not wait (a step in backward)", "no accumulation, no clipping of the whole",
              {"gradients": PHASES, "temporaries": STEP}),
    Technique("fewer gradients and states (LoRA)", "a smaller space to learn in", OF_THE_TRAINED),
    Technique("LoRA on weights in 4 bits (QLoRA)", "that, a rounded model, and time to unpack it",
              {"parameters": PHASES} | OF_THE_TRAINED),
)  # fmt: skip


@dataclass(frozen=True)
class Diagnosis:
    """``peak``, and for each technique the lowest peak in bytes that it can reach: ``lowest``, by its name."""

    peak: MemorySnapshot
    lowest: dict[str, int]

    @property
    def helps(self) -> list[str]:
        """The techniques that can lower the peak by a fiftieth or more, the most promising first."""
        able = [name for name, nbytes in self.lowest.items() if nbytes <= (1 - WORTH) * self.peak.total]
        return sorted(able, key=lambda name: self.lowest[name])

    @property
    def cannot_help(self) -> list[str]:
        return [name for name in self.lowest if name not in self.helps]

    def __str__(self) -> str:
        peak = self.peak
        lines = [f"The peak is {format_bytes(peak.total)}, in {peak.phase}: {shares(peak)}."]
        if self.helps:
            width = max(len(name) for name in self.helps)
            lines.append("What can lower it, and to what at best:")
            lines += [f"  {name:<{width}}  {format_bytes(self.lowest[name])}" for name in self.helps]
        if self.cannot_help:
            lines.append(f"What cannot: {'; '.join(self.cannot_help)}.")
        return "\n".join(lines)

    __repr__ = __str__


def shares(moment: MemorySnapshot) -> str:
    """The categories of ``moment`` that matter, in per cent, the largest first."""
    parts = sorted(moment.by_category.items(), key=lambda part: -part[1])
    return ", ".join(f"{n / moment.total:.0%} {name}" for name, n in parts if n >= WORTH * moment.total)


def diagnose(run: Any) -> Diagnosis:
    """What could lower the peak of ``run``: a ``MemoryTracker``, a ``Prediction``, or the ``BudgetExceeded`` of a run that failed.

    The bytes are bounds, and most runs stay above: a smaller micro-batch still has a row, a factored state its factors.
    A technique that is in use already is named again where there is more for it to do. Side effects are not counted: frozen
    weights also save less for backward.

    Raises ``TypeError`` for what has no peak, and ``ValueError`` for a tracker that has seen nothing.
    """
    peak = getattr(run, "snapshot", None) or getattr(run, "peak", None)
    if not isinstance(peak, MemorySnapshot):
        raise TypeError(
            f"diagnose was given {type(run).__name__}: give a MemoryTracker, a Prediction, or the BudgetExceeded that a run "
            "ended with"
        )
    if not peak.total:
        raise ValueError("nothing was measured yet: give diagnose a tracker whose block has run a step")
    timeline = getattr(run, "timeline", None)
    largest = getattr(run, "largest_at_peak", None)
    holders = getattr(run, "everything", None) or (largest(10**9) if largest else None)
    return diagnosis(peak, None if timeline is None else timeline.rows, holders)


def diagnosis(peak: MemorySnapshot, rows: np.ndarray | None, holders: Sequence[Holder] | None) -> Diagnosis:
    """Of a peak, all moments (int64 (samples, 3 + 6), as in ``Timeline``) and the storages alive at the peak, as far as known."""
    here = np.array([[0, PHASES.index(peak.phase), peak.total, *peak.by_category.values()]])
    moments = here if rows is None or not len(rows) else np.concatenate([here, rows])
    return Diagnosis(peak, {t.name: _lowest(t, peak, moments, holders) for t in TECHNIQUES})


def _lowest(technique: Technique, peak: MemorySnapshot, rows: np.ndarray, holders) -> int:
    left = rows[:, 2].copy()
    for name, phases in technique.takes.items():
        acts = np.isin(rows[:, 1], [PHASES.index(phase) for phase in phases])
        left -= np.where(acts, rows[:, 3 + CATEGORIES.index(name)], 0)
    lowest = int(left.max())
    if technique.part and holders is not None:
        taken = (h for h in holders if peak.phase in technique.takes.get(h.category, ()))
        lowest = max(lowest, peak.total - sum(h.nbytes for h in taken if _part(h) == technique.part))
    return lowest


def _part(holder: Holder) -> str:
    """Layers stand in lists, so their names have a number in them."""
    return "layers" if any(part.isdigit() for part in holder.module.split(".")) else "outside"
