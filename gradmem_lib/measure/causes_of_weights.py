"""Causes: weights that are there more than once, second models, optimizer states, wide weights."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
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
COPIED = "The weights are there more than once"
EVIDENCE = "{size} at the peak are {how_many} of the model's weights, {origin}."
OF_A_REFERENCE = (
    "For a reference model or a teacher that never changes, compute its outputs once before the "
    "training (precompute_ref_log_probs=True in trl), or train with LoRA, where the model without "
    "its adapters is the reference."
)
OF_A_MODULE = "for an EMA, keep the averaged weights on the host (.to('cpu')). " + OF_A_REFERENCE
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


def _copies(
    which: Callable[[Holder, Facts], bool],
    origin: str,
    remedy: str,
    *,
    if_called: str = "",
    in_later_steps: str = "",
) -> Row:
    """A row about whole copies of the model among the storages of which ``which`` is true.

    ``if_called``: the remedy for a copy that each step calls. ``in_later_steps``: a sentence that
    is added if the peak is not in the first step.
    """

    def find(found: list[Holder], facts: Facts) -> Group | None:
        models = defaultdict[str, list[Holder]](list)
        for holder in found:
            name = ""
            if holder.module in facts.untrained:  # such as an average of the weights, and a teacher
                name = holder.module.partition(".")[0]
            models[name].append(holder)
        holders, count = list[Holder](), 0
        for model in models.values():
            alike, copies = _how_many(model, facts)
            if copies:
                count += copies
                holders += alike
        if not count:
            return None
        changes: dict[str, Any] = {"remedy": remedy}
        if facts.peak_time > 0:
            changes["remedy"] += in_later_steps
        if if_called and _calls_another_model(facts):
            changes["remedy"] = CALLED_IN_EACH_STEP + if_called
            changes["stays"] = total(holders) - total(holders) // 2
            changes["condition"] = "If this copy is half as wide"
        how_many = "a second copy" if count == 1 else f"{count} more copies"
        return Group(holders, {"how_many": how_many, "origin": origin}, changes)

    return Row(COPIED, EVIDENCE, remedy, those(which, find))


def _calls_another_model(facts: Facts) -> bool:
    """Whether several steps call a model that none of them trains: a target network, a teacher."""
    trained = {done.number for done in facts.of_models if done.used}
    steps = defaultdict[int, set[int]](set)
    for done in facts.of_models:
        if done.number not in trained and not done.has_tracked_weights:
            steps[done.number].add(done.step)
    return any(len(of_one) > 1 for of_one in steps.values())


def _how_many(model: list[Holder], facts: Facts) -> tuple[list[Holder], int]:
    """The tensors that are as large as a weight, and how many copies of the model they are.

    A teacher with more layers of the same shapes, or with another head, is no copy.
    """
    structure = facts.structure
    # A storage that was copied byte by byte has no shape.
    shape_of = {structure.nbytes(name): shape for name, shape in structure.shapes.items()}
    has_shapes = not any(map(is_copy_of_a_storage, model))

    def place_of(shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape if has_shapes else (prod(shape),)

    weights = Counter(map(place_of, structure.shapes.values()))
    found, numbers = Counter[tuple[int, ...]](), 0
    alike = []
    for holder in model:
        shape = holder.shape
        if is_copy_of_a_storage(holder):
            shape = shape_of.get(holder.nbytes, shape)
        found[place_of(shape)] += 1
        numbers += prod(shape)
        if place_of(shape) in weights:
            alike.append(holder)
    everything = sum(map(prod, structure.shapes.values()))
    count = 0
    while everything:
        more = sum(prod(shape) * min(found[shape], n * (count + 1)) for shape, n in weights.items())
        if more < ALMOST_ALL * everything * (count + 1):
            break
        count += 1
    others = abs(numbers - count * everything)
    if facts.of_another_model(model[0]) and others > (1 - ALMOST_ALL) * everything:
        count = 0
    # One tensor that looks like the largest weight may be a batch, or its targets.
    if len(alike) == 1 and not _is_known_to_be_weights(alike[0], facts):
        count = 0
    return alike, count


def _is_known_to_be_weights(holder: Holder, facts: Facts) -> bool:
    if facts.of_another_model(holder) or is_copy_of_a_storage(holder):
        return True
    return holder.computed_from == "parameters"


def _of_another_model(holder: Holder, facts: Facts) -> bool:
    return facts.of_another_model(holder) and holder.category == "other"


def _is_loose(holder: Holder, facts: Facts) -> bool:
    """Whether it is known to be weights, or has the shape of one and is no data."""
    is_data = holder.in_parts or holder.module == INPUTS or holder.computed_from == "gradients"
    if holder.category != "other" or is_data:
        return False
    if _is_known_to_be_weights(holder, facts):
        return not facts.of_another_model(holder)
    is_float = holder.dtype is not None and holder.dtype.is_floating_point
    return is_float and holder.shape in facts.structure.shapes.values()


def _was_copied(holder: Holder, facts: Facts) -> bool:
    """Whether this run has made it: it is loose, or an optimizer keeps it to go back to, or it has
    become the parameter later, or it is an average without ``detach``: code outside of all modules
    has computed it with a graph, and it is still there in another turn. In its own turn, a forward
    may have used it.
    """
    if _is_loose(holder, facts):
        # random numbers of the same shapes, for one step, are no copy
        is_kept = facts.time_of(holder) < facts.peak_time
        return holder.step >= 0 and (is_kept or _is_known_to_be_weights(holder, facts))
    if holder.computed_from != "parameters":
        return False
    if holder.category == "activations":
        return not holder.module and holder.turn < facts.peak.turn
    if holder.category == "parameters":
        alike = [h for h in facts.at_peak if h.category == "parameters"]
        return sum(h.module == holder.module for h in alike) > 1
    return holder.category == "optimizer"


def _was_there_before(holder: Holder, facts: Facts) -> bool:
    return holder.step < 0 and _is_loose(holder, facts)


def _is_of_a_twin(holder: Holder, facts: Facts) -> bool:
    # a model of an earlier round was updated
    is_twin = holder.category == "parameters" and holder.module in facts.twins
    return is_twin and holder.updated < 0


def _twins(found: list[Holder], facts: Facts) -> Group:
    part = facts.twins[found[0].module]
    return Group(found, {"how_many": "a second copy", "origin": f"`{part}`, which nothing trains"})


COPIES = (
    Row(COPIED, EVIDENCE, OF_A_REFERENCE, those(_is_of_a_twin, _twins)),
    _copies(
        _of_another_model,
        "parameters of a module that is not the tracked one",
        OF_A_MODULE,
        if_called=OF_A_REFERENCE,
    ),
    _copies(
        _was_copied, "made in the tracked run and still alive", OF_THIS_RUN, if_called=OF_THIS_RUN
    ),
    _copies(
        _was_there_before,
        "tensors that were there before this run read them",
        FROM_BEFORE,
        in_later_steps=OF_AN_AVERAGE,
    ),
)


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


FIRST_STATES = Row(
    "The first optimizer step makes its states",
    "{size} of optimizer states are made in this step, and stay: the forwards before it ran without"
    " them.",
    "SGD keeps no states without momentum, and one number a parameter with it, where Adam keeps "
    "two. 8-bit states (optim='adamw_8bit') and factored ones (Adafactor) keep less, and LoRA "
    "trains fewer parameters. A smaller batch and checkpointing do not change this.",
    those(_is_new_state),
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
