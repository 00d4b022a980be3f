"""What is known of a run and its peak: the facts from which ``causes.py`` reasons."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf, prod

import numpy as np

from ..names import MOMENTS
from .source_lines import SourceLine
from .structure import Structure
from .timeline import MOMENT, STEP, TOTAL, ForwardPass, Holder, MemorySnapshot, Turn

BETWEEN_STEPS, TRAINING_FORWARD, LOSS, IN_BACKWARD, IN_OPTIMIZER_STEP, EVALUATION = MOMENTS
# The "operation" of a parameter that was there before its first use.
FIRST_READ_PARAMETER = "first read as a parameter"
# ... of a data set, of which batches are taken; and the owner of what a module was called with
READ_IN_PARTS, INPUTS = "first read in parts", "inputs"
OF_A_TRAINING_STEP = (TRAINING_FORWARD, LOSS, IN_BACKWARD, IN_OPTIMIZER_STEP)


@dataclass(frozen=True)
class Facts:
    """``peak`` is the only fact that is always there; a prediction has ``rows`` as well.

    ``rows``: all moments, int64 (samples, 9 or 11), as in ``Timeline``. ``holders``: the storages
    that were alive at the peak, largest first; ``None`` if they are not known. ``forwards``,
    ``steps``: as in ``MemoryTracker``. ``structure``: of the model, if there was one. ``turns``:
    where training forwards have begun after a backward. ``moments``: those that have occurred.
    ``optimized``: the names of the model's parameters that an optimizer has; ``None`` if no
    optimizer is known. ``ended``: the block has ended. ``recomputed``: a forward ran again in a
    backward. ``untrained``: the names of the parameters of models that no optimizer trains, as far
    as they are known. ``samples``: the number of the sample in each of ``rows``, as in
    ``Holder.samples``. ``batch_rows``: how many rows the largest batch of the training had, as far
    as it is known. ``joined``: the latest results of ``torch.cat`` that are free by now.
    """

    peak: MemorySnapshot
    rows: np.ndarray | None = None
    holders: Sequence[Holder] | None = None
    forwards: Sequence[ForwardPass] = ()
    steps: int = 0
    structure: Structure | None = None
    turns: Sequence[Turn] = ()
    moments: frozenset[str] = frozenset()
    optimized: frozenset[str] | None = None
    ended: bool = False
    recomputed: bool = False
    untrained: frozenset[str] = frozenset()
    samples: np.ndarray | None = None
    batch_rows: int = 0
    joined: Sequence[Holder] = ()

    def bytes_of(self, holders: Iterable[Holder]) -> np.ndarray:
        """The bytes of ``holders`` at each of ``rows``, or less: int64 (samples,).

        A long run keeps one sample of several, and its row stands for those up to the next row on
        either side. A holder counts where it was alive in all of them.
        """
        before = np.concatenate(([-1], self.samples[:-1]))  # the samples of the neighbours
        after = np.concatenate((self.samples[1:], self.samples[-1:] + 1))
        nbytes = np.zeros(len(self.samples), dtype=np.int64)
        for holder in holders:
            first, stop = holder.samples
            nbytes[(first <= before + 1) & (after <= stop)] += holder.nbytes
        return nbytes

    def in_backward_of_peak(self) -> np.ndarray:
        """Which of ``rows`` are of the backward of the peak's turn: bool (samples,)."""
        begun, ended = 0, np.inf
        for done in self.forwards:
            if done.turn == self.peak.turn:
                begun = max(begun, done.samples[0])
            elif done.turn > self.peak.turn:
                ended = min(ended, done.samples[0])
        of_step = self.rows[:, STEP] == self.peak.step
        of_turn = (self.samples >= begun) & (self.samples < ended)
        return of_step & of_turn & (self.rows[:, MOMENT] == MOMENTS.index(IN_BACKWARD))

    @cached_property
    def at_peak(self) -> Sequence[Holder]:
        return self.holders or ()

    @property
    def activations(self) -> list[Holder]:
        """Those of the peak."""
        return [holder for holder in self.at_peak if holder.category == "activations"]

    def made_by(self, passes: Sequence[ForwardPass], and_after: bool = False) -> list[Holder]:
        """The activations at the peak that these forwards have made and not returned.

        ``and_after``: also what was made after each of them, until the next forward began.
        """
        begins = [done.samples[0] for done in self.forwards]
        wanted = {id(done) for done in passes}
        found = []
        for holder in self.activations:
            n_begun = bisect_right(begins, holder.samples[0])
            if n_begun == 0 or holder.is_result:
                continue
            done = self.forwards[n_begun - 1]
            inside = holder.samples[0] < done.samples[1]
            if id(done) in wanted and (inside or and_after):
                found.append(holder)
        return found

    def lines_of_results(self, holders: Sequence[Holder]) -> tuple[SourceLine, ...]:
        """The lines that made ``holders``, those with the most bytes first.

        For what a model has returned, it is the line that called the model.
        """
        begins = [done.samples[0] for done in self.forwards]
        called = dict[tuple, SourceLine]()  # also for forwards that are no longer in the list
        for holder in holders:
            n_begun = bisect_right(begins, holder.samples[0])
            if holder.is_result and n_begun and self.forwards[n_begun - 1].line is not None:
                called[holder.module, holder.op, holder.line] = self.forwards[n_begun - 1].line
        nbytes = Counter[SourceLine]()
        for holder in holders:
            line = called.get((holder.module, holder.op, holder.line), holder.line)
            if line is not None:
                nbytes[line] += holder.nbytes
        return tuple(line for line, _ in nbytes.most_common())

    def needed_without_a_graph(self, holders: Sequence[Holder]) -> int:
        """Of the bytes of activations, those that one forward needs at once if nothing is kept for
        a backward, at most: the tensors of its largest layer, and that layer's input.
        """
        sizes = dict[tuple, int]()  # of one forward: the others have made the same
        for holder in holders:
            sizes[holder.module, holder.op, holder.shape, holder.line] = holder.nbytes
        layers = Counter[str]()
        for (module, *_), nbytes in sizes.items():
            layers[self.layer_of(module)] += nbytes
        at_once = max(layers.values(), default=0) + max(sizes.values(), default=0)
        return min(at_once, sum(sizes.values()))

    def layer_of(self, module: str) -> str:
        """The name of the outermost layer that contains a module; empty if it is in none."""
        parts = module.split(".")
        for n in range(1, len(parts) + 1):
            name = ".".join(parts[:n])
            if self.structure is not None and name in self.structure.layers:
                return name
        return ""

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

    def highest_in(self, moments: Iterable[str]) -> int:
        """The highest total of these moments in bytes; 0 if it is not known."""
        if self.rows is None or self.rows.shape[1] <= MOMENT:
            return 0
        codes = [MOMENTS.index(moment) for moment in moments]
        totals = self.rows[np.isin(self.rows[:, MOMENT], codes), TOTAL]
        return int(totals.max(initial=0))

    def gradients_to_come(self) -> int:
        """The bytes of gradients of the trained parameters that are not there at the peak."""
        if self.structure is None:
            return 0
        nbytes = 0
        for name in self.structure.trained:
            nbytes += prod(self.structure.shapes[name]) * self.structure.dtypes[name].itemsize
        return max(nbytes - self.peak.by_category["gradients"], 0)

    def has_backward_in_step(self, step: int) -> bool:
        """Whether a backward has allocated anything in this step, as far as it is known."""
        if self.rows is None or self.rows.shape[1] <= STEP:
            return True
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
        if self.has_optimizer or not self.turns:
            return self.steps
        return self.turns[-1].number + 1

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

    def in_layers(self, holder: Holder) -> bool:
        return self.structure is not None and self.structure.in_layers(holder.module)

    def of_another_model(self, holder: Holder) -> bool:
        """Whether it is a parameter of a module that is not in the tracked model."""
        return holder.op == FIRST_READ_PARAMETER or holder.module in self.untrained

    @property
    def loss_of_whole_rows(self) -> bool:
        """Whether the loss sums over all ways through a row, so that no token has its own part."""
        return any("ctc_loss" in holder.op for holder in self.at_peak)

    @property
    def numbers_of_states(self) -> float:
        """How many numbers the optimizer keeps for each trained weight; infinite if that is not
        known, as in a step that has not ended.
        """
        in_a_step = not self.ended and self.peak.moment == IN_OPTIMIZER_STEP
        if self.structure is None or in_a_step:
            return inf
        trained = sum(prod(self.structure.shapes[name]) for name in self.structure.trained)
        states = 0
        for holder in self.at_peak:
            if holder.category == "optimizer":
                width = 4 if holder.dtype is None else holder.dtype.itemsize  # float32
                states += holder.nbytes // width
        return states / max(trained, 1)

    def is_logits(self, holder: Holder) -> bool:
        """Whether it has a number for each output of a matrix that comes after the layers, or for
        each row of a table.

        Logits, their copies in another dtype, and their gradients are such tensors.
        """
        if self.structure is None or len(holder.shape) < 2:
            return False
        if holder.shape[-1] == holder.shape[-2]:
            return False  # scores of all pairs, of as many tokens as a table has positions
        if holder.category not in ("activations", "temporaries"):
            return False
        as_a_parameter = holder.shape in self.structure.shapes.values()
        return holder.shape[-1] in self.structure.outputs and not as_a_parameter


def total(holders: Iterable[Holder]) -> int:
    return sum(holder.nbytes for holder in holders)
