"""Causes: graphs that nobody needs: no backward goes through them, or it has run already."""

from __future__ import annotations

from math import prod

import torch

from ..units import format_bytes
from .cause import (
    ALMOST_ALL,
    DOMINATES,
    LINES,
    MUCH,
    WORTH,
    Cause,
    detached,
    in_words,
    largest_held,
    lines_of,
    lines_of_forwards,
    name_of,
)
from .facts import IN_BACKWARD, LOSS, TRAINING_FORWARD, Facts, total
from .made_by_forwards import ONE_OF_EACH_LAYER, made_by, needed_without_a_graph
from .timeline import ForwardPass, Holder

WITHOUT_A_GRAPH = f"If no graph is kept, {ONE_OF_EACH_LAYER}"
GRAPHS_AT_ONCE = 3  # two may be the two sides of one loss


def unused_forward(facts: Facts) -> Cause | None:
    """A forward that records gradients, though no backward goes through it."""
    unused = []
    for done in facts.forwards:
        has_unused_graph = done.has_graph and not done.used
        if has_unused_graph and (is_unused(done, facts) or _may_be_unused(done, facts)):
            unused.append(done)
    kept = [done for done in unused if done.kept_at_peak]
    if not kept:
        return _unused_functions(facts)
    nbytes = sum(done.kept_at_peak for done in kept)
    inside = made_by(kept, facts)
    holders = made_by(kept, facts, and_after=True)
    needed_in = "nothing" if all(is_unused(done, facts) for done in kept) else ""
    if unused[0] is facts.forwards[0]:
        # The list has only the last forwards of a long evaluation. Activations that are of none of
        # them were made by earlier ones.
        made_before = _made_before(unused[0], facts)
        holders += made_before
        if made_before:
            needed_in = ""  # it is not known whether a backward went through those
        results = [h for h in facts.at_peak if h.is_result and h.category == "activations"]
        of_the_list = sum(done.kept_at_peak for done in facts.forwards) + total(results)
        nbytes += facts.peak.by_category["activations"] - of_the_list
    if nbytes < WORTH * facts.peak.total:
        return None
    # A loss is no forward of its own, unless it is all that there is.
    blamed = [done for done in kept if done.has_weights] or kept
    evidence = (
        f"{format_bytes(nbytes)} of activations at the peak are kept for a backward that never "
        f"comes: {len(blamed)} forward{'s' * (len(blamed) > 1)} recorded gradients, and nothing "
        "used them."
    )
    remedy = (
        "put the evaluation, sampling or metric under torch.no_grad() (with torch.no_grad(): "
        "around the loop, or @torch.no_grad() above the function). model.eval() does not do this."
    )
    lines = lines_of_forwards(blamed)
    name = "A forward's graph is never used"
    # What was computed from the outputs may be the result that the script wants: it stays. Of
    # forwards that are no longer in the list, it is not known what that is, so all of it counts.
    after_the_calls = total(holders) - total(inside)
    stays = min(needed_without_a_graph(inside, facts) + after_the_calls, nbytes)
    return Cause(
        name,
        nbytes,
        evidence,
        remedy,
        lines,
        holders,
        stays=stays,
        needed_in=needed_in,
        condition=WITHOUT_A_GRAPH,
    )


def _made_before(first: ForwardPass, facts: Facts) -> list[Holder]:
    """The activations of forwards that are no longer in the list."""
    found = []
    for holder in facts.activations:
        if holder.samples[0] < first.samples[0] and not holder.is_result:
            found.append(holder)
    return found


def _unused_functions(facts: Facts) -> Cause | None:
    """The same, of a model that is written as a function: no module is called."""
    of_modules = any(done.step == facts.peak.step for done in facts.of_models)
    if of_modules or not facts.ended or facts.peak.moment != TRAINING_FORWARD:
        return None
    kept = [holder for holder in facts.at_peak if holder.category == "activations"]
    nbytes = total(kept)
    if facts.has_backward_in_step(facts.peak.step) or nbytes < DOMINATES * facts.peak.total:
        return None
    evidence = (
        f"{format_bytes(nbytes)} of activations at the peak are kept for a backward that never "
        "comes."
    )
    remedy = "put what is computed here under torch.no_grad(), as in `with torch.no_grad():`."
    name = "A forward's graph is never used"
    stays = needed_without_a_graph(kept, facts)
    lines = lines_of(kept)
    return Cause(
        name, nbytes, evidence, remedy, lines, kept, stays=stays, condition=WITHOUT_A_GRAPH
    )


def is_unused(done: ForwardPass, facts: Facts) -> bool:
    """Whether it is known that no backward goes through this forward."""
    if done.used:
        return False
    if facts.ended and _trains(facts):
        return True
    if _backward_may_come(done, facts):
        return False
    if done.step < facts.steps - 1:
        return True  # the optimizer has stepped twice since then
    if _is_new_to_the_training(done, facts):
        return True
    # Another call of this line was never used.
    for other in facts.forwards:
        if _calls_the_same(other, done) and other.step < facts.steps - 1 and not other.used:
            return True
    return False


def _backward_may_come(done: ForwardPass, facts: Facts) -> bool:
    """Whether a run that was stopped before its end would have gone back through this forward, as
    far as one can tell: its optimizer has still to step for the first time (a generator's, after
    the discriminator's steps), or an earlier call of this line was used.
    """
    if facts.ended:
        return False
    if done.waits_for_step:
        return True
    return any(other.used and _calls_the_same(other, done) for other in facts.forwards)


def _calls_the_same(other: ForwardPass, done: ForwardPass) -> bool:
    """Whether another forward with a graph is a call of the same kind."""
    return other is not done and other.has_graph and other.call == done.call


def _trains(facts: Facts) -> bool:
    return facts.had_backward or facts.had_optimizer_step


def _may_be_unused(done: ForwardPass, facts: Facts) -> bool:
    """Whether a line is called again and again, and no backward has come so far.

    If there is an optimizer and the run goes on, its first backward may still come.
    """
    optimizer_waits = facts.optimized is not None or done.waits_for_step
    if _trains(facts) or (optimizer_waits and not facts.ended):
        return False
    return any(_calls_the_same(other, done) for other in facts.forwards)


def _is_new_to_the_training(done: ForwardPass, facts: Facts) -> bool:
    """Whether two steps at least have used forwards, all of other calls than this one."""
    used = [p for p in facts.forwards if p.used and p.step < done.step]
    steps = {p.step for p in used}
    return len(steps) >= 2 and done.call not in {p.call for p in used}


def kept_graph(facts: Facts) -> Cause | None:
    """A graph that is still there after its backward: ``retain_graph=True``, or a second loss that
    goes through it without need.
    """
    if facts.peak.moment not in (TRAINING_FORWARD, LOSS, IN_BACKWARD):
        return None
    kept, nbytes = [], 0
    for done in facts.of_models:
        # Graphs of older steps are left to the causes of growth.
        is_recent = done.step >= facts.peak.step - 1
        finished = done.turn < facts.peak.turn and _is_finished_at_peak(done, facts)
        # If the graph were free, almost nothing of what the forward has made would be there.
        most_is_there = 2 * done.inside_at_peak > done.made > 0
        if finished and is_recent and most_is_there:
            kept.append(done)
            nbytes += min(done.inside_at_peak, done.made)
    if nbytes < MUCH * facts.peak.total:
        return None
    if finished_forwards(facts):
        return None  # that cause says where these bytes come from
    evidence = (
        f"{format_bytes(nbytes)} at the peak are the graph of {len(kept)} forward"
        f"{'s' * (len(kept) > 1)} whose backward has already run."
    )
    remedy = (
        "backward(retain_graph=True) keeps the graph for a second backward: leave it out, and "
        "detach what the second loss does not train, such as discriminator(fake.detach()) or "
        "hidden.detach(). Two losses of one graph can be added up, for one backward. `del` the "
        "loss and the outputs that the next forward does not need."
    )
    lines = lines_of_forwards(kept)
    name = "A graph is kept after its backward"
    return Cause(name, nbytes, evidence, remedy, lines, made_by(kept, facts), stays=None)


def leftovers(facts: Facts) -> Cause | None:
    """What the step before has computed and a variable still holds, such as its outputs or loss."""
    if facts.peak.moment not in (TRAINING_FORWARD, LOSS, IN_BACKWARD):
        return None
    previous = {done.turn for done in facts.of_models if done.turn < facts.peak.turn}
    if not previous:
        return None
    last_turn = max(previous)
    if not _finished_before(last_turn, facts):
        return None
    left = []
    for holder in facts.at_peak:
        if holder.category == "activations" and holder.turn == last_turn:
            left.append(holder)
    nbytes = total(left)
    if facts.peak.moment != IN_BACKWARD:
        # The backward may begin without them: its own peak remains.
        nbytes = min(nbytes, facts.peak.total - facts.highest_in([IN_BACKWARD]))
    # A run that ended at its budget may have failed by a few bytes.
    enough = MUCH * facts.peak.total if facts.ended else 1
    if nbytes < enough or total(left) < MUCH * facts.peak.total:
        return None
    words = list(dict.fromkeys(in_words(holder) for holder in left))
    evidence = (
        f"{format_bytes(total(left))} at the peak were computed before the last backward, and "
        f"nothing needs them after it: {'; '.join(words[:LINES])}."
    )
    remedy = (
        "a variable keeps its tensor until it is assigned again, and that is after the next "
        "forward. `del` the outputs and the loss at the end of a step, or compute them in a "
        "function that returns numbers."
    )
    lines = lines_of(left)
    name = "Tensors of the step before are still there"
    condition = "Without these tensors"
    return Cause(name, nbytes, evidence, remedy, lines, left, condition=condition)


def _finished_before(turn: int, facts: Facts) -> bool:
    """Whether a backward has been through all forwards of a turn, and needs them no more."""
    of_turn = [done for done in facts.of_models if done.turn == turn]
    return all(_is_finished_at_peak(done, facts) for done in of_turn if done.has_graph)


def _is_finished_at_peak(done: ForwardPass, facts: Facts) -> bool:
    """Whether a backward went through this forward in an earlier turn than the peak's, and no
    second one needs its graph. A generator's graph may wait while the critic steps several times.
    """
    return done.used and done.used_in_turn < facts.peak.turn and not done.differentiable


def finished_forwards(facts: Facts) -> Cause | None:
    """Several forwards of one step, each with a backward of its own, whose tensors stay: a metric
    with its graph, outputs in a list, or a state that goes on with its graph.
    """
    if not facts.has_optimizer or facts.peak.moment not in (TRAINING_FORWARD, LOSS, IN_BACKWARD):
        return None  # without an optimizer, such bytes grow from turn to turn
    turns = _finished_turns(facts)
    kept = []
    for holder in facts.at_peak:
        of_the_step = holder.step == facts.peak.step and holder.turn in turns
        if of_the_step and holder.category == "activations":
            kept.append(holder)
    nbytes = total(kept)
    times = len({holder.turn for holder in kept})
    if times < GRAPHS_AT_ONCE or nbytes < WORTH * facts.peak.total:
        return None
    evidence = (
        f"{format_bytes(nbytes)} at the peak were made in {times} forwards of this step, each with "
        "a backward of its own, and are still alive: "
    )
    results = [holder for holder in kept if holder.is_result]
    held, nbytes_held = largest_held(kept)
    stays = 0
    if held is not None and held.graph and 2 * nbytes_held > nbytes:
        evidence += f"the graph of `{name_of(held)}` reaches back over them."
        remedy = f"{detached(held)} backward(retain_graph=True) is not needed then."
    elif any(done.chained for done in facts.forwards):
        evidence += "each forward takes a state from the one before it, with its graph."
        remedy = (
            "detach the state before the next forward takes it (hidden = hidden.detach()). If the "
            "script has backward(retain_graph=True), leave that argument out."
        )
    elif total(results) >= ALMOST_ALL * nbytes:
        evidence += "they are what the forwards have returned, and something keeps them."
        remedy = (
            "keep less of the outputs until the end of the step: a number (.item()), a class "
            "(outputs.argmax(-1)), or outputs.detach().cpu(). .detach() alone keeps the bytes."
        )
        stays = min(sum(map(_bytes_of_classes, results)), nbytes)
    else:
        evidence += "something that was made from the outputs has a graph, or is kept itself."
        remedy = (
            "add up or keep numbers for the log, not tensors with a graph: .item() or .detach() on "
            "the metric. If the script has backward(retain_graph=True), leave that argument out."
        )
    name = "Forwards stay in memory after their own backward"
    return Cause(name, nbytes, evidence, remedy, lines_of(kept), kept, stays=stays)


def _bytes_of_classes(scores: Holder) -> int:
    """The bytes of the classes with the highest scores, at most: one int64 for each row of scores,
    or for each pixel, where the second dimension has the classes.
    """
    may_be_classes = scores.shape[-1:]
    if len(scores.shape) > 2:
        may_be_classes = (scores.shape[1], scores.shape[-1])
    classes = min(may_be_classes, default=1)
    return prod(scores.shape) // classes * torch.int64.itemsize


def _finished_turns(facts: Facts) -> set[int]:
    """The turns of the peak's step whose forwards no later backward needs."""
    finished: set[int] = set()
    needed: set[int] = set()
    for done in facts.of_models:
        if done.step != facts.peak.step or done.turn >= facts.peak.turn:
            continue
        if _is_finished_at_peak(done, facts):
            finished.add(done.turn)
        else:
            needed.add(done.turn)
    return finished - needed
