"""Causes: who holds what is no longer needed: a list or an attribute that grows, an exception, a
reference cycle, the buckets of a parallel model.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import pairwise

from ..units import format_bytes
from .cause import (
    LINES,
    MUCH,
    WORTH,
    Cause,
    belongs_to_training,
    detached,
    in_words,
    larger_than_its_tensor,
    largest_held,
    lines_of,
    name_of,
)
from .facts import BETWEEN_STEPS, Facts, total
from .made_by_forwards import lines_of_results
from .paths import Held
from .source_lines import source_line
from .timeline import Holder

GROWTH = "Bytes grow from step to step"
COLLECTED = "An evaluation collects its results"
# Bytes that grow by this part of the peak double it in a thousand steps.
GROWS = 0.001
SEVERAL = 3  # steps; a tensor of the last two may be a variable that is not overwritten yet
LAYER = re.compile(r"\.\d+\b")  # the same list of each layer is one
SAMPLE = 100  # freed storages that are looked at, spread over all
YOUNGER = 2  # that stay when an older one goes: a window of the last ones


def kept_by_a_name(facts: Facts) -> Cause | None:
    """What one name of the script has kept of at least three steps, or forwards of an evaluation:
    the one with the most bytes.
    """
    groups = defaultdict[tuple, list[Holder]](list)
    for holder in facts.at_peak:
        place = _place_of(holder)
        if place is not None:
            groups[place].append(holder)
    found = [_kept(place, group, facts) for place, group in groups.items()]
    causes = [cause for cause in found if cause is not None]
    return max(causes, key=lambda cause: cause.nbytes, default=None)


def _place_of(holder: Holder) -> tuple[str, str] | None:
    """The name that may keep tensors of many steps: a list, or a tensor with its graph."""
    held = holder.held
    if held is None or not held.in_script or held.kind == "window":
        return None
    if held.box:
        return held.where, LAYER.sub(".…", held.box)
    return (held.where, held.path) if held.graph else None


def _kept(place: tuple[str, str], group: list[Holder], facts: Facts) -> Cause | None:
    """The cause if this group grows, with those of its storages that are no longer in use."""
    unused = _without_the_model_in_use(group, facts)
    by_step, by_forward = _by_step(unused, facts), _by_forward(unused, facts)
    if max(len(by_step), len(by_forward)) < SEVERAL or _is_a_window(place, group, facts):
        return None
    if len(by_step) >= SEVERAL and _goes_on(group, facts):
        earlier = [kept for time, kept in by_step if time < facts.peak_time]
        rounds, old = len(earlier), [holder for kept in earlier for holder in kept]
        # At a peak after a step, other forwards of this step have kept something as well.
        for kept in by_forward[:-1]:
            old += [holder for holder in kept if facts.time_of(holder) == facts.peak_time]
        return _cause(GROWTH, old, rounds, facts.unit, facts)
    if len(by_step) < SEVERAL <= len(by_forward):
        old = [holder for kept in by_forward[:-1] for holder in kept]
        cause = _cause(COLLECTED, old, len(by_forward) - 1, "forward", facts)
        if cause is None:
            return None
        stays = min(total(by_forward[-1]), cause.nbytes)
        condition = "If those of only one forward are kept at a time"
        return replace(cause, needed_in="", stays=stays, condition=condition)
    return None


def _by_step(holders: list[Holder], facts: Facts) -> list[tuple[int, list[Holder]]]:
    """The holders by the step that has made them; of models, by that which has made the model."""
    weights = [holder for holder in holders if holder.category == "parameters"]
    found = defaultdict[int, list[Holder]](list)
    begins = sorted({facts.time_of(holder) for holder in weights})
    for holder in holders:
        time = facts.time_of(holder)
        if begins:
            time = begins[max(bisect_right(begins, time) - 1, 0)]
        if time >= 0:
            found[time].append(holder)
    return sorted(found.items())


def _cause(name: str, old: list[Holder], rounds: int, unit: str, facts: Facts) -> Cause | None:
    nbytes = total(old)
    if not old:
        return None
    each = nbytes // rounds
    if nbytes < WORTH * facts.peak.total and each < GROWS * facts.peak.total:
        return None
    held, _ = largest_held(old)
    kinds = Counter[str]()
    for holder in old:
        kinds[in_words(holder)] += holder.nbytes
    largest = "; ".join(words for words, _ in kinds.most_common(LINES))
    evidence = (
        f"{_of_the_peak(nbytes, facts)} are kept by `{name_of(held)}`: {len(old)} tensors of "
        f"{rounds} {unit}s, about {format_bytes(each)} a {unit}: {largest}."
    )
    remedy = _remedy(held, old, name == COLLECTED)
    needed_in = "round" if any(map(belongs_to_training, old)) else facts.unit
    lines = lines_of_results(old, facts)
    return Cause(name, nbytes, evidence, remedy, lines, old, old, needed_in=needed_in)


def _of_the_peak(nbytes: int, facts: Facts) -> str:
    return f"{format_bytes(nbytes)} of the peak's {format_bytes(facts.peak.total)}"


def _without_the_model_in_use(group: list[Holder], facts: Facts) -> list[Holder]:
    """The group without weights that are updated, and without their gradients and states."""
    old, replaced = [], Counter[str]()
    gradients = []
    for holder in group:
        if holder.category == "gradients":
            gradients.append(holder)
        elif not belongs_to_training(holder):
            old.append(holder)
        elif holder.updated < facts.peak.step - 1:
            old.append(holder)
            replaced[holder.held.path] += 1
    gradients.sort(key=lambda holder: holder.samples[0])
    for holder in gradients:
        weight = holder.held.path.removesuffix(".grad")
        if replaced[weight] > 0:
            replaced[weight] -= 1
            old.append(holder)
    if not any(holder.category == "parameters" for holder in old):
        return [holder for holder in old if holder.category != "optimizer"]
    return old


def _by_forward(holders: list[Holder], facts: Facts) -> list[list[Holder]]:
    """For a peak outside of training steps, the holders of each forward that has made some."""
    found = defaultdict[int, list[Holder]](list)
    if not facts.outside_of_training:
        return []
    for holder in sorted(holders, key=lambda holder: holder.samples[0]):
        begun = facts.last_begun(holder.samples[0])
        if begun is not None and begun.has_weights:
            found[begun.samples[0]].append(holder)
    return list(found.values())


def _goes_on(group: list[Holder], facts: Facts) -> bool:
    """Whether something was kept until the peak, or to the run's end if most of it is there then:
    a list of the first n examples has ended. The newest one may have another name as well.
    """
    last = facts.samples[-1] if facts.samples is not None else 0
    at_the_end = [holder for holder in group if holder.samples[1] > last]
    stays = 2 * total(at_the_end) > total(group)
    times = sorted({facts.time_of(holder) for holder in (at_the_end if stays else group)})
    longest = max((after - before for before, after in pairwise(times)), default=0) + 1
    kinds = {(holder.line, holder.op) for holder in group}
    known, end = list(facts.at_peak), facts.peak_time
    if stays:
        known += [holder for holder in facts.others if holder.samples[1] > last]
        end = facts.times
    later = set[int]()
    for holder in known:
        if (holder.line, holder.op) in kinds and facts.time_of(holder) > times[-1]:
            later.add(facts.time_of(holder))
    until_the_end = [times[-1], *sorted(later), end]
    return all(after - before <= longest for before, after in pairwise(until_the_end))


def _is_a_window(place: tuple[str, str], group: list[Holder], facts: Facts) -> bool:
    """Whether old ones go while younger ones stay, so that there are always as many."""
    everything = [*group, *(holder for holder in facts.others if _place_of(holder) == place)]
    last = facts.samples[-1] if facts.samples is not None else 0
    gone = [holder for holder in everything if holder.samples[1] <= last]
    gone = gone[:: len(gone) // SAMPLE + 1]  # a long run has freed thousands
    one_by_one = [holder for holder in gone if _younger_stay(holder, everything, facts)]
    return 2 * len(one_by_one) > len(gone)


def _younger_stay(gone: Holder, everything: list[Holder], facts: Facts) -> bool:
    """Whether those of at least two later forwards were there when this one went, and stayed."""
    born, freed = gone.samples
    forwards = set[int]()
    for other in everything:
        if born < other.samples[0] < freed < other.samples[1]:
            forwards.add(id(facts.last_begun(other.samples[0])))
    forwards.discard(id(facts.last_begun(born)))
    return len(forwards) >= YOUNGER


def _remedy(held: Held, holders: list[Holder], in_an_evaluation: bool) -> str:
    name = name_of(held)
    trained = [holder for holder in holders if belongs_to_training(holder)]
    if 2 * total(trained) > total(holders):
        return (
            f"the models of earlier rounds are kept. Put their results into `{name}` as numbers, "
            "and weights that are needed again on the host: {name: t.cpu() for name, t in "
            "model.state_dict().items()}."
        )
    in_graphs = [holder for holder in holders if holder.held is not None and holder.held.graph]
    if 2 * total(in_graphs) > total(holders):
        return detached(name)
    if held.kind == "cache":
        return (
            f"the cache of `{name}` keeps all its results: give it a limit, "
            f"lru_cache(maxsize=1), or empty it, {name}.cache_clear()."
        )
    if held.kind == "attribute of a module":
        filled_by = "the forward"
        if held.hook is not None:
            where = source_line((held.hook, held.hook.co_firstlineno))
            filled_by = f"the hook ({where})"
        return (
            f"`{name}` stays on the module: empty it where it has been used, and let {filled_by} "
            "fill it only where something takes it out again."
        )
    if in_an_evaluation:
        return (
            f"keep less in `{name}`: x.argmax(-1), or x.cpu() for what has to stay whole. A "
            "smaller batch does not help."
        )
    remedy = (
        f"keep less in `{name}`: numbers, x.item(), or x.detach().cpu() for what has to stay a "
        "tensor; and empty it when it has been used."
    )
    if any(map(larger_than_its_tensor, holders)):
        remedy += (
            " A loss of one number can lie in a storage as large as the tensor that it was computed"
            " from, and .detach() keeps this storage: use .item()."
        )
    return remedy


def in_an_exception(facts: Facts) -> Cause | None:
    """The variables of functions that an error has ended."""
    kept = _held_as("exception", facts)
    nbytes = total(kept)
    if nbytes < MUCH * facts.peak.total:
        return None
    held, _ = largest_held(kept)
    evidence = (
        f"{_of_the_peak(nbytes, facts)} are held by an error that is kept, `{held.path}`: its "
        "traceback has the variables of the functions that it ended."
    )
    remedy = (
        "keep str(error) in place of the error: its traceback holds the variables of all functions "
        "that it went through."
    )
    name = "An exception keeps the variables of its functions"
    return Cause(name, nbytes, evidence, remedy, lines_of(kept), kept, needed_in=facts.unit)


def in_a_cycle(facts: Facts) -> Cause | None:
    """Objects that refer to one another, until Python's collector runs."""
    kept = _held_as("cycle", facts)
    nbytes = total(kept)
    times = {facts.time_of(holder) for holder in kept}
    differentiable = any(done.differentiable for done in facts.forwards)
    if len(times) < SEVERAL or nbytes < MUCH * facts.peak.total or differentiable:
        return None
    evidence = (
        f"{_of_the_peak(nbytes, facts)} have no name any more: objects that refer to one another "
        "hold them, until Python's collector runs, and bytes of tensors do not make it run."
    )
    remedy = (
        "let no object refer to itself (weakref.ref for the way back), or call gc.collect() at the "
        "end of a step."
    )
    name = "Reference cycles keep tensors"
    return Cause(name, nbytes, evidence, remedy, lines_of(kept), kept, needed_in=facts.unit)


def in_buckets(facts: Facts) -> Cause | None:
    """The buckets in which DistributedDataParallel sums gradients: a second copy of them."""
    kept = []
    for holder in facts.at_peak:
        in_cpp = holder.held is not None and holder.held.kind == "C++"
        if in_cpp and holder.category == "other" and facts.in_ddp:
            kept.append(holder)
    nbytes = total(kept)
    if nbytes < MUCH * facts.peak.total:
        return None
    evidence = (
        f"{_of_the_peak(nbytes, facts)} are held by DistributedDataParallel: its buckets are a "
        "second copy of the gradients."
    )
    remedy = (
        "DistributedDataParallel(model, gradient_as_bucket_view=True): the gradients are views of "
        "the buckets then."
    )
    name = "DistributedDataParallel keeps a copy of the gradients"
    # Without gradients, as after zero_grad(), the buckets are still there.
    return Cause(name, nbytes, evidence, remedy, lines_of(kept), kept, stays=None)


def _held_as(kind: str, facts: Facts) -> list[Holder]:
    """What is held so, was made before the peak's step, and is nothing that is trained."""
    found = []
    for holder in facts.at_peak:
        earlier = facts.time_of(holder) < facts.peak_time or holder.made_in == BETWEEN_STEPS
        is_held = holder.held is not None and holder.held.kind == kind
        if is_held and earlier and not belongs_to_training(holder):
            found.append(holder)
    return found
