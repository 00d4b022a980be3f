"""Causes: gradients that are there more than once, longer than needed, or for nothing."""

from __future__ import annotations

from collections.abc import Sequence

from .cause import BEFORE_THE_OPTIMIZER, MUCH, WORTH, Group, Row, lines_of_forwards, those
from .facts import IN_BACKWARD, IN_OPTIMIZER_STEP, LOSS, TRAINING_FORWARD, Facts, total
from .made_by_forwards import ONE_FORWARD, largest_forward, made_by
from .timeline import Holder


def _is_copy(holder: Holder, facts: Facts) -> bool:
    """Whether it is a copy of a gradient, or what else was computed from gradients alone."""
    if holder.computed_from != "gradients":
        return False
    # as the directions of sharpness-aware minimization, which some keep as states
    is_kept = holder.category == "optimizer" and holder.turn < facts.peak.turn
    before_a_step = facts.peak.moment in BEFORE_THE_OPTIMIZER
    return holder.category in ("gradients", "other") or (is_kept and before_a_step)


def _beside_gradients(copies: list[Holder], facts: Facts) -> Group | None:
    turns = {holder.turn for holder in copies}
    originals = []
    for holder in facts.at_peak:
        if holder.category == "gradients" and not holder.computed_from:
            originals.append(holder)
    there_twice = total(originals) >= WORTH * facts.peak.total
    if not there_twice and turns == {facts.peak.turn}:
        return None  # they have taken the gradients' place
    instead = [holder for holder in copies if holder.category == "gradients"]
    remedy = COPIED_GRADIENTS.remedy
    if 2 * total(instead) > total(copies):
        # An optimizer reads the copies, so the gradients that they were made from can go.
        remedy = (
            "set p.grad = None as soon as a copy in another dtype has taken its place, for one "
            "weight after another."
        )
    elif len(turns) > 1:
        remedy = (
            "keep one running sum for the gradients of several backwards, or a number of each, "
            "such as p.grad.norm().item(), instead of a list of copies."
        )
    elif max(turns) < facts.peak.turn:
        remedy = (
            "a method that goes back later, such as SAM, needs them only then: keep them off the "
            "card (e.cpu(), and e.to(p.device) on the way back), or in bf16, or for a part of the "
            "weights, such as the normalization layers."
        )
    return Group(copies, changes={"remedy": remedy})


COPIED_GRADIENTS = Row(
    "The gradients are there more than once",
    "{size} at the peak were computed from gradients alone, as a copy or in another dtype.",
    "take one gradient after another instead of all at once: p.grad.norm() of each for a norm "
    "(torch.nn.utils.clip_grad_norm_ does that).",
    those(_is_copy, _beside_gradients),
    stays=None,
)


def _is_used(holder: Holder, facts: Facts) -> bool:
    """Whether it is a gradient that the optimizer has used. One that no optimizer has is a cause of
    its own.
    """
    if holder.category != "gradients" or not 0 <= holder.step < facts.peak.step:
        return False
    return facts.optimized is None or holder.module in facts.optimized


def _until_the_backward(old: list[Holder], facts: Facts) -> Group:
    # A backward makes them again: its own peak remains.
    later = max(facts.highest_in(IN_BACKWARD), facts.highest_in(IN_OPTIMIZER_STEP))
    nbytes = min(total(old), facts.peak.total - later)
    return Group(old, changes={"nbytes": nbytes, "needed_in": "step"})


GRADIENTS_WAIT = Row(
    "Gradients wait during the next forward",
    "{size} at the peak are gradients that the optimizer has already used.",
    "call optimizer.zero_grad() right after optimizer.step(), not before the next backward, and "
    "leave set_to_none as it is (True).",
    those(_is_used, _until_the_backward),
    least=MUCH,
    moments=(TRAINING_FORWARD, LOSS),
)


def _for_no_optimizer(free: Sequence[Holder], facts: Facts) -> Group | None:
    """Weights that need a gradient, though no optimizer has them: a backbone, VGG in a loss."""
    if facts.optimized is None:
        return None
    shapes_of_others = {h.shape for h in facts.at_peak if facts.of_another_model(h)}
    gradients = []
    for holder in free:
        if _is_unwanted(holder, facts) or _is_left(holder, facts, shapes_of_others):
            gradients.append(holder)
    forwards = []
    for done in facts.of_models:
        # A chained forward needs its graph: gradients go through it to what comes before.
        needless = done.for_no_optimizer and done.has_graph and not done.chained
        # If the run has ended without a backward, this is an unused forward instead.
        if needless and (done.used or not facts.ended):
            forwards.append(done)
    graphs = made_by(forwards, free, facts)
    changes = {"lines": lines_of_forwards(forwards), "stays": largest_forward(graphs, facts)}
    so_far = "" if facts.steps else " so far"
    return Group(gradients + graphs, {"so_far": so_far}, changes)


FOR_NO_OPTIMIZER = Row(
    "Gradients are computed for no optimizer",
    "{size} at the peak are gradients of weights that no optimizer has{so_far}, or graphs that "
    "only such gradients need.",
    "module.requires_grad_(False) for what is not trained (a backbone, the network of a perceptual "
    "loss, a teacher): its gradients, and the graph in front of the first trained layer, are then "
    "never made. What is there from before goes with zero_grad() on the whole model. A teacher's "
    "outputs can be computed under torch.no_grad(). What is to be trained, such as layers that "
    "were added later, has to be given to the optimizer: optimizer.add_param_group({'params': "
    "layer.parameters()}).",
    _for_no_optimizer,
    condition=f"If these gradients and graphs are not made, {ONE_FORWARD}",
)


def _is_unwanted(holder: Holder, facts: Facts) -> bool:
    """Whether it is the gradient of a parameter that no optimizer has."""
    if holder.category != "gradients" or holder.module not in facts.structure.shapes:
        return False
    return holder.module not in facts.optimized


def _is_left(holder: Holder, facts: Facts, shapes: set) -> bool:
    """Whether the backward of an earlier step has made it for a parameter of another model."""
    of_earlier_step = 0 <= holder.step < facts.peak.step and holder.module == "(backward)"
    return of_earlier_step and holder.category == "temporaries" and holder.shape in shapes
