"""Causes: graphs that a backward needs, but that need not be there at once."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from itertools import pairwise

from ..units import format_bytes
from .cause import DOMINATES, WORTH, Cause, lines_of, lines_of_forwards
from .causes_of_gradients import gradients_of_rows
from .causes_of_graphs import GRAPHS_AT_ONCE, finished_forwards, is_unused
from .facts import IN_BACKWARD, LOSS, TRAINING_FORWARD, Facts, total
from .made_by_forwards import made_by
from .timeline import ForwardPass

WITH_GRADIENTS = "If one forward at a time is in memory, beside all gradients"


def several_graphs(facts: Facts) -> Cause | None:
    """Losses that are added up over several forwards, and one backward for all of them."""
    if facts.peak.moment not in (TRAINING_FORWARD, LOSS, IN_BACKWARD):
        return None
    passes = _alive_together(facts)
    if len(passes) < GRAPHS_AT_ONCE:
        return None
    # The first one may have read its inputs for the first time.
    each = (passes[-1].live_before - passes[1].live_before) // (len(passes) - 2)
    nbytes = each * (len(passes) - 1)
    if nbytes < WORTH * facts.peak.total:
        return None
    if finished_forwards(facts):
        return None  # these forwards have had their backward: no loss waits for one
    evidence = (
        f"the graphs of {len(passes)} forwards of one step are alive at once, about "
        f"{format_bytes(each)} each."
    )
    remedy = (
        "call backward after each forward, (loss / n).backward() for n of them, and step the "
        "optimizer after the last: the gradients add up by themselves. (If one loss compares the "
        "outputs of all these forwards, this is not possible.)"
    )
    lines = lines_of_forwards(passes[-1:])
    holders = []  # the first forward's graph is there in any case
    for holder in facts.activations:
        if holder.samples[0] >= passes[1].samples[0]:
            holders.append(holder)
    name = "Losses are added up before one backward"
    stays = min(facts.gradients_to_come(), nbytes)
    return Cause(
        name, nbytes, evidence, remedy, lines, holders, stays=stays, condition=WITH_GRADIENTS
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
    if all(done.differentiable for done in found) and not _outer_forwards(facts):
        return []  # gradients have been taken already
    # Without losses in between, one loss takes all outputs.
    losses = _samples_of_losses(facts)
    return found if any(_has_a_loss(*pair, losses) for pair in pairwise(found)) else []


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


def _outer_forwards(facts: Facts) -> list[ForwardPass]:
    """In the peak's step, the forwards whose loss is not differentiated twice.

    In meta-learning, these are the forwards of the outer losses.
    """
    return [p for p in facts.of_models if p.step == facts.peak.step and not p.differentiable]


def _has_a_loss(before: ForwardPass, after: ForwardPass, losses: list[int]) -> bool:
    """Whether a loss was computed in the first of two forwards, or between them. Features that are
    averaged there, for one loss of all forwards, and an input of the next forward are none.

    ``losses``: as ``_samples_of_losses`` gives them.
    """
    return bisect_left(losses, before.samples[0]) < bisect_left(losses, after.samples[0])


def chained_forwards(facts: Facts) -> Cause | None:
    """One module is called again and again with what it has computed, and one backward goes
    through all of these calls.
    """
    if facts.peak.moment not in (TRAINING_FORWARD, LOSS, IN_BACKWARD):
        return None
    chains = defaultdict[int, list[ForwardPass]](list)
    for done in facts.of_models:
        in_this_turn = (done.step, done.turn) == (facts.peak.step, facts.peak.turn)
        is_first = done.number not in chains
        # Without a backward of its own, or with a second one, a checkpoint does not help.
        needed_once = not done.differentiable and not is_unused(done, facts)
        continues = done.chained or is_first
        if in_this_turn and continues and needed_once and done.inside_at_peak:
            chains[done.number].append(done)
    chain = max(chains.values(), key=len, default=[])
    if len(chain) <= GRAPHS_AT_ONCE:
        return None
    inside = [done.inside_at_peak for done in chain]
    nbytes = sum(inside) - max(inside)  # a checkpoint computes one of them again
    if nbytes < DOMINATES * facts.peak.total:
        return None
    each = sum(inside) // len(chain)
    evidence = (
        f"{format_bytes(sum(inside))} at the peak are the graphs of {len(chain)} calls of one "
        f"module, each of which continues the one before, about {format_bytes(each)} each."
    )
    remedy = (
        "let each call keep only its inputs, and compute the rest again in backward: "
        "torch.utils.checkpoint.checkpoint(module, x, use_reentrant=False) in place of module(x). "
        "Or cut the chain every few calls: backward, then x = x.detach()."
    )
    lines = lines_of_forwards(chain)
    name = "One backward goes through a chain of forwards"
    stays = min(facts.gradients_to_come(), nbytes)
    holders = made_by(chain, facts)
    return Cause(
        name, nbytes, evidence, remedy, lines, holders, stays=stays, condition=WITH_GRADIENTS
    )


def graphs_of_gradients(facts: Facts) -> Cause | None:
    """Gradients that were taken with ``create_graph=True``, and what they keep."""
    if not any(done.differentiable for done in facts.forwards):
        return None
    if gradients_of_rows(facts):
        return None  # torch.func.grad takes all gradients with a graph
    kept = []
    for holder in facts.at_peak:
        if holder.category == "activations" and holder.made_in == IN_BACKWARD:
            kept.append(holder)
    nbytes = total(kept)
    if nbytes < DOMINATES * facts.peak.total:
        return None
    evidence = (
        f"{format_bytes(nbytes)} at the peak were computed with gradients, for a second derivative "
        "(create_graph=True)."
    )
    remedy = (
        "leave create_graph=True out where the gradient itself is the result, as in the last "
        "derivative of several, or .detach() it at once: what is computed from it otherwise keeps "
        "all of this. If a loss needs it, take it for fewer rows (a gradient penalty), or for fewer"
        " inner steps (meta-learning, whose first-order method needs no create_graph)."
    )
    lines = lines_of(kept)
    name = "Gradients keep graphs of their own"
    return Cause(name, nbytes, evidence, remedy, lines, kept, stays=None)
