"""Why a run needs so much memory: its causes first, then which techniques could lower the peak, how
far at best, and which cannot.

A technique acts on some categories in some phases. Remove all bytes of these from every moment of
the run: the highest total that remains is a lower bound for the peak with this technique, however
well it works.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..model.structure import NO_MODEL
from ..names import CATEGORIES, PHASES
from ..units import format_bytes
from .cause import LINES, MUCH, WORTH, Cause, in_words, within
from .causes import find_causes
from .causes_of_evaluation import peak_may_be_of_the_step
from .causes_of_weights import MOMENTUM, is_state
from .facts import BETWEEN_STEPS, Facts, total
from .timeline import BY, PHASE, TOTAL, Holder, MemorySnapshot

PASSES, STEP = ("idle", "forward", "backward"), ("optimizer_step",)


@dataclass(frozen=True)
class Technique:
    """A way to lower a peak.

    ``shrinks``: for each category that it can shrink, the phases in which it can. ``part``:
    "layers", if it acts only inside the layers, or "outside", if only on logits and what else comes
    outside of them. ``of_the_step``: it acts on the batch of a training step, and on nothing
    between steps or in an evaluation.
    """

    name: str
    price: str
    shrinks: Mapping[str, tuple[str, ...]]
    part: str = ""
    of_the_step: bool = False


OF_THE_BATCH = dict.fromkeys(("activations", "temporaries", "other"), PASSES)
OF_THE_TRAINED = {"gradients": PHASES, "optimizer": PHASES, "temporaries": STEP}
FUSED = "an optimizer that works in place (fused)"
SGD = "SGD, with momentum or without"
CHUNKS = "the loss in chunks"
MICRO_BATCHES = "smaller micro-batches, or shorter rows"
TECHNIQUES = (  # the cheapest first
    Technique(FUSED, "nothing", {"temporaries": STEP}),
    Technique(
        CHUNKS,
        "almost nothing",
        {"activations": PASSES, "temporaries": PASSES},
        "outside",
        of_the_step=True,
    ),
    Technique(
        MICRO_BATCHES,
        "little time, while they keep the card busy",
        OF_THE_BATCH,
        of_the_step=True,
    ),
    Technique(
        "checkpointing",
        "up to a third more work (half if frozen)",
        {"activations": PASSES},
        "layers",
        of_the_step=True,
    ),
    Technique(
        "moving activations off the card",
        "two trips over the bus",
        {"activations": PASSES},
        of_the_step=True,
    ),
    Technique(
        "8-bit or factored states",
        "approximate moments, another learning rate",
        {"optimizer": PHASES, "temporaries": STEP},
    ),
    Technique(
        SGD,
        "another learning rate, often more steps",
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


@dataclass(frozen=True)
class Diagnosis:
    """Why a run needs its memory, from the ``facts`` of it."""

    facts: Facts

    @property
    def peak(self) -> MemorySnapshot:
        return self.facts.peak

    @cached_property
    def causes(self) -> list[Cause]:
        """What makes this run need more than an ordinary step, the first thing to change first."""
        return find_causes(self.facts)

    @cached_property
    def lowest(self) -> dict[str, int]:
        """For each technique, by name, the lowest peak in bytes that it can reach."""
        return lowest_peaks(self.facts)

    @property
    def helps(self) -> list[str]:
        """The techniques that can lower the peak by 2% or more, the cheapest first."""
        return [
            name for name, nbytes in self.lowest.items() if nbytes <= (1 - WORTH) * self.peak.total
        ]

    @property
    def cannot_help(self) -> list[str]:
        return [name for name in self.lowest if name not in self.helps]

    def cause_lines(self) -> list[str]:
        """The causes in words, a line each for what was found, where, and what to do."""
        lines = []
        for cause in self.causes:
            lines += str(cause).splitlines()
        return lines

    def peak_line(self) -> str:
        """How large the peak is, where it is, and what it consists of."""
        peak = self.peak
        return (
            f"The peak is {format_bytes(peak.total)}, {within(peak.moment or peak.phase)}: "
            f"{shares(peak)}."
        )

    def __str__(self) -> str:
        lines = [self.peak_line(), *self.cause_lines()]
        if not self.causes:
            what = "No cause was found"
            if self.facts.moments == {BETWEEN_STEPS}:
                what = "No forward and no step was seen"
            elif self._is_ordinary():
                what = "This is an ordinary step"
            lines += [f"{what}. The largest at the peak:", *self._largest_lines()]
        if self.helps:
            width = max(len(name) for name in self.helps)
            else_ = " else" * bool(self.causes)
            lines.append(f"What{else_} can lower it, the cheapest first, and to what at best:")
            lines += [
                f"  {name:<{width}}  {format_bytes(self.lowest[name])}" for name in self.helps
            ]
        if self.cannot_help:
            lines.append(f"What cannot: {'; '.join(self.cannot_help)}.")
        return "\n".join(lines)

    def _is_ordinary(self) -> bool:
        """Whether a technique helps, and almost all bytes are the model's, the optimizer's, or of
        the peak's own step.
        """
        facts = self.facts
        older = []
        for holder in facts.at_peak:
            of_earlier_steps = 0 <= facts.time_of(holder) < facts.peak_time
            if of_earlier_steps and not holder.is_of_training:
                older.append(holder)
        return bool(self.helps) and total(older) < MUCH * self.peak.total

    def _largest_lines(self) -> list[str]:
        """Who holds the most at the peak, and which lines have made it."""
        groups = defaultdict[tuple, list[Holder]](list)
        for holder in self.facts.at_peak:
            groups[holder.line, holder.category, holder.held].append(holder)
        lines = []
        for group in sorted(groups.values(), key=total, reverse=True)[:LINES]:
            first = group[0]
            line = f"  {format_bytes(total(group))} {first.category}"
            if first.held:
                line += f", held by {first.held}"
            if first.line:
                line += f", at {first.line}"
            if first.dtype:  # what was there before the run began is known by its bytes alone
                line += f": {in_words(first)}"
            lines.append(line)
        return lines

    __repr__ = __str__


def shares(moment: MemorySnapshot) -> str:
    """The large categories of ``moment`` in per cent, the largest first."""
    parts = sorted(moment.by_category.items(), key=lambda part: -part[1])
    return ", ".join(
        f"{n / moment.total:.0%} {name}" for name, n in parts if n >= WORTH * moment.total
    )


def lowest_peaks(facts: Facts) -> dict[str, int]:
    """For each technique, by name, the lowest peak in bytes that it can reach.

    It is the peak itself for a technique that the facts say cannot be applied to this peak.
    """
    peak = facts.peak
    phase = PHASES.index(peak.phase)
    moments = np.array([[0, phase, peak.total, *peak.by_category.values()]])
    if facts.rows is not None and len(facts.rows):
        moments = np.concatenate([moments, facts.rows[:, : moments.shape[1]]])
    lowest = {}
    for technique in TECHNIQUES:
        if applies(technique, facts):
            lowest[technique.name] = _lowest(technique, facts, moments)
        else:
            lowest[technique.name] = peak.total
    return lowest


def applies(technique: Technique, facts: Facts) -> bool:
    """Whether the technique can be applied to this peak, as far as the facts say."""
    if technique.of_the_step and facts.outside_of_training:
        return technique.name == MICRO_BATCHES and peak_may_be_of_the_step(facts)
    if facts.holders is None or facts.structure is NO_MODEL:
        return True
    if technique.name == SGD and facts.had_optimizer_step:
        return facts.numbers_of_states > MOMENTUM
    if technique.part == "outside" and facts.loss_of_whole_rows:
        return False
    if technique.part == "outside":
        return any(facts.is_logits(holder) for holder in facts.holders)
    return True


def _lowest(technique: Technique, facts: Facts, moments: np.ndarray) -> int:
    remaining = moments[:, TOTAL].copy()
    for name, phases in technique.shrinks.items():
        acts = np.isin(moments[:, PHASE], [PHASES.index(phase) for phase in phases])
        remaining -= np.where(acts, moments[:, BY][:, CATEGORIES.index(name)], 0)
    lowest = int(remaining.max())
    kept = total(_out_of_reach(technique, facts))
    remaining_at_peak = int(remaining[0]) + kept
    return max(lowest, remaining_at_peak)


def _out_of_reach(technique: Technique, facts: Facts) -> Sequence[Holder]:
    """Of the categories that the technique shrinks at the peak, what it does not reach."""
    kept = []
    for holder in facts.at_peak:
        if facts.peak.phase not in technique.shrinks.get(holder.category, ()):
            continue
        # a state that is being made is a temporary for now, which a fused optimizer makes as well
        state = technique.name == FUSED and is_state(holder, facts)
        if state or _is_in_another_part(holder, technique, facts):
            kept.append(holder)
    return kept


def _is_in_another_part(holder: Holder, technique: Technique, facts: Facts) -> bool:
    """Whether it is known to be in a part of the model on which the technique does not act."""
    if not technique.part or facts.structure is NO_MODEL:
        return False
    return facts.in_layers(holder) != (technique.part == "layers")
