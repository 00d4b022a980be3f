"""Causes: bytes that one name keeps, of more and more steps or forwards; and what pictures show of
them.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import filterfalse, pairwise
from typing import Any

from ..units import format_bytes
from .cause import (
    DOMINATES,
    SEVERAL,
    WORTH,
    Group,
    Row,
    cause_of,
    detached,
    in_words,
    is_copy_of_a_storage,
    largest_held,
    name_of,
)
from .facts import BETWEEN_STEPS, EVALUATION, Facts, total
from .made_by_forwards import lines_of_results
from .paths import ITERATOR, MODULE_ATTRIBUTE, Held
from .source_lines import source_line
from .timeline import Holder

GROWTH = "Bytes grow from step to step"
COLLECTED = "An evaluation collects its results"
# Bytes that grow by this part of the peak double it in a thousand steps.
GROWS = 0.001
LAYER = re.compile(r"\.\d+\b")  # the same list of each layer is one
EACH = "[…]"  # in a path: an entry of a list
SAMPLE = 100  # freed storages that are looked at, spread over all
STATES = ".state["  # in a path: an optimizer's
HOOKS = "_hooks["  # in a path: a module's
HISTORY = 5
LATE = 0.75  # if what has no name grows until a run's end, the peak is in its last quarter
YOUNGER = 2  # that stay when an older one goes: a window of the last ones

OF_A_TRAINER = (
    "keep less of each result: in a Trainer, preprocess_logits_for_metrics=lambda logits, labels: "
    "logits.argmax(-1), or logits[0].argmax(-1) where the model returns a tuple, "
    "TrainingArguments(eval_accumulation_steps=1), or prediction_loss_only=True if no metric needs "
    "them. Results that the metric does not read, such as hidden states, are turned off in the "
    "model (output_hidden_states=False). A smaller batch does not help."
)
WITHOUT_A_NAME = (
    "look where the results of this line go: a list, a sum, a hook or a cache keeps them. Keep "
    "numbers, x.item(), or x.detach().cpu() for what has to stay a tensor. A Jacobian of a batch "
    "has zeros between its rows: take it of one row after another, and reduce each at once."
)
HELD_BY_NO_NAME = (
    "no list and no variable of the script keeps them. Look at what this line calls, and where its "
    "results go: a torch.autograd.Function that puts its own output on ctx keeps it until Python's "
    "collector runs (write ctx.save_for_backward(y) in place of ctx.y = y), and a library may have "
    "a queue or a buffer that was given them."
)
OF_A_LONGER_ONE = (
    "keep only numbers of it, or put the pieces into a list off the card, "
    "history.append(x.detach().cpu()), and join them once at the end."
)
OF_A_HISTORY = (
    "the optimizer keeps a history of its steps: give it a shorter one, "
    f"torch.optim.LBFGS(..., history_size={HISTORY})."
)
OF_A_HOOK = (
    "a hook stays on its module, with all that it fills: call handle.remove() when the forward is "
    "done, since a hook that each step registers is one more each time; or empty what it fills "
    "where that has been used."
)
KEEP_LESS = (
    "keep less in `{name}`: numbers, x.item(), or x.detach().cpu() for what has to stay a tensor; "
    "and empty it when it has been used."
)
# The remedies for what a name keeps, by what it is, ...
OF_A_KIND = {
    "gradients": "`{name}` keeps gradients of earlier steps: keep a number of each, "
    "p.grad.norm().item(), or copies off the card, p.grad.cpu().",
    "optimizer": "`{name}` keeps optimizers that no longer step, with their states: let go of one "
    "before the next is made.",
    "parameters": "the weights of earlier rounds are kept. Put results into `{name}` as numbers, "
    "and weights that are needed again on the host: {{name: t.cpu() for name, t in "
    "model.state_dict().items()}}.",
    "slices": "`{name}` keeps parts of larger tensors, and each part keeps the whole of it: keep "
    "x.item() of a number, and of a slice a copy, x.clone().",
}
# ... and by the owner.
OF_AN_OWNER = {
    "cache": "the cache of `{name}` keeps all its results: give it a limit, lru_cache(maxsize=1), "
    "or empty it, {name}.cache_clear().",
    "gradient": "each tensor keeps its gradient, `{name}`: take it by torch.autograd.grad(loss, x),"
    " or set x.grad = None where it has been used.",
    ITERATOR: "`{name}` keeps what it has given, as itertools.cycle(loader) and itertools.tee do: "
    "write a generator that goes over the loader again, while True: yield from loader.",
    "optimizer": "`{name}` keeps weights that no forward uses any more: let go of their group, of "
    "their entries in the optimizer's `state`, and of their module, before the next is added.",
    "window": "give `{name}` a smaller bound, or keep what is in it off the card: "
    "x.detach().cpu().",
}


def growing_holders(facts: Facts) -> Sequence[Holder]:
    """The storages that pictures show as a band of their own."""
    for row in (KEPT_BY_A_NAME, GROWING_TENSOR):
        cause = cause_of(row, facts.at_peak, facts)
        if cause is not None:
            return cause.growing
    return ()


def _kept_by_a_name(free: Sequence[Holder], facts: Facts) -> Group | None:
    """What one name has kept of at least three steps, or of three forwards of an evaluation.

    Of several such names, the one with the most bytes.
    """
    # Of a deque with a bound, only the graphs may grow.
    free = [holder for holder in free if holder.keeper.kind != "window" or holder.keeper.graph]
    found = dict[tuple, list[Holder]]()
    for place, holders in _by_place(free).items():
        if _kept(place, holders, facts) is not None:
            found[place] = holders
    _join_to_outer_lists(found, facts)
    return _largest(_kept(place, holders, facts) for place, holders in found.items())


def _join_to_outer_lists(found: dict[tuple, list[Holder]], facts: Facts) -> None:
    """Where a list grows, and a list in each of its entries too, the outer one keeps both."""
    innermost_first = sorted(found, key=str, reverse=True)
    for place in innermost_first:
        where, inside = place[0], str(place[1])
        outer = where, inside.partition(EACH)[0]
        if outer == place or outer not in found:
            continue
        both = found[outer] + found[place]
        if _kept(outer, both, facts) is not None:
            found[outer] = both
            del found[place]


def _full(free: Sequence[Holder], facts: Facts) -> Group | None:
    """The same, of a name that may grow no more: a full cache, the first results, a deque with a
    bound.
    """
    found = []
    for group in _by_place(free).values():
        by_step = _by_step(_without_the_model_in_use(group, facts), facts)
        if group[0].keeper.box and len(by_step) >= SEVERAL:
            found.append(_group([kept for _, kept in by_step], facts.unit, facts))
    return _largest(found)


def _by_place(free: Sequence[Holder]) -> dict[tuple, list[Holder]]:
    groups = defaultdict[tuple, list[Holder]](list)
    for holder in free:
        place = _place_of(holder)
        if place is not None:
            groups[place].append(holder)
    return groups


def _largest(groups: Iterable[Group | None]) -> Group | None:
    found = [group for group in groups if group is not None]
    return max(found, key=lambda group: total(group.holders), default=None)


KEPT_BY_A_NAME = Row(
    GROWTH,
    "{size} of the peak's {peak} are kept by {by}: {count} tensors of {rounds} {unit}s, about "
    "{each} a {unit}: {kinds}.",
    WITHOUT_A_NAME,
    _kept_by_a_name,
    least=0,  # it may become more
)


FULL = Row(
    "A name keeps what many steps have made",
    "{size} of the peak's {peak} are kept by {by}: {count} tensors of {rounds} {unit}s: {kinds}.",
    WITHOUT_A_NAME,
    _full,
    least=DOMINATES,  # of what is there once, only the large is worth a word
)


def _place_of(holder: Holder) -> tuple | None:
    """What may keep tensors of many steps: a name of a list, or of a tensor with its graph; or what
    has no name that was found, by the line that makes it.
    """
    held = holder.keeper
    if not held.path:
        return _made(holder)
    if _is_history(held):
        return held.where, held.box.partition(STATES)[0]
    if held.kind == "gradient" and not holder.is_of_training:
        return held.where, held.path
    if held.box:
        return held.where, LAYER.sub(".…", held.box)
    if held.graph:
        return held.where, held.path
    return None


def _is_history(held: Held) -> bool:
    """Whether it is a list of an optimizer's past steps, as LBFGS has."""
    return held.kind == "optimizer" and STATES in held.box


def _kept(place: tuple, group: list[Holder], facts: Facts) -> Group | None:
    """Those of this group that are no longer in use, if it grows."""
    unused = _without_the_model_in_use(group, facts)
    by_step, by_forward = _by_step(unused, facts), _by_forward(unused, facts)
    if max(len(by_step), len(by_forward)) < SEVERAL or _ends(place, group, facts):
        return None
    if len(by_step) < SEVERAL:
        *earlier, newest = by_forward  # the newest result may be in use
        found = _group(earlier, "forward", facts)
        if found is None:
            return None
        stays = total(newest) + found.changes["stays"]
        if any(holder.continues for holder in newest):
            stays += total(earlier[-1])  # the newest is joined from it
        of_one = {
            "name": COLLECTED,
            "stays": min(stays, total(found.holders)),
            "condition": "If those of only one forward are kept at a time",
        }
        return replace(found, changes={**found.changes, **of_one})
    if not _goes_on(group, facts):
        return None
    rounds = []
    for time, kept in by_step:
        old = [holder for holder in kept if not _may_be_the_batch(holder, facts)]
        if time < facts.peak_time and old:
            rounds.append(old)
    return _group(rounds, facts.unit, facts)


def _ends(place: tuple, group: list[Holder], facts: Facts) -> bool:
    """Whether these are known to become no more."""
    copies = [h for h in group if _what_it_is(h) == "parameters" and not h.is_of_training]
    is_empty_later = not any(map(facts.is_there_at_the_end, group))
    if is_empty_later and 2 * total(copies) > total(group):
        return True  # copies of a round, which are averaged at its end
    if not group[0].keeper.path:
        # Later steps did not need more, or gradients with a graph of their own keep it.
        is_early = facts.peak_time < LATE * (facts.times - 1)
        if is_early or facts.has_second_derivatives:
            return True
    return _is_a_window(place, group, facts)


def _group(rounds: list[list[Holder]], unit: str, facts: Facts) -> Group | None:
    """What was kept of several steps, turns or forwards."""
    old = list[Holder]()
    for kept in rounds:
        old += kept
    in_an_evaluation = unit == "forward"
    least = WORTH if in_an_evaluation else min(WORTH, GROWS * len(rounds))
    if total(old) < least * facts.peak.total or not old:
        return None
    each = total(old) // len(rounds)
    held, _ = largest_held(old)
    outer = min(old, key=lambda holder: len(holder.keeper.box)).keeper.box
    if outer and held.box.startswith(outer + EACH):
        held = held._replace(path=outer, box=outer)
    slices = 0  # bytes of their own
    for holder in old:
        if holder.keeper.part > 1:
            slices += holder.nbytes // holder.keeper.part
    changes: dict[str, Any] = {"growing": old, "lines": lines_of_results(old, facts)}
    changes["stays"] = slices
    if not in_an_evaluation:
        changes["needed_in"] = "round" if any(h.is_of_training for h in old) else unit
    by = "something that has no name"
    if held.path:
        name = _name_of(held, old)
        by = f"`{name}`"
        changes["remedy"] = _remedy(name, held, old, in_an_evaluation)
        if _is_history(held):
            changes["condition"] = f"If the history has {HISTORY} steps"
            changes["stays"] = min(total(old), HISTORY * each)
    elif all(holder.held is not None for holder in old):
        changes["remedy"] = HELD_BY_NO_NAME  # walks have looked for one
    words = {"by": by, "rounds": len(rounds), "unit": unit, "each": format_bytes(each)}
    return Group(old, words, changes)


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


def _may_be_the_batch(holder: Holder, facts: Facts) -> bool:
    """Whether it was made right before the peak's step, which may be in use of it."""
    is_last = facts.time_of(holder) == facts.peak_time - 1
    return is_last and holder.made_in == BETWEEN_STEPS and not holder.is_of_training


def _without_the_model_in_use(group: list[Holder], facts: Facts) -> list[Holder]:
    """The group without weights and states that are in use.

    They are of an earlier round if they were not updated after the next ones like them were made.
    A boosted ensemble calls such models in later rounds.
    """
    if _calls_older_models(facts):
        group = [holder for holder in group if not holder.is_of_training]
    births = defaultdict[tuple, set[int]](set)
    for holder in facts.at_peak:
        births[_kind(holder)].add(holder.step)
    old = []
    for holder in group:
        is_in_use = holder.category in ("parameters", "optimizer")
        may_be_in_use = is_in_use and not _is_history(holder.keeper)
        if not may_be_in_use or _is_replaced(holder, births[_kind(holder)]):
            old.append(holder)
    return old


def _calls_older_models(facts: Facts) -> bool:
    """Whether models are called that were trained two steps ago or earlier."""
    trained = dict[int, int]()  # by a model's number: the last step
    for done in facts.of_models:
        if done.used:
            trained[done.number] = done.step
    return any(done.step > trained.get(done.number, done.step) + 1 for done in facts.of_models)


def _is_replaced(holder: Holder, births: set[int]) -> bool:
    """Whether others of its kind, made in ``births``, have taken the place of a weight or state."""
    later = [step for step in births if step > holder.step]
    return bool(later) and holder.updated <= min(later)


def _kind(holder: Holder) -> tuple:
    return holder.category, holder.shape, holder.dtype


def _by_forward(holders: list[Holder], facts: Facts) -> list[list[Holder]]:
    """For a peak outside of training steps, the holders of each forward that has made some.

    Only of the module that was called most often: the layers of one batch are no evaluation.
    """
    of_modules = defaultdict[int, dict[int, list[Holder]]](dict)
    forgotten = defaultdict[int, list[Holder]](list)
    if not facts.outside_of_training:
        return []
    alike = Counter[tuple]()
    for holder in sorted(holders, key=lambda holder: holder.first_sample):
        begun = facts.maker_of(holder)
        if begun is None and holder.made_in == EVALUATION:
            # A long run's list has only the last forwards. The n-th tensor of a kind is taken for
            # one of the n-th forward before them.
            kind = (holder.module, *_made(holder))
            forgotten[alike[kind]].append(holder)
            alike[kind] += 1
        of_an_evaluation = begun is not None and begun.has_weights and not begun.with_grad
        if of_an_evaluation and facts.time_of(holder) >= 0:  # data was there before
            of_modules[begun.number].setdefault(begun.first_sample, []).append(holder)
    known = max(of_modules.values(), key=len, default={})
    return [*forgotten.values(), *known.values()]


def _goes_on(group: list[Holder], facts: Facts) -> bool:
    """Whether something was kept until the peak, or to the run's end if most of it is there then: a
    list of the first n examples has ended.
    """
    at_the_end = list(filter(facts.is_there_at_the_end, group))
    stays = 2 * total(at_the_end) > total(group)
    times = sorted({facts.time_of(holder) for holder in (at_the_end if stays else group)})
    gaps = [after - before for before, after in pairwise(times)]
    longest = max(gaps[:-1], default=0) + 1  # the last one may have nothing to do with the others
    kinds = {_made(holder) for holder in group}
    known, end = list(facts.at_peak), facts.peak_time
    if stays:
        known += filter(facts.is_there_at_the_end, facts.others)
        end = facts.times
    later = set[int]()  # of the newest ones, which a variable may hold as well
    for holder in known:
        if _made(holder) in kinds and facts.time_of(holder) > times[-1]:
            later.add(facts.time_of(holder))
    until_the_end = [*times[-2:], *sorted(later), end]
    return all(after - before <= longest for before, after in pairwise(until_the_end))


def _is_a_window(place: tuple, group: list[Holder], facts: Facts) -> bool:
    """Whether old ones go while younger ones stay, so that there are always as many."""
    everything = [*group, *(holder for holder in facts.others if _place_of(holder) == place)]
    gone = list(filterfalse(facts.is_there_at_the_end, everything))
    first = min((holder.end_sample for holder in gone), default=0)
    then = [h for h in everything if h.first_sample < first <= h.end_sample]
    if 2 * len(then) < len(group):
        return False  # a queue that is filled faster than it is emptied
    gone = gone[:: len(gone) // SAMPLE + 1]  # a long run has freed thousands
    one_by_one = [holder for holder in gone if _younger_stay(holder, everything, facts)]
    return 2 * len(one_by_one) > len(gone)


def _younger_stay(gone: Holder, everything: list[Holder], facts: Facts) -> bool:
    """Whether those of at least two later forwards were there when this one went, and stayed."""
    forwards = set[int]()
    for other in everything:
        if gone.first_sample < other.first_sample < gone.end_sample < other.end_sample:
            forwards.add(id(facts.maker_of(other)))
    forwards.discard(id(facts.maker_of(gone)))
    return len(forwards) >= YOUNGER


def _name_of(held: Held, holders: list[Holder]) -> str:
    """The list, dict or attribute that holds most of these; of a list of objects, the attribute of
    each that does. Of a model that is kept, each weight has an attribute.
    """
    in_an_entry = held.path.removeprefix(held.box)
    if "]." in in_an_entry and not any(holder.is_of_training for holder in holders):
        return held.path
    return name_of(held)


def _remedy(name: str, held: Held, holders: list[Holder], in_an_evaluation: bool) -> str:
    """What to do about most of the bytes that one name keeps."""
    kinds = Counter[str]()
    for holder in holders:
        kinds[_what_it_is(holder)] += holder.nbytes
    most = kinds.most_common(1)[0][0]
    if most == "optimizer" and kinds["parameters"]:
        most = "parameters"  # of whole models
    if _is_history(held):
        return OF_A_HISTORY
    if most == "graphs":
        return detached(held)
    if most in OF_A_KIND:
        return OF_A_KIND[most].format(name=name)
    return _remedy_by_owner(held, name, in_an_evaluation)


def _what_it_is(holder: Holder) -> str:
    if holder.keeper.graph:
        return "graphs"
    if holder.is_of_training:
        return holder.category
    if holder.computed_from == "gradients":
        return "gradients"
    if holder.computed_from == "parameters" or is_copy_of_a_storage(holder):
        return "parameters"  # copies of weights
    return "slices" if holder.keeper.part > 1 else "other"


def _remedy_by_owner(held: Held, name: str, in_an_evaluation: bool) -> str:
    if held.kind in OF_AN_OWNER:
        return OF_AN_OWNER[held.kind].format(name=name)
    if HOOKS in held.path:
        return OF_A_HOOK
    if held.kind == MODULE_ATTRIBUTE and (held.hook is not None or not in_an_evaluation):
        filled_by = "the forward"
        if held.hook is not None:
            where = source_line((held.hook, held.hook.co_firstlineno))
            filled_by = f"the hook ({where})"
        return (
            f"`{name}` stays on the module: empty it where it has been used, and let {filled_by} "
            "fill it only where something takes it out again."
        )
    if not in_an_evaluation:
        return KEEP_LESS.format(name=name)
    if not held.in_script:
        return OF_A_TRAINER
    return (
        f"keep less in `{name}`: x.argmax(-1), or x.cpu() for what has to stay whole. A smaller "
        "batch does not help."
    )


def _growing_tensor(free: Sequence[Holder], facts: Facts) -> Group | None:
    """One tensor that a longer one replaces in each step, or in each forward of an evaluation, as
    ``torch.cat([history, new])`` does.
    """
    survivors = [holder for holder in free if _has_survived(holder, facts)]
    old = max(survivors, key=lambda holder: holder.nbytes, default=None)
    if old is None:
        return None
    alike = [holder for holder in facts.others if _continues(holder, old)]
    alike.sort(key=lambda holder: holder.samples)
    earlier = [holder for holder in alike if holder.first_sample < old.first_sample]
    rising = [old]  # the newest first
    for holder in reversed(earlier):
        if holder.nbytes < rising[-1].nbytes:
            rising.append(holder)
    growth = old.nbytes - rising[-1].nbytes
    if len(rising) <= SEVERAL or growth < WORTH * facts.peak.total:
        return None
    holders = [holder for holder in survivors if _made(holder) == _made(old)]
    for holder in free:
        if holder.nbytes > old.nbytes and _made(holder) == _made(old):
            holders.append(holder)  # the longer one, which is being made
    newest = holders[-1]
    later = [holder for holder in alike if holder.first_sample > newest.first_sample]
    if later and later[0].nbytes == newest.nbytes:
        return None  # a window of the last rows, which is full
    unit = facts.unit
    changes: dict[str, Any] = {"growing": [*rising[1:], *holders]}
    if facts.time_of(old) == facts.peak_time:
        unit = "forward"
        remedy = f"{OF_A_LONGER_ONE} A smaller batch does not help."
        if old.held is not None and not old.held.in_script:
            remedy = OF_A_TRAINER
        changes |= {"name": COLLECTED, "remedy": remedy}
    each = format_bytes(growth // (len(rising) - 1))
    return Group(holders, {"unit": unit, "each": each, "newest": in_words(newest)}, changes)


GROWING_TENSOR = Row(
    GROWTH,
    "{size} at the peak are in tensors that become longer in each {unit}, by about {each}: "
    "{newest}.",
    OF_A_LONGER_ONE,
    _growing_tensor,
)


def _has_survived(holder: Holder, facts: Facts) -> bool:
    """Whether it was joined before the peak's step, or before the last forward of an evaluation.

    A batch is made before the step that it belongs to, but it does not continue earlier ones.
    """
    if not holder.continues:
        return False
    if facts.time_of(holder) == facts.peak_time - 1:
        return True
    by_a_layer = holder.made_in != BETWEEN_STEPS  # which joins keys and values
    last = facts.evaluations[-1:]
    return bool(last) and not by_a_layer and holder.first_sample < last[0].first_sample


def _made(holder: Holder) -> tuple:
    """The same for all that one line has made by one operation."""
    return holder.line, holder.op, holder.dtype


def _continues(one: Holder, other: Holder) -> bool:
    """Whether both are of one line, and only one of their sizes differs, if any does."""
    if _made(one) != _made(other) or len(one.shape) != len(other.shape):
        return False
    return sum(map(int.__ne__, one.shape, other.shape)) <= 1
