"""Where in a training script the program is: training forward, loss, backward, optimizer step,
evaluation, or between steps; and which forward passes there were.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque

import torch
from torch import nn
from torch.optim import Optimizer

from ..compat.autograd import current_node, in_backward, next_sequence_nr, sequence_nr
from ..names import (
    BETWEEN_STEPS,
    EVALUATION,
    IN_BACKWARD,
    IN_OPTIMIZER_STEP,
    LOSS,
    TRAINING_FORWARD,
)
from .timeline import ForwardPass

KEPT_PASSES = 256  # the latest


class Position:
    """What runs now, and what has run before it. Plain state, changed by the program's events."""

    def __init__(self) -> None:
        self.calls: list[nn.Module] = []  # modules whose forward runs, the outermost first
        self.stepping: list[Optimizer] = []  # optimizers whose step runs
        self.moment_of_call = EVALUATION  # of the outermost call
        # A training forward has begun, and no backward since then: its loss is due.
        self.loss_is_due = False
        self.has_stepped = False  # an optimizer has stepped since the last training forward
        # A turn is what a script repeats: training forwards, then backwards. An optimizer's step
        # ends one turn, or several if gradients are accumulated.
        self.turn = 0
        self.has_gone_back = False  # a backward has run since the last training forward
        self._of_models: deque[ForwardPass] = deque(maxlen=KEPT_PASSES)
        # and of other modules without weights
        self._of_losses: deque[ForwardPass] = deque(maxlen=KEPT_PASSES)
        self.open: ForwardPass | None = None  # the call that runs
        # The latest with gradients, and no backward so far; in order.
        self._unused: list[ForwardPass] = []

    @property
    def passes(self) -> list[ForwardPass]:
        """The latest calls of outermost modules, in order. A loss pushes out no call of a model."""
        return sorted([*self._of_models, *self._of_losses], key=lambda done: done.first_sample)

    def moment(self) -> int:
        """The moment of the operation that has just run."""
        if self.stepping:
            return IN_OPTIMIZER_STEP
        if in_backward():
            if self._unused:
                self._find_used()
            # A gradient with a graph of its own (create_graph=True) is a part of the forward.
            if not self.has_gone_back:
                self.has_gone_back = not torch.is_grad_enabled()
            # A gradient that a module takes inside its own forward does not end that forward.
            self.loss_is_due = self.loss_is_due and bool(self.calls)
            return IN_BACKWARD
        if self.calls:
            return self.moment_of_call
        return LOSS if self.loss_is_due else BETWEEN_STEPS

    def _moment_of(self, call: ForwardPass) -> int:
        if not call.with_grad:
            return EVALUATION
        # A module without weights that is given a model's output computes a loss.
        is_loss = call.chained and not call.has_weights
        return LOSS if is_loss else TRAINING_FORWARD

    # Events

    def begin_step(self) -> int:
        """A forward begins that records gradients. Returns 1 if it begins a new step."""
        if self.has_gone_back or self.has_stepped:
            self.has_gone_back = False
            self.turn += 1
        new = int(self.has_stepped)
        if new:
            self.has_stepped = False
            # A graph may be used after other steps: a generator's, after those of the critic.
            del self._unused[:-KEPT_PASSES]
        return new

    def begin_forward(self, new: ForwardPass) -> None:
        self.stepping.clear()  # a step that raised an error has not ended
        self.moment_of_call = self._moment_of(new)
        self.loss_is_due = self.loss_is_due or new.with_grad
        self.open = new
        (self._of_models if new.has_weights else self._of_losses).append(new)

    def find_weights(self) -> None:
        """The call that runs has weights, though its module has none: it hides another module."""
        self.open.has_weights = True
        self.moment_of_call = self._moment_of(self.open)
        self._of_losses.remove(self.open)
        self._of_models.append(self.open)

    def end_forward(self, live: int, sample: int) -> None:
        done, self.open = self.open, None
        if done is None:
            return
        done.last, done.live_after = next_sequence_nr(), live
        done.end_sample = sample
        done.peak = max(done.peak, live)
        if done.with_grad and done.last > done.first:  # something in it needs a gradient
            self._unused.append(done)

    def add_live(self, nbytes: int) -> None:
        """Count ``nbytes`` more in all calls so far: they are found now, and were there before."""
        for done in self.passes:
            done.live_before += nbytes
            done.peak += nbytes
            if done is not self.open:
                done.live_after += nbytes

    def end_step(self) -> None:
        del self.stepping[-1:]
        self.loss_is_due, self.has_stepped = False, True

    def _find_used(self) -> None:
        """Backward runs a node: the pass that made it is used."""
        number = sequence_nr(current_node())
        index = bisect_right(self._unused, number, key=lambda done: done.first) - 1
        if index >= 0 and number < self._unused[index].last:
            done = self._unused.pop(index)
            done.used, done.used_in_turn = True, self.turn
            # a gradient with a graph of its own (create_graph=True) needs this one once more
            done.differentiable = torch.is_grad_enabled()
