"""Causes: gradients that are there more than once, longer than needed, or for each row."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from ..names import MOMENTS
from ..units import format_bytes
from .cause import (
    ALMOST_ALL,
    DOMINATES,
    IN_PIECES,
    MUCH,
    WORTH,
    Cause,
    belongs_to_training,
    lines_of,
    numel,
    pieces_of,
)
from .facts import IN_BACKWARD, IN_OPTIMIZER_STEP, LOSS, TRAINING_FORWARD, Facts, total
from .timeline import MOMENT, STEP, Holder

# Of the parameters' bytes: one number for each weight has as many, two have twice as many.
ONE_FOR_EACH = 1.5


def kept_directions(facts: Facts) -> Cause | None:
    """A number for each weight that was computed from the gradients of an earlier backward, and
    stays during another forward and backward, as in sharpness-aware minimization (SAM).
    """
    if facts.structure is None or facts.peak.moment not in (TRAINING_FORWARD, LOSS, IN_BACKWARD):
        return None
    kept = []
    for holder in facts.at_peak:
        of_earlier_turn = holder.turn < facts.peak.turn
        is_kept = holder.category in ("other", "optimizer") and of_earlier_turn
        if is_kept and holder.computed_from == "gradients":
            kept.append(holder)
    nbytes = total(kept)
    is_a_list = nbytes > ONE_FOR_EACH * facts.peak.by_category["parameters"]  # of copies
    if is_a_list or nbytes < WORTH * facts.peak.total:
        return None
    evidence = (
        f"{format_bytes(nbytes)} at the peak were computed from the gradients of an earlier "
        "backward, about a number for each weight, and stay during this one."
    )
    remedy = (
        "a method that goes back later, such as SAM, needs them only then: keep them off the card "
        "(e.cpu(), and e.to(p.device) on the way back), or in bf16, or for a part of the weights, "
        "such as the normalization layers."
    )
    name = "Directions for all weights are kept"
    return Cause(name, nbytes, evidence, remedy, lines_of(kept), kept)


def copied_gradients(facts: Facts) -> Cause | None:
    """Copies of the gradients, and what else was computed from gradients alone."""
    if kept_directions(facts):
        return None  # that cause names these bytes
    copies, originals = [], []
    for holder in facts.at_peak:
        if holder.computed_from == "gradients" and holder.category in ("gradients", "other"):
            copies.append(holder)
        elif holder.category == "gradients":
            originals.append(holder)
    if min(total(copies), total(originals)) < WORTH * facts.peak.total:
        return None
    evidence = (
        f"{format_bytes(total(copies))} at the peak were computed from gradients alone, as a copy "
        f"or in another dtype, beside {format_bytes(total(originals))} of gradients."
    )
    name = "The gradients are there more than once"
    lines = lines_of(copies)
    are_gradients = [holder for holder in copies if holder.category == "gradients"]
    if 2 * total(are_gradients) > total(copies):
        # An optimizer reads the copies, so the gradients that they were made from can go.
        remedy = (
            "set p.grad = None as soon as a copy in another dtype has taken its place, for one "
            "weight after another."
        )
        nbytes = total(originals)
        stays = max(holder.nbytes for holder in originals)
        condition = "If each gradient goes when its copy is there"
    elif _are_several_sets(copies, originals, facts):
        remedy = (
            "keep one running sum for the gradients of several backwards, or a number of each, "
            "such as p.grad.norm().item(), instead of a list of copies."
        )
        nbytes, stays = total(copies), _bytes_of_sets(2, copies, originals, facts)
        condition = "If only a running sum and the last copy of each gradient stay"
    else:
        remedy = (
            "take one gradient after another instead of all at once: p.grad.norm() of each for a "
            "norm (torch.nn.utils.clip_grad_norm_ does that)."
        )
        nbytes, stays = total(copies), _bytes_of_the_largest(copies, originals)
        condition = "If one gradient at a time is copied"
    return Cause(name, nbytes, evidence, remedy, lines, copies, stays=stays, condition=condition)


def _kinds(copies: list[Holder]) -> list[list[Holder]]:
    """The copies that one operation of one line has made in one dtype, as lists."""
    kinds = defaultdict[tuple, list[Holder]](list)
    for holder in copies:
        kinds[holder.line, holder.op, holder.dtype].append(holder)
    return list(kinds.values())


def _width(kind: list[Holder]) -> int:
    """Bytes of one number."""
    dtype = kind[0].dtype
    return 4 if dtype is None else dtype.itemsize  # float32


def _numbers_of_a_set(originals: list[Holder], facts: Facts) -> int:
    """The numbers in the gradients of all weights, also of those that are not there at the peak."""
    numbers = sum(total(kind) // _width(kind) for kind in _kinds(originals))
    if facts.structure is None:
        return numbers
    return max(numbers, sum(numel(facts.structure.shapes[name]) for name in facts.trained))


def _are_several_sets(copies: list[Holder], originals: list[Holder], facts: Facts) -> bool:
    """Whether gradients of several backwards were copied, or all gradients more than once."""
    if len({holder.turn for holder in copies}) > 1:
        return True
    limit = ONE_FOR_EACH * _numbers_of_a_set(originals, facts)
    return any(total(kind) > limit * _width(kind) for kind in _kinds(copies))


def _bytes_of_sets(n: int, copies: list[Holder], originals: list[Holder], facts: Facts) -> int:
    """The bytes of ``copies`` if there were ``n`` of each gradient, at most."""
    numbers = n * _numbers_of_a_set(originals, facts)
    return sum(min(total(kind), numbers * _width(kind)) for kind in _kinds(copies))


def _bytes_of_the_largest(copies: list[Holder], originals: list[Holder]) -> int:
    """The bytes of ``copies`` if there were those of one gradient at a time, at most.

    One copy of all gradients, as torch.cat makes it, becomes one of a single gradient, the largest
    at most. And a copy may be beside its square, as in p.grad.double().square().sum().
    """
    kinds = _kinds(copies)
    largest = max(holder.nbytes // _width([holder]) for holder in originals)
    nbytes = 0
    for kind in kinds:
        nbytes += min(max(holder.nbytes for holder in kind), largest * _width(kind))
    a_copy_and_its_square = 2 * largest * max(map(_width, kinds))
    return min(max(nbytes, a_copy_and_its_square), total(copies))


def gradients_of_rows(facts: Facts) -> Cause | None:
    """A gradient for each row of a batch, as ``torch.func.vmap(grad(loss))`` makes them."""
    if facts.structure is None or not facts.structure.shapes:
        return None
    shapes = {_without_ones(shape) for shape in facts.structure.shapes.values()}
    of_rows = defaultdict[int, list[Holder]](list)  # by the number of rows
    found = defaultdict[int, set[tuple[int, ...]]](set)  # shapes of parameters, for as many rows
    for holder in facts.at_peak:
        rows, *rest = holder.shape or (1,)
        shape = _without_ones(tuple(rest))
        if rows > 1 and shape in shapes and not belongs_to_training(holder):
            of_rows[rows].append(holder)
            found[rows].add(shape)
    for rows, holders in of_rows.items():
        # A bias's gradients look like any activation: the large parameters have to be there.
        numbers = sum(map(numel, found[rows]))
        is_the_model = numbers >= ALMOST_ALL * sum(map(numel, shapes))
        in_backward = [holder for holder in holders if holder.made_in == IN_BACKWARD]
        nbytes = total(holders)
        if not is_the_model or not in_backward or nbytes < DOMINATES * facts.peak.total:
            continue
        evidence = (
            f"{format_bytes(nbytes)} at the peak have the shapes of the model's parameters, {rows} "
            "times: a gradient for each row, and what is computed from it."
        )
        remedy = (
            "take the gradients of a few rows at a time, for piece in x.split(8): ..., and reduce "
            "each at once, to its norm or to a sum of clipped gradients."
        )
        name = "A gradient for each row is in memory"
        lines = lines_of(in_backward)
        stays = pieces_of(nbytes)
        return Cause(
            name, nbytes, evidence, remedy, lines, holders, stays=stays, condition=IN_PIECES
        )
    return None


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """vmap makes the gradients of (64,) as (rows, 1, 64)."""
    return tuple(size for size in shape if size > 1)


def gradients_set_to_zero(facts: Facts) -> Cause | None:
    """Gradients of earlier steps, as zeros, in layers that the backward has not come to yet."""
    if facts.peak.moment != IN_BACKWARD:
        return None
    waiting = _layers_that_wait(facts)
    zeros = []
    for holder in facts.at_peak:
        layer = holder.module.rpartition(".")[0]  # a gradient has the name of its parameter
        old = holder.category == "gradients" and 0 <= holder.step < facts.peak.step
        in_use = facts.optimized is None or holder.module in facts.optimized
        if old and in_use and layer in waiting:
            zeros.append(holder)
    nbytes = total(zeros)
    if nbytes < MUCH * facts.peak.total:
        return None
    evidence = (
        f"{format_bytes(nbytes)} at the peak are gradients of an earlier step, of layers to which "
        "this backward has not come yet."
    )
    remedy = (
        "call optimizer.zero_grad() after optimizer.step(), and leave set_to_none as it is (True): "
        "with False, the gradients stay as zeros, beside all activations."
    )
    return Cause("Gradients stay as zeros", nbytes, evidence, remedy, stays=None)


def _layers_that_wait(facts: Facts) -> set[str]:
    """The modules to which the peak's backward has not come yet.

    A backward takes the operations of its forward from the last one to the first. So while it needs
    a tensor, it has not come to what ran before this tensor was made. It needs those that it frees
    later.
    """
    needed = 0
    for holder in facts.activations:
        of_this_turn = holder.turn == facts.peak.turn and holder.made_in == TRAINING_FORWARD
        if of_this_turn and holder.module and _is_freed_in_backward(holder, facts):
            needed = max(needed, holder.samples[0])
    last_ran = dict[str, int]()  # the sample in which a module has made its last tensor
    for holder in (*facts.at_peak, *facts.others):
        if holder.turn == facts.peak.turn and holder.made_in == TRAINING_FORWARD:
            last_ran[holder.module] = max(last_ran.get(holder.module, 0), holder.samples[0])
    return {module for module, sample in last_ran.items() if module and sample <= needed}


def _is_freed_in_backward(holder: Holder, facts: Facts) -> bool:
    """Whether the peak's backward frees it after the peak. In a run that was interrupted there, all
    but the model's result count, since a variable may hold that.
    """
    if facts.samples is None or holder.samples[1] > facts.samples[-1]:
        return not facts.ended and not holder.is_result
    row = facts.rows[np.searchsorted(facts.samples, holder.samples[1])]
    in_backward = MOMENTS[row[MOMENT]] == IN_BACKWARD
    return in_backward and row[STEP] == facts.peak.step


def gradients_of_the_step_before(facts: Facts) -> Cause | None:
    """Gradients that the optimizer has used, beside the next step's forward."""
    if facts.peak.moment not in (TRAINING_FORWARD, LOSS) or facts.rows is None:
        return None
    old = []
    for holder in facts.at_peak:
        # a gradient that no optimizer has is a cause of its own
        in_use = facts.optimized is None or holder.module in facts.optimized
        if holder.category == "gradients" and in_use and 0 <= holder.step < facts.peak.step:
            old.append(holder)
    # A backward makes them again: its own peak remains.
    later = facts.highest_in([IN_BACKWARD, IN_OPTIMIZER_STEP])
    nbytes = min(total(old), facts.peak.total - later)
    if nbytes < MUCH * facts.peak.total:
        return None
    evidence = (
        f"{format_bytes(total(old))} at the peak are gradients that the optimizer has already "
        f"used. Without them the peak would be {format_bytes(facts.peak.total - nbytes)}."
    )
    remedy = (
        "call optimizer.zero_grad() right after optimizer.step(), not before the next backward, "
        "and leave set_to_none as it is (True)."
    )
    name = "Gradients wait during the next forward"
    return Cause(name, nbytes, evidence, remedy, holders=old, needed_in="step")
