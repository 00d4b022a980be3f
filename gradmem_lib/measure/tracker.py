"""Live memory of a training step, to the byte, on any device.

``MemoryTracker`` watches every operation that PyTorch dispatches (``watch.py``). It counts each *storage* once
(``storages.py``) and keeps what the bytes did (``recording.py``).

What it cannot see: scratch memory that a kernel takes and returns inside one operation, the random-number states
that checkpointing keeps, operations of threads other than the block's (a module's forward there is refused), and whatever
an allocator rounds up or holds in reserve. On a CUDA card ``tracker.allocator`` has the allocator's own figures, to be read
beside the tracker's.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..names import CATEGORIES, PHASES
from ..units import parse_bytes
from .budget import BudgetExceeded, let_go, over_budget
from .display import in_kernel, pictures
from .recording import Recording
from .storages import has_memory
from .timeline import Holder, MemorySnapshot, Timeline, largest_of
from .watch import Meter

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TIMELINE_SAMPLES = 16_384
LIVE_FRAME_SECONDS = 0.1


class _OnDevice(Recording):
    """Counts the storages of one device."""

    def __init__(self, device: torch.device):
        super().__init__(TIMELINE_SAMPLES)
        self._type, self._index = device.type, device.index

    def size(self, storage: torch.UntypedStorage) -> int:
        device = storage.device
        here = device.type == self._type and self._index in (None, device.index)
        return storage.nbytes() if here and has_memory(storage) else 0


class MemoryTracker:
    """Count the live bytes of whatever runs inside ``with MemoryTracker(model, optimizer) as tracker:``.

    Args:
        model: the ``nn.Module`` in training. Its parameters, gradients and buffers are counted from the start, and
            every storage is put down to the submodule that made it. Without it, only what the block itself creates
            is counted.
        optimizer: a ``torch.optim.Optimizer`` or a list of them, so that states that exist already are counted.
            Optimizers that step inside the block are found without it.
        budget: bytes (an int, or text such as ``"2 GiB"``). The first allocation that passes it raises
            ``BudgetExceeded``, which turns any machine into a card of that size.
        live: ``False`` draws nothing. Otherwise a notebook shows the memory while it moves and a still picture at the
            end; with ``GRADMEM_LIVE=0``, the still picture alone.
        title: a heading for the plots.
        device: the device to count. ``None``: the model's, or torch's default device.

    One tracker measures one ``with`` block, and trackers do not nest. All figures are bytes.
    """

    _running: MemoryTracker | None = None

    def __init__(
        self,
        model: nn.Module | None = None,
        optimizer: Optimizer | Iterable[Optimizer] | None = None,
        *,
        budget: int | str | None = None,
        live: bool | None = None,
        title: str = "",
        device: torch.device | str | None = None,
    ):
        self.model = _checked_model(model)
        self.optimizers = checked_optimizers(optimizer)
        self.budget = None if budget is None else parse_bytes(budget)
        self.title = title
        self.device = _device_of(self.model, device)
        self._recording = _OnDevice(self.device)
        self._meter = Meter(self.model, self.optimizers, self._recording, device=self.device)
        self._live_wanted = live
        self._plot: Any = None
        self._last_frame = 0.0
        self._state = "new"
        self._undo = ExitStack()
        self._thread = threading.get_ident()
        self._earlier: tuple[MemorySnapshot, list[Holder]] | None = None  # of the laps before
        self._final: dict[str, Any] = {}

    @property
    def current(self) -> MemorySnapshot:
        """Live bytes now; after the block, live bytes when it ended."""
        if self._state == "done":
            return self._final["current"]
        with self._meter.lock:
            if self._state == "running":
                self._meter.sync_model()
            self._meter.ledger.drain()
            return self._snapshot()

    @property
    def peak(self) -> MemorySnapshot:
        """The moment with the most live bytes."""
        if self._earlier is not None and self._earlier[0].total >= self._recording.peak_total:
            return self._earlier[0]
        return self._recording.peak()

    @property
    def peak_by_phase(self) -> dict[str, int]:
        """The most live bytes that each phase saw; 0 for a phase that did not occur."""
        return dict(zip(PHASES, self._recording.phase_peaks, strict=True))

    @property
    def timeline(self) -> Timeline:
        """Live bytes over the operations so far."""
        with self._meter.lock:
            return self._recording.timeline()

    def largest(self, n: int = 5) -> list[Holder]:
        """The ``n`` largest storages alive now (after the block: when it ended), largest first."""
        return largest_of(self._holders("current"), n)

    def largest_at_peak(self, n: int = 5) -> list[Holder]:
        """The ``n`` largest storages that were alive at the peak, largest first."""
        return largest_of(self._holders("peak"), n)

    def by_module(self, *, at: str = "peak", depth: int | None = None) -> dict[str, int]:
        """Bytes by module name, largest first, at the ``"peak"`` or ``"current"``; names cut to ``depth`` parts."""
        if at not in ("peak", "current"):
            raise ValueError(f'by_module(at=...) takes "peak" or "current", not {at!r}')
        sums: dict[str, int] = {}
        for holder in self._holders(at):
            name = ".".join(holder.module.split(".")[:depth])
            sums[name] = sums.get(name, 0) + holder.nbytes
        return dict(sorted(sums.items(), key=lambda item: -item[1]))

    @property
    def allocator(self) -> dict[str, int] | None:
        """The CUDA allocator's own figures in bytes (allocated, reserved and their peaks in this block), or ``None``."""
        if self.device.type != "cuda":
            return None
        return self._final.get("allocator") or {
            "allocated": torch.cuda.memory_allocated(self.device),
            "reserved": torch.cuda.memory_reserved(self.device),
            "max_allocated": torch.cuda.max_memory_allocated(self.device),
            "max_reserved": torch.cuda.max_memory_reserved(self.device),
        }

    def plot(self, ax: Axes | None = None) -> Figure:
        """The timeline as a matplotlib ``Figure``, for print."""
        return pictures().plot_timeline(self.timeline, title=self.title, budget=self.budget, ax=ax)

    def show(self) -> None:
        """Display the timeline as the interactive view (hover, arrow keys), after the fact."""
        pictures().show_timeline(self.timeline, title=self.title, budget=self.budget)

    def __repr__(self) -> str:
        return f"MemoryTracker(peak {self.peak})"

    def _repr_html_(self) -> str:
        now, peak = self.current, self.peak
        rows = "".join(
            f"<tr><td style='text-align:left'>{name}</td><td>{peak.by_category[name]:,}</td>"
            f"<td>{now.by_category[name]:,}</td></tr>"
            for name in CATEGORIES
        )
        allocator = "".join(f"<br>CUDA {key}: {n:,} bytes" for key, n in (self.allocator or {}).items())
        return (
            "<table><thead><tr><th style='text-align:left'>bytes</th>"
            f"<th>at the peak ({peak.phase})</th><th>{'at the end' if self._state == 'done' else 'now'}</th></tr></thead>"
            f"<tbody>{rows}<tr><th style='text-align:left'>total</th><th>{peak.total:,}</th><th>{now.total:,}</th></tr>"
            f"</tbody></table>{allocator}"
        )

    def reset_peak(self) -> None:
        """Start the search for the peak anew from the bytes that are live now. The timeline goes on."""
        with self._meter.lock:
            self._recording.phase_peaks = [0] * len(PHASES)
            self._earlier = None
            self._peak_from_here()

    def lap(self) -> MemorySnapshot:
        """The peak since the last lap, or since the beginning. Unlike ``reset_peak`` it leaves ``peak`` what it was."""
        with self._meter.lock:
            self._meter.ledger.drain()
            found = self._recording.peak()
            if self._earlier is None or found.total > self._earlier[0].total:
                self._earlier = (found, self._holders("peak"))
            self._peak_from_here()
        return found

    def _peak_from_here(self) -> None:
        ledger = self._meter.ledger
        ledger.drain()
        self._recording.take_peak(self._meter.phase, ledger.total, ledger.by)

    def watch(self, tensors: torch.Tensor | Iterable[torch.Tensor], category: str) -> None:
        """Count ``tensors`` under ``category``: for states and buffers that no module or optimizer owns."""
        if category not in CATEGORIES:
            raise ValueError(f"unknown category {category!r}: choose one of {', '.join(CATEGORIES)}")
        with self._meter.lock:
            self._meter.tag(tensors, CATEGORIES.index(category), "watched")
            self._meter.sample()

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Name the phase of a hand-written part: ``with tracker.phase("optimizer_step"): ...``."""
        if name not in PHASES:
            raise ValueError(f"unknown phase {name!r}: choose one of {', '.join(PHASES)}")
        return self._meter.in_phase(PHASES.index(name))

    def __enter__(self) -> MemoryTracker:
        if self._state != "new":
            raise RuntimeError(
                "this MemoryTracker has measured its block already: make a new one for the next block"
            )
        if MemoryTracker._running is not None:
            raise RuntimeError(
                "a MemoryTracker is running already, and two would count the same bytes: end the outer `with` block "
                "first, or read the outer tracker inside it (.current, .reset_peak(), .peak)"
            )
        meter = self._meter
        meter.limit, meter.exceeded = self.budget, self._over_budget
        with self._undo as undo:
            MemoryTracker._running = self
            undo.callback(setattr, MemoryTracker, "_running", None)
            if self.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self.device)
            undo.enter_context(meter)
            self._start_live()
            self._undo = undo.pop_all()
        self._state = "running"
        return self

    def __exit__(self, exc_type, exc, tb) -> None:
        try:
            self._undo.close()
            if isinstance(exc, torch.OutOfMemoryError):
                # A notebook keeps the last exception, and a traceback keeps the variables of every frame in it, and with
                # them the tensors that did not fit.
                let_go(exc)
        finally:
            self._finish()

    def _finish(self) -> None:
        meter = self._meter
        with meter.lock:
            meter.after_sample = None
            meter.ledger.drain()
            meter.sample()
            self._final = {
                "current": self._snapshot(),
                "holders": {at: self._holders(at) for at in ("current", "peak")},
                "allocator": self.allocator,
            }
            self._state = "done"
            # A tracker that is kept for its figures must not keep the model.
            meter.close()
            self._recording.forget_holders()
            self.model, self.optimizers = None, []
        if self._plot is not None:
            self._draw(lambda plot: plot.finish(self.timeline))

    def _snapshot(self) -> MemorySnapshot:
        ledger = self._meter.ledger
        by = dict(zip(CATEGORIES, ledger.by, strict=True))
        return MemorySnapshot(ledger.total, by, PHASES[self._meter.phase_now])

    def _holders(self, at: str) -> list[Holder]:
        if self._state == "done":
            return self._final["holders"][at]
        with self._meter.lock:
            self._meter.ledger.drain()
            if (
                at == "peak"
                and self._earlier is not None
                and self._earlier[0].total >= self._recording.peak_total
            ):
                return self._earlier[1]
            entries = list(self._meter.ledger.storages.values())
            if at == "peak":
                entries = self._recording.at_peak(entries)
            modules = self._module_names()
        return [
            Holder(
                entry.nbytes,
                CATEGORIES[entry.category],
                _owner(entry.module, modules),
                str(entry.op).removesuffix(".default"),
            )
            for entry in entries
        ]

    def _module_names(self) -> dict[int, str]:
        return {id(m): name for name, m in self.model.named_modules()} if self.model is not None else {}

    def _over_budget(self, asked: int, func: object) -> BudgetExceeded:
        stack = self._meter.stack
        where = f" in {_owner(stack[-1], self._module_names())}" if stack else ""
        what = str(func).removesuffix(".default") + where
        return over_budget(self.budget or 0, asked, what, self._snapshot(), self._holders("current"))

    def _start_live(self) -> None:
        if self._live_wanted is False:
            return
        if in_kernel():
            self._plot = pictures().LivePlot(title=self.title, budget=self.budget)
            self._draw(lambda plot: plot.start())
            self._meter.after_sample = self._draw_frame

    def _draw_frame(self) -> None:
        if self._plot is None or time.perf_counter() - self._last_frame < LIVE_FRAME_SECONDS:
            return
        if threading.get_ident() != self._thread:
            return  # autograd's own threads must not talk to the front end
        current = self._snapshot()
        self._draw(lambda plot: plot.push(self.timeline, None, current, current.phase))
        self._last_frame = time.perf_counter()

    def _draw(self, action) -> None:
        """A picture that fails must not stop a training run."""
        try:
            action(self._plot)
        except Exception as error:
            self._plot = None
            warnings.warn(f"the live memory plot stopped ({error!r}); the figures go on", stacklevel=2)


def _owner(owner, modules: dict[int, str]) -> str:
    if isinstance(owner, nn.Module):
        return modules.get(id(owner)) or type(owner).__name__
    return owner


def _checked_model(model) -> nn.Module | None:
    if model is None or isinstance(model, nn.Module):
        return model
    raise TypeError(
        f"MemoryTracker(model=...) takes a torch.nn.Module, and was given {type(model).__name__}. To count a step without "
        "a module, leave it out; to count loose tensors, use tracker.watch(tensors, category)"
    )


def checked_optimizers(optimizer) -> list[Optimizer]:
    several = [] if optimizer is None else [optimizer] if isinstance(optimizer, Optimizer) else optimizer
    if not isinstance(several, (list, tuple)) or not all(isinstance(o, Optimizer) for o in several):
        raise TypeError(
            f"MemoryTracker(optimizer=...) takes a torch.optim.Optimizer or a list of them, and was given "
            f"{type(optimizer).__name__}. For states kept by hand, use tracker.watch(tensors, 'optimizer')"
        )
    return list(several)


def _device_of(model: nn.Module | None, device) -> torch.device:
    if device is not None:
        return torch.device(device)
    devices = {p.device for p in model.parameters()} if model is not None else set()
    if len(devices) > 1:
        raise ValueError(
            f"the model lies on several devices ({', '.join(sorted(map(str, devices)))}): say which one to count, "
            "for example MemoryTracker(model, device='cuda:0')"
        )
    return devices.pop() if devices else torch.get_default_device()
