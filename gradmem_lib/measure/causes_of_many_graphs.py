"""Cause: graphs that a backward needs, but that need not be there at once."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

from ..units import format_bytes
from .cause import lines_of_forwards
from .causes_of_graphs import is_unused
from .facts import Facts
from .rows import BEFORE_THE_OPTIMIZER, Group, Row
from .timeline import ForwardPass, Holder

GRAPHS_AT_ONCE = 3  # two may be the two sides of one loss


def _added_up(free: Sequence[Holder], facts: Facts) -> Group | None:
    """Losses that are added up over several forwards, and one backward for all of them."""
    passes = _alive_together(facts)
    if len(passes) < GRAPHS_AT_ONCE:
        return None
    # The first one may have read its inputs for the first time.
    each = (passes[-1].live_before - passes[1].live_before) // (len(passes) - 2)
    nbytes = each * (len(passes) - 1)
    holders = []  # the first forward's graph is there in any case
    for holder in free:
        if holder.category == "activations" and holder.samples[0] >= passes[1].samples[0]:
            holders.append(holder)
    changes = {
        "nbytes": nbytes,
        "lines": lines_of_forwards(passes[-1:]),
        "stays": min(facts.gradients_to_come(), nbytes),
    }
    return Group(holders, {"forwards": len(passes), "each": format_bytes(each)}, changes)


ADDED_UP = Row(
    "Losses are added up before one backward",
    "the graphs of {forwards} forwards of one step are alive at once, about {each} each.",
    "call backward after each forward, (loss / n).backward() for n of them, and step the optimizer "
    "after the last: the gradients add up by themselves. (If one loss compares the outputs of all "
    "these forwards, this is not possible.)",
    _added_up,
    moments=BEFORE_THE_OPTIMIZER,
    condition="If one forward at a time is in memory, beside all gradients",
)


def _alive_together(facts: Facts) -> list[ForwardPass]:
    """Forwards in the peak's step whose graphs were all alive after the last one.

    They are calls of one kind: of several such groups, the largest. A forward that
    continues another one, as in backward through time, does not count.
    """
    calls = defaultdict[tuple, list[ForwardPass]](list)
    for done in facts.of_models:
        is_last = done is facts.forwards[-1]  # it may run now, with a graph that is not finished
        if done.step != facts.peak.step or done.chained or not (done.has_graph or is_last):
            continue
        if is_unused(done, facts):
            continue  # there is no loss
        together = calls[done.call]
        if together:
            previous = together[-1]
            kept = previous.live_after - previous.live_before
            # If less than half of what the previous one has kept is there, its graph is free.
            if done.live_before < previous.live_before + kept // 2:
                if len(together) >= GRAPHS_AT_ONCE:
                    continue  # the group is found
                together.clear()
        together.append(done)
    found = max(calls.values(), key=len, default=[])
    # In meta-learning, the forwards of the outer losses are not differentiated twice.
    of_the_step = [done for done in facts.of_models if done.step == facts.peak.step]
    if all(done.differentiable for done in of_the_step):
        return []  # gradients have been taken already
    # Without losses in between, one loss takes all outputs.
    losses = _samples_of_losses(facts)
    for before, after in pairwise(found):
        # Features that are averaged between two forwards, for one loss of all, are no loss.
        if bisect_left(losses, before.samples[0]) < bisect_left(losses, after.samples[0]):
            return found
    return []


def _samples_of_losses(facts: Facts) -> list[int]:
    """The first sample of each loss that is known, in order: one number with a graph, which a model
    has returned or which was made outside of models.
    """
    samples = []
    for holder in (*facts.at_peak, *facts.others):
        if holder.category != "activations" or holder.shape != ():
            continue
        made = holder.samples[0]
        last = facts.last_begun(made)
        inside = last is not None and last.has_weights and made < last.samples[1]
        if holder.is_result or not inside:
            samples.append(made)
    return sorted(samples)
