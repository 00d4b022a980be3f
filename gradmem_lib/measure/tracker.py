"""Live memory of a training step, to the byte, on any device.

``MemoryTracker`` watches every operation that PyTorch dispatches. It counts each *storage* (the block of bytes behind
one or more tensors) once, when it appears, and takes it off again when Python's weak reference says that it is gone.
Views and tied weights share a storage, so they are never counted twice.

What it cannot see: scratch memory that a kernel takes and returns inside one operation, the random-number states
that checkpointing keeps, and whatever an allocator rounds up or holds in reserve. On a CUDA card ``tracker.cuda`` has
the allocator's own figures, to be read beside the tracker's.
"""

from __future__ import annotations

import threading
import time
import warnings
import weakref
from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice

import numpy as np
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from ..names import (
    ACTIVATIONS,
    BACKWARD,
    CATEGORIES,
    FORWARD,
    GRADIENTS,
    IDLE,
    OPTIMIZER,
    OPTIMIZER_STEP,
    OTHER,
    PARAMETERS,
    PHASES,
    TEMPORARIES,
)
from ..units import format_bytes, parse_bytes
from .budget import REMEDIES, BudgetExceeded, let_go
from .display import in_kernel, pictures
from .timeline import Holder, MemorySnapshot, Timeline

TIMELINE_SAMPLES = 16_384
LIVE_FRAME_SECONDS = 0.1
_graph_task = torch._C._current_graph_task_id


class _Storage(weakref.ref):
    """A live storage. The weak reference's callback tells the tracker that its bytes are free."""

    __slots__ = ("birth", "category", "key", "module", "nbytes", "op")


class Watch(TorchDispatchMode):
    """Hands the result of every dispatched operation to the tracker."""

    def __init__(self, observe):
        super().__init__()
        self._observe = observe

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self._observe(func, args, out)
        return out


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
        self.optimizers = _checked_optimizers(optimizer)
        self.budget = None if budget is None else parse_bytes(budget)
        self.title = title
        self.device = _device_of(self.model, device)
        self._live_wanted = live
        self._plot = None
        self._state = "new"
        self._undo = ExitStack()
        # Reentrant: a garbage collection inside the locked part may free tensors and run Python code.
        self._lock = threading.RLock()
        self._thread = threading.get_ident()

        self._storages: dict[int, _Storage] = {}
        self._freed: deque[_Storage] = deque()
        self._total = 0
        self._by = [0] * len(CATEGORIES)
        self._op = 0
        self._serial = 0
        self._makes_alias: dict[object, bool] = {}

        self._host_phase = IDLE
        self._stepping: list[int] = []
        self._step_optimizer: Optimizer | None = None
        self._phase = IDLE
        self._root_has_grad = False
        self._stack: list[nn.Module] = []
        self._names: dict[int, str] = {}
        self._hooked = WeakIdKeyDictionary()
        self._states_seen: dict[int, int] = {}

        self._earlier: tuple[MemorySnapshot, list[Holder]] | None = None  # of the laps before
        self._peak_total, self._peak_by, self._peak_phase, self._peak_serial = (
            0,
            [0] * len(CATEGORIES),
            IDLE,
            0,
        )
        self._dead_at_peak: list[_Storage] = []
        self._phase_peaks = [0] * len(PHASES)
        self._rows = array("q")
        self._stride, self._in_window, self._window = 1, 0, None
        self._last_frame = 0.0
        self._final: dict = {}

    # What a learner reads ------------------------------------------------------------------------------------------

    @property
    def current(self) -> MemorySnapshot:
        """Live bytes now; after the block, live bytes when it ended."""
        if self._state == "done":
            return self._final["current"]
        with self._lock:
            if self._state == "running":
                self._sync_model()
            self._drain()
            return self._snapshot()

    @property
    def peak(self) -> MemorySnapshot:
        """The moment with the most live bytes."""
        if self._earlier is not None and self._earlier[0].total >= self._peak_total:
            return self._earlier[0]
        return self._lap_peak()

    def _lap_peak(self) -> MemorySnapshot:
        return MemorySnapshot(
            self._peak_total, dict(zip(CATEGORIES, self._peak_by, strict=True)), PHASES[self._peak_phase]
        )

    @property
    def peak_by_phase(self) -> dict[str, int]:
        """The most live bytes that each phase saw; 0 for a phase that did not occur."""
        return dict(zip(PHASES, self._phase_peaks, strict=True))

    @property
    def timeline(self) -> Timeline:
        """Live bytes over the operations so far."""
        with self._lock:
            rows = np.array(self._rows, dtype=np.int64)
            if self._window is not None:
                rows = np.concatenate([rows, np.array(self._window, dtype=np.int64)])
        return Timeline(rows.reshape(-1, 3 + len(CATEGORIES)))

    def largest(self, n: int = 5) -> list[Holder]:
        """The ``n`` largest storages alive now (after the block: when it ended), largest first."""
        return _largest(self._holders("current"), n)

    def largest_at_peak(self, n: int = 5) -> list[Holder]:
        """The ``n`` largest storages that were alive at the peak, largest first."""
        return _largest(self._holders("peak"), n)

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
    def cuda(self) -> dict[str, int] | None:
        """The CUDA allocator's own figures in bytes (allocated, reserved and their peaks in this block), or ``None``."""
        if self.device.type != "cuda":
            return None
        return self._final.get("cuda") or {
            "allocated": torch.cuda.memory_allocated(self.device),
            "reserved": torch.cuda.memory_reserved(self.device),
            "max_allocated": torch.cuda.max_memory_allocated(self.device),
            "max_reserved": torch.cuda.max_memory_reserved(self.device),
        }

    def plot(self, ax=None):
        """The timeline as a matplotlib ``Figure``, for print."""
        return pictures().plot_timeline(self.timeline, title=self.title, budget=self.budget, ax=ax)

    def show(self) -> None:
        """Display the timeline as the interactive view (hover, arrow keys), after the fact."""
        pictures().show_timeline(self.timeline, title=self.title, budget=self.budget, peak=self.peak)

    def __repr__(self) -> str:
        return f"MemoryTracker(peak {self.peak})"

    def _repr_html_(self) -> str:
        now, peak = self.current, self.peak
        rows = "".join(
            f"<tr><td style='text-align:left'>{name}</td><td>{peak.by_category[name]:,}</td>"
            f"<td>{now.by_category[name]:,}</td></tr>"
            for name in CATEGORIES
        )
        cuda = "".join(f"<br>CUDA {key}: {n:,} bytes" for key, n in (self.cuda or {}).items())
        return (
            "<table><thead><tr><th style='text-align:left'>bytes</th>"
            f"<th>at the peak ({peak.phase})</th><th>{'at the end' if self._state == 'done' else 'now'}</th></tr></thead>"
            f"<tbody>{rows}<tr><th style='text-align:left'>total</th><th>{peak.total:,}</th><th>{now.total:,}</th></tr>"
            f"</tbody></table>{cuda}"
        )

    # What a learner says -------------------------------------------------------------------------------------------

    def reset_peak(self) -> None:
        """Start the search for the peak anew from the bytes that are live now."""
        with self._lock:
            self._drain()
            self._phase_peaks = [0] * len(PHASES)
            self._earlier = None
            self._take_peak()

    def lap(self) -> MemorySnapshot:
        """The peak since the last lap, or since the beginning. Unlike ``reset_peak`` it leaves ``peak`` what it was."""
        with self._lock:
            self._drain()
            found = self._lap_peak()
            if self._earlier is None or found.total > self._earlier[0].total:
                self._earlier = (found, self._holders("peak"))
            self._take_peak()
        return found

    def watch(self, tensors: torch.Tensor | Iterable[torch.Tensor], category: str) -> None:
        """Count ``tensors`` under ``category``: for states and buffers that no module or optimizer owns."""
        if category not in CATEGORIES:
            raise ValueError(f"unknown category {category!r}: choose one of {', '.join(CATEGORIES)}")
        with self._lock:
            for tensor in [tensors] if isinstance(tensors, torch.Tensor) else tensors:
                self._tag(tensor, CATEGORIES.index(category), "watched")
            self._sample()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name the phase of a hand-written part: ``with tracker.phase("optimizer_step"): ...``."""
        if name not in PHASES:
            raise ValueError(f"unknown phase {name!r}: choose one of {', '.join(PHASES)}")
        before, self._host_phase = self._host_phase, PHASES.index(name)
        try:
            yield
        finally:
            self._host_phase = IDLE if name == "optimizer_step" else before

    # The block -----------------------------------------------------------------------------------------------------

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
        self._refuse_compiled()
        with self._undo as undo:
            MemoryTracker._running = self
            undo.callback(setattr, MemoryTracker, "_running", None)
            if self.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self.device)
            self._sync_model()
            for optimizer in self.optimizers:
                self._tag_states(optimizer)
            self._sample()
            if self.budget is not None and self._total > self.budget:
                raise self._over_budget(self._total, "what exists before the first step")
            self._start_live()
            for handle in (
                register_module_forward_pre_hook(self._before_forward),
                # always_call: checkpointing leaves a recomputed forward early, by an exception
                register_module_forward_hook(self._after_forward, always_call=True),
                register_optimizer_step_pre_hook(self._before_step),
                register_optimizer_step_post_hook(self._after_step),
            ):
                undo.callback(handle.remove)
            if self.model is not None:
                undo.callback(
                    self.model.register_forward_pre_hook(self._count_inputs, with_kwargs=True).remove
                )
            undo.enter_context(self._watch())
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
        with self._lock:
            self._drain()
            self._sample()
            self._final = {
                "current": self._snapshot(),
                "holders": {at: self._holders(at) for at in ("current", "peak")},
                "cuda": self.cuda,
            }
            self._state = "done"
            self._storages, self._dead_at_peak, self._stack = {}, [], []
            # A tracker that is kept for its figures must not keep the model.
            self.model, self.optimizers, self._step_optimizer = None, [], None
        if self._plot is not None:
            self._draw(lambda plot: plot.finish(self.timeline, self.peak))

    # Counting ------------------------------------------------------------------------------------------------------

    def _watch(self) -> TorchDispatchMode:
        return Watch(self._observe)

    def _observe(self, func, args, out) -> None:
        """Called after every operation: take off what is gone, add what is new, and see where that leaves us."""
        with self._lock:
            self._op += 1
            before = self._total
            self._drain()
            in_backward = _graph_task() != -1
            self._phase = phase = BACKWARD if in_backward and not self._stepping else self._host_phase
            if in_backward and self._host_phase == FORWARD:
                self._host_phase = IDLE  # what follows the backward pass is no longer its forward pass
            if isinstance(out, torch.Tensor):
                asked = self._add(out, func, args, phase)
            elif isinstance(out, (tuple, list)):
                asked = sum([self._add(t, func, args, phase) for t in tensors_in(out)])
            else:
                asked = 0
            if self._stepping and asked:
                self._tag_new_states()
            if asked or self._total != before:
                self._sample()
                if asked and self.budget is not None and self._total > self.budget:
                    raise self._over_budget(asked, str(func).removesuffix(".default"))

    def _add(self, tensor: torch.Tensor, func, args, phase: int) -> int:
        """Count the storage of ``tensor`` if it is new; the bytes that it adds."""
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # sparse tensors have no storage of their own
            return sum(self._add(part, func, args, phase) for part in _parts(tensor))
        key, nbytes = storage._cdata, storage.nbytes()
        entry = self._storages.get(key)
        if entry is not None:
            return 0 if entry.nbytes == nbytes else self._resize(entry, nbytes)
        if nbytes == 0 or not self._is_here(storage):
            return 0
        if self._aliases(func):
            category = OTHER  # made before the block, or by code that does not dispatch
        elif phase == FORWARD:
            category = ACTIVATIONS if self._root_has_grad else TEMPORARIES
        elif phase == BACKWARD:
            # Autograd computes gradients with grad mode off; on means that a forward is being recomputed.
            category = ACTIVATIONS if torch.is_grad_enabled() else TEMPORARIES
        elif phase == OPTIMIZER_STEP:
            category = TEMPORARIES
        elif torch.is_grad_enabled() and any(isinstance(a, torch.Tensor) and a.requires_grad for a in args):
            category, self._phase = ACTIVATIONS, FORWARD  # a forward pass written without modules
        else:
            category = OTHER
        if phase == BACKWARD and category == TEMPORARIES:
            owner = "(backward)"
        else:
            owner = self._stack[-1] if self._stack else ""
        self._enter(storage, category, owner, func)
        return nbytes

    def _enter(self, storage, category: int, owner, op) -> None:
        entry = _Storage(storage, self._freed.append)
        entry.key, entry.nbytes, entry.category = storage._cdata, storage.nbytes(), category
        entry.module, entry.op, entry.birth = owner, op, self._serial
        self._serial += 1
        self._storages[entry.key] = entry
        self._total += entry.nbytes
        self._by[category] += entry.nbytes

    def _resize(self, entry: _Storage, nbytes: int) -> int:
        grown = nbytes - entry.nbytes
        entry.nbytes = nbytes
        self._total += grown
        self._by[entry.category] += grown
        return max(grown, 0)

    def _drain(self) -> None:
        """Take off the storages that were freed since the last look."""
        while self._freed:
            entry = self._freed.popleft()
            if self._storages.get(entry.key) is not entry:
                continue
            del self._storages[entry.key]
            self._total -= entry.nbytes
            self._by[entry.category] -= entry.nbytes
            if entry.birth < self._peak_serial:
                self._dead_at_peak.append(entry)

    def _tag(self, tensor: torch.Tensor, category: int, owner: str) -> None:
        """Put the storage of ``tensor`` under ``category``, counting it if it was not known."""
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            for part in _parts(tensor):
                self._tag(part, category, owner)
            return
        self._drain()  # its address may have been another storage's a moment ago
        entry = self._storages.get(storage._cdata)
        if entry is None:
            if storage.nbytes() and self._is_here(storage):
                self._enter(storage, category, owner, "")
            return
        if entry.category != category:
            self._by[entry.category] -= entry.nbytes
            self._by[category] += entry.nbytes
            if entry.birth < self._peak_serial:  # it was this all along, also at the peak
                self._peak_by[entry.category] -= entry.nbytes
                self._peak_by[category] += entry.nbytes
            entry.category = category
        entry.module = owner

    def _sample(self) -> None:
        """Note where the bytes stand: peak, timeline, picture."""
        if self._total > self._peak_total:
            self._take_peak()
        if self._total > self._phase_peaks[self._phase]:
            self._phase_peaks[self._phase] = self._total
        window = self._window
        if window is None or self._total >= window[2]:
            self._window = (self._op, self._phase, self._total, *self._by)
        self._in_window += 1
        if self._in_window >= self._stride:
            self._rows.extend(self._window)
            self._window, self._in_window = None, 0
            if len(self._rows) >= TIMELINE_SAMPLES * (3 + len(CATEGORIES)):
                self._thin_out()
        if self._plot is not None and time.perf_counter() - self._last_frame >= LIVE_FRAME_SECONDS:
            self._draw_frame()

    def _thin_out(self) -> None:
        rows = np.array(self._rows, dtype=np.int64).reshape(-1, 3 + len(CATEGORIES))
        self._rows = array("q", Timeline(rows).decimate(len(rows) // 2).rows.tobytes())
        self._stride *= 2

    def _snapshot(self) -> MemorySnapshot:
        phase = self._phase
        if phase == BACKWARD and _graph_task() == -1 and not self._stepping:
            phase = self._host_phase  # the backward pass is over, and nothing has run since
        return MemorySnapshot(self._total, dict(zip(CATEGORIES, self._by, strict=True)), PHASES[phase])

    def _take_peak(self) -> None:
        self._peak_total, self._peak_by = self._total, list(self._by)
        self._peak_phase, self._peak_serial = self._phase, self._serial
        self._dead_at_peak = []

    def _is_here(self, storage) -> bool:
        device = storage.device
        return device.type == self.device.type and (self.device.index in (None, device.index))

    def _aliases(self, func) -> bool:
        """Whether ``func`` returns (a view of) one of its arguments rather than new memory."""
        known = self._makes_alias.get(func)
        if known is None:
            known = any(r.alias_info is not None for r in func._schema.returns)
            self._makes_alias[func] = known
        return known

    # Who owns what -------------------------------------------------------------------------------------------------

    def _sync_model(self) -> None:
        """Put parameters, gradients and buffers where they belong: they may have been replaced since the last look."""
        if self.model is None:
            return
        before = self._total
        for name, parameter in self.model.named_parameters():
            if parameter.device.type != self.device.type:
                raise RuntimeError(
                    f"the model moved while it was tracked: the tracker counts {self.device}, and {name} is on "
                    f"{parameter.device}. Move the model first, then start a new MemoryTracker"
                )
            self._names[id(parameter)] = name
            self._tag(parameter, PARAMETERS, name)
            if parameter.grad is not None:
                self._tag(parameter.grad, GRADIENTS, name)
            if parameter.requires_grad and parameter.is_leaf and parameter not in self._hooked:
                self._hooked[parameter] = True
                self._undo.callback(parameter.register_post_accumulate_grad_hook(self._after_gradient).remove)
        for name, buffer in self.model.named_buffers():
            self._tag(buffer, OTHER, name)
        if self._total != before:
            self._sample()

    def _after_gradient(self, parameter: nn.Parameter) -> None:
        with self._lock:
            if parameter.grad is not None:  # another hook may have used it up already
                self._tag(parameter.grad, GRADIENTS, self._names.get(id(parameter), "parameter"))

    def _tag_states(self, optimizer: Optimizer, start: int = 0, stop: int | None = None) -> None:
        for parameter, state in islice(optimizer.state.items(), start, stop):
            for value in state.values() if isinstance(state, dict) else ():
                if isinstance(value, torch.Tensor):
                    self._tag(value, OPTIMIZER, self._names.get(id(parameter), "parameter"))

    def _tag_new_states(self) -> None:
        """In a first step: name states as they appear. The newest parameter's may still be incomplete."""
        optimizer = self._step_optimizer
        seen, there = self._states_seen.get(id(optimizer), 0), len(optimizer.state)
        if there - 1 > seen:
            self._tag_states(optimizer, seen, there - 1)
            self._states_seen[id(optimizer)] = there - 1

    def _before_step(self, optimizer: Optimizer, args, kwargs) -> None:
        with self._lock:
            self._stepping.append(self._host_phase)
            self._host_phase = OPTIMIZER_STEP
            self._step_optimizer = optimizer
            self._states_seen.setdefault(id(optimizer), 0)
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    name = self._names.get(id(parameter), "parameter")
                    self._tag(parameter, PARAMETERS, name)
                    if parameter.grad is not None:
                        self._tag(parameter.grad, GRADIENTS, name)
            self._tag_states(optimizer)
            self._sample()

    def _after_step(self, optimizer: Optimizer, args, kwargs) -> None:
        with self._lock:
            self._tag_states(optimizer)
            self._states_seen[id(optimizer)] = len(optimizer.state)
            # Optimizers may step inside the backward pass, from a hook: go back to what was before.
            before = self._stepping.pop() if self._stepping else IDLE
            self._host_phase = before if before == FORWARD else IDLE

    def _before_forward(self, module: nn.Module, args) -> None:
        if _graph_task() == -1 and not self._stack:
            with self._lock:
                if _is_compiled(module):
                    raise _compiled_error(type(module).__name__)
                self._stepping.clear()  # a step that raised never came to its end
                self._host_phase = FORWARD
                self._root_has_grad = torch.is_grad_enabled()
                self._sync_model()
                for tensor in tensors_in(args):
                    self._tag_input(tensor)
        self._stack.append(module)

    def _after_forward(self, module: nn.Module, args, output) -> None:
        while self._stack and self._stack.pop() is not module:
            pass  # an exception skipped the hooks of these
        if not self._stack and not self._root_has_grad and _graph_task() == -1:
            self._host_phase = IDLE

    def _count_inputs(self, module, args, kwargs) -> None:
        with self._lock:
            for tensor in tensors_in(list(kwargs.values())):
                self._tag_input(tensor)

    def _tag_input(self, tensor: torch.Tensor) -> None:
        """Count a batch that was made before the block; leave what is known as it is."""
        if tensor.layout == torch.strided and tensor.untyped_storage()._cdata not in self._storages:
            self._tag(tensor, OTHER, "inputs")
            self._sample()

    def _holders(self, at: str) -> list[Holder]:
        if self._state == "done":
            return self._final["holders"][at]
        with self._lock:
            self._drain()
            if at == "peak" and self._earlier is not None and self._earlier[0].total >= self._peak_total:
                return self._earlier[1]
            entries = list(self._storages.values())
            if at == "peak":
                entries = [e for e in entries if e.birth < self._peak_serial] + self._dead_at_peak
            modules = (
                {id(m): name for name, m in self.model.named_modules()} if self.model is not None else {}
            )
        return [
            Holder(
                entry.nbytes,
                CATEGORIES[entry.category],
                _owner(entry.module, modules),
                str(entry.op).removesuffix(".default"),
            )
            for entry in entries
        ]

    def _over_budget(self, asked: int, op: str) -> BudgetExceeded:
        snapshot = self._snapshot()
        main = max(CATEGORIES, key=lambda name: snapshot.by_category[name])
        modules = {id(m): name for name, m in self.model.named_modules()} if self.model is not None else {}
        where = f" in {_owner(self._stack[-1], modules)}" if self._stack else ""
        holders = self._holders("current")
        sums: dict[tuple[str, str], int] = {}
        for h in holders:
            key = (h.category, ".".join(h.module.split(".")[:3]))
            sums[key] = sums.get(key, 0) + h.nbytes
        largest = sorted(sums.items(), key=lambda item: -item[1])[:5]
        lines = [
            f"out of budget by {snapshot.total - self.budget:,} bytes: "
            f"{snapshot.total:,} live ({format_bytes(snapshot.total)}), "
            f"{self.budget:,} allowed ({format_bytes(self.budget)})",
            f"  asked for {asked:,} bytes: {op}{where}, in {snapshot.phase}",
            "  live by category:",
            *(f"    {n:>16,} bytes  {name}" for name, n in snapshot.by_category.items() if n),
            "  largest holders:",
            *(f"    {n:>16,} bytes  {category:<12} {module}".rstrip() for (category, module), n in largest),
            f"  Most of it is {REMEDIES[main]}.",
        ]
        return BudgetExceeded(
            "\n".join(lines), budget=self.budget, asked=asked, snapshot=snapshot, holders=_largest(holders, 5)
        )

    def _refuse_compiled(self) -> None:
        for name, module in self.model.named_modules() if self.model is not None else ():
            if _is_compiled(module):
                raise _compiled_error(name or type(module).__name__)

    # The picture ---------------------------------------------------------------------------------------------------

    def _start_live(self) -> None:
        if self._live_wanted is False:
            return
        if in_kernel():
            self._plot = pictures().LivePlot(title=self.title, budget=self.budget)
            self._draw(lambda plot: plot.start())

    def _draw_frame(self) -> None:
        if threading.get_ident() != self._thread:
            return  # autograd's own threads must not talk to the front end
        current = self._snapshot()
        self._draw(lambda plot: plot.push(self.timeline, self.peak, current, current.phase))
        self._last_frame = time.perf_counter()

    def _draw(self, action) -> None:
        """A picture that fails must not stop a training run."""
        try:
            action(self._plot)
        except Exception as error:
            self._plot = None
            warnings.warn(f"the live memory plot stopped ({error!r}); the figures go on", stacklevel=2)


def tensors_in(values) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from tensors_in(value)
        elif isinstance(value, dict):
            yield from tensors_in(value.values())


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The dense tensors inside a sparse one; nothing for tensors that hide their memory."""
    if tensor.layout == torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())


def _largest(holders: list[Holder], n: int) -> list[Holder]:
    return sorted(holders, key=lambda h: (-h.nbytes, h.category, h.module))[:n]


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


def _checked_optimizers(optimizer) -> list[Optimizer]:
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


def _is_compiled(module: nn.Module) -> bool:
    return (
        type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None
    )


def _compiled_error(name: str) -> RuntimeError:
    return RuntimeError(
        f"{name} is compiled with torch.compile, and under a tracker it would run uncompiled, now and afterwards. Track the "
        "original module (before torch.compile, or compiled._orig_mod); compiled code has its own memory plan"
    )
