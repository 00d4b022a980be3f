"""Which techniques could lower a peak, how far at best, and which cannot.

A technique acts on some categories in some phases. Remove all bytes of these from every moment of
the run: the highest total that remains is a lower bound for the peak with this technique, however
well it works.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..names import CATEGORIES, PHASES
from .timeline import BY, PHASE, TOTAL, Holder, MemorySnapshot

PASSES, STEP = ("idle", "forward", "backward"), ("optimizer_step",)


@dataclass(frozen=True)
class Technique:
    """A way to lower a peak.

    ``shrinks``: for each category that it can shrink, the phases in which it can. ``part``:
    "layers" or "outside", if it acts only inside or only outside the layers.
    """

    name: str
    price: str
    shrinks: Mapping[str, tuple[str, ...]]
    part: str = ""


OF_THE_BATCH = dict.fromkeys(("activations", "temporaries", "other"), PASSES)
OF_THE_TRAINED = {"gradients": PHASES, "optimizer": PHASES, "temporaries": STEP}
TECHNIQUES = (
    Technique(
        "smaller micro-batches, or shorter rows",
        "little time, while they keep the card busy",
        OF_THE_BATCH,
    ),
    Technique(
        "checkpointing",
        "up to a third more work (half if frozen)",
        {"activations": PASSES},
        "layers",
    ),
    Technique("moving activations off the card", "two trips over the bus", {"activations": PASSES}),
    Technique(
        "the loss in chunks",
        "almost nothing",
        {"activations": PASSES, "temporaries": PASSES},
        "outside",
    ),
    Technique("an optimizer that works in place (fused)", "nothing", {"temporaries": STEP}),
    Technique(
        "8-bit or factored states",
        "approximate moments, another learning rate",
        {"optimizer": PHASES, "temporaries": STEP},
    ),
    Technique(
        "gradients that do not wait (a step in backward)",
        "no accumulation, no clipping of the whole",
        {"gradients": PHASES, "temporaries": STEP},
    ),
    Technique("fewer gradients and states (LoRA)", "a smaller space to learn in", OF_THE_TRAINED),
    Technique(
        "LoRA on weights in 4 bits (QLoRA)",
        "that, a rounded model, and time to unpack it",
        {"parameters": PHASES} | OF_THE_TRAINED,
    ),
)


def lowest_peaks(
    peak: MemorySnapshot, rows: np.ndarray | None, holders: Sequence[Holder] | None
) -> dict[str, int]:
    """For each technique, by name, the lowest peak in bytes that it can reach.

    ``rows`` are all moments (int64 (samples, 3 + 6), as in ``Timeline``), ``holders`` the storages
    alive at the peak, if known.
    """
    peak_row = np.array([[0, PHASES.index(peak.phase), peak.total, *peak.by_category.values()]])
    moments = peak_row if rows is None or not len(rows) else np.concatenate([peak_row, rows])
    return {t.name: _lowest(t, peak, moments, holders) for t in TECHNIQUES}


def _lowest(technique: Technique, peak: MemorySnapshot, rows: np.ndarray, holders) -> int:
    remaining = rows[:, TOTAL].copy()
    for name, phases in technique.shrinks.items():
        acts = np.isin(rows[:, PHASE], [PHASES.index(phase) for phase in phases])
        remaining -= np.where(acts, rows[:, BY][:, CATEGORIES.index(name)], 0)
    lowest = int(remaining.max())
    if technique.part and holders is not None:
        shrinkable = (h for h in holders if peak.phase in technique.shrinks.get(h.category, ()))
        lowest = max(
            lowest, peak.total - sum(h.nbytes for h in shrinkable if _part(h) == technique.part)
        )
    return lowest


def _part(holder: Holder) -> str:
    """Return "layers" or "outside". Layers are in lists, so their names contain a number."""
    return "layers" if any(part.isdigit() for part in holder.module.split(".")) else "outside"
