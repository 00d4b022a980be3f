"""Records a schedule of a real step: which layer ran when, and what it kept."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from ..compat.autograd import current_node, graph_task, next_sequence_nr, sequence_nr
from ..compat.tensors import storage_key
from ..display import pictures
from ..measure.recording import Entry, Recording
from ..measure.storages import storages_of, tensors_in
from ..measure.watch import Watch
from ..names import OTHER, PARAMETERS

KINDS = ("forward", "recompute", "backward", "outside")
PARTS = ("inputs", "internals", "passing", "left")
OUTSIDE = -1  # all layers


class Event(NamedTuple):
    """One column of the picture: ``kind`` of ``KINDS``, ``layer`` from 0 (-1: outside all layers),
    and its operations.

    ``start`` and ``stop`` count dispatched operations of the step, from 0; ``stop`` is the first of
    the next event.
    """

    kind: str
    layer: int
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class ScheduleRecord:
    """A record of one training step, layer by layer. It counts the bytes that the step made, and
    the first layer's input.

    Attributes:
        layers: the number of layers.
        events: the events, in order.
        inputs: int64 (layers, events): bytes of a layer's input that are alive when an event ends.
        internals: int64 (layers, events): bytes made inside a layer's forward that are alive when
            an event ends.
        live: for each of ``PARTS``, int64 (operations,): bytes after each operation. "inputs" are
            boundaries between layers. "internals" were made inside one layer. "left" stays when the
            step is over (gradients of parameters). "passing" is the rest (gradients of activations,
            the loss).
    """

    layers: int
    events: list[Event]
    inputs: np.ndarray
    internals: np.ndarray
    live: dict[str, np.ndarray]

    @property
    def totals(self) -> np.ndarray:
        """int64 (operations,): live bytes after each operation."""
        return sum(self.live.values())  # type: ignore[return-value]

    @property
    def peak(self) -> int:
        """The most live bytes: those that the step made and the first layer's input, without
        weights.
        """
        return int(self.totals.max())

    @property
    def peak_operation(self) -> int:
        return int(self.totals.argmax())

    @property
    def peak_event(self) -> int:
        """Index of the event in which the peak is."""
        return bisect_right([event.start for event in self.events], self.peak_operation) - 1

    def ran(self, *kinds: str) -> list[int]:
        """The layers, from 0, in the order in which events of ``kinds`` ran them."""
        return [event.layer for event in self.events if event.kind in kinds]

    def _repr_mimebundle_(self, include=None, exclude=None):
        return pictures().plot_schedule(self).bundle()


def record_schedule(layers: Sequence[nn.Module], step: Callable[[], object]) -> ScheduleRecord:
    """Run ``step()``, one forward and one backward pass, and record what ``layers`` do.

    Args:
        layers: an ``nn.Sequential``, an ``nn.ModuleList`` or a list, in the order in which they
            run. They may be checkpointed in any way.
        step: calls forward and backward, for example ``lambda: model(x).sum().backward()``. Its
            result is dropped.

    An operation belongs to the layer whose module, or submodule, was entered last. An operation of
    backward belongs to the layer whose forward made the running node of the graph. Modules do not
    change, and all hooks are removed afterwards, whether ``step`` returns or raises.

    Raises ``TypeError`` for layers that are not modules, and ``ValueError`` when a layer never ran
    forward or backward.
    """
    layers = list(layers)
    wrong = [type(layer).__name__ for layer in layers if not isinstance(layer, nn.Module)]
    if wrong or not layers:
        raise TypeError(
            "record_schedule(layers, step) takes a list of torch.nn.Module, and was given "
            f"{', '.join(wrong) or 'none'}. Give the layers themselves: for a Llama, "
            "model.model.layers"
        )
    recording = _LayerRecording(layers)
    with ExitStack() as undo:
        undo.callback(register_module_forward_pre_hook(recording.enter_module).remove)
        # always_call: checkpointing ends a recomputed forward early, by an exception
        undo.callback(register_module_forward_hook(recording.leave_module, always_call=True).remove)
        undo.enter_context(Watch(recording.observe))
        step()
    return recording.record()


class _LayerRecording(Recording):
    """Attributes every operation and storage to a layer.

    An entry's ``module`` is its layer, and ``op`` is the kind of run.
    """

    def __init__(self, layers: list[nn.Module]):
        super().__init__(torch.device("cpu"))
        self.layers = layers
        self.layer_of = {id(m): i for i, layer in enumerate(layers) for m in layer.modules()}
        self.entries_so_far: list[Entry] = []
        self.freed_at: dict[int, int] = {}  # for each entry, the operation that freed it
        self.users: dict[int, set[int]] = defaultdict(set)  # layers, by entry
        self.forward_layer = OUTSIDE  # the layer that runs forward
        self.depth = 0  # how many nested modules run
        self.backward_layer = OUTSIDE  # the layer that runs backward
        self.runs: list[tuple[str, int, int]] = []  # kind, layer, first operation
        # Nodes of the graph are numbered as they are made: the first number of each layer's nodes.
        self.numbers, self.number_layers = [0], [OUTSIDE]
        self.thread = threading.get_ident()
        for layer in layers:
            self.tag([*layer.parameters(), *layer.buffers()], PARAMETERS, OUTSIDE)

    def enter_module(self, module: nn.Module, args) -> None:
        self.depth += 1
        self._go_to(self.layer_of.get(id(module), self.forward_layer))

    def leave_module(self, module: nn.Module, args, output) -> None:
        self.depth -= 1
        if module in self.layers:
            self._go_to(OUTSIDE)

    def _go_to(self, layer: int) -> None:
        self.forward_layer = layer
        # On a card, backward has its own threads, and each thread numbers its nodes from 0.
        if layer != self.number_layers[-1] and threading.get_ident() == self.thread:
            self.numbers.append(next_sequence_nr())
            self.number_layers.append(layer)

    def _kind_and_layer(self) -> tuple[str, int]:
        task = graph_task()
        if task == -1 or torch.is_grad_enabled() or self.depth:
            kind = "forward" if task == -1 else "recompute"
            return ("outside" if self.forward_layer == OUTSIDE else kind), self.forward_layer
        number = sequence_nr(current_node())
        # gradients are accumulated by nodes without a number: they follow their layer
        if number < 2**63:
            self.backward_layer = self.number_layers[bisect_right(self.numbers, number) - 1]
        return "backward", self.backward_layer

    def observe(self, func, args, kwargs, out) -> None:
        self.drain()
        kind, layer = self._kind_and_layer()
        # Saving a tensor detaches it: this operation belongs to the layer that runs.
        saves = func is torch.ops.aten.detach.default
        if not self.runs or not (saves or self.runs[-1][:2] == (kind, layer)):
            self.runs.append((kind, layer, self.count))
        used = set()
        for tensor in tensors_in((args, kwargs or {})):
            for storage in storages_of(tensor):
                key = storage_key(storage)
                used.add(key)
                if kind == "backward":
                    continue
                if key not in self.live and tensor.is_floating_point():  # older than the step
                    self.on_alloc(storage, OTHER, OUTSIDE, "outside")
                    self.live[key].sample = -1
                if key in self.live:
                    self.users[id(self.live[key])].add(layer)
        for storage in storages_of(out):
            if storage_key(storage) not in used and storage_key(storage) not in self.live:
                self.on_alloc(storage, OTHER, layer, kind)
        self.count += 1

    def size(self, storage: torch.UntypedStorage) -> int:
        return storage.nbytes()

    def after_alloc(self, entry: Entry) -> None:
        self.entries_so_far.append(entry)

    def after_free(self, entry: Entry) -> None:
        self.freed_at[id(entry)] = self.count

    def record(self) -> ScheduleRecord:
        self.drain()
        events = _columns(self.runs, self.count)
        for kind in ("forward", "backward"):
            missing = sorted(
                set(range(len(self.layers))) - {e.layer for e in events if e.kind == kind}
            )
            if missing:
                raise ValueError(
                    f"layer {missing[0]} of {len(self.layers)}, from 0, was not seen to run {kind}"
                    + (f" (and {len(missing) - 1} more)" if missing[1:] else "")
                    + ". The step must call forward and backward once, with something that "
                    "requires a gradient before the "
                    "first layer or in it, and call its layers rather than their forward, which is "
                    "not heard"
                )
        live = {name: np.zeros(self.count + 1, np.int64) for name in PARTS}
        stored = {
            name: np.zeros((len(self.layers), len(events)), np.int64)
            for name in ("inputs", "internals")
        }
        ends = [event.stop for event in events]
        for entry in self.entries_so_far:
            part, layer = self._part(entry)
            if not part:
                continue
            end = self.freed_at.get(id(entry), self.count + 1)
            live[part][max(entry.sample, 0)] += entry.nbytes
            live[part][min(end, self.count)] -= entry.nbytes
            if part in stored:
                # An event ends when the next event's first operation begins: by then, its temporary
                # tensors are released.
                first, last = bisect_right(ends, entry.sample), bisect_right(ends, end - 1)
                stored[part][layer, first:last] += entry.nbytes
        live = {name: np.cumsum(change)[:-1] for name, change in live.items()}
        return ScheduleRecord(len(self.layers), events, live=live, **stored)

    def _part(self, entry: Entry) -> tuple[str, int]:
        """Which of ``PARTS`` a storage is, and of which layer; "" for weights, and for storages
        older than the step.
        """
        layer, users = entry.module, self.users[id(entry)]
        others = users - {layer, OUTSIDE}
        made_in_step = entry.sample >= 0
        if entry.category == PARAMETERS:
            return "", OUTSIDE
        if made_in_step and id(entry) not in self.freed_at:
            return "left", OUTSIDE
        if entry.op == "backward":
            return "passing", OUTSIDE
        if (
            layer == OUTSIDE and len(others) == 1
        ):  # a batch, an embedding; masks and position tables have many users
            return "inputs", min(others)
        if layer != OUTSIDE and others:
            return "inputs", min((i for i in others if i > layer), default=min(others))
        if layer == OUTSIDE or OUTSIDE in users:  # the last layer's output, which the loss uses
            return ("passing" if made_in_step else ""), OUTSIDE
        return "internals", layer


def _columns(runs: list[tuple[str, int, int]], ops: int) -> list[Event]:
    """Runs of operations as events: one for each time that a layer runs.

    Shorter runs join a neighbour.
    """
    inside = [i for i, (_, layer, _) in enumerate(runs) if layer >= 0]
    if not inside:
        return []
    last_forward = max((i for i in inside if runs[i][0] == "forward"), default=-1)
    joined: list[tuple[str, int, int]] = []
    for i, (kind, layer, start) in enumerate(runs):
        # Operations outside the layers have a column before the layers, and one between forward and
        # backward.
        if layer < 0 and inside[0] < i and i != last_forward + 1:
            continue
        # Backward reaches a layer, finds nothing stored, and recomputes its segment before it
        # continues.
        after = next((run for run in runs[i + 1 :] if run[0] == "backward"), None)
        if kind == "backward" and after and after[1] == layer and runs[i + 1][0] == "recompute":
            kind, layer = runs[i + 1][:2]
        kind = kind if layer >= 0 else "outside"
        if not joined or joined[-1][:2] != (kind, layer):
            joined.append((kind, layer, start))
    starts = [0, *(start for _, _, start in joined[1:])]
    stops = [*starts[1:], ops]
    return [
        Event(*run[:2], start, stop) for run, start, stop in zip(joined, starts, stops, strict=True)
    ]
