"""Causes: weights that are there more than once, second models, optimizer states, wide weights."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import torch

from ..units import format_bytes
from .cause import (
    ALMOST_ALL,
    DOMINATES,
    WORTH,
    Cause,
    is_copy_of_a_storage,
    lines_of,
    numel,
)
from .facts import IN_OPTIMIZER_STEP, INPUTS, READ_IN_PARTS, Facts, total
from .timeline import Holder

CALLED_IN_EACH_STEP = (
    "each step calls another model. If it follows the trained one (a target network, a teacher of "
    "averaged weights), the step needs it: keep it in a narrower dtype (copy.to(torch.bfloat16) "
    "halves float32), or move it to the card for its forward alone. "
)
MOMENTUM = 1.1  # numbers for each weight, with some numbers for the optimizer itself


def copy_in_another_module(facts: Facts) -> Cause | None:
    """Parameters of another module, with the shapes of the tracked model's."""
    copies = [c for c in copies_of_weights(facts) if facts.of_another_model(c[0])]
    if _calls_another_model(facts):
        remedy = CALLED_IN_EACH_STEP
    else:
        remedy = "for an EMA, keep the averaged weights on the host (.to('cpu')). "
    remedy += (
        "For a reference model or a teacher that never changes, compute its outputs once before "
        "the training (precompute_ref_log_probs=True in trl), or train with LoRA, where the model "
        "without its adapters is the reference."
    )
    return _copied(copies, facts, "parameters of a module that is not the tracked one", remedy)


def loaded_copy(facts: Facts) -> Cause | None:
    """A loaded checkpoint that stays alive after resume."""
    copies = []
    for copy in copies_of_weights(facts):
        if copy[0].step < 0 and not facts.of_another_model(copy[0]):
            copies.append(copy)
    remedy = (
        "if this is a loaded checkpoint, load it to the host (torch.load(..., map_location='cpu')),"
        " and `del` it after load_state_dict."
    )
    if facts.peak_time > 0:  # before the first step has ended, nothing is averaged
        remedy += (
            " If it is an average of the weights (an EMA), keep it on the host: "
            "parameter.detach().cpu()."
        )
    return _copied(copies, facts, "tensors that were there before this run read them", remedy)


def copy_made_here(facts: Facts) -> Cause | None:
    """A deepcopy, a clone of the state dict, an EMA's store(), a merge."""
    copies = []
    for copy in copies_of_weights(facts):
        first = copy[0]
        # random numbers of the same shapes, for one step, are no copy
        is_copied = first.computed_from == "parameters" or is_copy_of_a_storage(first)
        is_kept = is_copied or facts.time_of(first) < facts.peak_time
        if first.step >= 0 and is_kept and not facts.of_another_model(first):
            copies.append(copy)
    remedy = CALLED_IN_EACH_STEP if _calls_another_model(facts) else ""
    remedy += (
        "copy to the host (parameter.detach().cpu()), and `del` the copy as soon as it is written "
        "or restored. A deepcopy, a clone of the state dict, the store() of an EMA and a merge all "
        "hold the weights twice."
    )
    return _copied(copies, facts, "made in the tracked run and still alive", remedy)


def second_model(facts: Facts) -> Cause | None:
    """Parameters of a module that is not the tracked one, with other shapes."""
    if facts.structure is None or not facts.structure.shapes:
        return None
    copied = {id(holder) for copy in copies_of_weights(facts) for holder in copy}
    holders = []
    for holder in facts.at_peak:
        foreign = facts.of_another_model(holder) and holder.category == "other"
        if foreign and id(holder) not in copied:
            holders.append(holder)
    nbytes = total(holders)
    if nbytes < WORTH * facts.peak.total:
        return None
    evidence = (
        f"{format_bytes(nbytes)} at the peak are {len(holders)} parameters of modules that are not "
        "in the tracked model."
    )
    remedy = (
        "compute the second model's outputs once before the training, and free it; or load it in a "
        "narrower dtype (dtype=torch.bfloat16), which halves float32 weights."
    )
    name = "A second model is in memory"
    lines = lines_of(holders)
    stays = nbytes // 2
    condition = "If the second model's dtype is half as wide"
    return Cause(name, nbytes, evidence, remedy, lines, holders, stays=stays, condition=condition)


def first_optimizer_step(facts: Facts) -> Cause | None:
    """The optimizer makes its states at the peak."""
    if facts.peak.moment != IN_OPTIMIZER_STEP:
        return None
    states = []
    for holder in facts.at_peak:
        existed = not holder.op  # an optimizer had it when the block began
        if holder.step == facts.peak.step and is_state(holder, facts) and not existed:
            states.append(holder)
    nbytes = total(states)
    if nbytes < WORTH * facts.peak.total:
        return None
    evidence = (
        f"{format_bytes(nbytes)} of optimizer states are made in this step, and stay: the forwards "
        "before it ran without them."
    )
    if facts.numbers_of_states > MOMENTUM:
        remedy = (
            "SGD keeps no states, and SGD with momentum one number a parameter, where Adam keeps "
            "two. "
        )
    else:
        remedy = "without momentum, this optimizer would keep less, or nothing. "
    remedy += (
        "8-bit states (optim='adamw_8bit') and factored ones (Adafactor) keep less, and LoRA trains"
        " fewer parameters. A smaller batch and checkpointing do not change this."
    )
    name = "The first optimizer step makes its states"
    return Cause(name, nbytes, evidence, remedy, holders=states)


def is_state(holder: Holder, facts: Facts) -> bool:
    """Whether it is an optimizer's state, or zeros that will be one."""
    if holder.category == "optimizer":
        return True
    if facts.structure is None or facts.peak.moment != IN_OPTIMIZER_STEP:
        return False
    zeros = holder.category == "temporaries" and "zeros" in holder.op
    return zeros and holder.shape in facts.structure.shapes.values()


def wide_weights(facts: Facts) -> Cause | None:
    """Weights in float64, or frozen ones in float32."""
    if facts.structure is None:
        return None
    of_double = list[Holder]()
    of_frozen = list[Holder]()
    for holder in facts.at_peak:
        dtype = facts.structure.dtypes.get(holder.module)
        if holder.category != "parameters":
            continue
        if dtype is torch.float64:
            of_double.append(holder)
        elif dtype is torch.float32 and holder.module not in facts.trained:
            of_frozen.append(holder)
    name = "Weights are wider than needed"
    condition = "If these weights are half as wide"
    double, frozen = total(of_double), total(of_frozen)
    if double >= WORTH * facts.peak.total:
        evidence = f"{format_bytes(double)} of weights are in float64."
        remedy = f"model.float() halves them, to {format_bytes(double // 2)}, and all that follows."
        stays = double - double // 2
        return Cause(
            name, double, evidence, remedy, holders=of_double, stays=stays, condition=condition
        )
    if frozen < DOMINATES * facts.peak.total:
        return None
    evidence = f"{format_bytes(frozen)} of frozen weights are in float32."
    remedy = (
        "a frozen weight is never updated, so bf16 rounds it only once: load the model with "
        f"dtype=torch.bfloat16, which leaves {format_bytes(frozen // 2)} of these bytes."
    )
    stays = frozen - frozen // 2
    return Cause(
        name, frozen, evidence, remedy, holders=of_frozen, stays=stays, condition=condition
    )


def double_tensors(facts: Facts) -> Cause | None:
    """Tensors in float64 beside weights in a narrower dtype: numpy's numbers are float64, and so
    is what ``.double()`` makes.
    """
    if facts.structure is None or torch.float64 in facts.structure.dtypes.values():
        return None
    double = []
    for holder in facts.at_peak:
        if holder.dtype is torch.float64 and holder.category != "optimizer":
            double.append(holder)
    nbytes = total(double)
    if nbytes // 2 < WORTH * facts.peak.total:
        return None
    evidence = (
        f"{format_bytes(nbytes)} at the peak are in float64, though no weight is. What is "
        "computed from a float64 tensor and a float32 one is float64."
    )
    # Lines of data come first: float64 most often begins there.
    data = [h for h in double if h.category == "other" and not h.computed_from]
    of_training = [h for h in double if h.computed_from]
    if 2 * total(of_training) > nbytes:
        remedy = (
            "they were computed from gradients or weights alone, which are narrower, so .double() "
            "or dtype=torch.float64 has made them. In float32 they have half as many bytes."
        )
    elif data:
        remedy = (
            "numpy's numbers are float64 by default: torch.from_numpy(array.astype(np.float32)), "
            "or torch.tensor(..., dtype=torch.float32), halves them and all that is computed from "
            "them."
        )
    else:
        remedy = (
            "look for .double() and dtype=torch.float64, and for arrays of numpy, whose numbers "
            "are float64 by default. In float32, these tensors and all that is computed from them "
            "have half as many bytes."
        )
    lines = tuple(dict.fromkeys((*lines_of(data), *lines_of(double))))
    name = "Tensors are in float64"
    stays = nbytes - nbytes // 2
    condition = "If these tensors are in float32"
    return Cause(name, nbytes, evidence, remedy, lines, double, stays=stays, condition=condition)


def copies_of_weights(facts: Facts) -> list[list[Holder]]:
    """Groups of tensors with the shapes of all parameters, each made by one line in one step.

    The parameters of other models, whose layers have a line each, are one group if their names are
    known.
    """
    if facts.structure is None or not facts.structure.shapes:
        return []
    names = Counter(h.module for h in facts.at_peak if h.category == "parameters")
    twice = {name for name, times in names.items() if times > 1}
    groups = defaultdict[Any, list[Holder]](list)
    for holder in facts.at_peak:
        is_data = holder.op == READ_IN_PARTS or holder.module == INPUTS
        of_gradients = holder.computed_from == "gradients"
        can_be = holder.category == "other" or _is_copy_to_go_back_to(holder, twice)
        can_be = can_be or _is_copy_with_a_graph(holder, facts)
        if is_data or of_gradients or not can_be:
            continue
        if holder.module in facts.untrained:
            groups["other models"].append(holder)
        else:
            groups[holder.line, holder.step, facts.of_another_model(holder)].append(holder)
    copies = []
    for group in groups.values():
        if not facts.of_another_model(group[0]):
            copies += _copies_among(group, facts)[0]
            continue
        in_group = _copies_in_other_models(group, facts)
        if not in_group and group[0].module in facts.untrained:
            # An average of the weights beside a teacher: each has a name of its own.
            models = defaultdict[str, list[Holder]](list)
            for holder in group:
                models[holder.module.partition(".")[0]].append(holder)
            for model in models.values():
                in_group += _copies_in_other_models(model, facts)
        copies += in_group
    return copies


def _copies_among(holders: list[Holder], facts: Facts) -> tuple[list[list[Holder]], list[Holder]]:
    """The copies of the model's weights among ``holders``, and the rest of them."""
    copies, rest = [], holders
    while copy := _with_shapes_of_the_model(rest, facts):
        copies.append(copy)
        in_copy = set(map(id, copy))
        rest = [holder for holder in rest if id(holder) not in in_copy]
    return copies, rest


def _copies_in_other_models(holders: list[Holder], facts: Facts) -> list[list[Holder]]:
    """The copies among parameters of other models. A teacher with more layers of the same shapes,
    or with another head, is no copy: a copy has all shapes of the model, each as often.
    """
    shapes = facts.structure.shapes.values()
    copies, rest = _copies_among(holders, facts)
    have_different_sizes = len(set(map(len, copies))) > 1
    if have_different_sizes:
        return []  # a second model: twice as many layers, say, and only one head
    if not rest:
        return copies  # parameters may be missing in all copies, if no step reads them
    some_are_missing = any(len(copy) < len(shapes) for copy in copies)
    if some_are_missing:
        return []  # a second model, which has the rest in their place, such as another head
    more_of_the_same = sum(numel(holder.shape) for holder in rest if holder.shape in shapes)
    everything = sum(map(numel, shapes))
    return copies if more_of_the_same < (1 - ALMOST_ALL) * everything else []


def _is_copy_to_go_back_to(holder: Holder, twice: set[str]) -> bool:
    """Whether an optimizer keeps it among its states, or it has become the parameter later.

    ``twice``: the names of parameters that have two storages at the peak.
    """
    if holder.computed_from != "parameters":
        return False
    return holder.category == "optimizer" or holder.module in twice


def _is_copy_with_a_graph(holder: Holder, facts: Facts) -> bool:
    """Whether code outside of all modules has computed it from weights with a graph, and it is
    still there in another turn: an average without ``detach``. In its own turn, a forward may have
    used it.
    """
    if holder.category != "activations" or holder.computed_from != "parameters":
        return False
    return not holder.module and holder.turn < facts.peak.turn


def _calls_another_model(facts: Facts) -> bool:
    """Whether several steps call a model that none of them trains: a target network, a teacher."""
    trained = {done.number for done in facts.of_models if done.used}
    steps = defaultdict[int, set[int]](set)
    for done in facts.of_models:
        if done.number not in trained and not done.has_tracked_weights:
            steps[done.number].add(done.step)
    return any(len(of_one) > 1 for of_one in steps.values())


def _copied(copies: list[list[Holder]], facts: Facts, words: str, remedy: str) -> Cause | None:
    holders = [holder for copy in copies for holder in copy]
    nbytes = total(holders)
    if nbytes < WORTH * facts.peak.total:
        return None
    how_many = "a second copy" if len(copies) == 1 else f"{len(copies)} more copies"
    evidence = f"{format_bytes(nbytes)} at the peak are {how_many} of the model's weights, {words}."
    name = "The weights are there more than once"
    lines = lines_of(holders)
    if not remedy.startswith(CALLED_IN_EACH_STEP):
        return Cause(name, nbytes, evidence, remedy, lines, holders)
    stays = nbytes - nbytes // 2
    condition = "If this copy is half as wide"
    return Cause(name, nbytes, evidence, remedy, lines, holders, stays=stays, condition=condition)


def _with_shapes_of_the_model(holders: list[Holder], facts: Facts) -> list[Holder]:
    """Those of ``holders`` that have the shapes of the model's parameters, one for each.

    Empty if more than a tenth of the parameters' numbers has none.
    """
    structure = facts.structure
    missing = Counter(structure.shapes.values())
    everything = sum(numel(shape) * n for shape, n in missing.items())
    # shapes by bytes, for copies of whole storages, whose shape is not known
    of_size = defaultdict[int, set[tuple[int, ...]]](set)
    for name, shape in structure.shapes.items():
        of_size[numel(shape) * structure.dtypes[name].itemsize].add(shape)
    found, numbers = [], 0
    for holder in holders:
        shape = holder.shape
        is_whole_storage = is_copy_of_a_storage(holder)
        if not is_whole_storage and not (holder.dtype and holder.dtype.is_floating_point):
            continue  # labels are no weights
        if is_whole_storage:
            for possible in of_size[holder.nbytes]:
                if missing[possible] > 0:
                    shape = possible
        if missing[shape] > 0:
            missing[shape] -= 1
            numbers += numel(shape)
            found.append(holder)
    if numbers < ALMOST_ALL * everything:
        return []
    # One tensor that looks like the largest weight may be a batch, or its targets.
    is_known = any(_is_known_to_be_weights(holder, facts) for holder in found)
    return found if is_known or len(found) > 1 else []


def _is_known_to_be_weights(holder: Holder, facts: Facts) -> bool:
    if facts.of_another_model(holder) or is_copy_of_a_storage(holder):
        return True
    return holder.computed_from == "parameters"
