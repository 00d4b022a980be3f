"""Causes: graphs that nobody needs, or that need not be there at once."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

from ..units import format_bytes
from .cause import WORTH, Cause, lines_of, lines_of_forwards
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
        if has_unused_graph and _no_backward_will_come(done, facts):
            unused.append(done)
    kept = [done for done in unused if done.kept_at_peak]
    if not kept:
        return None
    nbytes = sum(done.kept_at_peak for done in kept)
    if unused[0] is facts.forwards[0]:
        # What was made before the first call in the list belongs to earlier ones of a long
        # evaluation.
        of_all = sum(done.kept_at_peak for done in facts.forwards)
        nbytes += facts.peak.by_category["activations"] - of_all
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


def _no_backward_will_come(done: ForwardPass, facts: Facts) -> bool:
    """Whether it is known that no backward goes through this forward."""
    if done.step < facts.steps - 1:
        return True  # the optimizer has stepped twice since then
    same_line = [p for p in facts.forwards if p.line == done.line and p.has_graph and p is not done]
    trains = facts.had_backward or facts.had_optimizer_step
    if facts.ended and trains:
        return True
    if _is_new_to_the_training(done, facts):
        return True
    # Another call of this line was never used, or there is no training at all.
    never_used_before = any(p.step < facts.steps - 1 and not p.used for p in same_line)
    return never_used_before or (bool(same_line) and not trains)


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
    for done in facts.forwards:
        made = done.live_after - done.live_before
        finished = done.turn < facts.peak.turn and done.used and not done.differentiable
        if finished and done.has_weights and 2 * done.kept_at_peak > made > 0:
            kept.append(done)
            nbytes += min(done.kept_at_peak, made)
    if nbytes < MUCH * facts.peak.total:
        return None
    if graph_of_a_sum(facts):
        return None  # the same bytes, and it knows more of them
    evidence = (
        f"{format_bytes(nbytes)} at the peak are the graph of {len(kept)} forward"
        f"{'s' * (len(kept) > 1)} that a backward has been through already."
    )
    remedy = (
        "backward(retain_graph=True) keeps the graph for a second backward: leave it out, and "
        "detach what the second loss does not train, such as discriminator(fake.detach()) or "
        "hidden.detach(). Two losses of one graph can be added up, for one backward. `del` the "
        "loss and the outputs that the next forward does not need."
    )
    lines = lines_of_forwards(kept)
    return Cause("A graph is kept after its backward", nbytes, evidence, remedy, lines)


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
    """Forwards of one module and line in the peak's step, whose graphs were all alive after the
    last one: of those that there are most of.

    A forward that continues another one, as in backward through time, does not count.
    """
    calls = defaultdict[tuple[SourceLine | None, str], list[ForwardPass]](list)
    for done in facts.of_models:
        is_last = done is facts.forwards[-1]  # it may run now, with a graph that is not finished
        if done.step != facts.peak.step or done.chained or not (done.has_graph or is_last):
            continue
        together = calls[done.line, done.module]
        if together:
            previous = together[-1]
            kept = previous.live_after - previous.live_before
            if done.live_before < previous.live_before + kept // 2:
                if len(together) >= GRAPHS_AT_ONCE:
                    continue
                together.clear()
        together.append(done)
    found = max(calls.values(), key=len, default=[])
    # Nothing was computed between these calls, so there are no losses: one loss takes all outputs.
    one_loss = all(after.live_before == before.live_after for before, after in pairwise(found))
    return [] if one_loss else found


def gradients_for_no_optimizer(facts: Facts) -> Cause | None:
    """Weights that need a gradient, though no optimizer has them: a backbone, VGG in a loss."""
    if facts.optimized is None or facts.structure is None or not facts.steps:
        return None
    shapes_of_others = {h.shape for h in facts.at_peak if facts.of_another_model(h)}
    gradients = []
    for holder in facts.at_peak:
        if _is_unwanted(holder, facts) or _is_left(holder, facts, shapes_of_others):
            gradients.append(holder)
    nbytes = total(gradients)
    forwards = []
    for done in facts.forwards:
        # the graph of one that was given a gradient's path is needed for what comes before it
        if done.for_no_optimizer and done.used and not done.chained and done.kept_at_peak:
            forwards.append(done)
            nbytes += min(done.kept_at_peak, max(done.live_after - done.live_before, 0))
    if nbytes < WORTH * facts.peak.total:
        return None
    evidence = (
        f"{format_bytes(nbytes)} at the peak are gradients of weights that no optimizer has, or "
        "graphs that only such gradients need."
    )
    remedy = (
        "module.requires_grad_(False) for what is not trained (a backbone, the network of a "
        "perceptual loss, a teacher): its gradients, and the graph in front of the first trained "
        "layer, are then never made. A teacher's outputs can be computed under torch.no_grad()."
    )
    lines = lines_of_forwards(forwards)
    return Cause("Gradients are computed for no optimizer", nbytes, evidence, remedy, lines)


def _is_unwanted(holder: Holder, facts: Facts) -> bool:
    """Whether it is the gradient of a parameter that no optimizer has."""
    return holder.category == "gradients" and holder.module in (
        facts.structure.trained - facts.optimized
    )


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
