"""Cause: graphs that a backward needs, but that need not be there at once."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence

from ..units import format_bytes
from .cause import lines_of_forwards
from .causes_of_graphs import is_unused
from .facts import Facts, total
from .made_by_forwards import made_by
from .rows import BEFORE_THE_OPTIMIZER, Group, Row
from .timeline import ForwardPass, Holder

GRAPHS_AT_ONCE = 3  # two may be the two sides of one loss


def _added_up(free: Sequence[Holder], facts: Facts) -> Group | None:
    """Losses that are added up over several forwards, and one backward for all of them."""
    passes = _alive_together(free, facts)
    if len(passes) < GRAPHS_AT_ONCE:
        return None
    holders = []  # the first forward's graph is there in any case
    for holder in free:
        if holder.category == "activations" and holder.samples[0] >= passes[1].samples[0]:
            holders.append(holder)
    each = total(holders) // (len(passes) - 1)
    changes = {
        "lines": lines_of_forwards(passes[-1:]),
        "stays": min(facts.gradients_to_come(), total(holders)),
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


def _alive_together(free: Sequence[Holder], facts: Facts) -> list[ForwardPass]:
    """Forwards in the peak's step whose graphs are alive at the peak, with a loss between them.

    They are calls of one kind: of several such groups, the largest. A forward that
    continues another one, as in backward through time, does not count.
    """
    of_the_step = [done for done in facts.of_models if done.step == facts.peak.step]
    if all(done.differentiable for done in of_the_step):
        # Gradients have been taken already. In meta-learning, the forwards of the outer losses are
        # not differentiated twice.
        return []
    calls = defaultdict[tuple, list[ForwardPass]](list)
    for done in of_the_step:
        if done.has_graph and not done.chained and not is_unused(done, facts):
            calls[done.call].append(done)
    alive = list[ForwardPass]()
    for passes in calls.values():
        nbytes = [total(made_by([done], free, facts)) for done in passes]
        # Of a graph that is free, some tensors may be left.
        together = [done for done, n in zip(passes, nbytes, strict=True) if 2 * n > max(nbytes)]
        alive = max(alive, together, key=len)
    if not alive:
        return []
    # Without a loss in between, such as for features that are averaged, one loss takes all outputs.
    losses = _samples_of_losses(facts)
    first, last = (bisect_left(losses, done.samples[0]) for done in (alive[0], alive[-1]))
    return alive if first < last else []


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
