"""Causes: what no name of the script holds: an error that is kept, reference cycles, the buckets of
a parallel model.
"""

from __future__ import annotations

from . import paths
from .cause import MUCH, SEVERAL, Group, Row, those
from .facts import BETWEEN_STEPS, Facts, total
from .timeline import Holder


def _is_in_use(holder: Holder, facts: Facts) -> bool:
    """Whether it is a weight, a gradient or a state of the peak's step, which have better names."""
    return holder.is_of_training and max(holder.updated, holder.step) >= facts.peak.step


def _is_earlier(holder: Holder, facts: Facts) -> bool:
    return facts.time_of(holder) < facts.peak_time or holder.made_in == BETWEEN_STEPS


def _was_given_up(holder: Holder, facts: Facts) -> bool:
    """Whether no backward used the forward that made it, and another one has begun since."""
    newest = max(facts.at_peak, key=lambda other: other.first_sample)
    maker = facts.maker_of(holder)
    is_used = maker is not None and maker.used
    return not is_used and maker is not facts.maker_of(newest)


def _kept_by_an_error(holder: Holder, facts: Facts) -> bool:
    if holder.keeper.kind != paths.EXCEPTION or _is_in_use(holder, facts):
        return False
    return _is_earlier(holder, facts) or _was_given_up(holder, facts)


def _only_in_cycles(holder: Holder, facts: Facts) -> bool:
    is_in_a_cycle = holder.keeper.kind == "cycle" and not _is_in_use(holder, facts)
    return is_in_a_cycle and _is_earlier(holder, facts)


def _until_it_was_raised(kept: list[Holder], facts: Facts) -> Group:
    """The functions that an error of the peak's step ended needed theirs, and it is not known until
    when.
    """
    newest = [holder for holder in kept if facts.time_of(holder) == facts.peak_time]
    changes = {"needed_in": facts.unit, "stays": total(newest)}
    if 2 * total(newest) > total(kept):
        changes["stays"] = None
    return Group(kept, changes=changes)


EXCEPTION = Row(
    "An exception keeps the variables of its functions",
    "{size} of the peak's {peak} are held by an error that is kept, `{path}`: its traceback has "
    "the variables of the functions that it ended.",
    "keep str(error) in place of the error, and try again after the `except` block instead of in "
    "it: the error's traceback holds the variables of all functions that it went through.",
    those(_kept_by_an_error, _until_it_was_raised),
    least=MUCH,
)


def _of_several_steps(kept: list[Holder], facts: Facts) -> Group | None:
    if len(set(map(facts.time_of, kept))) < SEVERAL or facts.has_second_derivatives:
        return None
    return Group(kept, changes={"needed_in": facts.unit})


CYCLES = Row(
    "Reference cycles keep tensors",
    "{size} of the peak's {peak} have no name any more: objects that refer to one another hold "
    "them, until Python's collector runs, and bytes of tensors do not make it run.",
    "let no object refer to itself (weakref.ref for the way back; in a torch.autograd.Function, "
    "ctx.save_for_backward(y) in place of ctx.y = y), or call gc.collect() at the end of a step.",
    those(_only_in_cycles, _of_several_steps),
    least=MUCH,
)


def _in_buckets(holder: Holder, facts: Facts) -> bool:
    return facts.in_ddp and holder.keeper.kind == "C++" and holder.category == "other"


BUCKETS = Row(
    "DistributedDataParallel keeps a copy of the gradients",
    "{size} of the peak's {peak} are held by DistributedDataParallel: its buckets are a second copy"
    " of the gradients.",
    "DistributedDataParallel(model, gradient_as_bucket_view=True): the gradients are views of the "
    "buckets then.",
    those(_in_buckets),
    least=MUCH,
    stays=None,  # without gradients, as after zero_grad(), the buckets are still there
)
