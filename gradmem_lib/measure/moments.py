"""Where in a training script the program is: training forward, loss, backward, optimizer step,
evaluation, or between steps; and which forward passes there were.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from types import CodeType
from typing import Any

from torch import nn
from torch.optim import Optimizer

from .. import compat
from ..names import (
    BETWEEN_STEPS,
    EVALUATION,
    IN_BACKWARD,
    IN_OPTIMIZER_STEP,
    LOSS,
    TRAINING_FORWARD,
)

graph_task = compat.graph_task  # a faster look-up
KEPT_PASSES = 256  # the latest


@dataclass(slots=True)
class Pass:
    """A call of an outermost module.

    ``owner``: the module, as ``Meter.owner`` gives it. ``first``, ``last``: autograd's numbers for
    the nodes of its graph, from the first one to the one after the last. ``first_sample``: the
    first sample of the recording that can have its bytes. The rest is as in ``ForwardPass``;
    ``has_weights`` may become true while the call runs.
    """

    owner: Any
    step: int
    with_grad: bool
    live_before: int
    line: tuple[CodeType, int] | None
    first: int
    last: int = 0
    live_after: int = 0
    peak: int = 0
    used: bool = False
    chained: bool = False
    has_weights: bool = True
    first_sample: int = 0


class Position:
    """What runs now, and what has run before it. Plain state, changed by the program's events."""

    def __init__(self) -> None:
        self.calls: list[nn.Module] = []  # modules whose forward runs, the outermost first
        self.stepping: list[Optimizer] = []  # optimizers whose step runs
        self.with_grad = False  # whether the outermost call records gradients
        # A training forward has begun, and no backward since then: its loss is due.
        self.loss_is_due = False
        self.has_stepped = False  # an optimizer has stepped since the last training forward
        self.passes: deque[Pass] = deque(maxlen=KEPT_PASSES)
        self.open: Pass | None = None  # the call that runs
        self._unused: list[Pass] = []  # with gradients, of this step, and no backward so far

    def moment(self) -> int:
        """The moment of the operation that has just run."""
        if self.stepping:
            return IN_OPTIMIZER_STEP
        if graph_task() != -1:
            if self._unused:
                self._find_used()
            # A gradient that a module takes inside its own forward does not end that forward.
            self.loss_is_due = self.loss_is_due and bool(self.calls)
            return IN_BACKWARD
        if self.calls:
            return TRAINING_FORWARD if self.with_grad else EVALUATION
        return LOSS if self.loss_is_due else BETWEEN_STEPS

    # Events

    def begin_step(self) -> int:
        """A forward begins that records gradients. Returns 1 if it begins a new step."""
        new = int(self.has_stepped)
        if new:
            self.has_stepped = False
            self._unused = []
        return new

    def begin_forward(self, new: Pass) -> None:
        self.stepping.clear()  # a step that raised an error has not ended
        self.with_grad = new.with_grad
        self.loss_is_due = self.loss_is_due or new.with_grad
        self.open = new
        self.passes.append(new)

    def end_forward(self, live: int) -> None:
        done, self.open = self.open, None
        if done is None:
            return
        done.last, done.live_after = compat.next_sequence_nr(), live
        done.peak = max(done.peak, live)
        if done.with_grad and done.last > done.first:  # something in it needs a gradient
            self._unused.append(done)

    def end_step(self) -> None:
        del self.stepping[-1:]
        self.loss_is_due, self.has_stepped = False, True

    def _find_used(self) -> None:
        """Backward runs a node: the pass that made it is used."""
        number = compat.sequence_nr(compat.current_node())
        for done in self._unused:
            if done.first <= number < done.last:
                done.used = True
                self._unused.remove(done)
                return
