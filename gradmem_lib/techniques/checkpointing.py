"""Layers that run in checkpointed segments while they train, by a schedule from ``schedules``.

For a chain of layers, all of it would be this loop:

    for start in range(0, len(layers), k):
        segment = layers[start : start + k]  # an nn.Sequential
        x = checkpoint(segment, x, use_reentrant=False)

But the loop over layers is the model's own, and is not rewritten here. So each layer's *call* is
intercepted. The protocol, for segments of 3:

    call of layer 0: runs layers 0, 1 and 2 in one checkpoint, returns layer 2's output
    call of layer 1: returns its input, which is that output
    call of layer 2: the same
    call of layer 3: runs layers 3, 4 and 5 in one checkpoint, ...

How one segment runs stands in ``segments``, which is lesson 04. Read ``checkpoint_layers`` next,
and then ``_LayerCalls.call``. The rest refuses what would give a wrong gradient: layers called out
of order, other arguments, caches.
"""

from __future__ import annotations

import warnings
from bisect import bisect
from collections.abc import Callable
from contextlib import ExitStack
from copy import copy
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from ..compat.modules import call_override, original_call
from ..compat.trees import tree_map
from ..hf_names import LAYER_SWITCH, OUTPUTS_OF_EACH_LAYER
from ..measure.storages import tensors_in
from ..model.layers import Named, find_layers, layers_in
from .best_schedule import best_schedule, measured_layers
from .call_overrides import (
    ALREADY_CHECKPOINTED,
    CallOverride,
    Checkpoints,
    refuse_checkpointed,
)
from .layer_arguments import split_input, without_cache
from .schedules import Schedule, first_layers, segments_for
from .second_run import version_of
from .segments import NOTHING, Chain, Handover


def checkpoint_layers(
    layers_or_model: nn.Module,
    every: str | int | Schedule,
    *,
    keep_last: bool | None = None,
    layers: Named = (),
) -> CheckpointedLayers:
    """Run layers in checkpointed segments while they train, until ``.remove()`` or the end of a
    ``with`` block. Backward may come after that end: it runs a segment again as it ran first.

    Args:
        layers_or_model: an ``nn.Sequential``; an ``nn.ModuleList`` whose layers are called in
            order, each with the output of the one before; or a transformers model, whose list of
            layers is found. A model with several lists (an encoder's and a decoder's) gets a
            schedule for each.
        every: an int k for segments of k layers, or ``"per-layer"`` for 1; ``"sqrt"`` for about
            sqrt(n) segments; a list of segment lengths, first segment first; ``"first-k"`` to
            checkpoint the first k layers one by one (counted from the first list on) and keep the
            others; or ``"best"``. This measures the bytes of each layer when the first of them is
            called (two extra forwards and a backward of the layers, one at a time) and uses
            ``safe_segments``. Then the peak is never higher than with one checkpoint a layer,
            whatever logits and loss need after the layers.
        keep_last: whether the last segment is kept rather than recomputed. ``None``: yes for a
            list, no for an int and ``"sqrt"``, and ``"best"`` chooses. ``"first-k"`` sets it
            itself.
        layers: of any model, the names of its lists of layers, as ``Recipe`` takes them.

    The first layer of a segment runs all of it, and the others hand on its output. Calls that do
    not fit are refused, and so is the gradient of an output inside a segment, which is the
    segment's: of a forward that ends there, or that collects outputs. If outputs are detached, or
    in an object that is no dataclass, that is not seen: checkpoint such layers one by one
    (``every=1``).

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
    on weights that FSDP has sharded over processes; in backward if an argument of a layer was
    changed in place; and in the first backward if a layer's second run has saved other numbers than
    its first, as with a generator that is not put back. (A Python number by which the last
    operation of a segment multiplies is saved by none, and is not seen.)
    """
    found = find_layers(layers_or_model, layers)
    refuse_checkpointed(layers_in(found))
    lengths = isinstance(every, (list, tuple))
    if lengths and len(found) > 1:
        raise ValueError(
            f"a {type(layers_or_model).__name__} has several lists of layers ({', '.join(found)}), "
            f"and every={every} is the schedule of one: give each its own, "
            "checkpoint_layers(model.<list>, [...]), or an int or a name"
        )
    if keep_last is None and every != "best":
        keep_last = lengths
    lists, first = {}, first_layers(every)
    for name, (several, owner) in found.items():
        if first is not None:
            in_this_list = min(first, len(several))
            every = f"first-{in_this_list}"
            keep_last = in_this_list < len(several)
            first -= in_this_list
        schedule = segments_for(every, len(several))
        caller = layers_or_model
        if name in layers:
            caller = layers_or_model.get_submodule(name)
        # A Sequential hands a tuple on as one argument.
        chain = Chain(several, passes_tuple_through=isinstance(caller, nn.Sequential))
        lists[name] = _LayerCalls(chain, owner, schedule, keep_last)
    if first:
        total = len(layers_in(found))
        raise ValueError(f"every='first-{first + total}': there are {total} layers in all")
    return CheckpointedLayers(lists)


class CheckpointedLayers(Checkpoints):
    """Layers that run in segments, as ``checkpoint_layers`` returns them.

    Attributes: ``layers``; ``segments`` (the schedule; None until ``"best"`` has measured);
    ``keep_last``; ``internal`` and ``boundary`` (the bytes that ``"best"`` measured, one number a
    layer; None before that, and for other schedules). If the model has several lists of layers,
    each attribute is a dict by the list's name in the model.
    """

    def __init__(self, lists: dict[str, _LayerCalls]):
        self._lists = lists
        super().__init__(lists.values())

    def __getattr__(self, name: str) -> Any:
        if name not in ("layers", "segments", "keep_last", "internal", "boundary"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        values = {where: getattr(calls, name) for where, calls in self._lists.items()}
        return values if len(values) > 1 else next(iter(values.values()))


@dataclass(eq=False)
class _LayerCalls:
    """One list of layers, whose calls are intercepted."""

    chain: Chain
    owner: nn.Module | None  # the transformers model that calls the layers
    segments: Schedule | None  # None until "best" has measured
    keep_last: bool | None
    internal: list[int] | None = None
    boundary: list[int] | None = None
    handover: Handover = NOTHING  # what the last call returned, if its segment goes on
    per_layer_this_forward: bool = False  # in this forward, each layer is its own segment
    called: bool = False  # whether any layer of the list was called

    @property
    def layers(self) -> list[nn.Module]:
        return self.chain.layers

    def install(self, undo: ExitStack) -> None:
        """Intercept the calls, until ``undo`` is closed."""
        # Dynamo must not look into a schedule that changes while it runs.
        call = torch.compiler.disable(self.call)
        if self.owner is not None:
            hook = _Hook(torch.compiler.disable(self.before_model))
            undo.callback(self.owner.register_forward_pre_hook(hook, with_kwargs=True).remove)
        for i, layer in enumerate(self.layers):
            _SegmentCall(layer, self, call, i).install(undo)
            for part in layer.children():
                hook = _Hook(self.after_part)
                undo.callback(part.register_forward_hook(hook).remove)

    def apply_to_copy(self, copies: dict[nn.Module, nn.Module]) -> None:
        """Apply the same schedule to a copy of the model; ``copies`` maps modules to copies."""
        chain = replace(self.chain, layers=[copies[layer] for layer in self.layers])
        copied = replace(self, chain=chain, owner=copies.get(self.owner), handover=NOTHING)
        CheckpointedLayers({"layers": copied})

    def call(self, i: int, args: tuple, kwargs: dict) -> Any:
        """Called in place of layer ``i``: run its segment, or return the output if it has run."""
        before, self.handover = self.handover, NOTHING
        self.called = True
        if not self._training():
            return self._call_as_it_is(i, args, kwargs, before)
        if getattr(self.layers[i], LAYER_SWITCH, False):
            raise RuntimeError(ALREADY_CHECKPOINTED)
        x, rest = split_input(*without_cache(args, kwargs))
        if self.segments is None and not self.per_layer_this_forward:
            self._choose_schedule(i, x, rest)
        start, stop = self._segment_of(i)
        if i == start:
            self._refuse_skipped(i, x, before)
        if self.keep_last and stop == len(self.layers):
            return self.chain.call_layer(i, x, rest)  # kept: nothing runs again
        if i == start:
            out = self.chain.run_checkpointed(start, stop, x, rest)
        else:  # the segment has run: hand its output on
            self._refuse_unless_continued(i, start, x, rest, before)
            out, rest = before.of_segment, before.rest
        if i + 1 == stop:
            return out
        handed_on = _for_the_next_layer(i, out)
        version = version_of(self.chain.hidden(out))
        self.handover = Handover(i + 1, handed_on, rest, version, of_segment=out)
        return handed_on

    def _segment_of(self, i: int) -> tuple[int, int]:
        """Layer ``i``'s segment in this forward: its first layer, and the layer after its last."""
        if self.per_layer_this_forward:
            return i, i + 1
        ends = list(accumulate(self.segments))
        index = bisect(ends, i)
        return ends[index] - self.segments[index], ends[index]

    def _training(self) -> bool:
        return torch.is_grad_enabled() and any(layer.training for layer in self.layers)

    def _call_as_it_is(self, i: int, args: tuple, kwargs: dict, before: Handover) -> Any:
        """Call layer ``i`` where nothing is checkpointed: without gradients, or in eval mode."""
        if before.next_layer == i and split_input(args, kwargs)[0] is self.chain.hidden(before.out):
            raise RuntimeError(
                "gradients or training mode were switched off in a segment that has run: "
                f"begin a new one at layer {i}"
            )
        return original_call(self.layers[i])(*args, **kwargs)

    def _refuse_unless_continued(
        self, i: int, start: int, x: Any, rest: tuple, before: Handover
    ) -> None:
        problem = before.problem(self.chain, i, x, rest)
        if problem:
            raise RuntimeError(
                f"layer {i} {problem}, and a segment that begins at layer {start} runs its layers "
                "in order, each with the last one's output and the same other arguments: begin a "
                f"new segment at layer {i}, or use every=1"
            )

    def _refuse_skipped(self, i: int, x: Any, before: Handover) -> None:
        """Refuse a call that begins a segment with the output of one that has not been called to
        its end: that output is of layers that the model leaves out.
        """
        if before is not NOTHING and x is self.chain.hidden(before.out):
            raise RuntimeError(
                f"layer {i} was given the output of layer {before.next_layer - 1}, and layer "
                f"{before.next_layer}, which is in the same segment, has run already: a segment "
                "runs all of its layers, so where the model leaves some out, use every=1"
            )

    # Hooks on the model and on parts of the layers.

    def before_model(self, model: nn.Module, args: tuple, kwargs: dict) -> None:
        """Called before the forward of the model that owns these layers."""
        self.per_layer_this_forward = any(
            getattr(model.config, name, None) if kwargs.get(name) is None else kwargs[name]
            for name in OUTPUTS_OF_EACH_LAYER
        )

    def after_part(self, part: nn.Module, args: tuple, out: Any) -> None:
        """Called after a part of a layer has run. If no layer was called by the time of backward,
        none will be.
        """
        if self.called or not self._training():
            return
        for tensor in tensors_in((out,)):
            if tensor.requires_grad:
                tensor.register_hook(self._warn_if_none_was_called)
                return

    def _warn_if_none_was_called(self, gradient: Any) -> None:
        if self.called:
            return
        warnings.warn(
            "give checkpoint_layers a list whose items the model's forward calls: it calls parts "
            "of the layers in this list, and not the layers themselves, so no checkpoint runs",
            stacklevel=2,
        )

    def _choose_schedule(self, i: int, x: Any, rest: tuple) -> None:
        """``"best"``: measure all layers, and choose the schedule, before layer ``i`` runs."""
        if i != 0:
            raise RuntimeError(
                f'layer {i} was called before layer 0, at which "best" measures all layers'
            )
        # Where a batch has padding, layers of different kinds get different masks: each is a
        # segment of its own, and they are not measured with those of layer 0.
        kinds = set(getattr(getattr(self.owner, "config", None), "layer_types", None) or ())
        sizes = measured_layers(self.chain, x, rest) if len(kinds) < 2 else []
        self.internal = [size.internal for size in sizes]
        self.boundary = [size.boundary for size in sizes]
        self.segments, self.keep_last = best_schedule(sizes, len(self.layers), self.keep_last)


def _for_the_next_layer(i: int, out: Any) -> Any:
    """The output of layer ``i``'s segment, as the layer itself returns it. The next layer's call
    returns other tensors, so that these get a gradient only if something else uses them.
    """

    def refuse(gradient: Tensor) -> None:
        raise RuntimeError(
            f"end a segment at layer {i}, or use every=1: its output is used elsewhere than in "
            f"layer {i + 1}, and a layer inside a segment returns the output of the segment"
        )

    def hand_on(part: Any) -> Any:
        if isinstance(part, Tensor) and part.requires_grad:
            view = part.view_as(part)
            view.register_hook(refuse)
            return view
        if is_dataclass(part) and not isinstance(part, type):  # torch's trees end at them
            handed_on = copy(part)
            for field in fields(part):
                inside = tree_map(hand_on, getattr(part, field.name))
                object.__setattr__(handed_on, field.name, inside)  # also of a frozen one
            return handed_on
        return part

    return tree_map(hand_on, out)


def checkpoints_of(model: nn.Module) -> list[_LayerCalls]:
    """The checkpoints that ``checkpoint_layers`` has put on layers of ``model``."""
    # The layers of one list share their _LayerCalls. A dict keeps the order.
    found: dict[_LayerCalls, None] = {}
    for module in model.modules():
        override = call_override(module)
        if isinstance(override, _SegmentCall):
            found[override.calls] = None
    return list(found)


class _SegmentCall(CallOverride):
    """The override of one layer's call. A copy of the layer gets the layer's own call instead."""

    def __init__(self, layer: nn.Module, calls: _LayerCalls, call: Callable, index: int):
        self.module, self.calls, self.call, self.index = layer, calls, call, index

    def __call__(self, *args, **kwargs):
        return self.call(self.index, args, kwargs)

    def __reduce__(self):
        return original_call, (self.module,)


class _Hook:
    """A hook that calls ``callback``.

    It is a class, since a copy of the model also copies its hooks: there it does nothing.
    """

    def __init__(self, callback: Callable = lambda *args: None):
        self.callback = callback

    def __call__(self, *args) -> None:
        self.callback(*args)

    def __reduce__(self):
        return type(self), ()
