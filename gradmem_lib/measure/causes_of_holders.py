"""Causes: what no name of the script holds: an error that is kept, reference cycles, the buckets of
a parallel model.
"""

from __future__ import annotations

from collections.abc import Sequence

from .cause import MUCH, belongs_to_training
from .facts import BETWEEN_STEPS, Facts
from .rows import Group, Row
from .timeline import Holder

SEVERAL = 3  # steps; a tensor of the last two may be a variable that is not overwritten yet


def _in_an_exception(free: Sequence[Holder], facts: Facts) -> Group:
    return Group(_held_as("exception", free, facts), changes={"needed_in": facts.unit})


EXCEPTION = Row(
    "An exception keeps the variables of its functions",
    "{size} of the peak's {peak} are held by an error that is kept, `{path}`: its traceback has "
    "the variables of the functions that it ended.",
    "keep str(error) in place of the error: its traceback holds the variables of all functions that"
    " it went through.",
    _in_an_exception,
    least=MUCH,
)


def _in_cycles(free: Sequence[Holder], facts: Facts) -> Group | None:
    kept = _held_as("cycle", free, facts)
    times = {facts.time_of(holder) for holder in kept}
    if len(times) < SEVERAL or facts.has_second_derivatives:
        return None
    return Group(kept, changes={"needed_in": facts.unit})


CYCLES = Row(
    "Reference cycles keep tensors",
    "{size} of the peak's {peak} have no name any more: objects that refer to one another hold "
    "them, until Python's collector runs, and bytes of tensors do not make it run.",
    "let no object refer to itself (weakref.ref for the way back; in a torch.autograd.Function, "
    "ctx.save_for_backward(y) in place of ctx.y = y), or call gc.collect() at the end of a step.",
    _in_cycles,
    least=MUCH,
)


def _held_as(kind: str, free: Sequence[Holder], facts: Facts) -> list[Holder]:
    """What is held so, was made before the peak's step, and is nothing that is trained."""
    found = []
    for holder in free:
        earlier = facts.time_of(holder) < facts.peak_time or holder.made_in == BETWEEN_STEPS
        is_held = holder.held is not None and holder.held.kind == kind
        if is_held and earlier and not belongs_to_training(holder):
            found.append(holder)
    return found


def _in_buckets(free: Sequence[Holder], facts: Facts) -> Group | None:
    if not facts.in_ddp:
        return None
    kept = []
    for holder in free:
        in_cpp = holder.held is not None and holder.held.kind == "C++"
        if in_cpp and holder.category == "other":
            kept.append(holder)
    return Group(kept)


BUCKETS = Row(
    "DistributedDataParallel keeps a copy of the gradients",
    "{size} of the peak's {peak} are held by DistributedDataParallel: its buckets are a second copy"
    " of the gradients.",
    "DistributedDataParallel(model, gradient_as_bucket_view=True): the gradients are views of the "
    "buckets then.",
    _in_buckets,
    least=MUCH,
    stays=None,  # without gradients, as after zero_grad(), the buckets are still there
)
