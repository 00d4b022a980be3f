"""Computes the trace of a step from traces of a few layers and micro-batches, where these prove it.

Otherwise the whole step is traced.
"""

from collections.abc import Iterator
from dataclasses import replace
from math import lcm
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from ..model.layers import find_layers, layers_in
from ..model.linear import linear_layers, linear_sizes
from ..names import SELECTIVE
from ..techniques.schedules import first_layers, segments_for
from ..training.recipe import Recipe
from . import allocator
from .extrapolation import PART, Trace, extrapolate, timeline_rows
from .question import CannotTrace, Kept, Question
from .requests import extrapolated_requests
from .second_process import traces_of
from .trace import traced

# Numbers of units (layers, or segments of layers) to try, until short traces prove the deep one.
UNITS = (2, 3, 4)
SHORTEST = 3  # layers: with fewer, no layer lies between the first and the last
# Traces of "first-k" are those of any other k too: they are made for about so many of them.
SHARED_BY = 3
MOST_SHORT_TRACES = 64  # that a source remembers: about a MiB each
# micro-batches that are traced: the first, the last, and one that stands for all between them
MICRO_BATCHES = 3


class ShortTraces(NamedTuple):
    """What a deep model's trace is computed from.

    ``short``: a trace of a few layers. By the number in the marks of each list of layers that it
    does not have whole: ``longer`` has the trace with one unit more, and ``repeats`` how many units
    more the deep model has.
    """

    short: Trace
    longer: dict[int, Trace]
    repeats: dict[int, int]

    def requests(self) -> tuple[int, ...] | None:
        """The deep model's requests to an allocator, without what the traces leave out;
        ``None`` if these traces do not prove them.
        """
        return extrapolated_requests(*self)


class Traced(NamedTuple):
    """The timeline's rows, and how they were found.

    After short traces, ``layers`` has the number of layers in each of them, and ``requests`` is
    empty: ``short.requests()`` computes them. After a full trace, ``requests`` has its requests,
    ``layers`` is empty, and ``short`` is ``None``.
    """

    rows: np.ndarray
    offload_traffic_bytes: int
    layers: tuple[int, ...]
    requests: tuple[int, ...]
    short: ShortTraces | None = None


def trace_step(question: Question, full: bool) -> Traced:
    if full:
        trace = traced(question)
        return Traced(trace.rows, trace.offload_traffic_bytes, (), trace.requests)
    for kept in _shortenings(question):
        try:
            found = _trace_few_layers(question, kept)
        except (ValueError, CannotTrace):
            break  # the model does not run with fewer layers: the full trace works, or says why
        if found is not None:
            return found
    trace = trace_few_parts(question)
    rows = timeline_rows(trace.changes(), trace.left_out)
    return Traced(rows, trace.offload_traffic_bytes, (), trace.requests)


def requests_of_more_layers(question: Question, traced: tuple[int, ...]) -> tuple[int, ...] | None:
    """The step's requests to an allocator, computed from traces of a few more layers than the
    ``traced`` ones, which proved the step's bytes but not its requests.

    ``None`` if they are not proved either, or if such traces are as much work as a full one.
    """
    for kept in _shortenings(question):
        if _layers_traced(question, kept) <= traced[0]:
            continue
        found = _trace_few_layers(question, kept)
        requests = None
        if found is not None and found.short is not None:
            requests = found.short.requests()
        if requests is not None:
            return requests
    return None


def _trace_few_layers(question: Question, kept: list[Kept]) -> Traced | None:
    """The step from a trace of the ``kept`` layers and, for each list, one with a unit more.

    DDP's buckets grow with each layer: a third trace shows by how much.
    """
    question = replace(question, recipe=_with_equal_segments(question))
    shortened = [i for i, one in enumerate(kept) if one.count < one.total]
    # Which list is longer than in the short trace, and by how many units.
    longer_by = [(i, 1) for i in shortened]
    if _grows_in_buckets(question.recipe):
        longer_by += [(i, 2) for i in shortened]
    all_kept = [kept]
    for i, units in longer_by:
        count = kept[i].count + units * kept[i].unit
        all_kept.append([*kept[:i], kept[i]._replace(count=count), *kept[i + 1 :]])
    short, *others = _short_traces(question, all_kept)
    longer: dict[int, Trace] = {}
    longest: dict[int, Trace] = {}
    for (i, units), trace in zip(longer_by, others, strict=True):
        if units == 1:
            longer[i] = trace
        else:
            longest[i] = trace
    repeats = {i: (kept[i].total - kept[i].count) // kept[i].unit for i in shortened}
    changes = extrapolate(
        short.changes(),
        {i: long.changes() for i, long in longer.items()},
        repeats,
        {i: long.changes() for i, long in longest.items()},
    )
    if changes is None:
        return None
    traffic = short.offload_traffic_bytes
    for i, long in longer.items():
        traffic += repeats[i] * (long.offload_traffic_bytes - short.offload_traffic_bytes)
    layers = _layers_traced(question, kept)
    traced_layers = [layers, *[layers + kept[i].unit for i in shortened]]
    if longest:
        traced_layers += [layers + 2 * kept[i].unit for i in shortened]
    rows = timeline_rows(changes, short.left_out)
    return Traced(rows, traffic, tuple(traced_layers), (), ShortTraces(short, longer, repeats))


def _layers_traced(question: Question, kept: list[Kept]) -> int:
    """How many layers a trace of the ``kept`` ones has, with those of lists that it has whole."""
    left_out = sum(one.total - one.count for one in kept)
    return sum(map(len, question.source.lists)) - left_out


def _short_traces(question: Question, all_kept: list[list[Kept]]) -> list[Trace]:
    """For each of ``all_kept``: the trace with these layers.

    Where only the first k layers are recomputed, the traces are remembered for other k. But a batch
    has no hash, and a loss may read other values the next time.
    """
    questions = [_short_question(question, kept) for kept in all_kept]
    source = question.source
    is_shared = first_layers(question.recipe.checkpointing) is not None
    if not is_shared or question.batch is not None or question.loss is not None:
        return traces_of(source, questions, trace_few_parts)
    known = source.short_traces
    unknown = [one for one in questions if one not in known]
    new_traces = traces_of(source, unknown, trace_few_parts)
    known.update(zip(unknown, new_traces, strict=True))
    traces = [known[one] for one in questions]
    while len(known) > MOST_SHORT_TRACES:
        oldest = next(iter(known))
        del known[oldest]
    return traces


def _short_question(question: Question, kept: list[Kept]) -> Question:
    """The question for the ``kept`` layers.

    Where only the first k layers are recomputed ("first-k"), the trace does not depend on how many
    layers of each kind the deep model has. So the question is the same for different k.
    """
    recomputed = first_layers(question.recipe.checkpointing)
    if recomputed is None:
        return replace(question, kept=tuple(kept))
    # The short model's k: that of the deep one without the recomputed layers that are left out.
    for one in kept:
        if one.recomputed:
            recomputed -= one.total - one.count
    recipe = replace(question.recipe, checkpointing=f"first-{recomputed}")
    # The totals are those of the deep model, and no part of the shared question.
    shared = tuple(one._replace(total=0) for one in kept)
    return replace(question, recipe=recipe, kept=shared)


def _grows_in_buckets(recipe: Recipe) -> bool:
    """Whether gradients of many layers are sent in one storage."""
    return recipe.sharding is not None and not recipe.fully_sharded


def _shortenings(question: Question) -> Iterator[list[Kept]]:
    """Which layers to keep, the fewest first, as long as that is less work than to trace all."""
    if first_layers(question.recipe.checkpointing) is not None:
        yield from _shortenings_of_first_layers(question)
        return
    lists = _repeated_units(question)
    all_layers = sum(one.total for one in lists)
    for units in UNITS:
        kept = [one._replace(count=units * one.unit + one.count % one.unit) for one in lists]
        if any(units * one.unit < SHORTEST for one in kept):
            continue
        # Each list costs more traces, so a list of few layers is traced whole.
        choices = [kept[: i + 1] for i in range(len(kept))]
        longer = 2 if _grows_in_buckets(question.recipe) else 1
        costs = [_layers_in_all_traces(choice, all_layers, longer) for choice in choices]
        if not costs or min(costs) >= all_layers:
            return
        yield choices[costs.index(min(costs))]


def _shortenings_of_first_layers(question: Question) -> Iterator[list[Kept]]:
    """Which layers to keep where the first k of all lists are recomputed, and the others are not.

    k counts through the lists one after the other. Of each list, some recomputed layers are kept
    and some others, if it has both kinds.
    """
    if _needs_all_layers(question):
        return
    found = find_layers(question.source.skeleton, question.recipe.layers)
    all_layers = len(layers_in(found))
    if not 0 < first_layers(question.recipe.checkpointing) < all_layers:
        return  # there is one kind of layers
    most_work = SHARED_BY * all_layers  # in layers: several recipes share the traces
    for units in range(SHORTEST, max(UNITS) + 1):
        kept = _kinds_of_layers(question, units)
        shortened = [one for one in kept if one.count < one.total]
        if not shortened or _layers_in_all_traces(shortened, all_layers, 1) >= most_work:
            return
        yield kept


def _kinds_of_layers(question: Question, units: int) -> list[Kept]:
    """At most ``units`` recomputed layers and ``units`` others of each list of equal layers."""
    repeated = {tuple(several.layers): several for several in question.source.lists}
    to_recompute = first_layers(question.recipe.checkpointing)  # in this list and the next ones
    kept = []
    found = find_layers(question.source.skeleton, question.recipe.layers)
    for layers, _ in found.values():
        recomputed = min(to_recompute, len(layers))
        others = len(layers) - recomputed
        to_recompute -= recomputed
        several = repeated.get(tuple(layers))
        if several is None or several.period != 1:
            continue  # this list is traced whole
        if recomputed:
            kept.append(Kept(several, 1, min(units, recomputed), recomputed, recomputed=True))
        if others:
            kept.append(Kept(several, 1, min(units, others), others, at_end=recomputed > 0))
    return kept


def _layers_in_all_traces(kept: list[Kept], all_layers: int, longer: int) -> int:
    """How many layers the short trace and the longer ones have together.

    ``longer``: the number of longer traces for each list.
    """
    short = all_layers - sum(one.total - one.count for one in kept)
    total = short
    for one in kept:
        for more in range(1, longer + 1):
            total += short + more * one.unit
    return total


def _repeated_units(question: Question) -> list[Kept]:
    """The lists that can be shortened, with their units, the longest first. ``count`` is the number
    of all layers.
    """
    recipe, lists = question.recipe, question.source.lists
    if _needs_all_layers(question):
        return []
    recipe = _with_equal_segments(question)
    schedule = recipe.checkpointing
    if isinstance(schedule, int):
        unit = schedule
    elif schedule in (None, "per-layer", *SELECTIVE):
        unit = recipe.every_n_layers or 1
    else:
        return []  # segments of different lengths
    lengths = [len(several) for several in lists]
    return [
        Kept(several, lcm(unit, several.period), length, length)
        for several, length in zip(lists, lengths, strict=True)
    ]


def _needs_all_layers(question: Question) -> bool:
    """Whether the recipe names single layers, or what sharding does with a layer depends on how
    many layers there are.
    """
    recipe = question.recipe
    if not all(isinstance(name, str) for name in recipe.layers):
        return True  # a layer of this name may be missing in a shorter list
    if recipe.shards_only_states:
        # ranks divide whole parameters by size: in a longer model, a rank gets other layers
        return True
    if question.target == "cuda" and recipe.sharding == "ddp":
        return not _fill_whole_blocks(question)
    return False


def _fill_whole_blocks(question: Question) -> bool:
    """Whether the gradients of each repeated layer together fill whole blocks of the allocator.

    DDP's bucket has the gradients of all layers, and is rounded as a whole. So only then does each
    layer add as many bytes to it.
    """
    recipe = question.recipe
    for several in question.source.lists:
        for layer in several.layers:
            if recipe.lora_rank is not None:
                fills = _adapters_fill_whole_blocks(layer, recipe.lora_rank)
            else:
                fills = _gradient_bytes(layer, recipe) % allocator.BLOCK == 0
            if not fills:
                return False
    return True


def _adapters_fill_whole_blocks(layer: nn.Module, rank: int) -> bool:
    """Whether each adapter that a linear layer inside may get fills whole blocks, in 16 bits or in
    32: then so do those of any targets.
    """
    of_a_feature = rank * torch.bfloat16.itemsize
    for linear in linear_layers(layer).values():
        for features in linear_sizes(linear) or ():
            if of_a_feature * features % allocator.BLOCK:
                return False
    return True


def _gradient_bytes(layer: nn.Module, recipe: Recipe) -> int:
    nbytes = 0
    for parameter in layer.parameters():
        if parameter.requires_grad:
            dtype = recipe.weight_dtype or parameter.dtype  # None: each weight keeps its own
            nbytes += parameter.numel() * dtype.itemsize
    return nbytes


def _with_equal_segments(question: Question) -> Recipe:
    """The recipe with the length of segments in place of ``"sqrt"``, which is another one for fewer
    layers.
    """
    recipe = question.recipe
    if recipe.checkpointing != "sqrt" or not question.source.lists:
        return recipe
    found = find_layers(question.source.skeleton, recipe.layers)
    lengths = {len(layers) for layers, _ in found.values()}
    if lengths != {len(question.source.lists[0])}:
        return recipe
    # all segments but the last have the length of the first
    return replace(recipe, checkpointing=segments_for("sqrt", *lengths)[0])


def trace_few_parts(question: Question) -> Trace:
    """A trace without micro-batches and chunks of a loss that are like others (``left_out``).

    The micro-batches that are left out are all like the second one, and their offload traffic is
    counted. The trace's parts: 0 is what exists first, 1 and 2 are the first micro-batch's forward
    and backward, and so on, and the last part is the optimizer's step. The first micro-batch
    creates the gradients, and all others add to them.
    """
    k = question.recipe.accumulation
    num_traced = MICRO_BATCHES
    if question.recipe.sharding is not None and not question.recipe.fully_sharded:
        num_traced += 1  # there the last one sends the gradients
    if k > num_traced and not question.source.is_user_module:
        trace = traced(question, num_traced, few_chunks=True)
        if _same_parts(trace, 3, 5) and _same_parts(trace, 4, 6):
            traffic = trace.offload_traffic_bytes * k // num_traced
            left_out = trace.left_out._replace(micro_batches=k - num_traced)
            return replace(trace, offload_traffic_bytes=traffic, left_out=left_out)
    return traced(question, few_chunks=True)


def _same_parts(trace: Trace, one: int, other: int) -> bool:
    """Whether two parts of a step have the same events, as far as both go.

    After the last backward, the sum of losses is read.
    """
    changes = trace.changes()
    part = changes.places[:, PART]
    a, b = changes[part == one], changes[part == other]
    same = min(len(a.rows), len(b.rows))
    return a[:same].equal(b[:same])
