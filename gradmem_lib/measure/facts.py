"""What is known of a run and its peak: the facts from which ``causes.py`` reasons."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf, prod

import numpy as np

from ..model.structure import NO_MODEL, Structure
from ..names import MOMENTS
from .timeline import MOMENT, STEP, TOTAL, ForwardPass, Holder, MemorySnapshot

BETWEEN_STEPS, TRAINING_FORWARD, LOSS, IN_BACKWARD, IN_OPTIMIZER_STEP, EVALUATION = MOMENTS
# The ``Holder.op`` of a parameter of another model, which was there before its first use.
FIRST_READ_PARAMETER = "first read as a parameter"
# The ``Holder.module`` of what a model was called with.
INPUTS = "inputs"
OF_A_TRAINING_STEP = (TRAINING_FORWARD, LOSS, IN_BACKWARD, IN_OPTIMIZER_STEP)


@dataclass(frozen=True)
class Facts:
    """``peak`` is always there, and a prediction has ``rows`` as well. A tracker has all facts."""

    peak: MemorySnapshot
    # All moments since the last ``reset_peak()``, int64 (samples, 9 or 11), as in ``Timeline``.
    rows: np.ndarray | None = None
    # The number of the sample in each of ``rows``, as in ``Holder.samples``.
    samples: np.ndarray = field(default_factory=lambda: np.zeros(1, dtype=np.int64))
    # The number of the first sample since the last ``reset_peak()``.
    first_sample: int = 0
    # The storages that were alive at the peak, largest first; ``None`` if they are not known.
    holders: Sequence[Holder] | None = None
    # Finds the storages that were not alive at the peak: those freed last, and those made later.
    find_others: Callable[[], Sequence[Holder]] = tuple

    # What the script did, as in ``MemoryTracker``, also before a ``reset_peak()``. ``turns``: how
    # many turns of forward and backward have begun. ``moments``: those that have occurred.
    forwards: Sequence[ForwardPass] = ()
    steps: int = 0
    turns: int = 0
    moments: frozenset[str] = frozenset()
    recomputed: bool = False  # a forward ran again in a backward
    ended: bool = False  # the block has ended; a budget interrupts it
    excess: int | None = None  # bytes above the budget, if it was exceeded
    batch_rows: int = 0  # of the training's largest batch; 0 if they are not known

    # The model; without parts if there was none.
    structure: Structure = NO_MODEL
    # The names of the model's parameters that an optimizer has; ``None`` if none is known.
    optimized: frozenset[str] | None = None
    # The names of the parameters of models that no optimizer trains, as far as they are known.
    untrained: frozenset[str] = frozenset()
    # Whether DistributedDataParallel has wrapped a model.
    in_ddp: bool = False

    @cached_property
    def at_peak(self) -> Sequence[Holder]:
        return self.holders or ()

    @cached_property
    def others(self) -> Sequence[Holder]:
        """The storages that were not alive at the peak, as far as they are known."""
        return self.find_others()

    @property
    def last_sample(self) -> int:
        """The number of the run's last sample; 0 if it is not known."""
        return int(self.samples[-1])

    @property
    def outside_of_training(self) -> bool:
        """Whether the peak is known to be outside of a training step."""
        return self.peak.moment in (BETWEEN_STEPS, EVALUATION)

    @property
    def had_backward(self) -> bool:
        return IN_BACKWARD in self.moments

    @property
    def had_optimizer_step(self) -> bool:
        return IN_OPTIMIZER_STEP in self.moments

    def highest_in(self, moment: str) -> int:
        """The highest total of this moment in bytes."""
        totals = self.rows[self.rows[:, MOMENT] == MOMENTS.index(moment), TOTAL]
        return int(totals.max(initial=0))

    @property
    def has_second_derivatives(self) -> bool:
        """Whether a gradient was taken with a graph of its own."""
        return any(done.differentiable for done in self.forwards)

    @property
    def samples_of_the_step(self) -> tuple[int, int]:
        """The first and the last sample of the peak's step, without what comes before and after
        its forwards, backwards and updates.
        """
        of_step = self.rows[:, STEP] == self.peak.step
        trains = of_step & (self.rows[:, MOMENT] != MOMENTS.index(BETWEEN_STEPS))
        samples = self.samples[trains if trains.any() else of_step]
        return int(samples[0]), int(samples[-1])

    def is_a_row_of_weights(self, holder: Holder) -> bool:
        """Whether it has the shape of a parameter for each row, as ``torch.func.vmap`` makes it."""
        if len(holder.shape) < 3:
            return False
        # vmap makes the gradients of (64,) as (rows, 1, 64)
        shape = tuple(size for size in holder.shape[1:] if size > 1)
        return shape in self.structure.shapes.values()

    @cached_property
    def trained(self) -> frozenset[str]:
        """The names of the model's parameters that are trained.

        A GAN switches ``requires_grad`` of its critic off for a part of each step, and a run may
        end in that part. So a parameter also counts if an optimizer has it, and it had a gradient
        in the second half of the run.
        """
        names = set(self.structure.trained)
        middle = (self.first_sample + self.last_sample) // 2
        for holder in (*self.at_peak, *self.others):
            is_gradient = holder.category == "gradients" and holder.module in self.structure.shapes
            if is_gradient and holder.end_sample > middle:
                names.add(holder.module)
        if self.optimized is not None:
            names &= self.structure.trained | self.optimized
        return frozenset(names)

    @cached_property
    def twins(self) -> dict[str, str]:
        """The names of parameters that nothing trains, in a part of the model that has the same
        names and shapes as the part beside it that has most of what is trained: a reference, a
        target network. To each name, the part. Layers of a list are no such parts.
        """
        in_training = self.trained & (self.optimized or self.trained)
        parts = defaultdict[str, dict[str, tuple[int, ...]]](dict)
        trained = Counter[str]()  # how many parameters of each part
        for name, shape in self.structure.shapes.items():
            part, _, rest = name.rpartition(".")
            while part:
                parts[part][rest] = shape
                trained[part] += name in in_training
                part, _, last = part.rpartition(".")
                rest = f"{last}.{rest}"
        twins = dict[str, str]()
        for other, count in trained.items():
            if 2 * count <= len(in_training):
                continue
            for part, weights in parts.items():
                is_beside = part.rpartition(".")[0] == other.rpartition(".")[0]
                is_alike = is_beside and weights.items() <= parts[other].items()
                if is_alike and not trained[part] and not self.structure.in_layers(part):
                    for rest in weights:
                        twins[f"{part}.{rest}"] = part
        return twins

    def gradients_to_come(self) -> int:
        """The bytes of gradients of the trained parameters that are not there at the peak."""
        nbytes = sum(map(self.structure.nbytes, self.trained))
        return max(nbytes - self.peak.by_category["gradients"], 0)

    def has_backward_in_step(self, step: int) -> bool:
        """Whether a backward has allocated anything in this step."""
        moments = self.rows[self.rows[:, STEP] == step, MOMENT]
        return MOMENTS.index(IN_BACKWARD) in moments

    # Steps of an optimizer, or the turns of a script that updates its weights by hand.

    @property
    def has_optimizer(self) -> bool:
        return self.steps > 0 or self.optimized is not None

    @property
    def unit(self) -> str:
        return "step" if self.has_optimizer else "turn"

    @property
    def times(self) -> int:
        """How many steps (or turns) there were."""
        return self.steps if self.has_optimizer else self.turns

    @property
    def peak_time(self) -> int:
        return self.peak.step if self.has_optimizer else self.peak.turn

    def time_of(self, holder: Holder) -> int:
        """The step (or turn) that made it; -1 if it was there before its first use."""
        if holder.step < 0 or self.has_optimizer:
            return holder.step
        return holder.turn

    @cached_property
    def of_models(self) -> list[ForwardPass]:
        """The forwards without those of losses and other modules that have no weights."""
        return [done for done in self.forwards if done.has_weights]

    @cached_property
    def _first_samples(self) -> list[int]:
        return [done.first_sample for done in self.forwards]

    def maker_of(self, holder: Holder) -> ForwardPass | None:
        """The last forward that had begun when it was made, if the list still has it."""
        begun = bisect_right(self._first_samples, holder.first_sample)
        return self.forwards[begun - 1] if begun else None

    @cached_property
    def of_the_step(self) -> list[ForwardPass]:
        """The forwards of models in the peak's step."""
        return [done for done in self.of_models if done.step == self.peak.step]

    @cached_property
    def evaluations(self) -> list[ForwardPass]:
        """The forwards without gradients in the peak's step, since the last ``reset_peak()``."""
        found = []
        for done in self.forwards:
            ended_before = done.live_after > 0 and done.end_sample <= self.first_sample
            if done.step == self.peak.step and not done.with_grad and not ended_before:
                found.append(done)
        return found

    def is_there_at_the_end(self, holder: Holder) -> bool:
        return holder.end_sample > self.last_sample

    @cached_property
    def finished_turns(self) -> set[int]:
        """The turns before the peak's whose forwards no later backward needs. A generator's graph
        may wait while the critic steps several times.
        """
        finished, needed = set[int](), set[int]()
        for done in self.of_models:
            if done.turn >= self.peak.turn or not done.has_graph:
                continue
            if done.used and done.used_in_turn < self.peak.turn and not done.differentiable:
                finished.add(done.turn)
            else:
                needed.add(done.turn)
        return finished - needed

    @cached_property
    def differentiated_turns(self) -> set[int]:
        """The turns before the peak's with a gradient that has a graph of its own."""
        turns = {done.turn for done in self.forwards if done.differentiable}
        return {turn for turn in turns if turn < self.peak.turn}

    def in_layers(self, holder: Holder) -> bool:
        return self.structure.in_layers(holder.module)

    def of_another_model(self, holder: Holder) -> bool:
        """Whether it is a parameter of a module that is not in the tracked model."""
        return holder.op == FIRST_READ_PARAMETER or holder.module in self.untrained

    @property
    def loss_of_whole_rows(self) -> bool:
        """Whether the loss sums over all ways through a row, so that no token has its own part."""
        return any("ctc_loss" in holder.op for holder in self.at_peak)

    @property
    def numbers_of_states(self) -> float:
        """How many numbers the optimizer keeps for each weight that has any; infinite if that is
        not known, as in a step that has not ended.
        """
        in_a_step = not self.ended and self.peak.moment == IN_OPTIMIZER_STEP
        if in_a_step or not self.structure.shapes:
            return inf
        states, names = 0, set[str]()
        for holder in self.at_peak:
            if holder.category == "optimizer":
                width = 4 if holder.dtype is None else holder.dtype.itemsize  # float32
                states += holder.nbytes // width
                names.add(holder.module)
        shapes = self.structure.shapes
        # a weight that was added after the optimizer was made has no states
        have_states = frozenset(names & shapes.keys())
        if not have_states:  # their names are not known
            have_states = self.trained
        return states / max(sum(prod(shapes[name]) for name in have_states), 1)

    def is_logits(self, holder: Holder) -> bool:
        """Whether it has a number for each output of a matrix that comes after the layers, or for
        each row of a table.

        Logits, their copies in another dtype, and their gradients are such tensors. The chunks of a
        loss in chunks do not count.
        """
        if len(holder.shape) < 2:
            return False
        if holder.shape[-1] == holder.shape[-2]:
            return False  # scores of all pairs, of as many tokens as a table has positions
        if holder.category not in ("activations", "temporaries"):
            return False
        if holder.shape in self.structure.shapes.values():
            return False
        return holder.shape[-1] in self.structure.outputs and not self._is_a_chunk(holder)

    def _is_a_chunk(self, logits: Holder) -> bool:
        """Whether these are logits of a part of the tokens, and the same turn made others. It is
        known where a hidden state of a layer is alive.
        """
        if self._made_alike[_kind_in_a_turn(logits)] < 2:
            return False
        into_head = set()
        for shape in self.structure.shapes.values():
            if len(shape) == 2 and shape[0] == logits.shape[-1]:
                into_head.add(shape[1])
        tokens = 0
        for holder in self.at_peak:
            is_hidden = len(holder.shape) in (2, 3) and holder.shape[-1] in into_head
            if is_hidden and self.in_layers(holder):
                tokens = max(tokens, prod(holder.shape[:-1]))
        return prod(logits.shape[:-1]) < tokens

    @cached_property
    def _made_alike(self) -> Counter[tuple]:
        """How many storages of each kind a turn made, as far as they are known."""
        return Counter(map(_kind_in_a_turn, (*self.at_peak, *self.others)))


def _kind_in_a_turn(holder: Holder) -> tuple:
    return holder.turn, holder.op, holder.shape[-1:], holder.dtype


def total(holders: Iterable[Holder]) -> int:
    return sum(holder.nbytes for holder in holders)
