"""Causes: what a script has set without an effect: gradients without an optimizer, checkpoints that
nothing recomputes.
"""

from __future__ import annotations

from ..units import format_bytes
from .cause import WORTH, Cause, lines_of_forwards
from .facts import Facts, total
from .made_by_forwards import ONE_OF_EACH_LAYER, made_by, needed_without_a_graph
from .timeline import Holder


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
    name = "Gradients are computed for no optimizer"
    graphs = made_by(forwards, facts)
    stays = needed_without_a_graph(graphs, facts)
    condition = f"If these gradients and graphs are not made, {ONE_OF_EACH_LAYER}"
    holders = gradients + graphs
    return Cause(name, nbytes, evidence, remedy, lines, holders, stays=stays, condition=condition)


def _is_unwanted(holder: Holder, facts: Facts) -> bool:
    """Whether it is the gradient of a parameter that no optimizer has."""
    if holder.category != "gradients" or holder.module not in facts.structure.shapes:
        return False
    return holder.module not in facts.optimized


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
    kept = [holder for holder in facts.activations if facts.in_layers(holder)]
    nbytes = total(kept)
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
    name = "Checkpointing is on and does nothing"
    return Cause(name, nbytes, evidence, remedy, holders=kept, stays=None)
