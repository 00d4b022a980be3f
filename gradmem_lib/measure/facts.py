"""What is known of a run and its peak: the facts from which ``causes.py`` reasons."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..names import BACKWARD, MOMENTS, OPTIMIZER_STEP
from .structure import Structure
from .timeline import PHASE, ForwardPass, Holder, MemorySnapshot

BETWEEN_STEPS, TRAINING_FORWARD, LOSS, IN_BACKWARD, IN_OPTIMIZER_STEP, EVALUATION = MOMENTS
# The "operation" of a parameter that was there before its first use.
FIRST_READ_PARAMETER = "first read as a parameter"
OF_A_TRAINING_STEP = (TRAINING_FORWARD, LOSS, IN_BACKWARD, IN_OPTIMIZER_STEP)


@dataclass(frozen=True)
class Facts:
    """``peak`` is the only fact that is always there; a prediction has ``rows`` as well.

    ``rows``: all moments, int64 (samples, 9 or 11), as in ``Timeline``. ``holders``: the storages
    that were alive at the peak, largest first; ``None`` if they are not known. ``forwards``,
    ``steps``: as in ``MemoryTracker``. ``structure``: of the model, if there was one.
    ``recomputed``: a forward ran again in a backward. ``untrained``: the names of the parameters of
    models that no optimizer trains, as far as they are known.
    """

    peak: MemorySnapshot
    rows: np.ndarray | None = None
    holders: Sequence[Holder] | None = None
    forwards: Sequence[ForwardPass] = ()
    steps: int = 0
    structure: Structure | None = None
    recomputed: bool = False
    untrained: frozenset[str] = frozenset()

    @cached_property
    def at_peak(self) -> Sequence[Holder]:
        return self.holders or ()

    @property
    def outside_of_training(self) -> bool:
        """Whether the peak is known to be outside of a training step."""
        return self.peak.moment in (BETWEEN_STEPS, EVALUATION)

    @property
    def had_backward(self) -> bool:
        return self.rows is not None and bool((self.rows[:, PHASE] == BACKWARD).any())

    @property
    def had_optimizer_step(self) -> bool:
        return self.rows is not None and bool((self.rows[:, PHASE] == OPTIMIZER_STEP).any())

    def in_layers(self, holder: Holder) -> bool:
        return self.structure is not None and self.structure.in_layers(holder.module)

    def of_another_model(self, holder: Holder) -> bool:
        """Whether it is a parameter of a module that is not in the tracked model."""
        return holder.op == FIRST_READ_PARAMETER or holder.module in self.untrained

    def is_logits(self, holder: Holder) -> bool:
        """Whether it has a number for each output of a matrix that comes after the layers.

        Logits, their copies in another dtype, and their gradients are such tensors.
        """
        if self.structure is None or len(holder.shape) < 2:
            return False
        if holder.category not in ("activations", "temporaries"):
            return False
        as_a_parameter = holder.shape in self.structure.shapes.values()
        return holder.shape[-1] in self.structure.outputs and not as_a_parameter


def total(holders: Iterable[Holder]) -> int:
    return sum(holder.nbytes for holder in holders)
