"""Causes: graphs that nobody needs, since no backward goes through them or it has run already;
graphs of gradients; graphs that a backward needs, but not all at once; checkpoints that nothing
recomputes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

from ..units import format_bytes
from .cause import (
    ALMOST_ALL,
    BEFORE_THE_OPTIMIZER,
    DOMINATES,
    MUCH,
    SEVERAL,
    WORTH,
    Find,
    Group,
    Row,
    detached,
    holder_of_most,
    lines_of_forwards,
    name_of,
    those,
)
from .facts import IN_BACKWARD, TRAINING_FORWARD, Facts, total
from .made_by_forwards import ONE_FORWARD, largest_forward, made_by
from .timeline import ForwardPass, Holder


def _left_by(unused: list[ForwardPass], free: Sequence[Holder], facts: Facts) -> Group | None:
    inside = made_by(unused, free, facts)
    holders = made_by(unused, free, facts, and_after=True)
    if not holders:
        return _unused_functions(free, facts)
    makers = {id(facts.maker_of(holder)) for holder in holders}
    kept = [done for done in unused if id(done) in makers]
    needed_in = "nothing" if all(is_unused(done, facts) for done in kept) else ""
    if unused[0] is facts.forwards[0]:
        # The list has only the last forwards of a long evaluation. Activations that are of none of
        # them were made by earlier ones.
        for holder in free:
            is_older = holder.first_sample < unused[0].first_sample and not holder.is_result
            if is_older and holder.category == "activations":
                holders.append(holder)
                needed_in = ""  # it is not known whether a backward went through those
    # A loss is no forward of its own, unless it is all that there is.
    blamed = [done for done in kept if done.has_weights] or kept
    # What was computed from the outputs may be the result that the script wants: it stays.
    others = total(holders) - total(inside)
    changes = {
        "lines": lines_of_forwards(blamed),
        "stays": largest_forward(inside, facts) + others,
        "needed_in": needed_in,
    }
    forwards = f"{len(blamed)} forward{'s' * (len(blamed) > 1)}"
    words = {"why": f": {forwards} recorded gradients, and nothing used them"}
    return Group(holders, words, changes)


def _forwards_that_are(unused: Callable[[ForwardPass, Facts], bool]) -> Find:
    """A search for what forwards have left that record gradients, and no backward uses them."""

    def find(free: Sequence[Holder], facts: Facts) -> Group | None:
        found = [done for done in facts.forwards if done.has_graph and unused(done, facts)]
        return _left_by(found, free, facts)

    return find


def _unused_functions(free: Sequence[Holder], facts: Facts) -> Group | None:
    """The same, of a model that is written as a function: no module is called."""
    in_a_forward = facts.ended and facts.peak.moment == TRAINING_FORWARD
    if facts.of_the_step or not in_a_forward or facts.has_backward_in_step(facts.peak.step):
        return None
    kept = []
    for holder in free:
        is_copy = bool(holder.computed_from)  # of a weight or a gradient, and no graph's
        if holder.category == "activations" and not is_copy:
            kept.append(holder)
    return Group(kept, {"why": ""}, {"stays": None})


def is_unused(done: ForwardPass, facts: Facts) -> bool:
    """Whether it is known that no backward goes through this forward."""
    if done.used:
        return False
    if facts.ended:
        return _trains(facts) or _may_be_unused(done, facts)
    # A backward may still come, as far as one can tell: its optimizer has still to step for the
    # first time (a generator's, after the discriminator's steps), or an earlier call was used.
    if done.waits_for_step or any(other.used for other in _calls_like(done, facts)):
        return False
    if done.step < facts.steps - 1:
        return True  # the optimizer has stepped twice since then
    # At least two steps have used forwards, all of other calls than this one.
    used = [other for other in facts.forwards if other.used and other.step < done.step]
    return len({other.step for other in used}) >= 2 and done.call not in {p.call for p in used}


def _calls_like(done: ForwardPass, facts: Facts) -> list[ForwardPass]:
    """The other forwards with a graph that are calls of the same kind."""
    alike = [other for other in facts.forwards if other.has_graph and other.call == done.call]
    return [other for other in alike if other is not done]


def _trains(facts: Facts) -> bool:
    return facts.had_backward or facts.had_optimizer_step


def _may_be_unused(done: ForwardPass, facts: Facts) -> bool:
    """Whether a line is called again and again, and no backward has come so far.

    If there is an optimizer and the run goes on, its first backward may still come.
    """
    optimizer_waits = facts.optimized is not None or done.waits_for_step
    if _trains(facts) or (optimizer_waits and not facts.ended):
        return False
    return bool(_calls_like(done, facts))


UNUSED = Row(
    "A forward's graph is never used",
    "{size} of activations at the peak are kept for a backward that never comes{why}.",
    "put the evaluation, sampling or metric under torch.no_grad() (with torch.no_grad(): around "
    "the loop, or @torch.no_grad() above the function). model.eval() does not do this.",
    _forwards_that_are(is_unused),
    condition=f"If no graph is kept, {ONE_FORWARD}",
)
# In a run that was stopped, a backward for all of them may have been meant to come: so this is
# asked after what has losses in between.
UNUSED_SO_FAR = replace(UNUSED, find=_forwards_that_are(_may_be_unused))


LATER = 2  # the last step's outputs are there at a run's end


def _is_of_a_finished_turn(holder: Holder, facts: Facts) -> bool:
    """Whether no backward needs it any more. Of older steps, a graph alone may have kept it."""
    is_late = holder.step >= facts.peak.step - 1 or holder.keeper.graph
    is_finished = holder.turn in facts.finished_turns
    return is_late and is_finished and holder.category == "activations"


def _after_their_backward(kept: list[Holder], facts: Facts) -> Group | None:
    """What several forwards have made whose own backward has run, or a whole graph: outputs in a
    list, a metric with its graph, a state that goes on with its graph, ``retain_graph=True``.
    """
    times = len({holder.turn for holder in kept})
    held = holder_of_most(kept)
    if times < SEVERAL and not held.graph:
        return None  # variables of the last step
    changes: dict[str, Any] = {}
    why = "something keeps what they have made."
    results = [holder for holder in kept if holder.is_result]
    reaches_back = times >= SEVERAL and held.graph
    # these bytes stay if they are detached
    kept_by_names = [holder for holder in kept if not holder.keeper.graph]
    if reaches_back or (held.graph and held.is_attribute):
        why = f"the graph of `{name_of(held)}` is kept."
        changes["remedy"] = f"{detached(held)} backward(retain_graph=True) is not needed then."
        if reaches_back:
            why = f"the graph of `{name_of(held)}` reaches back over them."
            changes["stays"] = total(kept_by_names)
    elif times >= SEVERAL and any(done.chained for done in facts.forwards):
        why = "each forward takes a state from the one before it, with its graph."
        changes["remedy"] = (
            "detach the state before the next forward takes it (hidden = hidden.detach()). If the "
            "script has backward(retain_graph=True), leave that argument out."
        )
    elif total(results) >= ALMOST_ALL * total(kept):
        why = "they are what the forwards have returned, and something keeps them."
        changes["remedy"] = (
            "keep less of the outputs until the end of the step: a number (.item()), a class "
            "(outputs.argmax(-1)), or outputs.detach().cpu(). .detach() alone keeps the bytes."
        )
    forwards = f"{times} forwards of this step, each with"
    if times < SEVERAL:
        forwards = "a forward that has had"
    return Group(kept, {"forwards": forwards, "why": why}, changes)


FINISHED = Row(
    "Forwards stay in memory after their own backward",
    "{size} at the peak were made in {forwards} a backward of its own, and are still alive: {why}",
    "keep numbers for the log, .item(), not tensors with a graph, and `del` the loss and the "
    "outputs that the next forward does not need. If the script has backward(retain_graph=True), "
    "leave it out, and detach what the second loss does not train, such as "
    "discriminator(fake.detach()). Two losses of one graph can be added up, for one backward.",
    those(_is_of_a_finished_turn, _after_their_backward),
    least=MUCH,
    moments=BEFORE_THE_OPTIMIZER,
    stays=None,
)


def _may_go_first(kept: list[Holder], facts: Facts) -> Group:
    """What the step before has computed and a variable still holds, such as its outputs or loss.
    What all later steps have as well, nothing has assigned again: they may read it.
    """
    left = kept
    if facts.times > facts.peak_time + LATER:
        left = [holder for holder in kept if not facts.is_there_at_the_end(holder)]
    nbytes = total(left)
    if facts.peak.moment != IN_BACKWARD:
        # The backward may begin without them: its own peak remains.
        nbytes = min(nbytes, facts.peak.total - facts.highest_in(IN_BACKWARD))
    changes: dict[str, Any] = {"nbytes": nbytes}
    held = holder_of_most(left)
    if held.is_attribute:
        name = name_of(held)
        changes["remedy"] = (
            f"`{name}` keeps them until the next forward assigns it again: let it go at the end of "
            f"a step ({name} = None), or keep a copy off the card (.detach().cpu())."
        )
    return Group(left, {"size": format_bytes(total(left))}, changes)


LEFT_OVER = Row(
    "Tensors of the step before are still there",
    "{size} at the peak were computed before the last backward, and nothing needs them after it: "
    "{kinds}.",
    "a variable keeps its tensor until it is assigned again, and that is after the next forward. "
    "`del` the outputs and the loss at the end of a step, or compute them in a function that "
    "returns numbers.",
    those(_is_of_a_finished_turn, _may_go_first),
    least=MUCH,
    condition="Without these tensors",
    costs_nothing=True,
)


def _of_a_gradient(holder: Holder, facts: Facts) -> bool:
    """Whether it was computed with a gradient that was taken with ``create_graph=True``, or such a
    gradient keeps the graph of an earlier turn.
    """
    if holder.category != "activations" or facts.is_a_row_of_weights(holder):
        return False  # torch.func.grad takes all gradients with a graph, and vmap one for each row
    if holder.made_in == IN_BACKWARD:
        return facts.has_second_derivatives
    return holder.turn in facts.differentiated_turns


def _of_second_derivatives(kept: list[Holder], facts: Facts) -> Group | None:
    # what this step has differentiated before may be a part of its loss
    older = [holder for holder in kept if holder.step < facts.peak.step]
    held = holder_of_most(older or kept)
    # of several backwards without a step in between
    again = [p for p in facts.forwards if p.differentiable and p.turn == facts.peak.turn]
    by_a_gradient = held.path.endswith(".grad") and len(again) >= SEVERAL
    if 2 * total(older) < total(kept) and not by_a_gradient:
        return Group(kept) if total(kept) >= DOMINATES * facts.peak.total else None
    for holder in facts.at_peak:
        is_old = holder.category == "gradients" and holder.turn < facts.peak.turn
        by_a_gradient = by_a_gradient or is_old
    remedy = OF_A_BACKWARD
    if not by_a_gradient and set(map(attrgetter("step"), older)) == {facts.peak.step - 1}:
        remedy = OF_VARIABLES
    elif held.box or (held.path and not by_a_gradient):
        remedy = detached(held)
    return Group(kept, changes={"remedy": remedy, "needed_in": "turn"})


OF_A_BACKWARD = (
    "after loss.backward(create_graph=True), each p.grad keeps the graph that it was computed "
    "with, and this graph keeps p: take the gradients by torch.autograd.grad(loss, "
    "list(model.parameters()), create_graph=True), or set p.grad to None as soon as it has "
    "been used (optimizer.zero_grad() after the step), and `del` the loss."
)
OF_VARIABLES = (
    "variables keep what the step before has differentiated until they are assigned again: `del` "
    "the gradients and the loss at the end of a step, or compute them in a function that returns "
    "numbers. Or take the gradients for fewer rows at once."
)
SECOND_DERIVATIVES = Row(
    "Gradients keep graphs of their own",
    "{size} at the peak were computed with gradients, for a second derivative (create_graph=True).",
    "leave create_graph=True out where the gradient itself is the result, as in the last derivative"
    " of several, or .detach() it at once: what is computed from it otherwise keeps all of this. "
    "If a loss needs it, take it for fewer rows (a gradient penalty), or for fewer inner steps "
    "(meta-learning, whose first-order method needs no create_graph).",
    those(_of_a_gradient, _of_second_derivatives),
    least=MUCH,
    stays=None,
)


def _idle_checkpoints(free: Sequence[Holder], facts: Facts) -> Group | None:
    """Checkpointing is switched on, and nothing was recomputed."""
    if facts.recomputed or not facts.had_backward:
        return None
    checkpoints = facts.structure.checkpoints
    kept = [h for h in free if h.category == "activations" and facts.in_layers(h)]
    trained_layers = any(map(facts.structure.in_layers, facts.structure.trained))
    # The reentrant method then runs the layers without gradients: they keep nothing, and learn
    # nothing.
    cut_off = checkpoints.reentrant and checkpoints.training and trained_layers
    is_large = total(kept) >= WORTH * facts.peak.total
    if not checkpoints.switched_on or not (is_large or cut_off):
        return None
    remedy = (
        "the model's forward does not use the switch, or does not call these modules: give "
        "checkpoint_layers the list that forward loops over."
    )
    if not checkpoints.training:
        remedy = "these modules are in eval mode, where it is not used: call model.train()."
    elif cut_off:
        remedy = (
            "the reentrant method needs an input with a gradient, and the layers' input is frozen, "
            "so the layers get no gradients and learn nothing: set "
            "gradient_checkpointing_kwargs={'use_reentrant': False}, or call "
            "model.enable_input_require_grads()."
        )
    elif not trained_layers:
        remedy = "no layer is trained, so nothing is recomputed: freeze less, or switch it off."
    return Group(kept, {"modules": len(checkpoints.switched_on)}, {"remedy": remedy})


IDLE_CHECKPOINTS = Row(
    "Checkpointing is on and does nothing",
    "it is switched on in {modules} modules, but no backward has recomputed anything; {size} of "
    "activations in the layers are kept.",
    "",
    _idle_checkpoints,
    least=0,
    stays=None,
)


GRAPHS_AT_ONCE = 3  # two may be the two sides of one loss


def _added_up(free: Sequence[Holder], facts: Facts) -> Group | None:
    """Losses that are added up over several forwards, and one backward for all of them."""
    passes = _alive_together(free, facts)
    if len(passes) < GRAPHS_AT_ONCE:
        return None
    holders = []  # the first forward's graph is there in any case
    for holder in free:
        if holder.category == "activations" and holder.first_sample >= passes[1].first_sample:
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
    if all(done.differentiable for done in facts.of_the_step):
        # Gradients have been taken already. In meta-learning, the forwards of the outer losses are
        # not differentiated twice.
        return []
    calls = defaultdict[tuple, list[ForwardPass]](list)
    for done in facts.of_the_step:
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
    first, last = (bisect_left(losses, done.first_sample) for done in (alive[0], alive[-1]))
    if first == last:
        return []
    return alive


def _samples_of_losses(facts: Facts) -> list[int]:
    """The first sample of each loss that is known, in order: one number with a graph, which a model
    has returned or which was made outside of models.
    """
    samples = []
    for holder in (*facts.at_peak, *facts.others):
        if holder.category != "activations" or holder.shape != ():
            continue
        made, maker = holder.first_sample, facts.maker_of(holder)
        inside = maker is not None and maker.has_weights and made < maker.end_sample
        if holder.is_result or not inside:
            samples.append(made)
    return sorted(samples)
