"""Live memory of a training step, to the byte, on any device.

``MemoryTracker`` watches every operation that PyTorch dispatches (``watch.py``), counts each
*storage* once, and records the live bytes over time (``recording.py``).

It cannot see scratch memory that a kernel allocates and frees inside one operation, the
random-number states that checkpointing and ``torch.get_rng_state`` make (5,056 bytes each on the
CPU), the sizes inside a strided nested tensor, operations of other threads than the block's (a
module's forward there is refused), and what an allocator rounds up or holds in reserve. Two
storages that share memory (as ``tensor.numpy()`` and DLPack make them) both count. Tensors from
before the block that no operation reads do not count: ``tracker.watch`` takes them.

While any dispatch mode is active, autograd adds up the gradients of a tensor that is used twice out
of place, and the backward of ``gather``, ``x[mask]`` and other indexing does not fill its zeros in
place. The tracker reports the bytes of the program without it, where the sum is written into the
first gradient, and the values into the zeros. Other differences stay, where PyTorch computes a
backward by other operations while a mode is active:

- Autograd copies a sparse gradient. Its indices, 8 bytes an id, are then not the batch's.
- The backward of a matrix exponential joins its blocks in a new tensor.
- The backward of ``prod``, ``cumprod``, ``householder_product``, of ``max``, ``min`` and ``median``
  over a whole tensor, of ``clamp`` between two tensors, and of a binary cross-entropy with
  ``pos_weight`` makes other temporaries. That of ``prod`` also rounds otherwise, so that its
  gradients may differ from those without a tracker in the last bits.
- Forward-mode derivatives (``torch.func.jvp``) make other temporaries.

A Python number that autograd keeps for backward (``x * 0.5``) has 8 bytes on the CPU that no
operation shows, and so does a number that an optimizer's step gives to an operation. Memory that
numpy or a mapped file brings counts as the tensors in it, though PyTorch's allocator did not give
it out. On a CUDA card, ``tracker.allocator`` has the allocator's own figures.
"""

from __future__ import annotations

import math
import sys
import threading
import time
import warnings
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from ..compat.autograd import next_sequence_nr
from ..display import has_viewer, pictures
from ..names import (
    BETWEEN_STEPS,
    CATEGORIES,
    EVALUATION,
    MOMENTS,
    PHASE_OF_MOMENT,
    PHASES,
    check_choice,
)
from ..units import parse_bytes
from .budget import BudgetExceeded, release_traceback
from .cause import MUCH, SEVERAL
from .causes_of_growth import growing_holders
from .facts import Facts
from .holders import Holders
from .meter import Meter, name_of
from .paths import Held
from .recording import Entry, Peak, Recording
from .snapshot import write_snapshot
from .source_lines import source_line
from .storages import tensors_to_watch
from .timeline import Block, ForwardPass, Holder, MemorySnapshot, Timeline
from .walks import likely_holders

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TIMELINE_SAMPLES = 16_384
MOST_BLOCKS = 2000  # storages that a picture shows by themselves
LIVE_FRAME_SECONDS = 0.1  # between the frames of a live plot, at least
FRAMES_SHARE = 0.2  # of the time, at most: what frames cost depends on the model and the machine


class MemoryTracker:
    """Count the live bytes of everything that runs inside ``with MemoryTracker(model, optimizer) as
    tracker:``.

    Args:
        model: the ``nn.Module`` in training. Its parameters, gradients and buffers are counted from
            the start, and every storage is attributed to the submodule that made it. Without a
            model, only storages that the block itself creates are counted.
        optimizer: a ``torch.optim.Optimizer`` or a list of them: their existing states are counted
            from the start. Optimizers that step inside the block are found even if they are not
            given.
        budget: bytes (an int, or text such as ``"2 GiB"``). The first allocation that exceeds the
            budget raises ``BudgetExceeded``, which turns any machine into a card of that size.
        live: ``False`` draws nothing. Otherwise a notebook shows a live plot while the block runs,
            and a still picture at the end. With ``GRADMEM_LIVE=0`` it shows only the still picture.
        title: a heading for the plots.
        device: the device to count. ``None``: the model's, or torch's default device.

    One tracker measures one ``with`` block, and trackers do not nest. All figures are bytes.
    """

    _running: MemoryTracker | None = None
    # what counts, and what watches; `gradmem run` has its own
    recording_class, meter_class = Recording, Meter
    measures_a_script = False

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
        if not (model is None or isinstance(model, nn.Module)):
            raise TypeError(
                "MemoryTracker(model=...) takes a torch.nn.Module, and was given "
                f"{type(model).__name__}. To count a step without a module, leave it out; to count "
                "loose tensors, use tracker.watch(tensors, category)"
            )
        self.budget = None if budget is None else parse_bytes(budget)
        self.title, self.device = title, _device_of(model, device)
        self._recording = self.recording_class(self.device, TIMELINE_SAMPLES)
        draws = live is not False and has_viewer()
        self._plot: Any = pictures().LivePlot(title=title, budget=self.budget) if draws else None
        self._next_frame = 0.0  # not before this time
        # no callback where there is nothing to do: it would run after every operation
        callback = self._after_sample if draws or self.budget is not None else None
        self._meter = self.meter_class(
            model, checked_optimizers(optimizer), self._recording, after_sample=callback
        )
        self._state, self._thread = "new", threading.get_ident()
        self._allocator: dict[str, int] | None = None  # set when the block ends
        self._undo = ExitStack()
        # Whether an error ended the block: what would have come after it is not known then.
        self._interrupted = False

    @property
    def current(self) -> MemorySnapshot:
        """Live bytes now. After the block: live bytes at its end."""
        with self._meter.lock:
            if self._state == "running":
                self._meter.sync()
            return self._recording.at()

    @property
    def peak(self) -> MemorySnapshot:
        """The moment with the most live bytes."""
        with self._meter.lock:
            return self._recording.at(self._recording.run_peak)

    @property
    def peak_by_phase(self) -> dict[str, int]:
        """The highest number of live bytes in each phase; 0 for a phase that did not occur."""
        peaks = dict.fromkeys(PHASES, 0)
        for moment, total in self._recording.moment_peaks.items():
            phase = PHASES[PHASE_OF_MOMENT[moment]]
            peaks[phase] = max(peaks[phase], total)
        return peaks

    @property
    def timeline(self) -> Timeline:
        """Live bytes after each operation so far; after the block also its largest storages."""
        with self._meter.lock:
            recording, growing = self._recording, self._growing()
            batches = recording.batches if len(recording.batches) > 1 else ()
            blocks = self._blocks(growing) if self._state == "done" else ()
            grown = recording.bytes_of(growing) if growing else None
            return Timeline(recording.rows(), grown, tuple(batches), blocks)

    def _growing(self) -> Sequence[Holder]:
        """The storages that grow from step to step."""
        peak = self._recording.run_peak
        in_a_step = peak.moment not in (BETWEEN_STEPS, EVALUATION)
        if in_a_step and max(peak.step, peak.turn) < SEVERAL:
            return ()  # found without the facts, which a live plot should not wait for
        return growing_holders(self._facts(peak))

    def _blocks(self, growing: Sequence[Holder]) -> list[Block]:
        """The largest storages as blocks, in the order in which they were made."""
        recording = self._recording
        rows = recording.sample_numbers()
        entries = recording.largest(MOST_BLOCKS)
        known = [*recording.past, *recording.live.values()]
        grown = {(holder.samples, holder.nbytes, holder.line) for holder in growing}
        blocks = []
        for holder in self._holders(entries, likely_holders(known)):
            start, stop = np.searchsorted(rows, holder.samples).tolist()
            if start < stop:
                grows = (holder.samples, holder.nbytes, holder.line) in grown
                blocks.append(Block(holder, start, stop, grows))
        return sorted(blocks, key=lambda block: (block.start, -block.stop))

    def largest_at_peak(self, n: int = 5) -> Holders:
        """The ``n`` largest storages that were alive at the peak, largest first: a list of
        ``Holder`` that shows itself as a table.
        """
        return Holders(self.holders()[:n])

    def holders(self, at: str = "peak") -> Holders:
        """All storages that were alive at the peak, or with ``at="now"`` those that are alive now
        (after the block: at its end), largest first.
        """
        check_choice("at", at, ("peak", "now"))
        with self._meter.lock:
            peak = self._recording.run_peak if at == "peak" else None
            return Holders(self._holders(self._recording.entries(peak)))

    @property
    def steps(self) -> int:
        """How many optimizer steps are finished.

        Several optimizers that step after one backward make one step.
        """
        return self._recording.step + self._meter.position.has_stepped

    @property
    def forwards(self) -> list[ForwardPass]:
        """The calls of outermost modules, in order; of a long run the latest ones."""
        with self._meter.lock:
            if self._state != "done":
                self._meter.mark_passes()
            found = [replace(done) for done in self._meter.position.passes]
            for done in found:
                done.line = source_line(done.line)
                done.last = done.last or next_sequence_nr()
                done.end_sample = done.end_sample or self._recording.count
            return found

    @property
    def facts(self) -> Facts:
        """What ``diagnose`` has to know of the peak."""
        with self._meter.lock:
            recording = self._recording
            recording.drain()
            at_peak = recording.entries(recording.run_peak)
            live = recording.live
            still = sum(entry.nbytes for entry in at_peak if live.get(entry.key) is entry)
            if still > MUCH * recording.run_peak.total:
                ended_by = None
                if self._interrupted:  # the functions that the error has ended are told as running
                    ended_by = sys.exc_info()[1]
                self._meter.walks.walk(sys._getframe(1), ended_by)
            return self._facts(recording.run_peak)

    @property
    def allocator(self) -> dict[str, int] | None:
        """The CUDA allocator's own figures in bytes (allocated, reserved and their peaks in this
        block), or ``None``.
        """
        if self.device.type != "cuda" or self._state == "done":
            return self._allocator
        names = (
            "memory_allocated",
            "memory_reserved",
            "max_memory_allocated",
            "max_memory_reserved",
        )
        return {
            name.replace("memory_", ""): getattr(torch.cuda, name)(self.device) for name in names
        }

    def plot(self, beside: MemoryTracker | None = None) -> Figure:
        """The timeline as a matplotlib ``Figure``, for a document.

        ``beside``: another tracker, whose run is drawn as an outline over this one.
        """
        return pictures().plot_timeline(
            self.timeline, title=self.title, budget=self.budget, beside=_outline(beside)
        )

    def show(self, beside: MemoryTracker | None = None) -> None:
        """Display the timeline as a view to explore (pointer, keys), after the block; ``beside`` as
        in ``plot``.
        """
        pictures().show_timeline(
            self.timeline, title=self.title, budget=self.budget, beside=_outline(beside)
        )

    def snapshot(self, file: str | Path) -> None:
        """Write the allocations and frees to ``file`` for PyTorch's own viewer,
        https://pytorch.org/memory_viz.
        """
        with self._meter.lock:
            self._recording.drain()
            write_snapshot(Path(file), self._recording, self._meter.module_names())

    def __repr__(self) -> str:
        card = "".join(f", CUDA {name} {n:,} bytes" for name, n in (self.allocator or {}).items())
        return f"MemoryTracker(peak {self.peak}{card})"

    def reset_peak(self) -> None:
        """Forget the peak, and search for a new one from the bytes that are live now.

        The timeline continues.
        """
        with self._meter.lock:
            self._recording.restart()
            forward = self._meter.position.open
            if forward is not None:
                forward.peak = self._recording.total

    def window_peak(self) -> MemorySnapshot:
        """The peak since the last call, or since the beginning.

        Unlike ``reset_peak``, it does not change ``peak``.
        """
        with self._meter.lock:
            return self._recording.next_window()

    def watch(self, tensors: Any, category: str) -> None:
        """Count ``tensors`` under ``category``.

        Use it for states and buffers that no module or optimizer owns. ``tensors``: a tensor, a
        module (its parameters and buffers), or a collection of them, however deep. Of a mapping,
        its values count; numbers and text among them are passed over. Raises ``TypeError`` for
        anything else, and for a collection without a tensor.
        """
        check_choice("category", category, CATEGORIES)
        found = tensors_to_watch(tensors)
        with self._meter.lock:
            self._recording.tag(found, CATEGORIES.index(category), "watched")
            self._meter.sample()

    @classmethod
    def of_script(cls) -> MemoryTracker | None:
        """The tracker of ``gradmem run``, while it measures this script."""
        running = cls._running
        if running is None or not running.measures_a_script:
            return None
        return running

    def __enter__(self) -> MemoryTracker:
        if self._state != "new":
            raise RuntimeError(
                "this MemoryTracker has measured its block: make a new one for the next"
            )
        if MemoryTracker._running is not None:
            MemoryTracker._running.on_another()
        with self._undo as undo:
            MemoryTracker._running = self
            undo.callback(setattr, MemoryTracker, "_running", None)
            if self.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self.device)
            undo.enter_context(self._meter)
            self._draw("start")
            self._undo = undo.pop_all()
        self._state = "running"
        return self

    def __exit__(self, exc_type, exc, tb) -> None:
        self._interrupted = exc is not None
        try:
            self._undo.close()
            if self._interrupted:
                self._meter.find_waiting_optimizers()
            if isinstance(exc, torch.OutOfMemoryError):
                # A notebook keeps the last exception. Its traceback keeps the local variables of
                # every frame, and so the tensors that did not fit.
                release_traceback(exc)
        finally:
            with self._meter.lock:
                self._recording.drain()
                self._recording.sample()
                self._allocator, self._state = self.allocator, "done"
                # whoever keeps the tracker for its figures must not keep the model alive
                self._meter.close()
            if self._plot is not None:
                self._draw("finish", self.timeline)

    def on_another(self) -> None:
        """Another tracker is entered while this one is running."""
        raise RuntimeError(
            "a MemoryTracker is running already, and two would count the same bytes: end the outer "
            "`with` block first, or read the outer tracker inside it (.current, .reset_peak(), "
            ".peak)"
        )

    def _holders(
        self, entries: Iterable[Entry], likely: dict[int, Held] | None = None
    ) -> list[Holder]:
        """``likely``: who holds what no walk has met, or met too early, by the entry's address."""
        named = self._meter.module_names()
        holders = []
        for entry in entries:
            holders.append(
                Holder(
                    nbytes=entry.nbytes,
                    samples=self._recording.lifetime(entry),
                    category=CATEGORIES[entry.category],
                    module=name_of(entry.module, named),
                    op=str(entry.op).removesuffix(".default"),
                    dtype=entry.dtype,
                    shape=tuple(entry.shape),
                    step=entry.step,
                    line=source_line(entry.line),
                    turn=entry.turn,
                    expanded=entry.expanded,
                    made_in=MOMENTS[entry.moment],
                    is_result=entry.is_result,
                    computed_from=entry.computed_from,
                    updated=entry.updated,
                    continues=entry.continues,
                    in_parts=entry.parts_until > entry.step,
                    held=(likely or {}).get(id(entry)) or entry.held,
                )
            )
        return sorted(holders, key=lambda h: (-h.nbytes, h.category, h.module))

    def _facts(self, peak: Peak | None = None) -> Facts:
        """What ``diagnose`` has to know of ``peak``, or of now."""
        recording, meter = self._recording, self._meter
        entries = recording.entries(peak)
        known = [*recording.past, *recording.live.values()]
        likely = likely_holders({id(entry): entry for entry in (*known, *entries)}.values())
        alive_then = {id(entry) for entry in entries}
        others = [entry for entry in known if id(entry) not in alive_then]
        samples = recording.sample_numbers()
        # Totals from before a reset_peak() say nothing about this peak.
        since_reset = samples >= recording.restarted_at
        return Facts(
            recording.at(peak),
            rows=recording.rows()[since_reset],
            samples=samples[since_reset],
            first_sample=recording.restarted_at,
            batch_rows=max((rows for _, rows in recording.batches), default=0),
            holders=self._holders(entries, likely),
            find_others=lambda: self._holders(others, likely),  # a live plot does without them
            forwards=self.forwards,
            steps=self.steps,
            turns=recording.turn + 1,
            moments=frozenset(MOMENTS[moment] for moment in recording.moments_seen),
            ended=self._state == "done" and not self._interrupted,
            optimized=meter.optimized(),
            structure=meter.structure(),
            recomputed=meter.recomputed,
            untrained=meter.untrained(),
            in_ddp=meter.has_ddp,
        )

    def _after_sample(self, allocated: int, func: object) -> None:
        recording, meter = self._recording, self._meter
        if allocated and self.budget is not None and recording.total > self.budget:
            meter.walks.walk(sys._getframe(1), everywhere=meter.measures_a_script)
            meter.find_waiting_optimizers()  # they tell which models are in training
            meter.sync()
            meter.tag_states_being_made()
            where = f" in {name_of(meter.owner(), meter.module_names())}" if meter.stack else ""
            what = str(func).removesuffix(".default") + where
            facts = replace(self._facts(), excess=recording.total - self.budget)
            holders = self._holders(recording.entries())
            raise BudgetExceeded(self.budget, allocated, what, facts.peak, holders, facts)
        # Autograd's own threads must not talk to the front end.
        in_own_thread = threading.get_ident() == self._thread
        if self._plot is not None and self._state == "running" and in_own_thread:
            self._draw_frame()

    def _draw_frame(self) -> None:
        """Draw a frame of the live plot, if it is time for one.

        A pause follows, so long that frames take ``FRAMES_SHARE`` of the time at most.
        """
        begun = time.perf_counter()
        if begun <= self._next_frame:
            return
        self._draw("push", self.timeline, self.current)
        ended = time.perf_counter()
        pause = (ended - begun) * (1 - FRAMES_SHARE) / FRAMES_SHARE
        self._next_frame = max(self._next_frame, ended + max(pause, LIVE_FRAME_SECONDS))

    def _draw(self, action: str, *args) -> None:
        """Draw. An error in a picture must not stop a training run."""
        try:
            if self._plot is not None:
                getattr(self._plot, action)(*args)
        except Exception as error:
            self._next_frame = math.inf  # the finished picture may still come
            warnings.warn(
                f"the live memory plot stopped ({error!r}); the figures go on", stacklevel=2
            )


def _outline(tracker: MemoryTracker | None) -> tuple[str, Timeline] | None:
    """The title and the timeline of a run that is drawn beside another one."""
    if tracker is None:
        return None
    if not isinstance(tracker, MemoryTracker):
        raise TypeError(
            f"beside= takes another MemoryTracker, and was given {type(tracker).__name__}"
        )
    timeline = tracker.timeline
    if not len(timeline):
        raise ValueError("beside= takes a tracker that has measured: run its block first")
    return tracker.title or "the other run", timeline


def checked_optimizers(optimizer) -> list[Optimizer]:
    several = optimizer
    if optimizer is None:
        several = []
    elif isinstance(optimizer, Optimizer):
        several = [optimizer]
    if not isinstance(several, (list, tuple)) or not all(isinstance(o, Optimizer) for o in several):
        raise TypeError(
            "MemoryTracker(optimizer=...) takes a torch.optim.Optimizer or a list of them, and "
            f"was given {type(optimizer).__name__}. For states kept by hand, use "
            "tracker.watch(tensors, 'optimizer')"
        )
    inner = [getattr(o, "optim", None) for o in several]  # inside ZeRO's: steps this rank's part
    return [*several, *(o for o in inner if isinstance(o, Optimizer))]


def _device_of(model: nn.Module | None, device) -> torch.device:
    if device is not None:
        return torch.device(device)
    devices = {p.device for p in model.parameters()} if model is not None else set()
    if len(devices) > 1:
        raise ValueError(
            f"the model lies on several devices ({', '.join(sorted(map(str, devices)))}): say "
            "which one to count, for example MemoryTracker(model, device='cuda:0')"
        )
    return devices.pop() if devices else torch.get_default_device()
