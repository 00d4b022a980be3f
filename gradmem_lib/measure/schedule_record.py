"""A schedule as it happened: which layer ran when, and what it kept."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from ..compat import current_node, graph_task, next_number, number_of, storage_key
from ..names import OTHER
from .display import pictures
from .storages import Entry, Ledger, Recorder, own_storage, storages_of, tensors_in
from .watch import Watch

KINDS = ("forward", "recompute", "backward", "outside")
PARTS = ("inputs", "internals", "passing", "left")


class Event(NamedTuple):
    """One column of the picture: ``kind`` of ``KINDS``, ``layer`` from 0 (-1: outside all layers), and its operations.

    ``start`` and ``stop`` count dispatched operations of the step, from 0; ``stop`` is the first of the next event.
    """

    kind: str
    layer: int
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class ScheduleRecord:
    """What one training step did, layer by layer. Bytes are what the step made, and the first layer's input.

    Attributes:
        layers: how many there are.
        events: what ran, in order.
        inputs: int64 (layers, events): bytes of a layer's input that are there when an event ends.
        internals: int64 (layers, events): bytes made inside a layer's forward that are there when an event ends.
        live: for each of ``PARTS``, int64 (operations,): bytes after each operation. "inputs" are boundaries between
            layers, "internals" were made inside one layer, "passing" is neither (gradients on their way, the loss), and
            "left" is what stays when the step is over (gradients of parameters).
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
        """The most bytes at once: what the step made and the first layer's input, without weights."""
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

    @property
    def forward_calls(self) -> int:
        """How often a layer ran forward, again or for the first time."""
        return len(self.ran("forward", "recompute"))

    @property
    def looks(self) -> list[str]:
        """For each event, which of ``LABELS`` it is: its kind, and whether internals are there when it ends ("")."""
        names = {"forward": ("dropped", "forward"), "recompute": ("redropped", "recompute")}
        return [
            names.get(event.kind, (event.kind,) * 2)[bool(self.internals[event.layer, t])]
            if event.layer >= 0
            else ""
            for t, event in enumerate(self.events)
        ]

    def stored(self, layer: int, what: str = "internals") -> list[tuple[int, int]]:
        """When ``layer`` has its "internals" or its "inputs": (first event, event by whose end they are gone)."""
        if what not in ("internals", "inputs"):
            raise ValueError(f'stored(layer, what) takes "internals" or "inputs", not {what!r}')
        return _runs(getattr(self, what)[layer] > 0)

    def _repr_mimebundle_(self, include=None, exclude=None):
        return pictures().schedule_bundle(self)


def _runs(there: np.ndarray) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.concatenate([[0], there.astype(int), [0]])))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def record_schedule(layers: Sequence[nn.Module], step: Callable[[], object]) -> ScheduleRecord:
    """Run ``step()``, one forward and one backward pass, and note what happens to ``layers``.

    Args:
        layers: an ``nn.Sequential``, an ``nn.ModuleList`` or a list, in the order in which they run. They may be
            checkpointed in any way.
        step: calls forward and backward, for example ``lambda: model(x).sum().backward()``. What it returns is dropped.

    An operation belongs to the layer whose module, or submodule, was entered last, or whose parameter it uses; an
    operation of backward, to the layer whose forward made the node of the graph that runs. Modules stay as they are, and
    nothing keeps listening afterwards, whether ``step`` returns or raises.

    Raises ``TypeError`` for layers that are not modules, and ``ValueError`` when a layer never ran forward or backward.
    """
    layers = list(layers)
    wrong = [type(layer).__name__ for layer in layers if not isinstance(layer, nn.Module)]
    if wrong or not layers:
        raise TypeError(
            f"record_schedule(layers, step) takes a list of torch.nn.Module, and was given {', '.join(wrong) or 'none'}. "
            "Give the layers themselves: for a Llama, model.model.layers"
        )
    recorder = _Layers(layers)
    with ExitStack() as undo:
        for register, hook, options in (
            (register_module_forward_pre_hook, recorder.enter_module, {}),
            # always_call: checkpointing ends a recomputed forward early, by an exception
            (register_module_forward_hook, recorder.leave_module, {"always_call": True}),
        ):
            undo.callback(register(hook, **options).remove)
        undo.enter_context(Watch(recorder.observe))
        step()
    return recorder.record()


@dataclass(eq=False)
class _Block:
    """A storage: who made it, when it came and went, counted in operations, and which layers use it."""

    layer: int
    kind: str
    nbytes: int
    birth: int
    death: int | None = None
    users: set[int] = field(default_factory=set)


_OUTSIDE = -1


class _Layers(Recorder):
    """Puts every operation, and every storage, down to a layer."""

    def __init__(self, layers: list[nn.Module]):
        self.ledger = Ledger(self)
        self.n = len(layers)
        self.module_layer = {id(m): i for i, layer in enumerate(layers) for m in layer.modules()}
        self.tops = {id(layer) for layer in layers}
        self.weight_layer: dict[int, int] = {}
        for i, layer in enumerate(layers):
            for tensor in [*layer.parameters(), *layer.buffers()]:
                for key in [storage_key(storage) for storage in storages_of(tensor)]:
                    # Shared weights say nothing about the layer that uses them.
                    self.weight_layer[key] = i if self.weight_layer.get(key, i) == i else _OUTSIDE
        self.now = _OUTSIDE  # the layer that runs forward
        self.back = _OUTSIDE  # the layer that runs backward
        self.depth = 0
        self.ops = 0
        self.runs: list[list] = []  # [kind, layer, first operation]
        self.seen: list[_Block] = []
        # Nodes of the graph are numbered as they are made: from which number on they are whose.
        self.numbers, self.number_layers = [0], [_OUTSIDE]
        self.thread = threading.get_ident()

    def enter_module(self, module: nn.Module, args) -> None:
        self.depth += 1
        layer = self.module_layer.get(id(module))
        if layer is not None:
            self._go_to(layer)

    def leave_module(self, module: nn.Module, args, output) -> None:
        self.depth = max(self.depth - 1, 0)
        if id(module) in self.tops:
            self._go_to(_OUTSIDE)

    def _go_to(self, layer: int, back: int = 0) -> None:
        self.now = layer
        # On a card, backward has threads of its own, and each numbers its nodes anew.
        if layer != self.number_layers[-1] and threading.get_ident() == self.thread:
            self.numbers.append(next_number() - back)
            self.number_layers.append(layer)

    def _kind_and_layer(self, keys: list[int]) -> tuple[str, int]:
        task = graph_task()
        if task == -1 or torch.is_grad_enabled() or self.depth:
            for key in keys:
                layer = self.weight_layer.get(key, _OUTSIDE)
                if layer not in (_OUTSIDE, self.now):
                    self._go_to(layer, back=1)  # the node of this operation exists already
            return ("forward" if task == -1 else "recompute"), self.now
        number = number_of(current_node())
        if number < 2**63:  # gradients are accumulated by nodes without a number: they follow their layer
            self.back = self.number_layers[bisect_right(self.numbers, number) - 1]
        return "backward", self.back

    def observe(self, func, args, kwargs, out) -> None:
        self.ledger.drain()
        used = [s for t in tensors_in((args, kwargs or {})) if (s := own_storage(t)) is not None]
        keys = [storage_key(storage) for storage in used]
        kind, layer = self._kind_and_layer(keys)
        # Saving a tensor detaches it: that belongs to whatever goes on.
        if func is not torch.ops.aten.detach.default or not self.runs:
            if layer == _OUTSIDE and kind != "backward":
                kind = "outside"
            if not self.runs or self.runs[-1][:2] != [kind, layer]:
                self.runs.append([kind, layer, self.ops])
        if kind != "backward":
            for tensor in tensors_in((args, kwargs or {})):
                storage = own_storage(tensor)
                if storage is not None and storage_key(storage) not in self.weight_layer:
                    self._use(storage, layer, tensor.is_floating_point())
        for tensor in tensors_in((out,)):
            storage = own_storage(tensor)
            if (
                storage is not None
                and storage_key(storage) not in self.ledger.storages
                and storage_key(storage) not in keys
            ):
                self._meet(storage, _Block(layer, kind, storage.nbytes(), self.ops))
        self.ops += 1

    def _use(self, storage, layer: int, floating: bool) -> None:
        entry = self.ledger.storages.get(storage_key(storage))
        if entry is not None:
            entry.module.users.add(layer)
        elif floating:  # older than the step
            block = _Block(_OUTSIDE, "outside", storage.nbytes(), -1)
            block.users.add(layer)
            self._meet(storage, block)

    def _meet(self, storage, block: _Block) -> None:
        self.seen.append(block)
        self.ledger.enter(storage, OTHER, block)

    def left(self, entry: Entry) -> None:
        entry.module.death = self.ops

    def record(self) -> ScheduleRecord:
        self.ledger.drain()
        events = _columns(self.runs, self.ops)
        unseen = {
            kind: sorted(set(range(self.n)) - {e.layer for e in events if e.kind == kind})
            for kind in ("forward", "backward")
        }
        for kind, missing in unseen.items():
            if missing:
                raise ValueError(
                    f"layer {missing[0]} of {self.n}, from 0, was not seen to run {kind}"
                    + (f" (and {len(missing) - 1} more)" if missing[1:] else "")
                    + ". The step must call forward and backward once, with something that requires a gradient before the "
                    "first layer or in it. A layer without weights or submodules that a wrapper runs by its forward "
                    "cannot be heard: put it into an nn.Sequential of its own"
                )
        live = {name: np.zeros(self.ops + 1, np.int64) for name in PARTS}
        inputs, internals = (np.zeros((self.n, len(events)), np.int64) for _ in range(2))
        ends = [event.stop for event in events]
        for block in self.seen:
            part, layer = self._part(block)
            death = self.ops + 1 if block.death is None else block.death
            if block.birth >= 0 or part == "inputs":
                live[part][max(block.birth, 0)] += block.nbytes
                live[part][min(death, self.ops)] -= block.nbytes
            if part in ("inputs", "internals") and layer >= 0:
                # An event ends when the next one's first operation begins: whoever held its tensors has let go by then.
                first, last = bisect_right(ends, block.birth), bisect_right(ends, death - 1)
                (inputs if part == "inputs" else internals)[layer, first:last] += block.nbytes
        live = {name: np.cumsum(change)[:-1] for name, change in live.items()}
        return ScheduleRecord(self.n, events, inputs, internals, live)

    def _part(self, block: _Block) -> tuple[str, int]:
        if block.birth >= 0 and block.death is None:
            return "left", _OUTSIDE
        if block.kind == "backward":
            return "passing", _OUTSIDE
        others = block.users - {block.layer, _OUTSIDE}
        if block.layer == _OUTSIDE:  # a batch, an embedding; masks and position tables have many users
            return ("inputs", min(others)) if len(others) == 1 else ("passing", _OUTSIDE)
        if others:
            return "inputs", min((i for i in others if i > block.layer), default=min(others))
        if _OUTSIDE in block.users:  # what the last layer hands to the loss
            return "passing", _OUTSIDE
        return "internals", block.layer


def _columns(runs: list[Any], ops: int) -> list[Event]:
    """Runs of operations as events: one for each time a layer runs, and what is shorter joined to its neighbour."""
    runs = [(kind if layer >= 0 else "outside", layer, start) for kind, layer, start in runs]
    inside = [i for i, run in enumerate(runs) if run[1] >= 0]
    if not inside:
        return []
    turn = max((i for i in inside if runs[i][0] == "forward"), default=-1)
    joined: list[list] = []
    for i, (kind, layer, start) in enumerate(runs):
        if joined and joined[-1][:2] == [kind, layer]:
            continue
        # What is done outside has a column before the layers and between forward and backward.
        if layer < 0 and inside[0] < i and i != turn + 1:
            continue
        # Backward reaches a layer, finds nothing stored, and has its segment run again before it goes on.
        after = next((run for run in runs[i:] if run[0] == "backward" and run[2] > start), None)
        if kind == "backward" and after and after[1] == layer and runs[i + 1][0] == "recompute":
            kind, layer = runs[i + 1][:2]
        joined.append([kind, layer, start])
    starts = [start for _, _, start in joined]
    starts[0] = 0
    stops = [*starts[1:], ops]
    return [
        Event(kind, layer, start, stop)
        for (kind, layer, _), start, stop in zip(joined, starts, stops, strict=True)
    ]
