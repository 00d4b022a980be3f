"""Causes: graphs that nobody needs, or that need not be there at once."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

from ..units import format_bytes
from .cause import DOMINATES, LINES, WORTH, Cause, in_words, lines_of, lines_of_forwards
from .facts import IN_BACKWARD, LOSS, TRAINING_FORWARD, Facts, total
from .source_lines import SourceLine
from .timeline import ForwardPass, Holder

MUCH = 0.1  # of the peak; the outputs of the last forward are often less
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
    if unused[0] is facts.forwards[0]:
        # The list has only the last forwards of a long evaluation. Activations that are of none of
        # them were made by earlier ones.
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
    return Cause(
        "A forward's graph is never used", nbytes, evidence, remedy, lines_of_forwards(blamed)
    )


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
    return Cause("A forward's graph is never used", nbytes, evidence, remedy, lines_of(kept))


def is_unused(done: ForwardPass, facts: Facts) -> bool:
    """Whether it is known that no backward goes through this forward."""
    if done.used:
        return False
    if done.step < facts.steps - 1:
        return True  # the optimizer has stepped twice since then
    if facts.ended and _trains(facts):
        return True
    if _is_new_to_the_training(done, facts):
        return True
    # Another call of this line was never used.
    for other in facts.forwards:
        if _calls_the_same(other, done) and other.step < facts.steps - 1 and not other.used:
            return True
    return False


def _calls_the_same(other: ForwardPass, done: ForwardPass) -> bool:
    """Whether another forward with a graph is of the same module, and called by the same line."""
    if other is done or not other.has_graph:
        return False
    return (other.line, other.number) == (done.line, done.number)


def _trains(facts: Facts) -> bool:
    return facts.had_backward or facts.had_optimizer_step


def _may_be_unused(done: ForwardPass, facts: Facts) -> bool:
    """Whether a line is called again and again, and no backward has come so far.

    If there is an optimizer and the run goes on, its first backward may still come.
    """
    if _trains(facts) or (facts.optimized is not None and not facts.ended):
        return False
    return any(_calls_the_same(other, done) for other in facts.forwards)


def _is_new_to_the_training(done: ForwardPass, facts: Facts) -> bool:
    """Whether two steps at least have used forwards, all of other lines than this one."""
    used = [p for p in facts.forwards if p.used and p.step < done.step]
    steps = {p.step for p in used}
    return len(steps) >= 2 and done.line not in {p.line for p in used}


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
        finished = done.turn < facts.peak.turn and done.used and not done.differentiable
        # If the graph were free, almost nothing of what the forward has made would be there.
        most_is_there = 2 * done.inside_at_peak > done.made > 0
        if finished and is_recent and most_is_there:
            kept.append(done)
            nbytes += min(done.inside_at_peak, done.made)
    if nbytes < MUCH * facts.peak.total:
        return None
    if graph_of_a_sum(facts):
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
    return Cause("A graph is kept after its backward", nbytes, evidence, remedy, lines)


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
    if nbytes < MUCH * facts.peak.total:
        return None
    words = list(dict.fromkeys(in_words(holder) for holder in left))
    evidence = (
        f"{format_bytes(nbytes)} at the peak were computed before the last backward, and nothing "
        f"needs them after it: {'; '.join(words[:LINES])}."
    )
    remedy = (
        "a variable keeps its tensor until it is assigned again, and that is after the next "
        "forward. `del` the outputs and the loss at the end of a step, or compute them in a "
        "function that returns numbers."
    )
    lines = lines_of(left)
    return Cause("Tensors of the step before are still there", nbytes, evidence, remedy, lines)


def _finished_before(turn: int, facts: Facts) -> bool:
    """Whether a backward has been through all forwards of a turn, and needs them no more."""
    of_turn = [done for done in facts.of_models if done.turn == turn]
    return all(done.used and not done.differentiable for done in of_turn if done.has_graph)


def several_graphs(facts: Facts) -> Cause | None:
    """Losses that are added up over several forwards, and one backward for all of them."""
    if facts.peak.moment not in (TRAINING_FORWARD, LOSS, IN_BACKWARD):
        return None
    passes = _alive_together(facts)
    if len(passes) < GRAPHS_AT_ONCE:
        return None
    each = (passes[-1].live_before - passes[0].live_before) // (len(passes) - 1)
    nbytes = each * (len(passes) - 1)
    if nbytes < WORTH * facts.peak.total:
        return None
    if graph_of_a_sum(facts):
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
    return Cause("Losses are added up before one backward", nbytes, evidence, remedy, lines)


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
    return Cause("One backward goes through a chain of forwards", nbytes, evidence, remedy, lines)


def graphs_of_gradients(facts: Facts) -> Cause | None:
    """Gradients that were taken with ``create_graph=True``, and what they keep."""
    if not any(done.differentiable for done in facts.forwards):
        return None
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
    return Cause("Gradients keep graphs of their own", nbytes, evidence, remedy, lines)


def graph_of_a_sum(facts: Facts) -> Cause | None:
    """A metric that is added up with its graph, beside a loss whose backward runs each time."""
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
        "a backward of its own, and are still alive: something that was made from the outputs has "
        "a graph."
    )
    remedy = (
        "add up or keep numbers for the log, not tensors with a graph: .item() or .detach() on the "
        "metric. If the script has backward(retain_graph=True), leave that argument out."
    )
    if any(done.chained for done in facts.forwards):
        remedy += (
            " If each forward takes a state from the one before it, the state keeps them: detach it"
            " first (hidden = hidden.detach())."
        )
    return Cause("A sum for the log keeps its graphs", nbytes, evidence, remedy, lines_of(kept))


def _finished_turns(facts: Facts) -> set[int]:
    """The turns of the peak's step whose forwards no later backward needs."""
    finished: set[int] = set()
    needed: set[int] = set()
    for done in facts.of_models:
        if done.step != facts.peak.step or done.turn >= facts.peak.turn:
            continue
        if done.used and not done.differentiable:
            finished.add(done.turn)
        else:
            needed.add(done.turn)
    return finished - needed


def _alive_together(facts: Facts) -> list[ForwardPass]:
    """Forwards in the peak's step whose graphs were all alive after the last one.

    They are calls of one module by one line: of several such groups, the largest. A forward that
    continues another one, as in backward through time, does not count.
    """
    calls = defaultdict[tuple[SourceLine | None, int], list[ForwardPass]](list)
    for done in facts.of_models:
        is_last = done is facts.forwards[-1]  # it may run now, with a graph that is not finished
        if done.step != facts.peak.step or done.chained or not (done.has_graph or is_last):
            continue
        if is_unused(done, facts):
            continue  # there is no loss
        together = calls[done.line, done.number]
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
    return found if any(_loss_between(*pair, facts) for pair in pairwise(found)) else []


def _outer_forwards(facts: Facts) -> list[ForwardPass]:
    """In the peak's step, the forwards whose loss is not differentiated twice.

    In meta-learning, these are the forwards of the outer losses.
    """
    return [p for p in facts.of_models if p.step == facts.peak.step and not p.differentiable]


def _loss_between(before: ForwardPass, after: ForwardPass, facts: Facts) -> bool:
    """Whether bytes came or went between two forwards, other than by forwards of models.

    They come if the loss is computed there. They go if the model computes the loss itself, and the
    rest of its outputs is dropped.
    """
    order = facts.of_models
    change = after.live_before - before.live_after
    for done in order[order.index(before) + 1 : order.index(after)]:
        change -= done.live_after - done.live_before
    return change != 0


def gradients_for_no_optimizer(facts: Facts) -> Cause | None:
    """Weights that need a gradient, though no optimizer has them: a backbone, VGG in a loss."""
    if facts.optimized is None or facts.structure is None:
        return None
    shapes_of_others = {h.shape for h in facts.at_peak if facts.of_another_model(h)}
    gradients = []
    for holder in facts.at_peak:
        if _is_unwanted(holder, facts) or _is_left(holder, facts, shapes_of_others):
            gradients.append(holder)
    nbytes = total(gradients)
    forwards = []
    for done in facts.of_models:
        # A chained forward needs its graph: gradients go through it to what comes before.
        needless = done.for_no_optimizer and done.has_graph and not done.chained
        # If the run has ended without a backward, this is an unused forward instead.
        has_backward = done.used or not facts.ended
        if needless and has_backward and done.inside_at_peak:
            forwards.append(done)
            nbytes += min(done.inside_at_peak, max(done.made, 0))
    if nbytes < WORTH * facts.peak.total:
        return None
    evidence = (
        f"{format_bytes(nbytes)} at the peak are gradients of weights that no optimizer has"
        f"{'' if facts.steps else ' so far'}, or graphs that only such gradients need."
    )
    remedy = (
        "module.requires_grad_(False) for what is not trained (a backbone, the network of a "
        "perceptual loss, a teacher): its gradients, and the graph in front of the first trained "
        "layer, are then never made. What is there from before goes with zero_grad() on the whole "
        "model. A teacher's outputs can be computed under torch.no_grad()."
    )
    lines = lines_of_forwards(forwards)
    return Cause("Gradients are computed for no optimizer", nbytes, evidence, remedy, lines)


def _is_unwanted(holder: Holder, facts: Facts) -> bool:
    """Whether it is the gradient of a parameter that no optimizer has, or that was frozen later."""
    if holder.category != "gradients" or holder.module not in facts.structure.shapes:
        return False
    return holder.module not in facts.structure.trained & facts.optimized


def _is_left(holder: Holder, facts: Facts, shapes: set) -> bool:
    """Whether the backward of an earlier step has made it for a parameter of another model."""
    of_earlier_step = 0 <= holder.step < facts.peak.step and holder.module == "(backward)"
    return of_earlier_step and holder.category == "temporaries" and holder.shape in shapes


def idle_checkpoints(facts: Facts) -> Cause | None:
    """Checkpointing is switched on, and nothing was recomputed."""
    if facts.structure is None:
        return None
    checkpoints = facts.structure.checkpoints
    if not checkpoints.switched_on or facts.recomputed or not facts.had_backward:
        return None
    nbytes = total(h for h in facts.at_peak if h.category == "activations" and facts.in_layers(h))
    trained_layers = any(facts.structure.in_layers(name) for name in facts.structure.trained)
    # The reentrant method then runs the layers without gradients: they keep nothing, and learn
    # nothing.
    cut_off = bool(checkpoints.reentrant and checkpoints.training and trained_layers)
    if nbytes < WORTH * facts.peak.total and not cut_off:
        return None
    evidence = (
        f"it is switched on in {len(checkpoints.switched_on)} modules, but no backward has "
        f"recomputed anything; {format_bytes(nbytes)} of activations in the layers are kept."
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
    else:
        remedy = (
            "the model's forward does not use the switch, or does not call these modules: give "
            "checkpoint_layers the list that forward loops over."
        )
    return Cause("Checkpointing is on and does nothing", nbytes, evidence, remedy)
