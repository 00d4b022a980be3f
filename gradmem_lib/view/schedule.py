"""A checkpointing schedule as it happened: layers against time, with what was stored, run again and freed.

``record_schedule`` listens to one real training step. From PyTorch's own dispatch it learns which layer each operation
belongs to, when each block of memory appears, and when its last reference goes. Nothing in the picture follows from a
formula, so any way of checkpointing can be looked at, one's own included, mistakes included.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import math
import threading
import weakref
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, lru_cache
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from ..tracker import _tensors
from ..units import format_bytes
from .live import show_explorer
from .static import (
    INK,
    MUTED,
    PAPER,
    PHASE_COLORS,
    _halo,
    _hatch_ink,
    _new_figure,
    _style,
    display_size,
    nice_step,
    png,
    scale_of,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KINDS = ("forward", "recompute", "backward", "outside")
PARTS = ("inputs", "internals", "passing", "left")

# Full cells differ in lightness by at least nine steps of CIE L*; inputs, thinner than a cell, and memory have shapes too.
COLORS = {
    "forward": "#2f62ab",
    "dropped": "#d3e0f3",
    "recompute": "#22a689",
    "redropped": "#d5efe6",
    "backward": "#262c38",
    "internals": "#f0a765",
    "inputs": "#b3400f",
    "passing": "#f3dc8c",
    "left": "#bd2b52",
    "free": "#f2f4f7",
}
HATCHES = {"recompute": "////", "internals": "..", "passing": "xx", "left": "\\\\"}
LABELS = {
    "forward": "forward, keeps internals",
    "dropped": "forward, drops them",
    "recompute": "forward again, keeps",
    "redropped": "forward again, drops",
    "backward": "backward",
    "internals": "internals stored",
    "inputs": "input stored",
    "free": "nothing stored",
}
PART_LABELS = {
    "inputs": "inputs",
    "internals": "internals",
    "passing": "passing through",
    "left": "left at the end",
}


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
        return sum(self.live.values())

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
        return _bundle(plot_schedule(self), describe_schedule(self), "")


def _runs(there: np.ndarray) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.concatenate([[0], there.astype(int), [0]])))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


# Recording ----------------------------------------------------------------------------------------------------------


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
    recorder = _Recorder(layers)
    with ExitStack() as undo:
        for register, hook, options in (
            (register_module_forward_pre_hook, recorder.enter_module, {}),
            # always_call: checkpointing ends a recomputed forward early, by an exception
            (register_module_forward_hook, recorder.leave_module, {"always_call": True}),
        ):
            undo.callback(register(hook, **options).remove)
        undo.enter_context(recorder)
        step()
    return recorder.record()


class _Block(weakref.ref):
    """A storage: who made it, who uses it, and when it came and went, counted in operations."""

    __slots__ = ("birth", "death", "key", "kind", "layer", "nbytes", "users")


_OUTSIDE = -1


class _Recorder(TorchDispatchMode):
    """Puts every operation, and every storage, down to a layer."""

    def __init__(self, layers: list[nn.Module]):
        super().__init__()
        self.n = len(layers)
        self.module_layer = {id(m): i for i, layer in enumerate(layers) for m in layer.modules()}
        self.tops = {id(layer) for layer in layers}
        self.weight_layer: dict[int, int] = {}
        for i, layer in enumerate(layers):
            for tensor in [*layer.parameters(), *layer.buffers()]:
                key = tensor.untyped_storage()._cdata
                # Shared weights say nothing about the layer that uses them.
                self.weight_layer[key] = i if self.weight_layer.get(key, i) == i else _OUTSIDE
        self.now = _OUTSIDE  # the layer that runs forward
        self.back = _OUTSIDE  # the layer that runs backward
        self.depth = 0
        self.ops = 0
        self.runs: list[list] = []  # [kind, layer, first operation]
        self.blocks: dict[int, _Block] = {}
        self.seen: list[_Block] = []
        # Nodes of the graph are numbered as they are made: from which number on they are whose.
        self.numbers, self.number_layers = [0], [_OUTSIDE]
        self.thread = threading.get_ident()

    # Which layer ------------------------------------------------------------

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
            self.numbers.append(torch.autograd._get_sequence_nr() - back)
            self.number_layers.append(layer)

    def _kind_and_layer(self, keys: list[int]) -> tuple[str, int]:
        graph_task = torch._C._current_graph_task_id()
        if graph_task == -1 or torch.is_grad_enabled() or self.depth:
            for key in keys:
                layer = self.weight_layer.get(key, _OUTSIDE)
                if layer not in (_OUTSIDE, self.now):
                    self._go_to(layer, back=1)  # the node of this operation exists already
            return ("forward" if graph_task == -1 else "recompute"), self.now
        node = torch._C._current_autograd_node()
        number = node._sequence_nr() if node is not None else 2**64 - 1
        if number < 2**63:  # gradients are accumulated by nodes without a number: they follow their layer
            self.back = self.number_layers[bisect_right(self.numbers, number) - 1]
        return "backward", self.back

    # What it does -----------------------------------------------------------

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        used = [*_tensors(args), *_tensors(kwargs.values())]
        stores = [_storage(t) for t in used]
        keys = [None if s is None else s._cdata for s in stores]
        kind, layer = self._kind_and_layer(keys)
        # Saving a tensor detaches it: that belongs to whatever goes on.
        if func is not torch.ops.aten.detach.default or not self.runs:
            if layer == _OUTSIDE and kind != "backward":
                kind = "outside"
            if not self.runs or self.runs[-1][:2] != [kind, layer]:
                self.runs.append([kind, layer, self.ops])
        if kind != "backward":
            for tensor, storage, key in zip(used, stores, keys, strict=True):
                if key is not None and key not in self.weight_layer:
                    self._use(tensor, storage, key, layer)
        out = func(*args, **kwargs)
        for tensor in _tensors((out,)):
            storage = _storage(tensor)
            if storage is not None and (key := storage._cdata) not in self.blocks and key not in keys:
                self._meet(storage, key, layer, kind, self.ops)
        self.ops += 1
        return out

    def _use(self, tensor: torch.Tensor, storage, key: int, layer: int) -> None:
        block = self.blocks.get(key)
        if block is None:  # older than the step
            if not tensor.is_floating_point():
                return
            block = self._meet(storage, key, _OUTSIDE, "outside", -1)
        block.users.add(layer)

    def _meet(self, storage, key: int, layer: int, kind: str, birth: int) -> _Block:
        block = _Block(storage, self._gone)
        block.key, block.nbytes, block.layer, block.kind = key, storage.nbytes(), layer, kind
        block.birth, block.death, block.users = birth, None, set()
        self.blocks[block.key] = block
        self.seen.append(block)
        return block

    def _gone(self, block: _Block) -> None:
        block.death = self.ops
        if self.blocks.get(block.key) is block:
            del self.blocks[block.key]

    # What it was ------------------------------------------------------------

    def record(self) -> ScheduleRecord:
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


def _storage(tensor: torch.Tensor):
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # sparse tensors have no storage of their own
        return None


def _columns(runs: list[list], ops: int) -> list[Event]:
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


# Drawing ------------------------------------------------------------------------------------------------------------

MAX_SAMPLES = 1200


def _boxes(record: ScheduleRecord) -> dict[str, list[tuple[float, float, float, float]]]:
    """Rectangles (x, y, width, height) by look, in columns and layers, in the order in which they are painted."""
    n = record.layers
    gap = 0.06 if n <= 24 else 0.0
    thin = 0.34
    boxes: dict[str, list] = {"internals": [], "inputs": []}
    for layer in range(n):
        # What appears in one event is there in the columns after it.
        for start, stop in record.stored(layer, "internals"):
            boxes["internals"].append((start + 1, layer + gap, stop - start - 1, 1 - 2 * gap))
        for start, stop in record.stored(layer, "inputs"):
            # Where the layer itself runs, its cell is enough.
            start += record.events[min(start + 1, stop - 1)].layer == layer
            stop -= stop > start + 1 and record.events[stop - 1].layer == layer
            boxes["inputs"].append((start + 1, layer + (1 - thin) / 2, stop - start - 1, thin))
    boxes = {name: [box for box in found if box[2] > 0] for name, found in boxes.items()}
    for look in ("dropped", "redropped", "forward", "recompute", "backward"):
        boxes[look] = [
            (t, record.events[t].layer + gap, 1, 1 - 2 * gap)
            for t, name in enumerate(record.looks)
            if name == look
        ]
    return boxes


def _samples(record: ScheduleRecord) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Live bytes over columns: where each sample begins, and the parts; thinned without losing a peak."""
    starts = np.array([event.start for event in record.events])
    widths = np.array([max(event.stop - event.start, 1) for event in record.events])
    ops = np.arange(len(record.totals))
    column = np.searchsorted(starts, ops, side="right") - 1
    x = column + (ops - starts[column]) / widths[column]
    window = -(-len(ops) // MAX_SAMPLES)
    if window > 1:
        firsts = np.arange(0, len(ops), window)
        keep = np.array([first + record.totals[first : first + window].argmax() for first in firsts])
        return x[keep], {name: values[keep] for name, values in record.live.items()}
    return x, record.live


def plot_schedule(record: ScheduleRecord, *, title: str = "") -> Figure:
    """Draw layers against time, and under it, on the same axis, the live bytes with their peak. See ``show_schedule``."""
    from matplotlib.patches import Rectangle

    n = record.layers
    grid_height = min(max(0.135 * n, 1.62), 3.9)
    top, gap, low, foot = 0.72, 0.13, 1.1, 0.46
    height = top + grid_height + gap + low + foot
    with _style():
        figure = _new_figure(8.6, height)
        left, width, legend = 0.064, 0.686, 0.772
        grid = figure.add_axes((left, (foot + low + gap) / height, width, grid_height / height))
        below = figure.add_axes((left, foot / height, width, low / height), sharex=grid)
        _draw_grid(grid, record)
        unit = _draw_bytes(below, record)
        figure.text(
            0.02, 1 - 0.26 / height, title or "Layers over one training step", fontsize=11, fontweight="bold"
        )
        figure.text(legend, 1 - 0.26 / height, "peak", color=MUTED)
        figure.text(
            0.985, 1 - 0.26 / height, format_bytes(record.peak), fontsize=11, fontweight="bold", ha="right"
        )
        figure.text(
            0.985,
            1 - 0.42 / height,
            f"{record.peak:,} bytes without weights",
            color=MUTED,
            fontsize=6.8,
            ha="right",
        )

        def row(y: float, look: str, label: str, value: str) -> None:
            """``y``: inches from the top."""
            tall = 0.05 if look == "inputs" and label == LABELS["inputs"] else 0.13
            figure.add_artist(
                Rectangle(
                    (legend, 1 - (y + tall / 2) / height),
                    0.024,
                    tall / height,
                    transform=figure.transFigure,
                    **_paint(look, small=True),
                )
            )
            figure.text(legend + 0.034, 1 - y / height, label, va="center_baseline", fontsize=8)
            figure.text(0.985, 1 - y / height, value, va="center_baseline", ha="right", fontsize=8)

        looks = record.looks
        shown = [name for name in LABELS if name in looks or name in ("internals", "inputs", "free")]
        step = min(0.2, (grid_height + 0.1) / len(shown))
        for i, look in enumerate(shown):
            row(top + i * step, look, LABELS[look], str(looks.count(look) or ""))
        at, y = record.peak_operation, top + grid_height + gap + 0.07
        figure.text(
            0.985, 1 - y / height, "at the peak", color=MUTED, fontsize=7.5, ha="right", va="center_baseline"
        )
        for name in reversed(PARTS):
            if record.live[name].any():
                y += 0.2
                row(y, name, PART_LABELS[name], format_bytes(int(record.live[name][at])))
        below.set_ylabel(unit, color=MUTED, fontsize=8.5)
    return figure


def _paint(look: str, small: bool = False) -> dict:
    """How matplotlib fills a box."""
    color = COLORS[look]
    edge = {"dropped": COLORS["forward"], "redropped": COLORS["recompute"], "free": "#c9ced6"}.get(look)
    if edge:
        return {"facecolor": color, "edgecolor": edge, "linewidth": 0.7 if small or look == "free" else 0.5}
    return {
        "facecolor": color,
        "edgecolor": (1, 1, 1, 0.75) if look == "recompute" else _hatch_ink(color),
        "hatch": HATCHES.get(look, "") * (2 if small else 1),
        "linewidth": 0,
    }


def _draw_grid(ax: Axes, record: ScheduleRecord) -> None:
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    n, columns = record.layers, len(record.events)
    ax.set_xlim(0, columns)
    ax.set_ylim(0, n)
    ax.set_facecolor(COLORS["free"])
    if n <= 32:
        ax.hlines(range(1, n), 0, columns, color=PAPER, linewidth=0.8, zorder=1)
    for z, (look, boxes) in enumerate(_boxes(record).items()):
        patches = [Rectangle(box[:2], *box[2:]) for box in boxes]
        ax.add_collection(PatchCollection(patches, zorder=2 + z / 10, **_paint(look)))
    for side in ax.spines.values():
        side.set_visible(False)
    step = round(nice_step(n, 4)) or 1
    ticks = [1, *(k for k in range(step, n + 1, step) if k > 1 and n - k > step / 2), n]
    ax.set_yticks([k - 0.5 for k in ticks], [str(k) for k in ticks])
    ax.tick_params(axis="y", length=0, colors=MUTED, labelsize=8, pad=2)
    ax.tick_params(axis="x", length=0, labelbottom=False)
    ax.set_ylabel("layer", color=MUTED, fontsize=8.5)
    turn, inch = _turn(record), 1 / (ax.get_position().height * ax.figure.get_size_inches()[1])
    for phase, start, stop in (("forward", 0, turn), ("backward", turn, columns)):
        strip = Rectangle(
            (start, 1 + 0.04 * inch),
            stop - start,
            0.17 * inch,
            transform=ax.get_xaxis_transform(),
            facecolor=PHASE_COLORS[phase],
            edgecolor=PAPER,
            linewidth=0.6,
            clip_on=False,
        )
        ax.add_patch(strip)
        ax.text(
            (start + stop) / 2,
            1 + 0.12 * inch,
            phase,
            transform=ax.get_xaxis_transform(),
            ha="center",
            va="center_baseline",
            fontsize=7.5,
            color="#ffffff" if phase == "backward" else INK,
        )
    ax.plot([turn, turn], [0, n], color=INK, alpha=0.2, linewidth=0.7, zorder=4)
    at = _peak_column(record)
    ax.plot([at, at], [0, n], color=INK, linewidth=0.9, linestyle=(0, (2, 2)), zorder=6)


def _turn(record: ScheduleRecord) -> int:
    """The column after the last first forward."""
    return max(t for t, event in enumerate(record.events) if event.kind == "forward") + 1


def _peak_column(record: ScheduleRecord) -> float:
    event = record.events[record.peak_event]
    inside = (record.peak_operation - event.start + 0.5) / max(event.stop - event.start, 1)
    return record.peak_event + inside


def _draw_bytes(ax: Axes, record: ScheduleRecord) -> str:
    x, live = _samples(record)
    x = np.append(x, len(record.events))
    factor, unit = scale_of(record.peak)
    low = np.zeros(len(x))
    for name in PARTS:
        values = np.append(live[name], live[name][-1]) / factor
        if not values.any():
            continue
        paint = _paint(name)
        ax.fill_between(x, low, low + values, step="post", zorder=2, **paint)
        low = low + values
        if len(x) <= 320:  # between more samples than that, it is noise
            ax.step(x, low, where="post", color=PAPER, linewidth=0.5, zorder=2.5)
    ax.step(x, low, where="post", color=INK, linewidth=0.8 if len(x) <= 320 else 0.6, zorder=3)
    top = record.peak / factor * 1.25
    ax.set_ylim(0, top)
    ax.set_yticks(np.arange(0, top, nice_step(top, 3)))
    ax.grid(axis="y", color="#e3e5e8", linewidth=0.7, zorder=0)
    ax.set_axisbelow(True)
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    ax.spines["bottom"].set_color(MUTED)
    ax.tick_params(colors=MUTED, length=3, width=0.7, labelsize=8)
    ax.tick_params(axis="y", length=0)
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.set_xlabel("time: one column each time a layer runs", color=MUTED, fontsize=8.5)
    at = _peak_column(record)
    ax.plot([at, at], [record.peak / factor, top], color=INK, linewidth=0.9, linestyle=(0, (2, 2)), zorder=3)
    ax.plot([at], [record.peak / factor], "o", markersize=5.5, color=INK, markeredgecolor=PAPER, zorder=6)
    right = at > 0.7 * len(record.events)
    ax.annotate(
        f"peak {format_bytes(record.peak)}",
        (at, record.peak / factor),
        xytext=(-7 if right else 7, 2),
        textcoords="offset points",
        ha="right" if right else "left",
        va="bottom",
        fontsize=8.5,
        fontweight="bold",
        zorder=7,
        path_effects=_halo(),
    )
    return unit


def describe_schedule(record: ScheduleRecord, *, title: str = "") -> str:
    """The picture in words, for those who do not see it."""
    n, again = record.layers, len(record.ran("recompute"))
    first = [look for look, event in zip(record.looks, record.events, strict=True) if event.kind == "forward"]
    event = record.events[record.peak_event]
    at, where = (
        record.peak_operation,
        event.kind if event.layer < 0 else f"{event.kind} of layer {event.layer + 1}",
    )
    if event.kind == "recompute":
        where = f"running layer {event.layer + 1} forward again"
    parts = ", ".join(
        f"{PART_LABELS[name]} {format_bytes(int(record.live[name][at]))}"
        for name in PARTS
        if record.live[name][at]
    )
    again_words = f"layers run forward again: {again}" if again else "no layer runs forward again"
    words = (
        f"Grid of {n} layers against {len(record.events)} columns of time. Forward calls that keep internals: "
        f"{first.count('forward')}, that drop them: {first.count('dropped')}; in backward, {again_words}. Peak: "
        f"{format_bytes(record.peak)} ({record.peak:,} bytes) in {where.replace('outside', 'the loss')}: {parts}."
    )
    return f"{title}: {words}" if title else words


PLAIN_TEXT = "Schedule plot"


def _bundle(figure: Figure, words: str, title: str, text: str = PLAIN_TEXT) -> tuple[dict, dict]:
    # The text stays the same on every computer, since notebook tests compare it; the picture need not.
    data = {
        "image/png": base64.b64encode(png(figure)).decode(),
        "text/plain": text + (f": {title}" if title else ""),
    }
    return data, {"image/png": {**display_size(figure), "alt": words}}


def show_schedule(record: ScheduleRecord, *, title: str = "") -> None:
    """Display ``plot_schedule`` with words for those who do not see it."""
    from IPython.display import display

    data, metadata = _bundle(
        plot_schedule(record, title=title), describe_schedule(record, title=title), title
    )
    display(data, metadata=metadata, raw=True)


# The explorer -------------------------------------------------------------------------------------------------------

EXPLORER_TEXT = "Schedule explorer"
RATIOS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
SCHEDULES = ("none", "equal segments", "best segments")
DEFAULTS = {"depth": 16, "segment": 4, "ratio": 1, "schedule": "equal segments"}
WIDTH, ROWS = 8, 32
BOUNDARY = 4 * WIDTH * ROWS  # 1 KiB: the explorer's bytes in KiB are boundaries


class _Layer(nn.Module):
    """x + W2 relu(W1 x) with frozen weights: autograd keeps ``ratio`` times the bytes of x, and not x."""

    def __init__(self, ratio: int):
        super().__init__()
        self.inside = nn.Sequential(
            nn.Linear(WIDTH, ratio * WIDTH), nn.ReLU(inplace=True), nn.Linear(ratio * WIDTH, WIDTH)
        )
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (32, 8), and so is the result."""
        return x + self.inside(x)


def segments_of(depth: int, segment: int, ratio: int, schedule: str) -> list[int]:
    """The explorer's segments: how many layers each has, first segment first."""
    from ..checkpointing import uniform_segments

    if schedule == "best segments":
        return list(_best(depth, ratio))
    return [depth] if schedule == "none" else uniform_segments(depth, segment)


@lru_cache(256)
def _best(depth: int, ratio: int) -> tuple[int, ...]:
    from ..checkpointing import best_segments

    # Inside a segment this chain keeps no inputs, so a layer adds ratio boundaries and not ratio + 1.
    return tuple(best_segments(depth, internal=(ratio - 1) * BOUNDARY, boundary=BOUNDARY))


@lru_cache(16)
def _chain(depth: int, ratio: int) -> nn.Sequential:
    state = torch.get_rng_state()
    try:
        return nn.Sequential(*(_Layer(ratio) for _ in range(depth)))
    finally:
        torch.set_rng_state(state)  # a learner's random numbers are not the explorer's to draw


@lru_cache(256)
def run_chain(depth: int, segment: int, ratio: int, schedule: str) -> ScheduleRecord:
    """Run one real step of a small chain with the explorer's settings (see ``ScheduleExplorer``), and record it."""
    from ..checkpointing import checkpoint_layers

    chain = _chain(depth, ratio)
    x = torch.ones(ROWS, WIDTH, requires_grad=True)
    with ExitStack() as undo:
        undo.enter_context(torch.enable_grad())
        if schedule != "none":
            last = schedule == "best segments"
            segments = segments_of(depth, segment, ratio, schedule)
            undo.enter_context(checkpoint_layers(chain, segments, keep_last=last))
        return record_schedule(chain, lambda: torch.autograd.grad(chain(x).sum(), x))


def curve_segments(depth: int) -> list[int]:
    """The segment lengths that the curve is measured at: all of them up to 16, then about every sixth longer one."""
    wanted = {*range(1, min(depth, 16) + 1), depth}
    k = 16.0
    while k < depth:
        wanted.add(round(k))
        k *= 1.19
    return sorted(wanted)


def _rule(depth: int, ratio: int) -> str:
    return f"√(n·x/a) = √({depth}/{ratio}) = {math.sqrt(depth / ratio):.1f}"


def summary(record: ScheduleRecord) -> str:
    """Peak and work in one line."""
    again = len(record.ran("recompute"))
    return (
        f"Peak {record.peak / BOUNDARY:.0f} boundaries ({format_bytes(record.peak)}) · "
        f"{record.forward_calls} forward calls ({record.layers} + {again} again)"
    )


def details(settings: dict, curve: dict[int, ScheduleRecord]) -> str:
    """What the segments are, and how they compare with the lowest point that was measured."""
    depth, ratio, schedule = settings["depth"], settings["ratio"], settings["schedule"]
    segments = segments_of(**settings)
    words = {
        "none": "No checkpoints: all internals stay.",
        "equal segments": f"{len(segments)} segment{'s' * (len(segments) > 1)} of {segments[0]}"
        + (f", the last of {segments[-1]}." if segments[-1] != segments[0] else "."),
        "best segments": f"{len(segments)} segments: {', '.join(map(str, segments))}; the last one is kept, not run again.",
    }[schedule]
    words += f" Rule for equal segments: {_rule(depth, ratio)} layers."
    if set(curve) >= set(curve_segments(depth)):
        lowest = min(curve, key=lambda k: (curve[k].peak, -k))
        words += f" Lowest measured of these: {curve[lowest].peak / BOUNDARY:.0f} boundaries, with segments of {lowest}."
    return words


# Reads on white and on black alike.
_BLUE_BOTH = "#4a82cf"
_HALO = 'style="paint-order:stroke;stroke:var(--jp-layout-color0,transparent);stroke-width:5px"'


def schedule_svg(record: ScheduleRecord, settings: dict, curve: dict[int, ScheduleRecord]) -> str:
    """Grid, live bytes and the curve of peak against segment length as one inline ``<svg>`` for light and dark pages."""
    n, columns = record.layers, len(record.events)
    width, left, grid_w, right = 800, 34, 496, 574
    top, grid_h, low_top, low_h, height = 30, 250, 304, 96, 424
    sx, sy = grid_w / columns, grid_h / n
    key = "gs" + hashlib.sha1(repr((settings, sorted(curve))).encode()).hexdigest()[:8]

    def path(boxes) -> str:
        return "".join(
            f"M{left + x * sx:.1f} {top + grid_h - (y + h) * sy:.1f}h{w * sx:.1f}v{h * sy:.1f}h{-w * sx:.1f}z"
            for x, y, w, h in boxes
        )

    def text(x, y, words, *, anchor="start", size=11, weight=400, opacity=0.8) -> str:
        return (
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" font-weight="{weight}" '
            f'fill="currentColor" opacity="{opacity}">{escape(words)}</text>'
        )

    words = describe_schedule(record)
    if curve:
        points = ", ".join(f"{k}: {curve[k].peak / BOUNDARY:.0f}" for k in sorted(curve))
        words += f" Peak in boundaries by segment length: {points}."
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-labelledby="{key}t {key}d" viewBox="0 0 {width} {height}" '
        f'style="width:100%;max-width:{width}px;height:auto;display:block;color:inherit;'
        f'font:11px var(--jp-ui-font-family,system-ui,sans-serif)">',
        f'<title id="{key}t">{escape(summary(record))}</title><desc id="{key}d">{escape(words)}</desc>',
        f"<defs>{''.join(_svg_hatch(key, look) for look in HATCHES)}</defs>",
    ]
    # The grid.
    turn = left + _turn(record) * sx
    end = left + grid_w
    out += [
        f'<rect x="{left}" y="{top}" width="{grid_w}" height="{grid_h}" fill="currentColor" opacity=".06"/>',
        f'<path d="M{left} {top - 7}H{turn - 2:.1f}" stroke="currentColor" stroke-width="2" opacity=".3"/>',
        f'<path d="M{turn:.1f} {top - 7}H{end}" stroke="currentColor" stroke-width="2" opacity=".75"/>',
        text((left + turn) / 2, top - 13, "forward", anchor="middle"),
        text((turn + end) / 2, top - 13, "backward", anchor="middle"),
    ]
    if n <= 32:
        lines = "".join(f"M{left} {top + i * sy:.1f}h{grid_w}" for i in range(1, n))
        out.append(f'<path d="{lines}" stroke="currentColor" opacity=".1" stroke-width=".8"/>')
    for look, boxes in _boxes(record).items():
        if boxes:
            out.append(f'<path class="gm-{look}" d="{path(boxes)}" {_svg_paint(key, look)}/>')
    for layer in sorted({1, n, *([n // 2] if n > 3 else [])}):
        out.append(text(left - 5, top + grid_h - (layer - 0.5) * sy + 4, str(layer), anchor="end"))
    out.append(
        f'<text transform="translate(9 {top + grid_h * 0.27:.0f}) rotate(-90)" text-anchor="middle" fill="currentColor" '
        f'opacity=".8">layer</text>'
    )
    # The bytes.
    x, live = _samples(record)
    most = max(record.peak, 1) * 1.2

    def bytes_y(value: float) -> float:
        return low_top + low_h - value / most * low_h

    step = nice_step(most / BOUNDARY, 3)
    ticks = [step * i for i in range(int(most / BOUNDARY / step) + 1)]
    for tick in ticks:
        y = bytes_y(tick * BOUNDARY)
        out.append(f'<path d="M{left} {y:.1f}H{end}" stroke="currentColor" opacity=".14"/>')
        out.append(text(left - 5, y + 4, f"{tick:g}", anchor="end"))
    base = np.zeros(len(x))
    for name in PARTS:
        if live[name].any():
            shape = _svg_steps(left + x * sx, bytes_y(base), bytes_y(base + live[name]), end)
            out.append(f'<path class="gm-{name}" d="{shape}" {_svg_paint(key, name)}/>')
            base = base + live[name]
    peak_x, peak_y = left + _peak_column(record) * sx, bytes_y(record.peak)
    side = -1 if _peak_column(record) > 0.7 * columns else 1
    out += [
        f'<path d="M{peak_x:.1f} {top}V{peak_y:.1f}" stroke="currentColor" stroke-dasharray="3 3"/>',
        f'<circle cx="{peak_x:.1f}" cy="{peak_y:.1f}" r="4" fill="currentColor"/>',
        f'<text x="{peak_x + 8 * side:.1f}" y="{peak_y - 4:.1f}" font-size="12" font-weight="700" fill="currentColor" '
        f'text-anchor="{"end" if side < 0 else "start"}" {_HALO}>peak {record.peak / BOUNDARY:.0f}</text>',
        text(left, low_top - 9, "live bytes, in boundaries"),
        text(end, low_top + low_h + 15, "time: one column each time a layer runs", anchor="end"),
    ]
    out += _svg_curve(record, settings, curve, right, top, width - 10 - right, 150, text)
    # The legend.
    looks, y = record.looks, top + 190

    def row(y: float, look: str, label: str, value: str) -> str:
        return (
            f'<rect x="{right}" y="{y - 6:.1f}" width="18" height="12" {_svg_paint(key, look)}/>'
            + text(right + 26, y + 4, label, size=12, opacity=1)
            + text(width - 10, y + 4, value, size=12, anchor="end", opacity=1)
        )

    out.append(text(width - 10, y + 3, "times", anchor="end"))
    for look, label in LABELS.items():
        if look in looks:
            y += 19
            out.append(row(y, look, label, str(looks.count(look))))
    y += 26
    out.append(text(width - 10, y + 3, "boundaries at the peak", anchor="end"))
    for name in ("passing", "internals", "inputs"):
        y += 19
        at_peak = record.live[name][record.peak_operation] / BOUNDARY
        out.append(row(y, name, PART_LABELS[name], f"{at_peak:.0f}"))
    return "".join(out) + "</svg>"


def _svg_curve(
    record, settings: dict, curve: dict, left: float, top: float, width: float, height: float, text
) -> list[str]:
    """Peak against segment length, as far as it is measured, and where the present settings stand."""
    depth = settings["depth"]
    highest = max([r.peak for r in curve.values()] + [record.peak]) * 1.12

    def px(k: float) -> float:  # logarithmic: short segments are where it turns
        return left + 26 + math.log(k) / math.log(depth) * (width - 34)

    def py(nbytes: float) -> float:
        return top + height - nbytes / highest * height

    out = [
        text(left, top - 13, "peak by length of equal segments"),
        f'<path d="M{left + 20} {top}V{top + height}H{left + width}" fill="none" stroke="currentColor" opacity=".35"/>',
    ]
    step = nice_step(highest / BOUNDARY, 4)
    for i in range(int(highest / BOUNDARY / step) + 1):
        y = py(i * step * BOUNDARY)
        out.append(text(left + 16, y + 4, f"{i * step:g}", anchor="end"))
        out.append(f'<path d="M{left + 20} {y:.1f}H{left + width}" stroke="currentColor" opacity=".12"/>')
    last = -100.0
    for k in (1, 2, 4, 8, 16, 32, 64):
        if k <= depth and px(k) - last > 20:
            out.append(text(px(k), top + height + 14, str(k), anchor="middle"))
            last = px(k)
    points = [(px(k), py(curve[k].peak)) for k in sorted(curve)]
    if points:
        line = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2"/>' for x, y in points)
        out.append(f'<path d="M{line}" fill="none" stroke="{_BLUE_BOTH}" stroke-width="1.6"/>')
        out.append(f'<g fill="{_BLUE_BOTH}">{dots}</g>')
    y = py(record.peak)
    if settings["schedule"] == "equal segments":
        out.append(
            f'<circle class="gm-here" cx="{px(settings["segment"]):.1f}" cy="{y:.1f}" r="5.5" fill="{COLORS["inputs"]}" '
            'stroke="currentColor" stroke-width="1.5"/>'
        )
    else:
        out.append(
            f'<path class="gm-here" d="M{left + 20} {y:.1f}H{left + width}" stroke="{COLORS["inputs"]}" stroke-width="2.5" '
            'stroke-dasharray="7 3"/>'
        )
        # On the side where the curve is not: nothing is lower than the best, nothing higher than none.
        best = settings["schedule"] == "best segments"
        out.append(
            f'<text x="{left + (width if best else 26)}" y="{y + 13 if best and y + 16 < top + height else y - 5:.1f}" '
            f'text-anchor="{"end" if best else "start"}" font-weight="700" fill="currentColor" {_HALO}>'
            f"{settings['schedule']}</text>"
        )
    return out


def _svg_steps(x: np.ndarray, low: np.ndarray, high: np.ndarray, end: float) -> str:
    """The area between two step functions that hold their value until the next x."""
    edges = np.append(x, end)
    up = "".join(f"H{b:.1f}V{y:.1f}" for b, y in zip(edges[1:-1], high[1:], strict=True))
    down = "".join(f"V{y:.1f}H{a:.1f}" for a, y in zip(edges[-2::-1], low[::-1], strict=True))
    return f"M{x[0]:.1f} {low[0]:.1f}V{high[0]:.1f}{up}H{end:.1f}{down}z"


def _svg_paint(key: str, look: str) -> str:
    edge = {"dropped": _BLUE_BOTH, "redropped": COLORS["recompute"]}.get(look)
    if edge:
        return f'fill="{edge}" fill-opacity=".22" stroke="{edge}" stroke-width="1"'
    if look == "backward":
        return 'fill="currentColor"'
    return f'fill="url(#{key}{look})"' if look in HATCHES else f'fill="{COLORS[look]}"'


def _svg_hatch(key: str, look: str) -> str:
    marks = {
        "/": '<path d="M-1 1L1 -1M0 6L6 0M5 7L7 5"/>',
        ".": '<path d="M3 3h.01" stroke-width="1.4" stroke-linecap="round"/>',
        "x": '<path d="M0 0L6 6M0 6L6 0"/>',
        "\\": '<path d="M-1 5L1 7M0 0L6 6M5 -1L7 1"/>',
    }[HATCHES[look][0]]
    ink = (
        'stroke="#fff" stroke-opacity=".7"'
        if look in ("recompute", "left")
        else 'stroke="#10141c" stroke-opacity=".35"'
    )
    return (
        f'<pattern id="{key}{look}" width="6" height="6" patternUnits="userSpaceOnUse">'
        f'<rect width="6" height="6" fill="{COLORS[look]}"/><g {ink} fill="none">{marks}</g></pattern>'
    )


@cache
def _picture_class():
    import anywidget
    import traitlets

    class SchedulePicture(anywidget.AnyWidget):
        _esm = Path(__file__).with_name("schedule.js")
        _css = Path(__file__).with_name("schedule.css")
        svg = traitlets.Unicode("").tag(sync=True)
        summary = traitlets.Unicode("").tag(sync=True)
        details = traitlets.Unicode("").tag(sync=True)

    return SchedulePicture


class ScheduleExplorer:
    """The explorer's settings, and its widgets once they are shown.

    Settings: ``depth`` (4 to 64 layers), ``segment`` (1 to depth layers), ``ratio`` (a/x, bytes that a layer keeps inside
    over bytes of its input: one of ``RATIOS``), ``schedule`` (one of ``SCHEDULES``). Each change runs a small chain.
    Raises ``TypeError`` for a setting that is unknown and ``ValueError`` for a value that is.
    """

    def __init__(self, **settings):
        if unknown := sorted(set(settings) - set(DEFAULTS)):
            raise TypeError(f"no setting named {', '.join(unknown)}: choose from {', '.join(DEFAULTS)}")
        self.settings = DEFAULTS | settings
        depth = self.settings["depth"]
        if depth not in range(4, 65):
            raise ValueError(f"depth is {depth!r}: choose 4 to 64 layers")
        if self.settings["segment"] not in range(1, depth + 1):
            raise ValueError(f"segment is {self.settings['segment']!r}: choose 1 to {depth}, the depth")
        for name, known in (("ratio", RATIOS), ("schedule", SCHEDULES)):
            if self.settings[name] not in known:
                raise ValueError(
                    f"{name} is {self.settings[name]!r}: choose one of {', '.join(map(repr, known))}"
                )
        self.controls: dict = {}
        self.curve: dict[int, ScheduleRecord] = {}
        self._picture = self._task = None

    def still_bundle(self) -> tuple[dict, dict]:
        """The picture of the starting settings as a mimebundle: (data, metadata)."""
        settings = self.settings
        record = run_chain(**settings)
        title = {
            "none": f"{settings['depth']} layers, no checkpoints",
            "equal segments": f"{settings['depth']} layers in segments of {settings['segment']}",
            "best segments": f"{settings['depth']} layers in segments of {', '.join(map(str, segments_of(**settings)))}",
        }[settings["schedule"]] + f", a/x = {settings['ratio']}"
        words = describe_schedule(record, title=title) + f" {summary(record)}."
        return _bundle(plot_schedule(record, title=title), words, "", EXPLORER_TEXT)

    def widget(self):
        """The controls over the picture, as one ipywidget."""
        import ipywidgets

        start = self.settings

        def looks() -> dict:
            layout = ipywidgets.Layout(width="auto", margin="2px 14px 2px 0")
            return {"style": {"description_width": "96px"}, "layout": layout}

        self.controls = {
            "segment": ipywidgets.IntSlider(
                start["segment"], 1, start["depth"], description="segment", **looks()
            ),
            "depth": ipywidgets.IntSlider(start["depth"], 4, 64, description="layers", **looks()),
            "ratio": ipywidgets.SelectionSlider(
                options=RATIOS, value=start["ratio"], description="a/x", **looks()
            ),
            "schedule": ipywidgets.Dropdown(
                options=SCHEDULES, value=start["schedule"], description="schedule", **looks()
            ),
        }
        self._picture = _picture_class()()
        for control in self.controls.values():
            control.observe(self._changed, "value")
        self._changed()
        grid = ipywidgets.Layout(
            grid_template_columns="repeat(auto-fit, minmax(300px, 1fr))", max_width="820px"
        )
        return ipywidgets.VBox([ipywidgets.GridBox(list(self.controls.values()), layout=grid), self._picture])

    def _changed(self, change=None) -> None:
        controls = self.controls
        if controls["segment"].max != controls["depth"].value:
            # Setting a maximum below the value moves the value too, and that must not draw on its own.
            controls["segment"].unobserve(self._changed, "value")
            controls["segment"].max = controls["depth"].value
            controls["segment"].observe(self._changed, "value")
        controls["segment"].disabled = controls["schedule"].value != "equal segments"
        now = {name: control.value for name, control in controls.items()}
        if not self.curve or change is None or change["owner"] in (controls["depth"], controls["ratio"]):
            self._start_curve(now["depth"], now["ratio"])
        self._draw()

    def _draw(self) -> None:
        now = {name: control.value for name, control in self.controls.items()}
        record = run_chain(**now)
        if now["schedule"] == "equal segments":
            self.curve[now["segment"]] = record
        with self._picture.hold_sync():
            self._picture.svg = schedule_svg(record, now, self.curve)
            self._picture.summary = summary(record)
            self._picture.details = details(now, self.curve)

    def _start_curve(self, depth: int, ratio: int) -> None:
        """Measure the curve: in a kernel between messages, so that a slider that is dragged is not waited for."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
        self.curve = {}
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            for k in curve_segments(depth):
                self.curve[k] = run_chain(depth, k, ratio, "equal segments")
            return
        self._task = loop.create_task(self._measure_curve(depth, ratio, self.curve))

    async def _measure_curve(self, depth: int, ratio: int, curve: dict[int, ScheduleRecord]) -> None:
        await asyncio.sleep(0.15)  # while the slider still moves, there is nothing to measure
        for k in curve_segments(depth):
            curve[k] = run_chain(depth, k, ratio, "equal segments")
            await asyncio.sleep(0.002)
        self._draw()


def explore_schedule(**settings) -> None:
    """Display the explorer, starting from ``settings`` (see ``ScheduleExplorer``). Under ``GRADMEM_LIVE=0`` a still picture."""
    explorer = ScheduleExplorer(**settings)
    show_explorer(explorer, EXPLORER_TEXT)
