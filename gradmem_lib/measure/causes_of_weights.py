"""Causes: weights that are there more than once, second models, optimizer states, wide weights."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

import torch

from .cause import ALMOST_ALL, DOMINATES, Group, Row, is_copy_of_a_storage, those
from .facts import IN_OPTIMIZER_STEP, INPUTS, Facts, total
from .timeline import Holder

CALLED_IN_EACH_STEP = (
    "each step calls another model. If it follows the trained one (a target network, a teacher of "
    "averaged weights), the step needs it: keep it in a narrower dtype (copy.to(torch.bfloat16) "
    "halves float32), or move it to the card for its forward alone. "
)
TWINS = "twins"  # the group of such parameters
MOMENTUM = 1.1  # numbers for each weight, with some numbers for the optimizer itself


def _copies(free: Sequence[Holder], facts: Facts) -> Group | None:
    """An EMA, a reference model, a loaded checkpoint, a deepcopy, a clone of the state dict."""
    copies = []
    for copy in _copies_of_weights(free, facts):
        first = copy[0]
        # random numbers of the same shapes, for one step, are no copy
        is_kept = facts.time_of(first) < facts.peak_time
        is_twin = first.category == "parameters"
        if is_kept or is_twin or _is_known_to_be_weights(first, facts):
            copies.append(copy)
    holders = [holder for copy in copies for holder in copy]
    if not holders:
        return None
    how_many = f"{len(copies)} more copies"
    if len(copies) == 1:
        how_many = "a second copy"
    is_called = _calls_another_model(facts)
    words, remedy = "made in the tracked run and still alive", OF_THIS_RUN
    if holders[0].category == "parameters" and holders[0].module in facts.twins:
        is_called = True  # together with the rest of the model
        words, remedy = f"`{facts.twins[holders[0].module]}`, which nothing trains", OF_A_REFERENCE
    elif facts.of_another_model(holders[0]):
        words = "parameters of a module that is not the tracked one"
        remedy = OF_A_REFERENCE if is_called else OF_A_MODULE + OF_A_REFERENCE
    elif holders[0].step < 0:
        is_called = False
        words, remedy = "tensors that were there before this run read them", FROM_BEFORE
        if facts.peak_time > 0:  # before the first step has ended, nothing is averaged
            remedy += OF_AN_AVERAGE
    changes: dict[str, Any] = {"remedy": remedy}
    if is_called:
        changes["remedy"] = CALLED_IN_EACH_STEP + remedy
        changes["stays"] = total(holders) - total(holders) // 2
        changes["condition"] = "If this copy is half as wide"
    return Group(holders, {"how_many": how_many, "origin": words}, changes)


OF_A_MODULE = "for an EMA, keep the averaged weights on the host (.to('cpu')). "
OF_A_REFERENCE = (
    "For a reference model or a teacher that never changes, compute its outputs once before the "
    "training (precompute_ref_log_probs=True in trl), or train with LoRA, where the model without "
    "its adapters is the reference."
)
FROM_BEFORE = (
    "if this is a loaded checkpoint, load it to the host (torch.load(..., map_location='cpu')), and"
    " `del` it after load_state_dict."
)
OF_AN_AVERAGE = (
    " If it is an average of the weights (an EMA), keep it on the host: parameter.detach().cpu()."
)
OF_THIS_RUN = (
    "copy to the host (parameter.detach().cpu()), and `del` the copy as soon as it is written or "
    "restored. A deepcopy, a clone of the state dict, the store() of an EMA and a merge all hold "
    "the weights twice."
)
COPIES = Row(
    "The weights are there more than once",
    "{size} at the peak are {how_many} of the model's weights, {origin}.",
    OF_THIS_RUN,
    _copies,
)


def _calls_another_model(facts: Facts) -> bool:
    """Whether several steps call a model that none of them trains: a target network, a teacher."""
    trained = {done.number for done in facts.of_models if done.used}
    steps = defaultdict[int, set[int]](set)
    for done in facts.of_models:
        if done.number not in trained and not done.has_tracked_weights:
            steps[done.number].add(done.step)
    return any(len(of_one) > 1 for of_one in steps.values())


def _copies_of_weights(free: Iterable[Holder], facts: Facts) -> list[list[Holder]]:
    """Groups of tensors with the shapes of all parameters, each computed from the weights or made
    by one line. While an average is renewed, some of its tensors are new ones.

    The parameters of other models, whose layers have a line each, are one group if their names are
    known.
    """
    if not facts.structure.shapes:
        return []
    names = Counter(h.module for h in facts.at_peak if h.category == "parameters")
    twice = {name for name, times in names.items() if times > 1}
    groups = defaultdict[Any, list[Holder]](list)
    for holder in free:
        # a model of an earlier round was updated
        if holder.category == "parameters" and holder.module in facts.twins and holder.updated < 0:
            groups[TWINS].append(holder)
        elif holder.module in facts.untrained:
            groups["other models"].append(holder)
        elif _may_be_of_a_copy(holder, twice, facts):
            made_by = holder.computed_from or holder.line
            groups[made_by, facts.of_another_model(holder)].append(holder)
    copies = []
    for place, group in groups.items():
        if place == TWINS:
            copies.append(group)
        elif facts.of_another_model(group[0]):
            copies += _copies_in_other_models(group, facts) or _copies_by_name(group, facts)
        else:
            copies += _copies_among(group, facts)[0]
    return copies


def _copies_by_name(holders: list[Holder], facts: Facts) -> list[list[Holder]]:
    """The copies in models with a name each, such as an average of the weights and a teacher."""
    models = defaultdict[str, list[Holder]](list)
    for holder in holders:
        models[holder.module.partition(".")[0]].append(holder)
    copies = []
    for model in models.values():
        copies += _copies_in_other_models(model, facts)
    return copies


def _may_be_of_a_copy(holder: Holder, twice: set[str], facts: Facts) -> bool:
    """Whether it is loose, or an optimizer keeps it to go back to, or it has become the parameter
    later, or it is an average without ``detach``: code outside of all modules has computed it with
    a graph, and it is still there in another turn. In its own turn, a forward may have used it.

    ``twice``: the names of parameters that have two storages at the peak.
    """
    if holder.category == "other":
        is_data = holder.in_parts or holder.module == INPUTS
        return not is_data and holder.computed_from != "gradients"
    if holder.computed_from != "parameters":
        return False
    if holder.category == "activations":
        return not holder.module and holder.turn < facts.peak.turn
    return holder.category == "optimizer" or holder.module in twice


def _copies_among(holders: list[Holder], facts: Facts) -> tuple[list[list[Holder]], list[Holder]]:
    """The copies of the model's weights among ``holders``, and the rest of them."""
    copies, rest = [], holders
    while copy := _one_of_each(rest, facts):
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
    if len(set(map(len, copies))) > 1:
        return []  # a second model: twice as many layers, say, and only one head
    some_are_missing = any(len(copy) < len(shapes) for copy in copies)
    if rest and some_are_missing:
        return []  # a second model, which has the rest in their place, such as another head
    more_of_the_same = sum(prod(holder.shape) for holder in rest if holder.shape in shapes)
    return copies if more_of_the_same < (1 - ALMOST_ALL) * sum(map(prod, shapes)) else []


def _one_of_each(holders: list[Holder], facts: Facts) -> list[Holder]:
    """Those of ``holders`` that have as many numbers as the model's parameters, one for each.

    Empty if more than a tenth of the parameters' numbers has none.
    """
    structure = facts.structure
    everything = sum(map(prod, structure.shapes.values()))
    missing = Counter(structure.shapes.values())
    # shapes by bytes, for copies of whole storages, whose shape is not known
    of_size = defaultdict[int, set[tuple[int, ...]]](set)
    for name, shape in structure.shapes.items():
        of_size[structure.nbytes(name)].add(shape)
    found = []
    for holder in holders:
        possible = {holder.shape}
        if is_copy_of_a_storage(holder):
            possible = of_size[holder.nbytes]
        elif not holder.dtype or not holder.dtype.is_floating_point:
            continue  # labels are no weights
        for shape in possible:
            if missing[shape] > 0:
                missing[shape] -= 1
                found.append(holder)
                break
    if sum(prod(shape) * n for shape, n in missing.items()) > (1 - ALMOST_ALL) * everything:
        return []
    # One tensor that looks like the largest weight may be a batch, or its targets.
    is_known = any(_is_known_to_be_weights(holder, facts) for holder in found)
    if not is_known and len(found) == 1:
        return []
    return found


def _is_known_to_be_weights(holder: Holder, facts: Facts) -> bool:
    if facts.of_another_model(holder) or is_copy_of_a_storage(holder):
        return True
    return holder.computed_from == "parameters"


def _of_another_model(holder: Holder, facts: Facts) -> bool:
    return facts.of_another_model(holder) and holder.category == "other"


SECOND_MODEL = Row(
    "A second model is in memory",
    "{size} at the peak are {count} parameters of modules that are not in the tracked model.",
    "compute the second model's outputs once before the training, and free it; or load it in a "
    "narrower dtype (dtype=torch.bfloat16), which halves float32 weights.",
    those(_of_another_model),
    stays=0.5,
    condition="If the second model's dtype is half as wide",
)


def _is_new_state(holder: Holder, facts: Facts) -> bool:
    existed = not holder.op  # an optimizer had it when the block began
    return holder.step == facts.peak.step and is_state(holder, facts) and not existed


def _instead_of_these(states: list[Holder], facts: Facts) -> Group:
    less = "without momentum, this optimizer would keep less, or nothing. "
    if facts.numbers_of_states > MOMENTUM:
        less = (
            "SGD keeps no states, and SGD with momentum one number a parameter, where Adam keeps "
            "two. "
        )
    return Group(states, changes={"remedy": less + FIRST_STATES.remedy})


FIRST_STATES = Row(
    "The first optimizer step makes its states",
    "{size} of optimizer states are made in this step, and stay: the forwards before it ran without"
    " them.",
    "8-bit states (optim='adamw_8bit') and factored ones (Adafactor) keep less, and LoRA trains "
    "fewer parameters. A smaller batch and checkpointing do not change this.",
    those(_is_new_state, _instead_of_these),
    moments=(IN_OPTIMIZER_STEP,),
)


def is_state(holder: Holder, facts: Facts) -> bool:
    """Whether it is an optimizer's state, or zeros that will be one."""
    if holder.category == "optimizer":
        return True
    if facts.peak.moment != IN_OPTIMIZER_STEP:
        return False
    zeros = holder.category == "temporaries" and "zeros" in holder.op
    return zeros and holder.shape in facts.structure.shapes.values()


def _is_wide(holder: Holder, facts: Facts) -> bool:
    is_frozen = holder.category == "parameters" and holder.module not in facts.trained
    return is_frozen and facts.structure.dtypes.get(holder.module) is torch.float32


WIDE = Row(
    "Weights are wider than needed",
    "{size} of frozen weights are in float32.",
    "a frozen weight is never updated, so bf16 rounds it only once: load the model with "
    "dtype=torch.bfloat16, which leaves half of these bytes.",
    those(_is_wide),
    least=DOMINATES,
    stays=0.5,
    condition="If these weights are half as wide",
)
