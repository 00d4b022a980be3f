"""Layers that run in checkpointed segments while they train, by a schedule from ``schedules``.

For a chain of layers, all of it would be this loop:

    for start in range(0, len(layers), k):
        segment = layers[start : start + k]  # an nn.Sequential
        x = checkpoint(segment, x, use_reentrant=False)

But the loop over layers is the model's own, and is not rewritten here. So each layer's *call* is
replaced: the call of a segment's first layer runs the whole segment in one checkpoint, and the
calls of the others hand its output on.

Read ``checkpoint_layers`` first, which makes a ``_Segments`` for each list of layers. Of
``_Segments``, read ``call`` (one call of a layer), ``_begin_segment`` and ``_run`` (one segment):
they are lesson 04.
``_choose_schedule`` and ``_measure`` belong to ``"best"``. The rest refuses what would give a wrong
gradient: layers called out of order, inputs changed in place, caches.
"""

from __future__ import annotations

import warnings
from bisect import bisect
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..compat import (
    call_override,
    is_compiled,
    original_call,
    override_call,
    storage_key,
    tree_flatten,
    version,
)
from ..hf_names import LAYER_INPUT, LAYER_SWITCH, OUTPUTS_OF_EACH_LAYER, hf_class
from .layer_bytes import LayerBytes, layer_bytes
from .layers import find_layers
from .schedules import Schedule, first_layers, safe_segments, segments_for, total_layers


def checkpoint_layers(
    layers_or_model: nn.Module, every: str | int | Schedule, *, keep_last: bool | None = None
) -> CheckpointedLayers:
    """Run layers in checkpointed segments while they train, until ``.remove()`` or the end of a
    ``with`` block.

    Args:
        layers_or_model: an ``nn.Sequential``; an ``nn.ModuleList`` whose layers are called in
            order, each with the output of the one before; or a transformers model, whose list of
            layers is found. A model with several lists (an encoder's and a decoder's) gets a
            schedule for each.
        every: an int k for segments of k layers, or ``"per-layer"`` for 1; ``"sqrt"`` for about
            sqrt(n) segments; a list of segment lengths, first segment first, in which a list is a
            segment made of segments; ``"first-k"`` to checkpoint the first k layers one by one
            (counted from the first list on) and keep the others; or ``"best"``. This measures the
            bytes of each layer at the beginning of the first training forward (two extra forwards
            and a backward of the layers, one at a time) and uses ``safe_segments``. Then the peak
            is never higher than with one checkpoint a layer, whatever logits and loss need after
            the layers.
        keep_last: whether the last segment is kept rather than recomputed. ``None``: yes for a
            list, no for an int and ``"sqrt"``, and ``"best"`` chooses. ``"first-k"`` sets it
            itself.

    Modules, parameters and state dicts do not change, and layers in eval mode or without gradients
    run as before. Hooks on a layer fire each time that it runs (the last layer of a recomputation
    stops early, once nothing more is needed). In training, an empty key-value cache is left out
    (with a warning), since a recomputed layer would write to it again. If the model is given here,
    a forward that collects hidden states or attentions checkpoints its layers one by one. Under
    ``torch.compile`` of the whole model, the layers run uncompiled. A copy of the model
    (``copy.deepcopy``, ``pickle``) has no checkpoints.

    Raises ``ValueError`` or ``TypeError`` for a schedule that does not fit, ``ValueError`` if no
    list of layers is found, and ``RuntimeError`` if a layer, or a part of one, is checkpointed
    already (by this function or by transformers), if a layer is compiled, or if ``"best"`` is used
    on weights that FSDP has sharded over processes.
    """
    found = find_layers(layers_or_model)
    refuse_checkpointed([layer for layers, _ in found.values() for layer in layers])
    lengths = isinstance(every, (list, tuple))
    if lengths and len(found) > 1:
        raise ValueError(
            f"a {type(layers_or_model).__name__} has several lists of layers ({', '.join(found)}), "
            f"and every={every} is the schedule of one: give each its own, "
            "checkpoint_layers(model.<list>, [...]), or an int or a name"
        )
    if keep_last is None and every != "best":
        keep_last = lengths
    passes_tuple_through = isinstance(layers_or_model, nn.Sequential)
    lists, first = {}, first_layers(every)
    for name, (layers, owner) in found.items():
        if first is not None:
            in_this_list = min(first, len(layers))
            every = f"first-{in_this_list}"
            keep_last = in_this_list < len(layers)
            first -= in_this_list
        schedule = segments_for(every, len(layers))
        lists[name] = _Segments(layers, owner, passes_tuple_through, schedule, keep_last)
    if first:
        total = sum(len(layers) for layers, _ in found.values())
        raise ValueError(f"every='first-{first + total}': there are {total} layers in all")
    return CheckpointedLayers(lists)


class CheckpointedLayers(AbstractContextManager):
    """Layers that run in segments, as ``checkpoint_layers`` returns them.

    Attributes: ``layers``; ``segments`` (the schedule; None until ``"best"`` has measured);
    ``keep_last``; ``internal`` and ``boundary`` (the bytes that ``"best"`` measured, one number a
    layer; None before that, and for other schedules). If the model has several lists of layers,
    each attribute is a dict by the list's name in the model.
    """

    def __init__(self, lists: dict[str, _Segments]):
        self._lists = lists
        with ExitStack() as undo:
            for segments in lists.values():
                segments.install(undo)
            self._undo = undo.pop_all()

    def __getattr__(self, name: str) -> Any:
        if name not in ("layers", "segments", "keep_last", "internal", "boundary"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        values = {where: getattr(segments, name) for where, segments in self._lists.items()}
        return values if len(values) > 1 else next(iter(values.values()))

    def remove(self) -> None:
        """Restore the layers' own forward. A second call does nothing."""
        self._undo.close()

    def __exit__(self, *error) -> None:
        self.remove()


class _Pending(NamedTuple):
    """A segment that has run, while the calls of its other layers are still expected."""

    next_layer: int  # the layer whose call is expected
    stop: int  # the layer after the segment's last
    out: Any  # the segment's output, which those calls hand on
    rest: tuple  # the arguments of its layers, without the input


@dataclass(eq=False)
class _Segments:
    """One list of layers, and how it runs.

    The model calls layer 0, 1, 2, ...; the call of a segment's first layer computes the whole
    segment, and the calls of the others only hand its output on. With segments of 3:

        call of layer 0: runs layers 0, 1 and 2 in one checkpoint, returns layer 2's output
        call of layer 1: returns its input, which is that output
        call of layer 2: the same
        call of layer 3: runs layers 3, 4 and 5 in one checkpoint, ...
    """

    layers: list[nn.Module]
    owner: nn.Module | None  # the transformers model that calls them
    # the next layer gets a tuple as it is, and not only its first element
    passes_tuple_through: bool
    segments: Schedule | None
    keep_last: bool | None
    internal: list[int] | None = None
    boundary: list[int] | None = None
    pending: _Pending | None = None
    per_layer_this_forward: bool = False  # in this forward, each layer is its own segment
    warned: bool = False
    called: bool = False  # whether any layer of the list was called
    # While "best" measures: for each call the layer, its bytes, and whether it may share a segment
    # with the layer before.
    measured: list[tuple[int, LayerBytes, bool]] | None = None

    def install(self, undo: ExitStack) -> None:
        # Dynamo must not look into a schedule that changes while it runs.
        call, before = torch.compiler.disable(self.call), torch.compiler.disable(self.before_model)
        if self.owner is not None:
            undo.callback(
                self.owner.register_forward_pre_hook(_ModelPreHook(before), with_kwargs=True).remove
            )
        for i, layer in enumerate(self.layers):
            undo.callback(override_call(layer, _SegmentCall(self, call, i)))
            for part in layer.children():
                undo.callback(
                    part.register_forward_pre_hook(_ModelPreHook(self.before_part)).remove
                )

    def apply_to_copy(self, copies: dict[nn.Module, nn.Module]) -> None:
        """Apply the same schedule to a copy of the model; ``copies`` maps modules to copies."""
        layers = [copies[layer] for layer in self.layers]
        copied = replace(self, layers=layers, owner=copies.get(self.owner), pending=None)
        CheckpointedLayers({"layers": copied})

    def call(self, i: int, args: tuple, kwargs: dict) -> Any:
        """Called in place of layer ``i``: run its segment, or return the output if it has run."""
        pending, self.pending = self.pending, None
        self.called = True
        if not self._training():
            return self._call_as_it_is(i, args, kwargs, pending)
        if getattr(self.layers[i], LAYER_SWITCH, False):
            raise RuntimeError(_ALREADY_CHECKPOINTED)
        args, kwargs, had_cache = without_cache(args, kwargs)
        if had_cache and not self.warned:
            self.warned = True
            warnings.warn(CACHE_WARNING, stacklevel=2)
        x, rest = _split_input(args, kwargs)
        if self.measured is not None:  # "best" is measuring: no segments yet
            return self._measure(i, x, rest, pending)
        if self.segments is None and not self.per_layer_this_forward:
            self._choose_schedule(partial(self._measure_in_order, i, x, rest))
        item, start, stop = self._segment_of(i)
        kept = self.keep_last and stop == len(self.layers)
        if kept and isinstance(item, int):
            return self._run(1, i, x, rest)  # nothing runs again
        if i == start:  # the whole segment runs now
            out = self._begin_segment(item, start, x, rest, kept=kept)
        else:  # the segment has run: hand its output on
            self._refuse_unless_continued(i, start, x, rest, pending)
            out, rest = pending.out, pending.rest
        if i + 1 < stop:
            self.pending = _Pending(i + 1, stop, out, rest)
        return out

    def _segment_of(self, i: int) -> tuple[int | Schedule, int, int]:
        """Layer ``i``'s segment in this forward: its item of the schedule, its first layer, and the
        layer after its last.
        """
        schedule = [1] * len(self.layers) if self.per_layer_this_forward else self.segments
        ends = list(accumulate(map(total_layers, schedule)))
        index = bisect(ends, i)
        item, stop = schedule[index], ends[index]
        return item, stop - total_layers(item), stop

    def _begin_segment(
        self, item: int | Schedule, start: int, x: Any, rest: tuple, *, kept: bool
    ) -> Any:
        """The output of a whole segment, in a checkpoint unless it is ``kept``."""
        run = partial(self._run, item, start, rest=rest)
        if kept:
            return run(x)
        before = _version(x)
        out = checkpoint(run, x, use_reentrant=False)
        if _version(x) != before:  # a second run would begin with another input
            raise RuntimeError(_IN_PLACE.format(start))
        return out

    def _call_as_it_is(self, i: int, args: tuple, kwargs: dict, pending: _Pending | None) -> Any:
        """Call layer ``i`` where nothing is checkpointed: without gradients, or in eval mode."""
        continues = pending is not None and pending.next_layer == i
        if continues and _split_input(args, kwargs)[0] is self._hidden(pending.out):
            raise RuntimeError(
                "gradients or training mode were switched off in a segment that has run: "
                f"begin a new one at layer {i}"
            )
        return original_call(self.layers[i])(*args, **kwargs)

    def _training(self) -> bool:
        return torch.is_grad_enabled() and any(layer.training for layer in self.layers)

    def _run(self, item: int | Schedule, start: int, x: Any, rest: tuple) -> Any:
        """The output of one segment that begins at layer ``start`` with input ``x``."""
        if item == 1:
            args, kwargs = _join_input(x, rest)
            return original_call(self.layers[start])(*args, **kwargs)
        parts = [1] * item if isinstance(item, int) else item
        for j, part in enumerate(parts, 1):
            run = partial(self._run, part, start, rest=rest)
            recompute = isinstance(item, list) and j < len(parts)
            out = checkpoint(run, x, use_reentrant=False) if recompute else run(x)
            if j < len(parts) and self._has_extra_outputs(out):
                raise RuntimeError(
                    "the layers return more than their hidden state, which is all that a segment "
                    "hands on: checkpoint them one by one (every=1), or leave output_attentions "
                    "off"
                )
            start, x = start + total_layers(part), self._hidden(out)
        return out

    def _hidden(self, out: Any) -> Any:
        """The part of a layer's output that the next layer gets."""
        return out[0] if isinstance(out, tuple) and not self.passes_tuple_through else out

    def _has_extra_outputs(self, out: Any) -> bool:
        if not isinstance(out, tuple) or self.passes_tuple_through:
            return False
        return any(part is not None for part in out[1:])

    def _refuse_unless_continued(
        self, i: int, start: int, x: Any, rest: tuple, pending: _Pending | None
    ) -> None:
        problem = self._problem(i, x, rest, pending)
        if problem:
            raise RuntimeError(
                f"layer {i} {problem}, and a segment that begins at layer {start} runs its layers "
                "in order, each with the last one's output and the same other arguments: begin a "
                f"new segment at layer {i}, or use every=1"
            )

    def _problem(self, i: int, x: Any, rest: tuple, pending: _Pending | None) -> str | None:
        """The reason why this call of layer ``i`` does not continue a segment; None if it does."""
        if pending is None or pending.next_layer != i:
            return "was called out of order"
        if self._has_extra_outputs(pending.out) or x is not self._hidden(pending.out):
            return f"was given something else than the output of layer {i - 1}"
        if not _same_arguments(rest, pending.rest):
            return f"was called with other arguments (masks, positions, ...) than layer {i - 1}"
        return None

    def _changes_its_input(self, i: int, x: Any, rest: tuple) -> bool:
        if not isinstance(x, Tensor):
            return False
        copy = x.detach().clone()
        before = _version(copy)
        with torch.no_grad():
            args, kwargs = _join_input(copy, rest)
            original_call(self.layers[i])(*args, **kwargs)
        return _version(copy) != before

    def before_part(self, *args) -> None:
        """Called before a part of a layer runs. It runs inside its layer, if that is called."""
        if self.called or self.warned or not self._training():
            return
        self.warned = True
        warnings.warn(
            "the model calls parts of the layers in this list, and not the layers themselves, so "
            "no checkpoint runs and nothing is saved: give checkpoint_layers a list whose items "
            "the model's forward calls",
            stacklevel=2,
        )

    def before_model(self, model: nn.Module, args: tuple, kwargs: dict) -> None:
        """Called before the forward of the model that owns these layers."""
        self.per_layer_this_forward = any(
            getattr(model.config, name, None) if kwargs.get(name) is None else kwargs[name]
            for name in OUTPUTS_OF_EACH_LAYER
        )
        if self.segments is None and not self.per_layer_this_forward and self._training():
            # Where a batch has padding, layers of different kinds get different masks.
            kinds = set(getattr(model.config, "layer_types", None) or ())
            self._choose_schedule(lambda: model.forward(*args, **kwargs), same_kind=len(kinds) < 2)

    def _measure_in_order(self, i: int, x: Any, rest: tuple) -> None:
        """Measure the layers of a list: call each with the output of the one before it.

        For lists whose model is not known.
        """
        if i != 0:
            raise RuntimeError(
                f'layer {i} was called before layer 0, at which "best" measures all layers'
            )
        for j in range(len(self.layers)):
            x = self._hidden(self._measure(j, x, rest, self.pending))

    def _choose_schedule(self, run: Callable[[], Any], same_kind: bool = True) -> None:
        """Measure each layer while ``run`` calls them, and choose the schedule.

        ``same_kind``: the layers get the same arguments, so they may share a segment. Random states
        do not change.
        """
        devices = {
            p.device for layer in self.layers for p in layer.parameters() if p.device.type == "cuda"
        }
        self.measured = measured = list[tuple[int, LayerBytes, bool]]()
        # copies cast before the layers would be alive during each layer's backward
        torch.clear_autocast_cache()
        try:
            with torch.random.fork_rng(devices=list(devices)):
                run()
        finally:
            self.measured = self.pending = None
        sizes = [size for _, size, _ in measured]
        self.internal, self.boundary = [s.internal for s in sizes], [s.boundary for s in sizes]
        in_order = [i for i, _, _ in measured] == list(range(len(self.layers)))
        if same_kind and in_order and all(follows for _, _, follows in measured[1:]):
            self.segments, self.keep_last = safe_segments(sizes, self.keep_last)
        else:  # layers that cannot share a segment
            self.segments, self.keep_last = [1] * len(self.layers), bool(self.keep_last)

    def _measure(self, i: int, x: Any, rest: tuple, pending: _Pending | None) -> Any:
        """Record the bytes that layer ``i`` saves and needs. Returns its output without a graph."""
        if any(hasattr(p, "placements") for p in self.layers[i].parameters()):
            raise RuntimeError(
                'every="best" measures one layer alone, and here FSDP has spread its weights over '
                "processes: give an int, "
                '"sqrt" or a list of segment lengths (best_segments finds them from the bytes of '
                "an unspread layer)"
            )
        try:
            size, out = layer_bytes(self.layers[i], *_join_input(x, rest), x, self._hidden)
        except RuntimeError as error:
            if self._changes_its_input(i, x, rest):
                raise RuntimeError(_IN_PLACE.format(i)) from error
            raise
        self.measured.append((i, size, self._problem(i, x, rest, pending) is None))
        self.pending = _Pending(i + 1, len(self.layers), out, rest)
        return out


def checkpoints_of(model: nn.Module) -> list[_Segments]:
    """The checkpoints that ``checkpoint_layers`` has put on layers of ``model``."""
    # The layers of one list share their _Segments. A dict keeps the order.
    found: dict[_Segments, None] = {}
    for module in model.modules():
        override = call_override(module)
        if isinstance(override, _SegmentCall):
            found[override.segments] = None
    return list(found)


class CallOverride:
    """A function that runs in place of a module's own call, and recomputes it in backward."""


class _SegmentCall(CallOverride):
    """The override of one layer's call. A copy of the layer gets the layer's own call instead."""

    def __init__(self, segments: _Segments, call: Callable, index: int):
        self.segments, self.call, self.index = segments, call, index

    def __call__(self, *args, **kwargs):
        return self.call(self.index, args, kwargs)

    def __reduce__(self):
        return original_call, (self.segments.layers[self.index],)


class _ModelPreHook:
    """A forward pre-hook of the model that calls ``callback``.

    It is a class, since a copy of the model also copies its hooks: there it does nothing.
    """

    def __init__(self, callback: Callable = lambda *args: None):
        self.callback = callback

    def __call__(self, *args) -> None:
        self.callback(*args)

    def __reduce__(self):
        return type(self), ()


def without_cache(args: tuple, kwargs: dict) -> tuple[tuple, dict, bool]:
    """The arguments with None for a key-value cache, and whether there was a cache.

    ``RuntimeError`` if it has entries.
    """
    kind = hf_class("Cache")
    caches = [value for value in (*args, *kwargs.values()) if isinstance(value, kind)]
    if any(cache.get_seq_length() > 0 for cache in caches):
        raise RuntimeError(
            "the layers were given a key-value cache that has entries, and running them again "
            "would add to it again: train without past_key_values, or remove the checkpoints"
        )

    def without(value: Any) -> Any:
        return None if isinstance(value, kind) else value

    named = {name: without(value) for name, value in kwargs.items()}
    if "use_cache" in named:
        named["use_cache"] = False
    return tuple(map(without, args)), named, bool(caches)


def _split_input(args: tuple, kwargs: dict) -> tuple[Any, tuple]:
    """Split a layer's arguments into its input and the rest.

    The rest is (the other positional arguments, or None if the input was named; the named ones).
    """
    if args:
        return args[0], (args[1:], kwargs)
    if LAYER_INPUT not in kwargs:
        raise TypeError(
            "a checkpointed layer was called without a positional argument (only "
            f"{sorted(kwargs) or 'nothing'}): pass what one layer hands to the next as the first "
            "argument"
        )
    named = dict(kwargs)
    return named.pop(LAYER_INPUT), (None, named)


def _join_input(x: Any, rest: tuple) -> tuple[tuple, dict]:
    """The opposite of ``_split_input``: (args, kwargs)."""
    positional, named = rest
    if positional is None:  # the input was named
        return (), named | {LAYER_INPUT: x}
    return (x, *positional), named


def _same_arguments(a: Any, b: Any) -> bool:
    """Whether two sets of arguments are the same.

    Tensors are the same if they are views of the same elements. Other values must be equal.
    """
    (leaves, kind), (other_leaves, other_kind) = tree_flatten(a), tree_flatten(b)
    return kind == other_kind and all(map(_same_leaf, leaves, other_leaves))


def _same_leaf(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return _tensor_identity(a) == _tensor_identity(b)
    return a is b or (type(a) is type(b) and bool(a == b))


def _tensor_identity(t: Tensor) -> tuple:
    return storage_key(t.untyped_storage()), t.storage_offset(), t.shape, t.stride(), t.dtype


def _version(x: Any) -> int:
    """How often the tensor was changed in place; 0 for something else."""
    return version(x) if isinstance(x, Tensor) else 0


_IN_PLACE = (
    "layer {} changes its input in place, and a checkpoint that begins there would compute it "
    "again from the changed input: set inplace=False in it, or begin the segment at an earlier "
    "layer"
)
_ALREADY_CHECKPOINTED = (
    "some of these layers, or parts of them, are checkpointed already, and with a second schedule "
    "on top they would run three times: call .remove() on the first one, or where it is "
    "transformers' own, model.activation_checkpointing_disable() "
    "(gradient_checkpointing_disable() before 5.23), and leave it out of the Trainer's arguments"
)
CACHE_WARNING = (
    "training with checkpoints leaves the key-value cache out: set model.config.use_cache=False"
)


def refuse_checkpointed(layers: list[nn.Module]) -> None:
    """Raise ``RuntimeError`` if a layer, or a part of one, is checkpointed or compiled already."""
    for part in [part for layer in layers for part in layer.modules()]:
        # In a copy, the override is the part's own call, and no checkpoint.
        ours = isinstance(call_override(part), CallOverride)
        if ours or getattr(part, LAYER_SWITCH, False):
            raise RuntimeError(_ALREADY_CHECKPOINTED)
    if any(map(is_compiled, layers)):
        raise RuntimeError(
            "a layer is compiled on its own, and compiled code bypasses the checkpoints: "
            "checkpoint the layers before you compile them, or do not compile them"
        )
